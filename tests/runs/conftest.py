from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.runs import session
from fedveil.runs.folder import RunFolder

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 12, "norm": "batch"},
    "clients": 4,
    "batch_size": 30,
    "lr": 0.05,
    "momentum": 0.9,
    "rounds": 10,
    "seed": 5,
    "checkpoint_every": 3,
    "evaluate_every": 0,
}


class Killed(BaseException):
    """Stands in for kill -9: nothing in the library catches it."""


@pytest.fixture
def small() -> Callable[..., RunConfig]:
    def configured(**changes: Any) -> RunConfig:
        return RunConfig.from_mapping({**SMALL, **changes})

    return configured


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, small: Callable[..., RunConfig]) -> Callable[..., Path]:
    """A run that stops dead right after writing the metrics of round `after`."""

    def stop(folder: Path, *, after: int, **changes: Any) -> Path:
        original = RunFolder.append_metrics

        def fatal(self: RunFolder, row: dict[str, Any]) -> None:
            original(self, row)
            if row["round"] == after:
                raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "append_metrics", fatal)
            with pytest.raises(Killed):
                session.run(small(**changes), folder, quiet=True)
        return folder

    return stop


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never interrupted."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    session.run(RunConfig.from_mapping(SMALL), folder, quiet=True)
    return folder
