"""Running an entry cell by cell, with every figure kept as soon as it is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.runs.files import write_atomically
from papers.catalogue import find
from papers.cells import Figures, Store, chosen
from papers.entry import Entry
from papers.headlines import report_of
from papers.report import Report
from papers.stage import Stage

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
        from fedveil.trials.pictures import contact_sheet

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
