"""Whole comparisons in real processes: what they leave, and what a second go makes of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedveil.compare import CellEvent, CellProgress, Comparison, compare
from fedveil.compare.grid import COST
from fedveil.compare.plan import planned, results_of, write_results
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.own_code import OwnCode
from fedveil.runs import session
from interrupting import interrupted_run

SMALL: dict[str, Any] = {
    "rounds": 4,
    "clients": 3,
    "batch_size": 16,
    "checkpoint_every": 2,
    "model_options": {"depth": 2, "width": 8},
    "vectorise": False,  # which would take a process longer to load than to train
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("compare") / "c"
    return compare(["fedavg", "nadp"], out=out, seeds=[2], jobs=1, epsilon=3.0, **SMALL)


def test_every_cell_is_the_run_folder_of_an_ordinary_run(done: Comparison, tmp_path: Path) -> None:
    assert [one.state for one in done.standings] == ["finished"] * 2
    config = RunConfig(scheme="nadp", seed=2, epsilon=3.0, **SMALL)
    alone = session.run(config, tmp_path / "run", quiet=True)
    folder = done.out / "nadp" / "seed-2"
    assert {one.name for one in folder.iterdir()} == {COST, *(one.name for one in (tmp_path / "run").iterdir())}
    assert (folder / "config.toml").read_text() == (tmp_path / "run" / "config.toml").read_text()
    found = json.loads((folder / "summary.json").read_text())
    unlike = {"seconds"}
    assert {k: v for k, v in found.items() if k not in unlike} == {
        k: v for k, v in json.loads(json.dumps(alone)).items() if k not in unlike
    }


def test_compare_json_holds_every_run_and_scheme(done: Comparison) -> None:
    written = json.loads(done.file.read_text())
    assert written == json.loads(json.dumps(done.results))
    assert [(one["scheme"], one["seed"], one["ok"]) for one in written["runs"]] == [
        ("fedavg", 2, True),
        ("nadp", 2, True),
    ]
    for one in written["runs"]:
        assert one["summary"] == json.loads((done.out / one["folder"] / "summary.json").read_text())
    assert written["schemes"]["nadp"]["privacy"]["server"]["epsilon"] <= 3.0
    assert written["schemes"]["fedavg"]["privacy"]["server"]["verdict"] == "none"
    assert written["left_out"] == {"fedavg": ["epsilon"]}


def test_a_folder_in_use_is_refused(done: Comparison, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds another comparison"):
        compare(["fedavg"], out=done.out, **SMALL)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        compare(["fedavg"], out=tmp_path, **SMALL)
    with pytest.raises(CheckpointError, match="no comparison to resume"):
        compare(["fedavg"], out=tmp_path, resume=True, **SMALL)


@pytest.mark.parametrize(
    "change", [{"lr": 0.5}, {"rounds": 9}, {"only": {"nadp": {"clip": 0.5}}}], ids=["lr", "rounds", "one scheme's"]
)
def test_changed_settings_are_refused_and_change_nothing(done: Comparison, change: dict[str, Any]) -> None:
    before = done.file.read_bytes()
    with pytest.raises(ConfigError, match="other settings"):
        compare(out=done.out, resume=True, **change)
    assert done.file.read_bytes() == before


def started(events: Sequence[CellEvent | None]) -> list[str]:
    return [one.standing.cell.folder for one in events if one is not None and one.kind == "start"]


def test_finished_runs_are_kept_half_done_ones_go_on_and_a_failure_ends_no_other(tmp_path: Path) -> None:
    out = tmp_path / "c"
    settings = {**SMALL, "loss": "cross-entropy"}
    # pbpfl needs the square loss and fails; one of the others is done already, and one half done.
    plan = planned(["pbpfl", "fedavg"], seeds=[1, 2], settings=settings, only={})
    *_, finished, half = plan.cells
    session.run(finished.config, out / finished.folder, quiet=True)
    interrupted_run(half.config, out / half.folder, at=3)
    write_results(out / "compare.json", results_of(plan, [CellProgress(one) for one in plan.cells]))
    kept = (out / finished.folder / "summary.json").stat().st_mtime_ns
    events: list[CellEvent | None] = []
    first_rounds: dict[str, int] = {}

    def watch(standings: Sequence[CellProgress], event: CellEvent | None) -> None:
        events.append(event)
        if event is not None and event.kind == "round":
            first_rounds.setdefault(event.standing.cell.scheme, event.standing.round)

    done = compare(out=out, resume=True, jobs=1, watch=watch)
    assert started(events) == ["pbpfl/seed-1", "pbpfl/seed-2", "fedavg/seed-2"]
    assert [one.state for one in done.standings] == ["failed", "failed", "kept", "finished"]
    assert (out / finished.folder / "summary.json").stat().st_mtime_ns == kept
    assert first_rounds == {"fedavg": 3}  # the checkpoint that the interruption has left
    rows = (out / half.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2, 3, 4]
    failed = done.failed[0]
    assert failed.exit_code == ConfigError.exit_code
    assert "square" in failed.reason
    runs = json.loads(done.file.read_text())["runs"]
    assert [(one["ok"], one["reason"]) for one in runs] == [(False, failed.reason)] * 2 + [(True, "")] * 2


MORTAL = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from fedveil.downlink.plain import Plain
from fedveil.protocol.parts import Scheme
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients

@dataclass(frozen=True)
class DiesOnce(Bare):
    at: int = 3

    def accumulator(self, context, terms, *, device):
        died = Path(__file__).with_name("died")
        if context.round == self.at and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().accumulator(context, terms, device=device)

def mortal(setting, *, at: int = 2):
    work = Gradients(setting.loss, setting.batches, setting.vectorise)
    return Scheme(name="mortal", downlink=Plain(), work=work, uplink=DiesOnce(at=at))
"""


@pytest.mark.slow
def test_a_process_that_dies_fails_its_cell_only_and_schemes_may_be_added(tmp_path: Path) -> None:
    out = tmp_path / "c"
    (tmp_path / "mine.py").write_text(MORTAL)
    mine = OwnCode(f"{tmp_path / 'mine.py'}:mortal")
    done = compare([mine, "fedavg"], out=out, jobs=1, only={mine: {"at": 3}}, **SMALL)
    assert (tmp_path / "died").exists()
    assert [one.state for one in done.standings] == ["failed", "finished"]
    (failed,) = done.failed
    assert "killed by signal 9" in failed.reason
    assert failed.exit_code == 1
    rounds: list[int] = []

    def watch(standings: Sequence[CellProgress], event: CellEvent | None) -> None:
        if event is not None and event.kind == "round" and event.standing.cell.scheme == "mine.py:mortal":
            rounds.append(event.standing.round)

    again = compare([mine, "ldp"], out=out, jobs=1, resume=True, watch=watch)
    assert [(one.cell.scheme, one.state, one.round) for one in again.standings] == [
        ("mine.py:mortal", "finished", 4),
        ("fedavg", "kept", 4),
        ("ldp", "finished", 4),
    ]
    assert rounds == [2, 3, 4]  # from the checkpoint on


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"seed": 1}, "schemes and seeds"),
        ({"seeds": [1, 1]}, "named twice"),
    ],
    ids=["jobs", "seed", "seeds"],
)
def test_wrong_arguments_are_refused_before_a_folder_is_taken(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(["fedavg"], out=tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists()


def test_what_lies_in_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A comparison as it was handed over, looked at from within.
    plan = planned(["fedavg"], seeds=[1], settings={**SMALL, "rounds": 1}, only={})
    write_results(tmp_path / "compare.json", results_of(plan, [CellProgress(one) for one in plan.cells]))
    for name in ("fedveil", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    done = compare(out=".", resume=True, jobs=1)
    assert [one.state for one in done.standings] == ["finished"]
    assert not (tmp_path / "ran").exists()
