"""Running entries cell by cell: every figure is kept as soon as it is there, and judged again from where it is kept.

Cells run on the grid that `fedveil compare` uses: in processes of their own, so that one that dies takes no other with
it, or in this one.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedveil.compare.grid import run_grid
from fedveil.data.sources import EMBEDDED
from fedveil.errors import ConfigError, DataError, FedVeilError, unknown_name
from fedveil.processes import usable_cores
from fedveil.runs.folder import write_atomically
from papers import lossless, mpdp, nadp, paraaegis, pbpfl, veil_dp
from papers.cells import Cell, Figures, Results, Store, chosen
from papers.entries import Entry
from papers.report import Report
from papers.stage import DATA_VARIABLE, Stage

ALL = "all"
"""The name that stands for every entry."""

GRAPHICS = ("nvidia", "cuda", "amd radeon")
_ENTRIES = (
    *nadp.ENTRIES,
    *mpdp.ENTRIES,
    *lossless.ENTRIES,
    *pbpfl.ENTRIES,
    *paraaegis.ENTRIES,
    *veil_dp.ENTRIES,
)


def entries() -> tuple[Entry, ...]:
    """Every entry."""
    return _ENTRIES


def find(name: str) -> Entry:
    """An entry by name; an unknown name suggests the nearest."""
    known = {one: entry for entry in entries() for one in (*entry.also, entry.name)}
    if name not in known:
        raise unknown_name("entry", name, known)
    return known[name]


@dataclass(frozen=True)
class Tick:
    """How far a run of an entry is: `done` of `cells` cells, and `round` of `rounds` in the present one."""

    cell: str
    done: int
    cells: int
    round: int = 0
    rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How entries are run: the folder for figures, the device, the folder of data sets, the form, the seeds 1 … N.

    `only` are names, leading parts or patterns of cells. At most `jobs` cells run at once, each in a process of its
    own; 0 runs them in this one. `say` and `tick` are told how far it is.
    """

    out: str | Path = Path("runs/reproduce")
    device: str = "cpu"
    data: str | Path | None = None
    quick: bool = False
    full: bool = False
    seeds: int = 1
    only: Iterable[str] = ()
    jobs: int = 0
    say: Callable[[str], None] = lambda text: None
    tick: Callable[[Tick], None] = lambda tick: None


@dataclass(frozen=True, eq=False)
class Run:
    """A cell of an entry under one seed."""

    entry: Entry
    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        """What it is called among those of its entry."""
        return f"{self.cell.name} seed {self.seed}" if self.entry.random else self.cell.name


def runs_of(entry: Entry, cells: Iterable[Cell], *, seeds: int) -> list[Run]:
    """Every cell under the seeds 1 … N, or under one where nothing is random."""
    return [Run(entry, cell, seed) for cell in cells for seed in range(1, seeds + 1 if entry.random else 2)]


def check(options: Options) -> None:
    """Whether there is such a device and such a folder of data: no cell could be run otherwise."""
    Stage(device=options.device)
    if options.data is not None and not Path(options.data).expanduser().is_dir():
        raise DataError(f"--data {options.data} is no folder: name the one that holds the data sets' folders.")


def reproduce(name: str, options: Options | None = None) -> Report:
    """Run an entry's cells that `out` does not hold yet; writes OUT/NAME.json, .md and .png; returns the report.

    Cells that cannot be run end no other; the first reason is raised when all are through.
    """
    report, failed = attempt(name, options)
    if failed:
        raise failed
    return report


def attempt(name: str, options: Options | None = None) -> tuple[Report, FedVeilError | None]:
    """As `reproduce`; what the cells there are amount to, and the first reason why others could not be run."""
    entry, options = find(name), options or Options()
    check(options)
    if options.seeds < 1:
        raise ConfigError(f"seeds must be at least 1 (got {options.seeds}).")
    if options.quick and not entry.has_quick:
        raise ConfigError(f"{name} has no quick form: it takes {entry.takes} as it is.")
    store = open_store(entry, Path(options.out), quick=options.quick)
    cells = chosen(entry.cells(options.quick), options.only, full=options.full)
    runs = runs_of(entry, cells, seeds=options.seeds)
    waiting = [run for run in runs if not store.has(run.cell, run.seed)]
    _check_data(waiting, Stage(folder=options.data))
    grid = Grid(options, {entry.name: store}, done=len(runs) - len(waiting), total=len(runs))
    if grid.done:
        options.say(f"{grid.done} of {grid.total} cells are in {store.path} already")
    failed = first_failure(grid.run(waiting))
    return conclude(entry, store, quick=options.quick), failed


def _check_data(waiting: Sequence[Run], stage: Stage) -> None:
    """Refuse to begin where no cell has its data; where only some have none, the others are run."""
    reasons: list[DataError] = []
    for run in waiting:
        name = run.cell.settings.get("dataset")
        try:
            if name is None or name in EMBEDDED or stage.place(name):
                return
        except DataError as reason:
            reasons.append(reason)
    if reasons:
        raise reasons[0]


def open_store(entry: Entry, folder: Path, *, quick: bool) -> Store:
    """The file of an entry's figures in one form."""
    label = f"{entry.name}-quick" if quick else entry.name
    return Store(folder / f"{label}.json", entry=label)


def conclude(entry: Entry, store: Store, *, quick: bool) -> Report:
    """Judge what is there, and write table, verdict and picture beside the figures."""
    report = entry.report(store.results(), quick)
    if store.path.exists():
        store.conclude(report.as_data())
        write_atomically(store.path.with_suffix(".md"), report.markdown())
        if entry.draw is not None:
            entry.draw(store.results(), quick, store.path.with_suffix(".png"))
    return report


@dataclass(frozen=True)
class Failure:
    """A run that came to nothing."""

    run: Run
    code: int
    reason: str


class Grid:
    """Runs of entries, each kept in its entry's store as soon as it is there; `took` is told how long one took."""

    def __init__(
        self,
        options: Options,
        stores: Mapping[str, Store],
        *,
        done: int = 0,
        total: int,
        took: Callable[[Run, float], None] = lambda run, seconds: None,
    ) -> None:
        if options.jobs < 0:
            raise ConfigError(f"jobs must be at least 0 (got {options.jobs}).")
        self.options, self.stores, self.took = options, stores, took
        self.done, self.total = done, total
        self.started: dict[Run, float] = {}
        self.failures: list[Failure] = []

    def run(self, waiting: Iterable[Run]) -> list[Failure]:
        """Run them, the next one when there is a place for it; gives back what could not be run."""
        jobs = self.options.jobs
        run_grid(
            waiting,
            work="papers.runner:run_cell",
            job_of=self._job,
            take=self._take,
            jobs=jobs or None,
            threads=None if jobs == 1 else max(1, usable_cores() // max(1, jobs)),
            path=[Path(__file__).parents[1]],
        )
        return self.failures

    def _job(self, run: Run) -> dict[str, Any]:
        folder = self.options.data or os.environ.get(DATA_VARIABLE)
        return {
            "entry": run.entry.name,
            "quick": self.options.quick,
            "cell": run.cell.name,
            "seed": run.seed,
            "device": self.options.device,
            "data": None if folder is None else str(folder),
        }

    def _take(self, run: Run, report: Mapping[str, Any]) -> None:
        name = run.name if len(self.stores) == 1 else f"{run.entry.name} {run.name}"
        now = Tick(name, self.done, self.total)
        if report["kind"] == "start":
            self.started[run] = time.monotonic()
            self.options.tick(now)
        elif report["kind"] == "round":
            self.options.tick(replace(now, round=report["round"], rounds=report["rounds"]))
        elif report["kind"] == "failed":
            self.failures.append(Failure(run, report["code"], report["reason"]))
            self.options.say(f"{name}: could not be run")
        else:
            figures: Figures = report["figures"]
            self.stores[run.entry.name].keep(run.cell, run.seed, figures)
            self.done += 1
            took = time.monotonic() - self.started[run]
            self.took(run, took)
            self.options.say(f"[{self.done}/{self.total}] {name}: {_in_short(figures)} ({took:.1f} s)")
            self.options.tick(Tick(name, self.done, self.total))


def first_failure(failures: Sequence[Failure]) -> FedVeilError | None:
    """The first reason why runs came to nothing, and of how many others."""
    if not failures:
        return None
    first, others = failures[0], len(failures) - 1
    more = f" ({first.run.name}; {others} other cells could not be run either)" if others else f" ({first.run.name})"
    kinds = {kind.exit_code: kind for kind in FedVeilError.__subclasses__()}
    return kinds.get(first.code, FedVeilError)(first.reason + more)


def run_cell(job: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The work of one cell, wherever it runs."""
    entry = find(job["entry"])
    cell = next(one for one in entry.cells(job["quick"]) if one.name == job["cell"])
    stage = _stage(job["device"], job["data"], job["quick"])

    def on_round(done: int, rounds: int) -> None:
        tell({"kind": "round", "round": done, "rounds": rounds})

    return {"figures": entry.work(stage, cell, job["seed"], on_round)}


@lru_cache(maxsize=1)
def _stage(device: str, data: str | None, quick: bool) -> Stage:
    """Data sets are read once for all cells that one process runs."""
    return Stage(device=device, folder=data, quick=quick)


def _in_short(figures: Figures) -> str:
    accuracy = figures.get("accuracy")
    text = "done" if accuracy is None else f"{accuracy:.2f} %" if isinstance(accuracy, float) else str(accuracy)
    return f"{text}, {figures['stopped']}" if "stopped" in figures else text


def run_entry(name: str, options: Options | None = None) -> Report:
    """`reproduce` with plain text on standard output; needs no terminal packages."""

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    report = reproduce(name, replace(options or Options(), say=say))
    say("\n" + report.text())
    return report


@dataclass(frozen=True)
class Outcome:
    """How an entry ended: with a report, or with the reason why there is none."""

    entry: Entry
    report: Report | None
    seconds: float
    failed: str = ""

    @property
    def word(self) -> str:
        """The verdict's word, or that it could not be run."""
        return "could not be run" if self.report is None else self.report.word

    def as_data(self) -> dict[str, object]:
        """As plain data."""
        about = {"name": self.entry.name, "paper": self.entry.paper, "seconds": round(self.seconds, 1)}
        return {**about, "failed": self.failed, "report": None if self.report is None else self.report.as_data()}


def reproduce_all(
    options: Options | None = None, *, done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run every entry; one without a quick form runs whole. Writes OUT/all.json (all-quick.json) as it goes on.

    Cells that `out` holds are not run again, so that the same call goes on where another was stopped.
    """
    options = options or Options()
    outcomes: list[Outcome] = []
    for place, entry in enumerate(entries(), start=1):
        options.say(f"{place} of {len(entries())}: {entry.name} ({entry.paper}, {entry.what})")
        started = time.perf_counter()
        report, failed = None, ""
        try:
            report, reason = attempt(entry.name, replace(options, quick=options.quick and entry.has_quick))
            failed = "" if reason is None else str(reason)
        except FedVeilError as reason:
            failed = str(reason)
        except Exception as reason:  # a defect in one entry must not cost the others
            failed = f"{type(reason).__name__}: {reason}"
        outcomes.append(Outcome(entry, report, time.perf_counter() - started, failed))
        path = Path(options.out) / f"{ALL}{'-quick' if options.quick else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([one.as_data() for one in outcomes], indent=1, ensure_ascii=False)
        write_atomically(path, text + "\n")
        done(outcomes[-1])
    return outcomes


@dataclass(frozen=True)
class Stored:
    """One file of figures: the entry, its form, the report they give, and where and when they were taken."""

    entry: Entry
    quick: bool
    report: Report
    path: Path
    machine: str
    noted: str
    cells: str
    seeds: int

    @property
    def command(self) -> str:
        """What shows the figures again."""
        words = ["fedveil reproduce", self.entry.name, "--quick" if self.quick else ""]
        words += [f"--seeds {self.seeds}"] if self.seeds > 1 else []
        on_gpu = any(name in self.machine.lower() for name in GRAPHICS)
        return " ".join(filter(None, [*words, "--device cuda" if on_gpu else ""]))


def stored_results(folder: Path) -> list[Stored]:
    """Every file of figures in a folder, in the order of the catalogue, the full form before the quick one."""
    return [
        found
        for entry in entries()
        for quick in ((False, True) if entry.has_quick else (False,))
        if (found := stored_result(folder, entry, quick=quick)) is not None
    ]


def stored_result(folder: Path, entry: Entry, *, quick: bool) -> Stored | None:
    """An entry's figures in one form, if the folder holds them."""
    store = open_store(entry, folder, quick=quick)
    if not store.path.exists():
        return None
    results = store.results()
    every = entry.cells(quick)
    usual = [cell.name for cell in every if cell.usual]
    there = f"{sum(name in results for name in usual)} of {len(usual)} cells"
    if len(every) > len(usual):
        there += f", {sum(cell.name in results for cell in every)} of the whole {len(every)}"
    seeds = max(map(len, results.values()), default=1)
    return Stored(entry, quick, entry.report(results, quick), store.path, _machine(results), store.noted, there, seeds)


def _machine(results: Results) -> str:
    """Every device and version of torch that the figures name."""
    figures = list(itertools.chain.from_iterable(seeds.values() for seeds in results.values()))
    devices = sorted({str(one["device"]).replace("1 threads", "1 thread") for one in figures if "device" in one})
    versions = sorted({str(one["torch"]) for one in figures if "torch" in one})
    return ", ".join([*devices, *(f"torch {one}" for one in versions)])
