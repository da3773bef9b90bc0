"""A run that is recorded: which rounds and clients, and what everybody knew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.audit.record import Choice, Recorder
from fedveil.audit.views import Facts
from fedveil.config import RunConfig
from fedveil.downlink import Architecture
from fedveil.protocol.parts import Scheme
from fedveil.runs.job import Agreed, Job, ModelFacts
from fedveil.runs.recipe import rate_of
from fedveil.work.losses import Loss


@dataclass(frozen=True)
class Recording:
    """Where a run is recorded, and about whom: what clients share is kept for pairs with a victim (None: for all)."""

    folder: Path
    victims: Collection[int] | None = None


def chosen(job: Job) -> Choice:
    """The rounds and clients that a job's settings name."""
    config = job.config
    return Choice.of(
        rounds=config.record_rounds, clients=config.record_clients, last=config.rounds, count=len(job.pool)
    )


def recorder_for(job: Job, place: Path | Recording, *, attempt: int) -> Recorder:
    """A recorder of this job that writes into a folder."""
    asked = place if isinstance(place, Recording) else Recording(place)
    choice = chosen(job)
    if asked.victims is not None:
        choice = replace(choice, victims=frozenset(asked.victims))
    return Recorder(
        asked.folder, choice, facts=facts_of(job), scheme=job.scheme, architecture=job.architecture, attempt=attempt
    )


def own_recorder(
    folder: Path, config: RunConfig, common: Agreed, facts: ModelFacts, at: Architecture, *, client: int, attempt: int
) -> Recorder:
    """A recorder of what one client, on its own machine, is sent and sends, in the rounds recorded by default."""
    choice = Choice.of(rounds=None, clients=str(client), last=config.rounds, count=config.clients)
    known = _facts(config, common.scheme, common.loss, facts, at)
    return Recorder(folder, choice, facts=known, scheme=common.scheme, architecture=at, attempt=attempt)


def facts_of(job: Job) -> Facts:
    """What everybody in the job knows."""
    return _facts(job.config, job.scheme, job.loss, job.facts, job.architecture)


def _facts(config: RunConfig, scheme: Scheme, loss: Loss, facts: ModelFacts, architecture: Architecture) -> Facts:
    return Facts(
        scheme=scheme.name,
        uplink=type(scheme.uplink).__name__.lower(),
        readable=scheme.readable,
        model=facts.name,
        options=dict(facts.options),
        input_shape=tuple(facts.input_shape),
        input_dtype=str(architecture.input_dtype).removeprefix("torch."),
        outputs=facts.outputs,
        task=facts.task,
        vocabulary=facts.vocabulary,
        parameters=architecture.parameters.sections,
        contribution=scheme.layout(architecture).sections,
        traced=scheme.downlink.traced,
        returns=scheme.work.returns,
        loss=loss.name,
        target_scale=config.target_scale,
        true_weight=config.true_weight,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        local_epochs=config.local_epochs,
        lr=config.client_lr or rate_of(config, loss),
        dtype=config.dtype,
        class_weights=getattr(loss, "class_weights", ()),
        label_smoothing=config.label_smoothing,
    )
