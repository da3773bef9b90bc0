"""Followers of a run hear of everything, in order, and in time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedveil
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, StopTraining
from fedveil.runs import session
from fedveil.runs.callbacks import Callback
from fedveil.runs.folder import RunFolder
from interrupting import interrupted_run, same_tensors
from pairs import crossed

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
    assert first.heard[-3:] == ["round 3", "kept 3", "stopped by KeyboardInterrupt"]
    session.resume(tmp_path / "run", quiet=True, follow=[second])
    assert second.heard[:2] == ["begin after 3 of 5", "round 4"]
    assert second.heard[-1] == "end after 5"


def test_a_follower_that_raises_ends_the_run(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(SMALL, tmp_path / "run", at=1, follow=[diary], caught=False)
    assert diary.heard == ["begin after 0 of 5", "round 1", "kept 1", "stopped by KeyboardInterrupt"]


class Everything(Callback):
    """Hears of everything; stops the run by the name of what it hears."""

    def __init__(self, stop: tuple[str, int] = ("", 0)) -> None:
        self.heard: list[str] = []
        self._stop = stop

    def _hear(self, what: str, round: int) -> None:
        self.heard.append(f"{what} {round}")
        if (what, round) == self._stop:
            raise StopTraining(f"enough at {what} {round}")

    def round_begins(self, round: int) -> None:
        self._hear("begins", round)

    def evaluated(self, round: int, figures: dict[str, float]) -> None:
        assert set(figures) >= {"test_loss", "test_accuracy"}
        figures.clear()
        self._hear("evaluated", round)

    def round(self, row: dict[str, Any]) -> None:
        assert "test_loss" in row, "what one callback does with its figures reaches no other"
        self._hear("round", row["round"])

    def end(self, summary: dict[str, Any]) -> None:
        self.heard.append(f"end after {summary['rounds']}")

    def stopped(self, reason: BaseException) -> None:
        self.heard.append("stopped")


def test_rounds_are_told_from_their_beginning_to_their_evaluation(tmp_path: Path) -> None:
    told = Everything()
    session.run(SMALL.with_changes(rounds=2), tmp_path / "run", quiet=True, follow=[told])
    each = [[f"begins {k}", f"evaluated {k}", f"round {k}"] for k in (1, 2)]
    assert told.heard == [*each[0], *each[1], "end after 2"]


@pytest.mark.parametrize(
    ("what", "scheme"), crossed(["begins", "evaluated", "round"], ["fedavg", "veil-secagg", "paraaegis"])
)
def test_a_callback_may_stop_the_run_with_what_it_has(tmp_path: Path, what: str, scheme: str) -> None:
    rounds = 2 if what == "begins" else 3
    told, diary = Everything((what, 3)), Diary()
    cipher = {"cipher": "pads"} if scheme == "paraaegis" else {}
    config = SMALL.with_changes(scheme=scheme, **cipher)
    summary = session.run(config, tmp_path / "run", quiet=True, follow=[told, diary])
    assert (summary["rounds"], summary["stopped"]) == (rounds, f"enough at {what} 3")
    assert diary.heard[-1] == f"end after {rounds}", "whoever comes later in the list is told all the same"
    assert f"kept {rounds}" in diary.heard, "the last round is in a checkpoint, whenever the next would have been due"
    assert "stopped" not in told.heard
    assert session.resume(tmp_path / "run", quiet=True)["rounds"] == SMALL.rounds


def test_a_run_that_was_stopped_and_resumed_ends_in_the_model_of_one_that_was_not(tmp_path: Path) -> None:
    session.run(SMALL, tmp_path / "whole", quiet=True)
    session.run(SMALL, tmp_path / "parts", quiet=True, follow=[Everything(("round", 3))])
    session.resume(tmp_path / "parts", quiet=True)
    assert same_tensors(tmp_path / "whole" / "model.safetensors", tmp_path / "parts" / "model.safetensors")


def test_python_takes_objects_and_plain_functions_with_and_without_a_folder(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(12, 4)
    data, losses = [(x, (x[:, 0] > 0).long())] * 2, []

    def watch(row: dict[str, Any]) -> None:
        losses.append(row["loss"])
        if row["round"] == 3:
            raise fedveil.StopTraining("three are enough")

    for out in (None, tmp_path / "run"):
        told, losses[:] = Everything(), []
        given = {"out": out, "callbacks": [watch, told], "scheme": "fedavg", "rounds": 9, "seed": 1, "progress": False}
        done = fedveil.train(net, data, test=data[0], **given)  # type: ignore[arg-type]
        assert (done.summary["rounds"], done.summary["stopped"], len(losses)) == (3, "three are enough", 3)
        assert told.heard[-1] == "end after 3"
    for wrong in (3, Everything):
        with pytest.raises(ConfigError, match=r"inherits from fedveil\.Callback"):
            fedveil.train(net, data, callbacks=[wrong], progress=False, rounds=1)  # type: ignore[list-item]


def test_a_callback_that_fails_is_no_wish_to_stop(tmp_path: Path) -> None:
    def broken(row: dict[str, Any]) -> None:
        raise ZeroDivisionError

    told = Everything()
    with pytest.raises(ZeroDivisionError):
        session.run(SMALL, tmp_path / "run", quiet=True, follow=[broken, told])
    assert told.heard[-1] == "stopped"


class Clumsy(Callback):
    """Fails when all is over."""

    def end(self, summary: dict[str, Any]) -> None:
        raise OSError("no room for the last page")

    def stopped(self, reason: BaseException) -> None:
        raise LookupError("whose fault was it?")


@pytest.mark.parametrize("stored", [False, True])
def test_a_callback_that_fails_at_the_end_loses_nobody_the_model(
    tmp_path: Path, stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, x, later = nn.Linear(4, 2), torch.randn(12, 4), Everything()
    data = [(x, (x[:, 0] > 0).long())] * 2
    given: dict[str, Any] = {"scheme": "fedavg", "rounds": 1, "seed": 1, "progress": False, "test": data[0]}
    given |= {"callbacks": [Clumsy(), later], "out": tmp_path / "run" if stored else None}
    with caplog.at_level("WARNING"):
        done = fedveil.train(net, data, **given)
    assert done.summary["rounds"] == 1
    assert later.heard[-1] == "end after 1"
    assert any("end of the callback Clumsy has failed: OSError: no room" in text for text in caplog.messages)


@pytest.mark.parametrize("stored", [False, True])
def test_a_callback_that_fails_when_told_of_an_error_does_not_hide_it(tmp_path: Path, stored: bool) -> None:
    net, x = nn.Linear(4, 2), torch.randn(12, 4)

    def trip(row: dict[str, Any]) -> None:
        raise RuntimeError("the first error")

    given: dict[str, Any] = {"scheme": "fedavg", "rounds": 2, "seed": 1, "progress": False}
    given |= {"callbacks": [trip, Clumsy()], "out": tmp_path / "run" if stored else None}
    with pytest.raises(RuntimeError, match="the first error") as caught:
        fedveil.train(net, [(x, (x[:, 0] > 0).long())] * 2, **given)
    assert caught.value.__notes__ == ["stopped of the callback Clumsy has failed: LookupError: whose fault was it?"]
