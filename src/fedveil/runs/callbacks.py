"""Who watches a run from outside: told of its beginning, every round, every checkpoint, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fedveil.config import RunConfig
from fedveil.runs.folder import RunFolder

Row = dict[str, Any]
Say = Callable[[str], None]


class Callback(Protocol):
    """Told what happens to one run; what it raises ends the run."""

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[Row]) -> None:
        """The run begins, or goes on after the rounds whose `rows` stand."""

    def round(self, row: Row) -> None:
        """A round is done, and its row written."""

    def kept(self) -> None:
        """All rounds so far are in a checkpoint: none of them is repeated after a resume."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished, and all its files written."""

    def stopped(self, reason: BaseException) -> None:
        """The run was stopped or has failed; it may be resumed."""


class Progress:
    """Round, loss, accuracy and time left, on standard error, if that is a terminal and rich is there; else silence."""

    def __init__(self, label: str, *, total: int, done: int = 0, quiet: bool = False) -> None:
        self.shown = None
        if quiet or not sys.stderr.isatty():
            return
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return
        self.shown = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self.shown.add_task(label, total=total, completed=done, figures="")

    def __enter__(self) -> Progress:
        if self.shown is not None:
            self.shown.start()
        return self

    def __exit__(self, *stopped: object) -> None:
        if self.shown is not None:
            self.shown.stop()

    def update(self, row: Row) -> None:
        """Advance, with the newest figures."""
        if self.shown is None:
            return
        figures = [] if row["loss"] is None else [f"loss {row['loss']:.4f}"]
        if "test_accuracy" in row:
            figures.append(f"accuracy {row['test_accuracy']:.1%}")
        if "test_mse" in row:
            figures.append(f"mse {row['test_mse']:.4f}")
        self.shown.update(self._task, completed=row["round"], figures="  ".join(figures))


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
