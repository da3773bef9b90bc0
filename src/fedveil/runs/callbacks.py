"""Who watches a run from outside: told of its beginning, every round, every checkpoint, and its end."""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import ConfigError, StopTraining
from fedveil.runs.folder import RunFolder

_LOG = logging.getLogger(__name__)

Row = dict[str, Any]
Say = Callable[[str], None]
WARNING = "warning: "
"""How a line begins that tells of something to change."""


class Callback:
    """Told what happens to one run: override what you want to hear.

    It sees figures and the server's folder, no client's data or secrets. Any of it may raise `fedveil.StopTraining`
    with the reason: the run then ends as if that round had been its last. What else it raises ends it as a failure;
    but what is over stays as it is: what `end` or `stopped` raises is told as a warning, and changes nothing.
    """

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[Row]) -> None:
        """The run begins, or goes on after the rounds whose `rows` stand; `folder` is None where it has none."""

    def round_begins(self, round: int) -> None:
        """Round `round`, counted from 1, is about to be asked for."""

    def evaluated(self, round: int, figures: dict[str, float]) -> None:
        """The model after this round was judged: test_loss and others, as its row will have them."""

    def round(self, row: Row) -> None:
        """A round is done, and its row written."""

    def kept(self) -> None:
        """All rounds so far are in a checkpoint: none of them is repeated after a resume."""

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished, and all its files written."""

    def stopped(self, reason: BaseException) -> None:
        """The run was interrupted or has failed; it may be resumed."""


Follower = Callback | Callable[[Row], object]
"""A callback, or a plain function that is given every row."""

_TOLD = ("begin", "round_begins", "evaluated", "round", "kept", "end", "stopped")
_JUDGED = ("test_", "validation_")


class Callbacks(Callback):
    """Several callbacks as one: objects with some of the methods, or plain functions, which are given every row.

    Whoever wants to stop the training is heard out of turn: all others are told first.
    """

    def __init__(self, given: Sequence[Follower]) -> None:
        self._stop: StopTraining | None = None
        self._each = list(given)
        for callback in self._each:
            some = any(callable(getattr(callback, name, None)) for name in _TOLD)
            if isinstance(callback, type) or not (some or callable(callback)):
                raise ConfigError(
                    f"{callback!r} is no callback: give an object of a class that inherits from fedveil.Callback, or a "
                    "function that takes a round's row."
                )

    def __bool__(self) -> bool:
        return bool(self._each)

    def _tell(self, name: str, *values: Any, warn: Say | None = None) -> None:
        for callback in self._each:
            method = getattr(callback, name, None)
            if method is None and name == "round" and not any(hasattr(callback, other) for other in _TOLD):
                method = callback
            if method is None:
                continue
            try:
                method(*(copy.deepcopy(value) if isinstance(value, dict) else value for value in values))
            except StopTraining as reason:
                self._stop = self._stop or reason
            except Exception as reason:
                if warn is None:
                    raise
                _LOG.warning("%s of a callback has failed", name, exc_info=reason)
                who = getattr(callback, "__qualname__", type(callback).__qualname__)
                warn(f"{name} of the callback {who} has failed: {type(reason).__name__}: {reason}")

    def check(self) -> None:
        """Stop the training (StopTraining) where a callback wants it."""
        if self._stop is not None:
            raise self._stop

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[Row]) -> None:
        """Pass it on."""
        self._tell("begin", folder, config, [dict(row) for row in rows])

    def round_begins(self, round: int) -> None:
        """Pass it on."""
        self._tell("round_begins", round)

    def evaluated(self, round: int, figures: dict[str, float]) -> None:
        """Pass it on."""
        self._tell("evaluated", round, figures)

    def round(self, row: Row) -> None:
        """Pass it on, and first what the model's evaluation said."""
        figures = {name: value for name, value in row.items() if name.startswith(_JUDGED)}
        if figures:
            self.evaluated(row["round"], figures)
        self._tell("round", row)

    def kept(self) -> None:
        """Pass it on."""
        self._tell("kept")

    def finish(self, summary: dict[str, Any], say: Say) -> None:
        """The run is finished: pass it on. Who fails then loses nobody the model; that is said."""
        self._tell("end", summary, warn=lambda text: say(f"{WARNING}{text}. The run is finished, and its model whole."))

    def stopped(self, reason: BaseException) -> None:
        """Pass it on; who fails then adds a note to the reason, which stays what it is."""
        self._tell("stopped", reason, warn=reason.add_note)


_REDRAWN_EVERY = 0.1


class Progress:
    """Round, loss, accuracy and time left, on standard error, if that is a terminal and rich is there; else silence."""

    def __init__(self, label: str, *, total: int, done: int = 0, quiet: bool = False) -> None:
        self.shown = None
        self._figures = ""
        self._since = self._drawn = time.monotonic()
        if quiet or not sys.stderr.isatty():
            return
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return
        self.shown = progress.Progress(
            progress.SpinnerColumn(),
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
        self._figures, self._since = "  ".join(figures), time.monotonic()
        self.shown.update(self._task, completed=row["round"], figures=self._figures)

    @property
    def listener(self) -> Callable[[int, int], None] | None:
        """Who is to be told of answers within a round; nobody where nothing is shown."""
        return None if self.shown is None else self.within

    def within(self, answered: int, asked: int) -> None:
        """How many of a phase's clients have answered, in a round that takes longer than a second."""
        now = time.monotonic()
        if self.shown is None or now < self._since + 1 or now < self._drawn + _REDRAWN_EVERY:
            return
        self._drawn = now
        self.shown.update(self._task, figures=f"{self._figures}  {answered:,} of {asked:,} answered".strip())


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
