"""Followers of a run hear of everything, in order, and in time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from interrupting import interrupted_run

SMALL = RunConfig(
    scheme="fedavg", rounds=5, clients=3, seed=1, checkpoint_every=2, model_options={"depth": 2, "width": 8}
)


class Diary:
    """Writes down what it hears, and what the folder held at that moment."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        self.folder = folder
        self.heard.append(f"begin after {len(rows)} of {config.rounds}")

    def round(self, row: dict[str, Any]) -> None:
        assert self.folder.metrics()[-1] == row
        self.heard.append(f"round {row['round']}")

    def kept(self) -> None:
        newest = max(self.folder.checkpoints.iterdir()).stem.removeprefix("round-")
        self.heard.append(f"kept {int(newest)}")

    def end(self, summary: dict[str, Any]) -> None:
        assert self.folder.summary_file.exists()
        assert self.folder.ledger_file.exists()
        assert self.folder.model_file.exists()
        self.heard.append(f"end after {summary['rounds']}")

    def stopped(self, reason: BaseException) -> None:
        self.heard.append(f"stopped by {type(reason).__name__}")


def test_a_whole_run_is_told_in_order(tmp_path: Path) -> None:
    diary = Diary()
    session.run(SMALL, tmp_path / "run", quiet=True, follow=[diary])
    rounds = ["round 1", "round 2", "kept 2", "round 3", "round 4", "kept 4", "round 5", "kept 5"]
    assert diary.heard == ["begin after 0 of 5", *rounds, "end after 5"]


def test_an_interrupted_run_is_told_to_have_stopped_and_a_resumed_one_begins_where_it_stands(tmp_path: Path) -> None:
    first, second = Diary(), Diary()
    interrupted_run(SMALL, tmp_path / "run", at=3, follow=[first])
    assert first.heard[-2:] == ["round 3", "stopped by KeyboardInterrupt"]
    session.resume(tmp_path / "run", quiet=True, follow=[second])
    assert second.heard[:2] == ["begin after 2 of 5", "round 3"]
    assert second.heard[-1] == "end after 5"


def test_a_follower_that_raises_ends_the_run(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(SMALL, tmp_path / "run", at=1, follow=[diary], caught=False)
    assert diary.heard == ["begin after 0 of 5", "round 1", "stopped by KeyboardInterrupt"]
