"""TensorBoard's own reader finds every round once, whatever happened in between."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import CheckpointError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.tracking import Tracked, figures_of, ledger_in_words, trackers
from interrupting import UNSEEDED, interrupted_run
from shell import fedveil

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
)

HERE = Tracked(tensorboard="")
SMALL = ("--scheme", "nadp", "--rounds", 3, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")


def read(folder: Path) -> Any:
    return accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def text(events: Any, name: str) -> str:
    (found,) = events.Tensors(f"{name}/text_summary")
    return str(found.tensor_proto.string_val[0].decode())


def check_all_rounds(folder: Path, run: Path) -> None:
    """Every figure of metrics.jsonl is there at its round, and no other."""
    events = read(folder)
    rows = RunFolder(run).metrics()
    names = {name for row in rows for name in figures_of(row)}
    assert {"clients", "seconds", "bytes_down", "bytes_up", "test_accuracy"} <= names
    for name in names:
        told = {row["round"]: figures_of(row)[name] for row in rows if name in figures_of(row)}
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == list(told), name
        assert dict(found) == pytest.approx(told, rel=1e-6), name


def test_a_run_is_read_back_with_settings_ledger_and_epsilon(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = fedveil("run", *SMALL, "--tensorboard", "--out", run)
    assert done.code == 0, done.error
    events = read(run / "tensorboard")
    check_all_rounds(run / "tensorboard", run)
    assert "| scheme | nadp |" in text(events, "settings")
    summary = session.resume(run, quiet=True)
    assert text(events, "ledger") == ledger_in_words(summary)
    (server,) = [line for line in summary["ledger"]["lines"] if line["adversary"] == "server"]
    (epsilon,) = events.Scalars("epsilon_server")
    assert (epsilon.step, epsilon.value) == (3, pytest.approx(server["epsilon"]))


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_resumed_run_goes_on_in_the_same_folder_and_repeats_no_round(tmp_path: Path, at: int) -> None:
    run = tmp_path / "run"
    interrupted_run(UNSEEDED, run, at=at, follow=trackers(HERE, run))
    session.resume(run, quiet=True, follow=trackers(HERE, run))
    check_all_rounds(run / "tensorboard", run)


def test_rounds_that_were_not_tracked_are_filled_in(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "events"
    session.run(dataclasses.replace(UNSEEDED, rounds=2), run, quiet=True)
    session.resume(run, changes={"rounds": 4}, quiet=True, follow=trackers(Tracked(str(place)), run))
    check_all_rounds(place, run)


def test_another_runs_events_are_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "events"
    session.run(UNSEEDED, tmp_path / "a", quiet=True, follow=trackers(Tracked(str(place)), tmp_path / "a"))
    with pytest.raises(CheckpointError, match="another run's events"):
        trackers(Tracked(str(place)), tmp_path / "b")
    done = fedveil("run", *SMALL, "--tensorboard", place, "--out", tmp_path / "b")
    assert (done.code, (tmp_path / "b").exists()) == (7, False)
    check_all_rounds(place, tmp_path / "a")


def test_a_missing_package_is_named_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = fedveil("run", *SMALL, "--tensorboard", "--out", tmp_path / "run")
    assert done.code == 8
    assert "pip install 'fedveil[tensorboard]'" in done.error
    assert not (tmp_path / "run").exists()
