"""Where the cells of a comparison stand, while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedveil.compare.plan import Cell

State = Literal["waiting", "starting", "running", "finished", "kept", "failed"]
OVER = ("finished", "kept", "failed")


@dataclass
class Standing:
    """One cell, as it stands now."""

    cell: Cell
    state: State = "waiting"
    round: int = 0
    loss: float | None = None
    score: float | None = None
    """Test accuracy, or for a regression the test MSE."""
    regression: bool = False
    seconds: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    summary: dict[str, Any] | None = None
    reason: str = ""
    exit_code: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in OVER

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a round's figures."""
        self.state = "running"
        self.round = row["round"]
        self.loss = row["loss"] if row["loss"] is not None else self.loss
        self._judge(row)
        self.seconds += row["seconds"]
        self.bytes_up, self.bytes_down = row["bytes_up"], row["bytes_down"]

    def finish(self, summary: dict[str, Any], *, kept: bool = False) -> None:
        """Take in the figures of the finished run; `kept`: it was there already."""
        self.state = "kept" if kept else "finished"
        self.summary = summary
        self.round = summary["rounds"]
        self.loss = summary["train_loss"]
        self._judge(summary)
        self.seconds = summary["seconds"]
        self.bytes_up, self.bytes_down = summary["bytes_up"], summary["bytes_down"]

    def _judge(self, figures: Mapping[str, Any]) -> None:
        self.regression = self.regression or "test_mse" in figures
        self.score = figures.get("test_accuracy", figures.get("test_mse", self.score))

    def fail(self, reason: str, *, code: int) -> None:
        """Take in why it failed."""
        self.state, self.reason, self.exit_code = "failed", reason, code


@dataclass(frozen=True)
class Event:
    """Something happened to a cell; `text` is what its run said, where it said something."""

    standing: Standing
    kind: Literal["start", "round", "over", "say"]
    text: str = ""
