"""Rounds that one bad upload has spoilt: what is said of them, and when a run ends because of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedveil.errors import Code, ConfigError, spelled
from fedveil.protocol.phases import RoundDone
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row
from fedveil.runs.job import Job
from fedveil.runs.monitor import skips_bad_rounds

_CLIENTS_NAMED = 20
_MOST_BAD = 3
_LEAST_LOSS = 1e-6


def refused_round(row: Row) -> str:
    """What to say of a round that was taken back; of many clients its row in metrics.jsonl has all."""
    suspects = row["suspects"]
    named = ", ".join(map(str, suspects[:_CLIENTS_NAMED])) + (", …" if len(suspects) > _CLIENTS_NAMED else "")
    return (
        f"round {row['round']} is refused ({row['code']}): {row['failed']}. The model stays as it was before. In the "
        f"sum were clients {named}."
    )


def too_many(job: Job, state: ServerState) -> bool:
    """Whether a run ends here because of bad rounds."""
    skips = skips_bad_rounds(job.config, job.scheme)
    return state.bad_rounds >= (job.config.max_bad_rounds or _MOST_BAD if skips else 1)


def why_stopped(job: Job, state: ServerState) -> str:
    """Why it does."""
    skips = skips_bad_rounds(job.config, job.scheme)
    rule = spelled("max_bad_rounds") if skips else spelled("on_bad_round", "stop")
    if job.config.on_bad_round is None and not skips:
        rule += ", as where masks alone hide what clients send"
    if state.bad_rounds == 1:
        return f"round {state.round} was refused for what clients sent in it ({rule})"
    return (
        f"{state.bad_rounds} rounds, and no good one between them, were refused for what clients sent in them ({rule})"
    )


def check_guard(job: Job) -> None:
    """Refuse a bound on the held-out loss where nothing is held out, or no model is here to take back."""
    if job.config.max_loss_jump is None:
        return
    if job.validation is None:
        raise ConfigError(
            f"{spelled('max_loss_jump')} goes by a validation part, and there is none: hold one out "
            f"({spelled('validation_fraction', 0.1, argument='validation=(inputs, targets)')})."
        )
    if job.scheme.holder == "clients":
        raise ConfigError(
            f"{spelled('max_loss_jump')} does not go with {spelled('scheme', job.scheme.name)}: its model lives with "
            "the clients, and its server has none to take back."
        )


class LossGuard:
    """Takes a round back that makes the loss on held-out samples more than `most` times as large, or no number.

    What it compares with is the loss of the model that the round began with, so that a run that is resumed decides the
    same. Losses are compared by their ratio: one below 10⁻⁶ counts as that, and one that begins below 0 is refused.
    """

    def __init__(self, most: float, state: ServerState, loss: Callable[[], float]) -> None:
        self._most = most
        self._loss = loss
        begun = loss()
        if not begun >= 0:
            raise ConfigError(
                f"{spelled('max_loss_jump')} says how many times as large a loss may become, and on the held-out "
                f"samples this one begins with {begun:.4g}: give a loss that is never negative, or leave the bound out."
            )
        self._keep(state, begun)

    def _keep(self, state: ServerState, loss: float) -> None:
        self._before, self._good = replace(state, weights=state.weights.clone(), velocity=state.velocity.clone()), loss

    def judged(self, done: RoundDone, state: ServerState) -> RoundDone:
        """The round as it counts; where it is taken back, `state` is what it was before, but for its number."""
        loss = self._loss()
        if loss <= self._most * max(self._good, _LEAST_LOSS):
            self._keep(state, loss)
            return done
        before = self._before
        state.weights.parameters.copy_(before.weights.parameters)
        state.weights.statistics.copy_(before.weights.statistics)
        state.velocity.copy_(before.velocity)
        state.head_level, state.clip = before.head_level, before.clip
        why = f"the loss on held-out samples went from {self._good:.4g} to {loss:.4g} ({spelled('max_loss_jump')})"
        return replace(done, loss=None, failed=why, code=Code.JUMPED)
