"""All entries in a row: one that fails is noted, the others run, and a second call goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedveil.errors import ConfigError, DataError
from papers import Cell, Check, Entry, Options, Report, reproduce_all, runner
from papers.cells import Figures, Results
from papers.stage import OnRound, Stage
from shell import fedveil


class Works:
    """Three entries; "wanting" lacks data, "broken" has a defect, until mended."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.wrong: dict[str, BaseException] = {"wanting": DataError("No data."), "broken": ValueError("a defect")}

    def entry(self, name: str, *, has_quick: bool = True) -> Entry:
        def work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
            if name in self.wrong:
                raise self.wrong[name]
            self.ran.append(name)
            return {"accuracy": 1.0}

        def report(results: Results, quick: bool) -> Report:
            return Report(name, ("a",), (("1",),), (Check("it ran", True),), quick=quick)

        return Entry(
            name, "none", "a cell", "no time", "nothing", lambda quick: (Cell("a"),), report, work, has_quick=has_quick
        )


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    made = Works()
    found = (made.entry("wanting"), made.entry("broken"), made.entry("fine", has_quick=False))
    monkeypatch.setattr(runner, "entries", lambda: found)
    monkeypatch.setattr(runner, "find", {one.name: one for one in found}.__getitem__)
    return made


def test_an_entry_that_fails_is_noted_and_the_others_run(works: Works, tmp_path: Path) -> None:
    outcomes = reproduce_all(Options(out=tmp_path, quick=True))
    assert [(one.entry.name, one.word, one.failed) for one in outcomes] == [
        ("wanting", "could not be run", "No data."),
        ("broken", "could not be run", "ValueError: a defect"),
        ("fine", "holds", ""),
    ]
    kept = json.loads((tmp_path / "all-quick.json").read_text())
    assert [one["failed"] for one in kept] == ["No data.", "ValueError: a defect", ""]
    assert kept[2]["report"]["word"] == "holds"
    assert json.loads((tmp_path / "fine.json").read_text())["verdict"]["word"] == "holds"


def test_a_second_call_runs_only_what_is_missing(works: Works, tmp_path: Path) -> None:
    reproduce_all(Options(out=tmp_path, quick=True))
    works.wrong.clear()
    reproduce_all(Options(out=tmp_path, quick=True))
    assert works.ran == ["fine", "wanting", "broken"]


def test_who_stops_it_stops_all_of_it(works: Works, tmp_path: Path) -> None:
    works.wrong["wanting"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        reproduce_all(Options(out=tmp_path))
    assert works.ran == []


def test_the_command_shows_every_verdict_and_fails_if_an_entry_did(works: Works, tmp_path: Path) -> None:
    done = fedveil("reproduce", "all", "--quick", "--jobs", 0, "--out", tmp_path)
    assert done.code == 1
    assert "a defect" in done.output
    assert "could not be run" in done.output
    assert "verdict: holds" in done.output
    works.wrong.clear()
    done = fedveil("reproduce", "all", "--quick", "--jobs", 0, "--out", tmp_path, "--json")
    assert done.code == 0
    assert [one["name"] for one in json.loads(done.output)] == ["wanting", "broken", "fine"]


def test_all_takes_no_pattern_of_cells(tmp_path: Path) -> None:
    done = fedveil("reproduce", "all", "--only", "a", "--out", tmp_path)
    assert done.code == ConfigError.exit_code
    assert "--only names cells of one entry" in done.error
