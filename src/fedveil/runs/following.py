"""Who watches a run from outside: told of its beginning, every round, every checkpoint, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fedveil.config import RunConfig
from fedveil.runs.folder import RunFolder

Row = dict[str, Any]


class Follower(Protocol):
    """Told what happens to one run; what it raises ends the run."""

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[Row]) -> None:
        """The run begins, or goes on after the rounds whose `rows` stand."""
        ...

    def round(self, row: Row) -> None:
        """A round is done, and its row written."""
        ...

    def kept(self) -> None:
        """All rounds so far are in a checkpoint: none of them is repeated after a resume."""
        ...

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished, and all its files written."""
        ...

    def stopped(self, reason: BaseException) -> None:
        """The run was stopped or has failed; it may be resumed."""
        ...


class Following:
    """Everybody who watches, told in turn."""

    def __init__(self, followers: Sequence[Follower]) -> None:
        self._followers = tuple(followers)

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[Row]) -> None:
        """Tell that the run begins."""
        for one in self._followers:
            one.begin(folder, config, rows)

    def round(self, row: Row) -> None:
        """Tell of a round."""
        for one in self._followers:
            one.round(row)

    def kept(self) -> None:
        """Tell of a checkpoint."""
        for one in self._followers:
            one.kept()

    def end(self, summary: dict[str, Any]) -> None:
        """Tell of the end."""
        for one in self._followers:
            one.end(summary)

    def stopped(self, reason: BaseException) -> None:
        """Tell that there will be no end for now."""
        for one in self._followers:
            one.stopped(reason)
