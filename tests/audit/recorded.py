"""Small recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import federation
from fedveil.audit.record import Record
from fedveil.engine import LocalEngine
from fedveil.protocol.phases import Heard
from fedveil.runs import loop as training
from fedveil.runs.job import Job
from fedveil.runs.loop import Outcome, fresh_state, train_job

_KEPT: list[TemporaryDirectory[str]] = []  # removed when the interpreter ends


def recorded(folder: Path, **settings: Any) -> tuple[Job, Outcome, Record]:
    """A run of three clients over two rounds, of which everything is recorded."""
    given = {"clients": 3, "rounds": 2, "record": True, "record_rounds": "1,2", "record_clients": "0,1,2"}
    one = federation.job(**{**given, **settings})
    outcome = train_job(one, state=fresh_state(one), record=folder)
    return one, outcome, Record(folder)


@cache
def _shared(settings: tuple[tuple[str, Any], ...]) -> tuple[Job, Record]:
    _KEPT.append(TemporaryDirectory(prefix="fedveil-test-"))
    job, _, record = recorded(Path(_KEPT[-1].name), **dict(settings))
    return job, record


def recorded_once(**settings: Any) -> tuple[Job, Record]:
    """The same for tests that only read."""
    return _shared(tuple(sorted(settings.items())))


@contextmanager
def overheard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heard]]:
    """Everything that passes in a run, heard by somebody else beside the recorder."""
    found: list[Heard] = []
    original = training.LocalEngine

    def engine(*args: Any, listen: Callable[[Heard], None], **named: Any) -> LocalEngine:
        def both(heard: Heard) -> None:
            found.append(heard)
            listen(heard)

        return original(*args, listen=both, **named)

    with monkeypatch.context() as patched:
        patched.setattr(training, "LocalEngine", engine)
        yield found
