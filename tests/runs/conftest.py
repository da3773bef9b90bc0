from __future__ import annotations

import shutil
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


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Path]]:
    """Where runs with the settings above that stopped dead are kept, by the round after which they did."""
    return tmp_path_factory.mktemp("stopped"), {}


@pytest.fixture
def interrupted(
    monkeypatch: pytest.MonkeyPatch, small: Callable[..., RunConfig], stopped: tuple[Path, dict[int, Path]]
) -> Callable[..., Path]:
    """A run that stops dead right after writing the metrics of round `after`; without changes, a copy of one."""
    place, kept = stopped

    def stop(folder: Path, *, after: int, **changes: Any) -> Path:
        if changes:
            return train(folder, after, changes)
        if after not in kept:
            kept[after] = train(place / f"after-{after}", after, {})
        return Path(shutil.copytree(kept[after], folder))

    def train(folder: Path, after: int, changes: dict[str, Any]) -> Path:
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
