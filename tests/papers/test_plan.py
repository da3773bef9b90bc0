"""The plan: what decides first is run first, what does not fit in the time is left out, and nothing is run twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedveil.errors import ConfigError
from papers import Cell, Check, Entry, Options, Report, entries, plan, run_plan, runner, still_to_run
from papers.cells import Figures, Results
from papers.stage import OnRound, Stage

RESULTS = Path(__file__).parents[2] / "docs" / "results"


class Machine:
    """Its clock stands still but for work; a cell takes as many minutes as it says, times how slow the machine is."""

    def __init__(self) -> None:
        self.now, self.slowness, self.broken = 1000.0, 1.0, ""
        self.ran: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def work(self, stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
        if cell.name == self.broken:
            raise KeyboardInterrupt
        self.now += 60.0 * cell.more["minutes"] * self.slowness
        self.ran.append(f"{cell.name} {seed}")
        return {"accuracy": 50.0}


def judged(results: Results, quick: bool) -> Report:
    return Report("cells", ("cell",), tuple((name,) for name in results), (Check("it runs", True),), quick=quick)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    first = (Cell("a", more={"minutes": 1.0}), Cell("long", more={"minutes": 9.0}), Cell("b", more={"minutes": 1.0}))
    second = (Cell("c", more={"minutes": 2.0}), Cell("d", more={"minutes": 2.0}))
    one = Entry("one", "none", "cells", "no time", "nothing", lambda quick: first, judged, made.work)
    known = {"one": one, "two": replace(one, name="two", cells=lambda quick: second, random=False)}
    for module in (runner, plan):
        monkeypatch.setattr(module, "find", known.__getitem__)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    (tmp_path / "plan.toml").write_text(
        'steps = [\n  { entry = "one", only = ["a"], seeds = 2, minutes = 1.0, decides = "the first" },\n'
        '  { entry = "one", only = ["long"], minutes = 9.0, decides = "the longest" },\n'
        '  { entry = "two", only = ["c", "d"], minutes = 2.0, decides = "another" },\n'
        '  { entry = "one", only = ["a", "b"], minutes = 1.0, decides = "the rest" },\n]\n'
    )
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "plan.py"))
    monkeypatch.setattr(plan, "SLOWER", 1.0)
    return made


def test_cells_run_in_the_plans_order_and_none_twice(machine: Machine, tmp_path: Path) -> None:
    ending = run_plan(Options(out=tmp_path))
    assert machine.ran == ["a 1", "a 2", "long 1", "c 1", "d 1", "b 1"]
    assert [(outcome.entry.name, outcome.word, outcome.failed) for outcome in ending.outcomes] == [
        ("one", "holds", ""),
        ("two", "holds", ""),
    ]
    assert ending.left_out == []
    assert (tmp_path / "one.md").exists()
    assert run_plan(Options(out=tmp_path)).outcomes == []
    assert len(machine.ran) == 6


def test_what_does_not_fit_is_left_out_and_shorter_cells_fill_the_time(machine: Machine, tmp_path: Path) -> None:
    ending = run_plan(Options(out=tmp_path), minutes=7.5)
    assert machine.ran == ["a 1", "a 2", "c 1", "d 1", "b 1"]
    assert [run.name for run in ending.left_out] == ["long seed 1"]
    assert [(step.decides, missing) for step, missing in still_to_run(tmp_path)][:2] == [
        ("the first", 0),
        ("the longest", 1),
    ]


def test_a_slower_machine_is_noticed_by_what_cells_take(machine: Machine, tmp_path: Path) -> None:
    """Three times as slow: the second `a` takes what the first took, and what was planned for two minutes takes six."""
    machine.slowness = 3.0
    ending = run_plan(Options(out=tmp_path), minutes=10.0)
    assert machine.ran == ["a 1", "a 2", "b 1"]
    assert [run.cell.name for run in ending.left_out] == ["long", "c", "d"]


def test_without_a_gpu_cells_are_taken_to_be_slow_until_one_was_seen(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan, "SLOWER", 4.0)
    ending = run_plan(Options(out=tmp_path), minutes=3.5)
    assert machine.ran == []
    assert len(ending.left_out) == 6
    run_plan(Options(out=tmp_path), minutes=5.5)  # `a` fits, and is as fast as on a GPU
    assert machine.ran == ["a 1", "a 2", "c 1", "b 1"]


def test_who_stops_it_keeps_what_is_done_and_its_verdict(machine: Machine, tmp_path: Path) -> None:
    machine.broken = "c"
    with pytest.raises(KeyboardInterrupt):
        run_plan(Options(out=tmp_path))
    assert "**Verdict: " in (tmp_path / "one.md").read_text()
    machine.broken = ""
    run_plan(Options(out=tmp_path))
    assert machine.ran == ["a 1", "a 2", "long 1", "c 1", "d 1", "b 1"]


def test_the_plan_has_forms_and_seeds_of_its_own(machine: Machine, tmp_path: Path) -> None:
    for given in ({"quick": True}, {"full": True}, {"only": ["a"]}, {"seeds": 2}):
        with pytest.raises(ConfigError, match="names cells, seeds and forms itself"):
            run_plan(Options(out=tmp_path, **given))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="minutes must be greater than 0"):
        run_plan(Options(out=tmp_path), minutes=0.0)


def test_every_usual_cell_without_stored_figures_is_planned() -> None:
    planned = {(run.entry.name, run.cell.name) for step in plan.steps() for run in step.runs}
    for entry in entries():
        store = runner.open_store(entry, RESULTS, quick=False)
        missing = [cell.name for cell in entry.cells(False) if cell.usual and not store.has(cell, 1)]
        assert [name for name in missing if (entry.name, name) not in planned] == []
