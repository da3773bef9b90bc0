"""Which trackers a run has, and that none of them can end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedveil.config import RunConfig
from fedveil.runs.folder import RunFolder
from fedveil.runs.following import Follower
from fedveil.tracking.event_files import EventFiles
from fedveil.tracking.mlflow_run import MlflowRun

Say = Callable[[str], None]


class _Tracker(Follower, Protocol):
    name: str


@dataclass(frozen=True)
class Tracked:
    """Where runs are tracked: None is nowhere, an empty text the usual place.

    That is the folder tensorboard in the run's own, and for MLflow what MLFLOW_TRACKING_URI names or ./mlflow.db.
    """

    tensorboard: str | None = None
    mlflow: str | None = None

    def within(self, part: str) -> Tracked:
        """The same for one of several runs: each has a TensorBoard folder of its own."""
        return Tracked(str(Path(self.tensorboard) / part) if self.tensorboard else self.tensorboard, self.mlflow)


def trackers(
    tracked: Tracked, run: str | Path, *, title: str | None = None, say: Say = lambda text: None
) -> list[Follower]:
    """Followers for the run in the folder `run`; a missing package or a store that does not answer is told now.

    What goes wrong later is said once and ends the tracking, not the run.
    """
    folder = Path(run)
    found: list[_Tracker] = []
    if tracked.tensorboard is not None:
        found.append(EventFiles(Path(tracked.tensorboard or folder / "tensorboard"), run=folder))
    if tracked.mlflow is not None:
        found.append(MlflowRun(tracked.mlflow or None, title=title or folder.resolve().name))
    return [_Guarded(one, say) for one in found]


class _Guarded:
    """A tracker whose failure costs its figures and nothing else."""

    def __init__(self, tracker: _Tracker, say: Say) -> None:
        self._tracker: _Tracker | None = tracker
        self._say = say

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.begin(folder, config, rows))

    def round(self, row: dict[str, Any]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.round(row))

    def kept(self) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.kept())

    def end(self, summary: dict[str, Any]) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.end(summary))

    def stopped(self, reason: BaseException) -> None:
        """Pass it on."""
        self._try(lambda tracker: tracker.stopped(reason))

    def _try(self, tell: Callable[[_Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            tell(self._tracker)
        except Exception as reason:
            name, self._tracker = self._tracker.name, None
            self._say(
                f"{name} takes no more ({type(reason).__name__}: {reason}); the run goes on without it. Resuming "
                "or repeating the run with the same flag fills in what is missing."
            )
