"""Running entries cell by cell: every figure is kept as soon as it is there, and judged again from where it is kept."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError, FedVeilError, unknown_name
from fedveil.runs.folder import write_atomically
from papers import inversion, membership, mpdp, nadp, nadp_attacks, paraaegis, reconstruction, veil_dp
from papers.cells import Figures, Report, Results, Store, chosen
from papers.headlines import report_of
from papers.stage import Entry, Stage

_ENTRIES = (
    nadp.TABLE3_ENTRY,
    nadp.TABLE1_ENTRY,
    nadp.FIG3_ENTRY,
    nadp.FIG4_ENTRY,
    nadp_attacks.ENTRY,
    mpdp.ENTRY,
    membership.MPDP_ENTRY,
    membership.LOSSLESS_ENTRY,
    reconstruction.ENTRY,
    inversion.ENTRY,
    paraaegis.TABLE1_ENTRY,
    paraaegis.TABLE2_ENTRY,
    veil_dp.ENTRY,
)


def entries() -> tuple[Entry, ...]:
    """Every entry."""
    return _ENTRIES


def find(name: str) -> Entry:
    """An entry by name; an unknown name suggests the nearest."""
    known = {entry.name: entry for entry in _ENTRIES}
    if name not in known:
        raise unknown_name("entry", name, known)
    return known[name]


DEFAULT_OUT = Path("runs/reproduce")


@dataclass(frozen=True)
class Tick:
    """How far a run of an entry is: `done` of `cells` cells, and `round` of `rounds` in the present one."""

    cell: str
    done: int
    cells: int
    round: int = 0
    rounds: int = 0


def reproduce(
    name: str,
    *,
    out: str | Path = DEFAULT_OUT,
    device: str = "cpu",
    data: str | Path | None = None,
    quick: bool = False,
    full: bool = False,
    seeds: int = 1,
    only: Iterable[str] = (),
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda tick: None,
) -> Report:
    """Run an entry's cells that `out` does not hold yet; writes OUT/NAME.json, .md and .png; returns the report."""
    entry = find(name)
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1 (got {seeds}).")
    if quick and not entry.has_quick:
        raise ConfigError(f"{name} has no quick form: it takes {entry.takes} as it is.")
    label = f"{name}-quick" if quick else name
    store = Store(Path(out) / f"{label}.json", entry=label)
    cells = chosen(entry.cells(quick), only, full=full)
    runs = [(cell, seed) for cell in cells for seed in range(1, seeds + 1 if entry.random else 2)]
    waiting = [(cell, seed) for cell, seed in runs if not store.has(cell, seed)]
    done = len(runs) - len(waiting)
    if done:
        say(f"{done} of {len(runs)} cells are in {store.path} already")
    stage = Stage(device=device, folder=data)
    for cell, seed in waiting:
        where = Tick(f"{cell.name} seed {seed}" if entry.random else cell.name, done, len(runs))
        tick(where)

        def on_round(round: int, rounds: int, where: Tick = where) -> None:
            tick(Tick(where.cell, where.done, where.cells, round, rounds))

        started = time.perf_counter()
        figures = entry.work(stage, cell, seed, on_round)
        store.keep(cell, seed, figures)
        done += 1
        took = time.perf_counter() - started
        say(f"[{done}/{len(runs)}] {where.cell}: {_in_short(figures)} ({took:.1f} s)")
        tick(Tick(where.cell, done, len(runs)))
    report = report_of(entry, store.results(), quick=quick)
    if store.path.exists():
        store.conclude(report.as_data())
        write_atomically(store.path.with_suffix(".md"), report.markdown())
        _write_sheet(entry, store, quick=quick)
    return report


def _write_sheet(entry: Entry, store: Store, *, quick: bool) -> None:
    """One picture beside the figures, where an entry makes pictures and there is something to compare."""
    rows = () if entry.pictures is None else entry.pictures(store.results(), quick)
    if len(rows) > 1:
        from fedveil.audit.pictures import contact_sheet

        contact_sheet(rows, store.path.with_suffix(".png"), box=(0.0, 1.0))


def _in_short(figures: Figures) -> str:
    accuracy = figures.get("accuracy")
    text = "done" if accuracy is None else f"{accuracy:.2f} %" if isinstance(accuracy, float) else str(accuracy)
    return f"{text}, {figures['stopped']}" if "stopped" in figures else text


def run_entry(
    name: str,
    *,
    out: str | Path = DEFAULT_OUT,
    device: str = "cpu",
    data: str | Path | None = None,
    quick: bool = False,
    full: bool = False,
    seeds: int = 1,
    only: Iterable[str] = (),
) -> Report:
    """`reproduce` with plain text on standard output; needs no terminal packages."""

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    report = reproduce(name, out=out, device=device, data=data, quick=quick, full=full, seeds=seeds, only=only, say=say)
    say("\n" + report.text())
    return report


ALL = "all"
"""The name that stands for every entry."""


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
    *,
    out: str | Path = DEFAULT_OUT,
    device: str = "cpu",
    data: str | Path | None = None,
    quick: bool = False,
    full: bool = False,
    seeds: int = 1,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Tick], None] = lambda tick: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every entry; one without a quick form runs whole. Writes OUT/all.json (all-quick.json) as it goes on.

    Cells that `out` holds are not run again, so that the same call goes on where another was stopped.
    """
    outcomes: list[Outcome] = []
    for place, entry in enumerate(entries(), start=1):
        say(f"{place} of {len(entries())}: {entry.name} ({entry.paper}, {entry.what})")
        started = time.perf_counter()
        report, failed = None, ""
        try:
            report = reproduce(
                entry.name,
                out=out,
                device=device,
                data=data,
                quick=quick and entry.has_quick,
                full=full,
                seeds=seeds,
                say=say,
                tick=tick,
            )
        except FedVeilError as reason:
            failed = str(reason)
        except Exception as reason:  # a defect in one entry must not cost the others
            failed = f"{type(reason).__name__}: {reason}"
        outcomes.append(Outcome(entry, report, time.perf_counter() - started, failed))
        _write(Path(out) / f"{ALL}{'-quick' if quick else ''}.json", outcomes)
        done(outcomes[-1])
    return outcomes


def _write(path: Path, outcomes: list[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([one.as_data() for one in outcomes], indent=1, ensure_ascii=False)
    write_atomically(path, text + "\n")


GRAPHICS = ("nvidia", "cuda", "amd radeon")


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

    @property
    def command(self) -> str:
        """What shows the figures again."""
        words = ["fedveil reproduce", self.entry.name, "--quick" if self.quick else ""]
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
    label = f"{entry.name}-quick" if quick else entry.name
    path = folder / f"{label}.json"
    if not path.exists():
        return None
    store = Store(path, entry=label)
    results = store.results()
    usual = [cell.name for cell in entry.cells(quick) if cell.usual]
    there = f"{sum(name in results for name in usual)} of {len(usual)} cells"
    report = report_of(entry, results, quick=quick)
    return Stored(entry, quick, report, path, _machine(results), store.noted, there)


def _machine(results: Results) -> str:
    """Every device and version of torch that the figures name."""
    figures = list(itertools.chain.from_iterable(seeds.values() for seeds in results.values()))
    devices = sorted({str(one["device"]).replace("1 threads", "1 thread") for one in figures if "device" in one})
    versions = sorted({str(one["torch"]) for one in figures if "torch" in one})
    return ", ".join([*devices, *(f"torch {one}" for one in versions)])
