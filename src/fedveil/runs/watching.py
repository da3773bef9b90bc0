"""What hears of every round of a run, in a folder or in memory: callbacks, and whoever keeps the best round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedveil.errors import StopTraining
from fedveil.roles.server import ServerState
from fedveil.runs.bad_rounds import too_many
from fedveil.runs.best import best_of
from fedveil.runs.callbacks import Callbacks, Follower, Row
from fedveil.runs.job import Job
from fedveil.runs.monitor import check_target_accuracy


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
