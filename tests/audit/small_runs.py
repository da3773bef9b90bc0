"""Small recorded runs on digits, ready to be audited."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedveil.audit.subject import Effort, Scene, Subject, cut, enacted, scene_of
from fedveil.config import RunConfig
from fedveil.runs.job import Job, job_from_config, settled

_KEPT: list[TemporaryDirectory[str]] = []  # removed when the interpreter ends
QUICK = Effort(quick=True)


def folder() -> Path:
    _KEPT.append(TemporaryDirectory(prefix="fedveil-test-"))
    return Path(_KEPT[-1].name)


def settings_of(**changes: Any) -> dict[str, Any]:
    """Four clients over four rounds, of which everything is recorded; None takes a setting away."""
    given = {
        "scheme": "lossless",
        "dataset": "digits",
        "clients": 4,
        "rounds": 4,
        "seed": 1,
        "evaluate_every": 0,
        "record": True,
        "record_rounds": "1-4",
        "record_clients": "0-3",
        "model_options": {"depth": 2, "width": 16},
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


def job_of(samples: int | None = None, **changes: Any) -> Job:
    job = job_from_config(settled(RunConfig.from_mapping(settings_of(**changes), where="test")))
    return job if samples is None else cut(job, samples=samples)


@cache
def _subject(samples: int | None, changes: tuple[tuple[str, Any], ...]) -> Subject:
    return enacted(job_of(samples, **dict(changes)), folder() / "record")


def subject_of(samples: int | None = None, **changes: Any) -> Subject:
    """A run of which clients keep their first `samples` samples (None: all); made once, to be read only."""
    return _subject(samples, tuple(sorted(changes.items())))


@cache
def _scene(samples: int | None, changes: tuple[tuple[str, Any], ...]) -> Scene:
    return scene_of(_subject(samples, changes), QUICK, folder())


def scene(samples: int | None = None, **changes: Any) -> Scene:
    """Its scene; replayed where it has to be."""
    return _scene(samples, tuple(sorted(changes.items())))
