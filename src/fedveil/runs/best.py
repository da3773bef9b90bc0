"""Good and bad rounds: the best one by one figure, and when to stop waiting; those that one upload has spoilt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.downlink import Weights
from fedveil.errors import CheckpointError, Code, ConfigError, StopTraining, spelled
from fedveil.protocol.phases import RoundDone
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Callbacks, Follower, Row
from fedveil.runs.job import Job
from fedveil.runs.monitor import Monitor, check_target_accuracy, monitor_of, skips_bad_rounds

# --- rounds that one bad upload has spoilt: what is said of them, and when a run ends because of them

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


class BestRound:
    """The best round so far. Only a figure that is strictly better makes another round the best one."""

    def __init__(self, monitor: Monitor, patience: int | None = None) -> None:
        self.monitor = monitor.name
        self._by = monitor
        self._patience = patience
        self._sign = -1.0 if monitor.higher_is_better else 1.0
        self.round = 0
        self.value = math.nan
        self.weights: Weights | None = None
        self._waited = 0

    def hear(self, row: Row, weights: Weights | None) -> None:
        """Take a round's row; `weights` are the model's after it, where they are at hand."""
        value = row.get(self.monitor)
        if value is None or "failed" in row:
            return
        if math.isfinite(value) and not self._sign * value >= self._sign * self.value:
            self.round, self.value, self._waited = row["round"], float(value), 0
            self.weights = None if weights is None else weights.clone()
        else:
            self._waited += 1

    def check(self) -> None:
        """Stop the training (StopTraining) where no better round is waited for any more."""
        if self._patience is not None and self._waited >= self._patience:
            raise StopTraining(
                f"{self.monitor} has not been better than {self.value:.6g} in round {self.round} for {self._waited} "
                "evaluations (early_stopping)"
            )

    def save(self, folder: Path, *, fingerprint: str) -> None:
        """Keep its model beside the checkpoint that is being written, for whoever resumes from that."""
        from fedveil.runs.checkpoint import keep_two, write_state  # in-memory training needs no safetensors

        if self.weights is None:
            return
        path = _file(folder, self.round)
        if not path.exists():
            state = ServerState.fresh(self.weights)
            state.round = self.round
            write_state(path, state, fingerprint=fingerprint)
        keep_two(path, "best-*.safetensors")

    def resume(
        self, rows: Sequence[Row], folder: Path, like: Weights, *, fingerprint: str, say: Callable[[str], None]
    ) -> None:
        """Go on after `rows`, with the model that an earlier attempt kept."""
        from fedveil.runs.checkpoint import load_checkpoint

        for row in rows:
            self.hear(row, None)
        if not self.round:
            return
        try:
            self.weights = load_checkpoint(_file(folder, self.round), like, fingerprint=fingerprint).weights
        except CheckpointError:
            say(
                f"The model of round {self.round}, the best by {self.monitor}, is not there: the best round from here "
                "on is kept instead."
            )
            self.__init__(self._by, self._patience)  # type: ignore[misc]

    def as_data(self) -> dict[str, Any]:
        """For the summary."""
        return {"round": self.round, "monitor": self.monitor, "value": self.value}


def _file(folder: Path, round: int) -> Path:
    return folder / f"best-{round:08d}.safetensors"


def best_of(job: Job) -> BestRound | None:
    """What keeps the best round of a job; None where nothing tells it.

    Raises:
        ConfigError: Settings ask for it, and there is nothing to tell it by.
    """
    config, monitor = job.config, monitor_of(job)
    if monitor is None:
        return None
    if not job.model_here:
        raise ConfigError(
            f"monitor = {monitor.name!r}, but the model lives with clients elsewhere: nobody here can keep it."
        )
    return BestRound(monitor, config.early_stopping)


# --- what hears of every round of a run, in a folder or in memory: callbacks, and whoever keeps the best round


class Watch:
    """Callbacks and the best round of a job; `keep` writes a checkpoint where one is due, or the `last` one."""

    def __init__(self, job: Job, callbacks: Sequence[Follower]) -> None:
        self._job = job
        self.callbacks = Callbacks(callbacks)
        self.best = best_of(job)
        check_target_accuracy(job)
        self.keep: Callable[[ServerState, bool], None] = lambda state, last: None

    @property
    def listens(self) -> bool:
        """Whether anybody is to be told of rounds."""
        return self.best is not None or bool(self.callbacks)

    def round_begins(self, round: int) -> None:
        """A round is about to be asked for, unless somebody has had enough (StopTraining)."""
        self._check()
        self.callbacks.round_begins(round)
        self._check()

    def round(self, row: Row, state: ServerState) -> None:
        """A round is done; it is the last where somebody has had enough (StopTraining), and kept as such."""
        if self.best is not None:
            self.best.hear(row, state.weights)
        self.callbacks.round(row)
        stop: StopTraining | None = None
        try:
            self._check()
        except StopTraining as reason:
            stop = reason
        self.keep(state, stop is not None or too_many(self._job, state))
        if stop is not None:
            raise stop
        self._check()

    def _check(self) -> None:
        if self.best is not None:
            self.best.check()
        self.callbacks.check()
