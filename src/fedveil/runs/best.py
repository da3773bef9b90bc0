"""The best round of a run, by one figure: which it is, its model, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedveil.downlink import Weights
from fedveil.errors import CheckpointError, ConfigError, StopTraining
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row
from fedveil.runs.job import Job
from fedveil.runs.monitor import Monitor, monitor_of


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
