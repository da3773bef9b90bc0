"""What is run first where time on a machine is short: cells that decide a verdict, in one order over all entries."""

from __future__ import annotations

import statistics
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.errors import ConfigError
from papers.cells import Store, chosen
from papers.entries import Entry
from papers.runner import (
    Failure,
    Grid,
    Options,
    Outcome,
    Run,
    check,
    conclude,
    find,
    first_failure,
    open_store,
    runs_of,
)

PLAN = "plan"
"""The name that stands for the plan."""


@dataclass(frozen=True, eq=False)
class Step:
    """Cells of one entry that take about as long as each other, and what they decide."""

    entry: Entry
    runs: tuple[Run, ...]
    minutes: float
    decides: str

    def missing(self, store: Store) -> list[Run]:
        """Those of which there are no figures."""
        return [run for run in self.runs if not store.has(run.cell, run.seed)]


def steps() -> list[Step]:
    """The plan, read from plan.toml; a run that two steps name belongs to the first."""
    content = tomllib.loads(Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))
    found: list[Step] = []
    named: set[tuple[str, str, int]] = set()
    for given in content["steps"]:
        entry = find(given["entry"])
        runs = runs_of(entry, chosen(entry.cells(False), given["only"]), seeds=given.get("seeds", 1))
        runs = [run for run in runs if (entry.name, run.cell.name, run.seed) not in named]
        named.update((entry.name, run.cell.name, run.seed) for run in runs)
        found.append(Step(entry, tuple(runs), given["minutes"], given["decides"]))
    return found


SLOWER = 30.0
"""Times as long as planned that two CPU cores are taken to need, until some cells were seen."""


class Pace:
    """How long runs take here: as long as the longest of their step has taken, or as planned times what others took.

    Until one was seen a run takes `usual` times what is planned.
    """

    def __init__(self, plan: Sequence[Step], *, usual: float = 1.0) -> None:
        self._step = {run: step for step in plan for run in step.runs}
        self._usual = usual
        self._seen: dict[Step, float] = {}
        self._ratios: list[float] = []

    def took(self, run: Run, seconds: float) -> None:
        """A run was seen to take so long."""
        step = self._step[run]
        self._seen[step] = max(seconds, self._seen.get(step, 0.0))
        self._ratios.append(seconds / (60.0 * step.minutes))

    def expected(self, run: Run) -> float:
        """Seconds that one is likely to take."""
        step = self._step[run]
        return self._seen.get(step, 60.0 * step.minutes * statistics.median(self._ratios or [self._usual]))


@dataclass(frozen=True)
class Ending:
    """How the plan's part that was run has ended: the entries that were touched, and the runs that did not fit."""

    outcomes: list[Outcome]
    left_out: list[Run]


def run_plan(options: Options, *, minutes: float | None = None) -> Ending:
    """Run what `out` does not hold of the plan, in its order; within `minutes`, what is expected to end in them.

    Judges every entry that was touched, when all is through or somebody stops it.
    """
    refuse_choice(options)
    check(options)
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"minutes must be greater than 0 (got {minutes:g}).")
    end = None if minutes is None else time.monotonic() + 60.0 * minutes
    plan = steps()
    stores = _stores(plan, Path(options.out))
    missing = [run for step in plan for run in step.missing(stores[step.entry.name])]
    pace = Pace(plan, usual=1.0 if options.device.startswith("cuda") else SLOWER)
    left_out: list[Run] = []

    def fitting() -> Iterator[Run]:
        for run in missing:
            if end is not None and time.monotonic() + pace.expected(run) > end:
                left_out.append(run)
            else:
                yield run

    total = sum(len(step.runs) for step in plan)
    grid = Grid(options, stores, done=total - len(missing), total=total, took=pace.took)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    try:
        failures = grid.run(fitting())
    finally:
        spent = time.monotonic() - began
        touched = {run.entry.name: run.entry for run in grid.started}
        reports = [(entry, conclude(entry, stores[name], quick=False)) for name, entry in touched.items()]
        outcomes += [Outcome(entry, report, spent) for entry, report in reports]
    return Ending([replace(one, failed=_why(failures, one.entry)) for one in outcomes], left_out)


def refuse_choice(options: Options) -> None:
    """The plan says itself what is run."""
    if options.quick or options.full or list(options.only) or options.seeds != 1:
        raise ConfigError("The plan names cells, seeds and forms itself: leave out --quick, --full, --only, --seeds.")


def _stores(plan: Sequence[Step], folder: Path) -> dict[str, Store]:
    entries = {step.entry.name: step.entry for step in plan}
    return {name: open_store(entry, folder, quick=False) for name, entry in entries.items()}


def _why(failures: Sequence[Failure], entry: Entry) -> str:
    reason = first_failure([one for one in failures if one.run.entry is entry])
    return "" if reason is None else str(reason)


def still_to_run(folder: Path) -> list[tuple[Step, int]]:
    """Every step, and how many of its runs a folder does not hold."""
    plan = steps()
    stores = _stores(plan, folder)
    return [(step, len(step.missing(stores[step.entry.name]))) for step in plan]
