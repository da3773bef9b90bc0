"""A run that is recorded: which rounds and clients, and what everybody knew."""

from __future__ import annotations

from pathlib import Path

from fedveil.audit.facts import Facts
from fedveil.audit.recording import Choice, Recorder
from fedveil.protocol.masked import Masked
from fedveil.runs.job import Job


def chosen(job: Job) -> Choice:
    """The rounds and clients that a job's settings name."""
    config = job.config
    return Choice.of(
        rounds=config.record_rounds, clients=config.record_clients, last=config.rounds, count=len(job.pool)
    )


def recorder_for(job: Job, folder: Path, *, attempt: int) -> Recorder:
    """A recorder of this job that writes into `folder`."""
    return Recorder(
        folder, chosen(job), facts=facts_of(job), scheme=job.scheme, blueprint=job.blueprint, attempt=attempt
    )


def facts_of(job: Job) -> Facts:
    """What everybody in the job knows."""
    config, scheme, facts, blueprint = job.config, job.scheme, job.facts, job.blueprint
    return Facts(
        scheme=scheme.name,
        uplink=type(scheme.uplink).__name__.lower(),
        readable=scheme.holder == "server" and not isinstance(scheme.uplink, Masked),
        model=facts.name,
        options=dict(facts.options),
        input_shape=tuple(facts.input_shape),
        input_dtype=str(blueprint.input_dtype).removeprefix("torch."),
        outputs=facts.outputs,
        task=facts.task,
        vocabulary=facts.vocabulary,
        parameters=blueprint.parameters.sections,
        contribution=scheme.layout(blueprint).sections,
        traced=scheme.downlink.traced,
        returns=scheme.work.returns,
        loss=job.loss.name,
        target_scale=config.target_scale,
        true_weight=config.true_weight,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        local_epochs=config.local_epochs,
        lr=config.lr,
        dtype=config.dtype,
    )
