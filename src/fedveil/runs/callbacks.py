"""Who watches a run from outside: told of its beginning, every round, every checkpoint, and its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
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


class Progress(Protocol):
    """Told about every finished round."""

    def __enter__(self) -> Progress:
        """Start showing."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
        ...

    def update(self, row: dict[str, Any]) -> None:
        """One round is done."""
        ...


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, row: dict[str, Any]) -> None:
        """Nothing."""


class Bar:
    """Round, loss, accuracy and time left, on standard error."""

    def __init__(self, label: str, *, total: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, figures="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, row: dict[str, Any]) -> None:
        """Advance, with the newest figures."""
        shown = [] if row["loss"] is None else [f"loss {row['loss']:.4f}"]
        if "test_accuracy" in row:
            shown.append(f"accuracy {row['test_accuracy']:.1%}")
        if "test_mse" in row:
            shown.append(f"mse {row['test_mse']:.4f}")
        self._bar.update(self._task, completed=row["round"], figures="  ".join(shown))


def progress_for(label: str, *, total: int, done: int = 0, quiet: bool = False) -> Progress:
    """A bar if standard error is a terminal and rich is installed, otherwise silence."""
    if quiet or not sys.stderr.isatty():
        return Quiet()
    try:
        return Bar(label, total=total, done=done)
    except ImportError:
        return Quiet()


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A turning sign beside `what` while something takes time; silence where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        yield
        return
    with Console(stderr=True).status(what):
        yield
