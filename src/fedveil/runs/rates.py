"""The learning rate by trial: the first rounds, again and again, each time with a larger step."""

from __future__ import annotations

import math
from dataclasses import replace

from fedveil.errors import ConfigError, NumericError, ProtocolError, spelled
from fedveil.runs.job import Job, agreed
from fedveil.runs.loop import fresh_state, train_job
from fedveil.schemes import SchemeInfo

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROUNDS = 8
_GROWN = 1.5


def with_found_rate(job: Job, *, own: SchemeInfo | None = None) -> tuple[Job, str]:
    """The job with the learning rate under which its loss falls most in the first rounds, and what was done for it.

    Each trial begins with the job's own weights and asks clients as a run does. Nobody accounts for that: where a
    ledger promises anything, it is refused.

    Raises:
        ConfigError: The scheme accounts for what clients show, or every rate made the loss grow.
    """
    scheme = job.scheme
    if scheme.plan is not None or scheme.uplink.introduction != "none" or not job.pool.clients:
        raise ConfigError(
            f"lr = 'auto' tries rates on the clients' data, and {scheme.name} accounts for every round that clients "
            "are asked for: such trials would not be in its ledger. Find a rate on data that nobody has to protect "
            f"({spelled('scheme', 'fedavg')} {spelled('lr', 'auto')}), and give it as a number."
        )
    losses: dict[float, float] = {}
    for rate in RATES:
        losses[rate] = _loss_after(job, rate, own)
        if math.isinf(losses[rate]):  # larger ones do no better
            break
    best = min(losses, key=lambda rate: losses[rate])
    if math.isinf(losses[best]):
        raise ConfigError(
            f"lr = 'auto': even {best:g} made the loss grow. Look at the data (are inputs standardised?), or give a "
            "smaller rate."
        )
    told = (
        f"lr: {best:g}, found with {len(losses)} rates of {_ROUNDS} rounds each; clients were asked for these "
        f"{len(losses) * _ROUNDS} rounds too"
    )
    return _with_rate(job, best, own), told


def _with_rate(job: Job, rate: float, own: SchemeInfo | None) -> Job:
    config = job.config.with_changes(lr=rate)
    task, outputs = job.facts.task, job.facts.outputs
    common = agreed(config, clients=len(job.pool), task=task, outputs=outputs, own=own, loss=job.loss, shape=job.shape)
    return replace(job, config=config, scheme=common.scheme, optimiser=common.optimiser)


def _loss_after(job: Job, rate: float, own: SchemeInfo | None) -> float:
    """The loss after a few rounds with this rate; infinite where it has grown meanwhile."""
    short = job.config.with_changes(rounds=_ROUNDS, record=False, record_rounds=None, record_clients=None)
    trial = replace(_with_rate(replace(job, config=short), rate, own), test=None)
    try:
        rows = train_job(trial, state=fresh_state(trial)).rows
    except (NumericError, ProtocolError):
        return math.inf
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    grown = not losses or not max(losses) <= _GROWN * losses[0]
    return math.inf if grown else float(losses[-1])
