"""An entry runs cell by cell, goes on where it was stopped, and says how far it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedveil.errors import ConfigError
from papers import Cell, Check, Entry, Options, Report, Tick, entries, find, reproduce, run_entry, runner
from papers.attacks import draw_sheet
from papers.cells import Figures, Results, numbers
from papers.stage import OnRound, Stage


class Work:
    """Counts what is run; fails at one cell while `broken`."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.broken = ""

    def __call__(self, stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
        if cell.name == self.broken:
            raise KeyboardInterrupt
        on_round(1, 2)
        on_round(2, 2)
        self.ran.append((cell.name, seed))
        return {"accuracy": 10.0 * seed}


def report(results: Results, quick: bool) -> Report:
    rows = tuple((name, str(numbers(results, name))) for name in ("a", "b", "c"))
    return Report("three cells", ("cell", "accuracy"), rows, (Check("it runs", True),), quick=quick)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    made = Work()
    cells = (Cell("a"), Cell("b"), Cell("c", usual=False))
    entry = Entry("three", "none", "three cells", "no time", "nothing", lambda quick: cells, report, made)
    known = {"three": entry, "one": replace(entry, name="one", random=False, has_quick=False)}
    monkeypatch.setattr(runner, "find", known.__getitem__)
    return made


def test_a_stopped_run_goes_on_with_the_cells_that_are_missing(work: Work, tmp_path: Path) -> None:
    work.broken = "b"
    with pytest.raises(KeyboardInterrupt):
        reproduce("three", Options(out=tmp_path))
    assert work.ran == [("a", 1)]
    work.broken = ""
    said: list[str] = []
    reproduce("three", Options(out=tmp_path, say=said.append))
    assert work.ran == [("a", 1), ("b", 1)]
    assert said[0] == f"1 of 2 cells are in {tmp_path / 'three.json'} already"
    assert said[1].startswith("[2/2] b seed 1: 10.00 %")
    reproduce("three", Options(out=tmp_path, seeds=2))
    assert work.ran[2:] == [("a", 2), ("b", 2)]


def test_cells_asked_for_join_those_that_are_there(work: Work, tmp_path: Path) -> None:
    reproduce("three", Options(out=tmp_path, only=["a"]))
    found = reproduce("three", Options(out=tmp_path, only=["c"]))
    assert work.ran == [("a", 1), ("c", 1)]
    assert found.rows == (("a", "{1: 10.0}"), ("b", "{}"), ("c", "{1: 10.0}"))


def test_every_round_and_every_cell_is_told(work: Work, tmp_path: Path) -> None:
    ticks: list[Tick] = []
    reproduce("three", Options(out=tmp_path, full=True, tick=ticks.append))
    assert ticks[:4] == [
        Tick("a seed 1", 0, 3),
        Tick("a seed 1", 0, 3, 1, 2),
        Tick("a seed 1", 0, 3, 2, 2),
        Tick("a seed 1", 1, 3),
    ]
    assert ticks[-1] == Tick("c seed 1", 3, 3)


def test_the_quick_form_keeps_its_figures_to_itself(work: Work, tmp_path: Path) -> None:
    reproduce("three", Options(out=tmp_path))
    found = reproduce("three", Options(out=tmp_path, quick=True))
    assert len(work.ran) == 4
    assert found.verdict.startswith("in the quick form, which shows directions only, holds")
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "three-quick.json",
        "three-quick.md",
        "three.json",
        "three.md",
    ]
    assert "**Verdict: holds: " in (tmp_path / "three.md").read_text()


def test_nothing_random_is_run_once_and_has_no_quick_form(work: Work, tmp_path: Path) -> None:
    reproduce("one", Options(out=tmp_path, seeds=3))
    assert work.ran == [("a", 1), ("b", 1)]
    with pytest.raises(ConfigError, match="one has no quick form"):
        reproduce("one", Options(out=tmp_path, quick=True))
    with pytest.raises(ConfigError, match="seeds must be at least 1"):
        reproduce("three", Options(out=tmp_path, seeds=0))


def test_plain_text_says_cells_table_claims_and_verdict(
    work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_entry("three", Options(out=tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/2] a seed 1: 10.00 % (")
    assert lines[3:5] == ["three cells", ""]
    assert "[ yes] it runs" in lines
    assert lines[-1].startswith("verdict: holds")


def test_the_catalogue_names_each_entry_once_and_suggests_the_nearest() -> None:
    found = [entry.name for entry in entries()]
    assert len(set(found)) == len(found)
    assert {"nadp-table1", "nadp-table3", "mpdp-accuracy", "veil-dp-accuracy"} <= set(found)
    assert [find(name).name for name in found] == found
    with pytest.raises(ConfigError, match="Did you mean 'nadp-table1'"):
        find("nadp-tabel1")


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_an_entry_without_figures_shows_an_empty_table_and_no_verdict(entry: Entry) -> None:
    for quick in (False, True) if entry.has_quick else (False,):
        names = [cell.name for cell in entry.cells(quick)]
        assert len(set(names)) == len(names)
        assert any(cell.usual for cell in entry.cells(quick))
        found = entry.report({}, quick)
        assert found.verdict.startswith("not decidable")
        assert all(len(row) == len(found.columns) for row in found.rows)
        json.dumps([cell.identity() for cell in entry.cells(quick)])


def test_an_entry_that_makes_pictures_leaves_a_sheet_once_there_is_something_to_compare(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(results: Results, quick: bool) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.rand(2, 1, 8, 8)) for name in results]

    shown = replace(runner.find("three"), draw=draw_sheet(rows))
    monkeypatch.setattr(runner, "find", lambda name: shown)
    reproduce("three", Options(out=tmp_path, only=["a"]))
    assert not (tmp_path / "three.png").exists()
    reproduce("three", Options(out=tmp_path))
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")
