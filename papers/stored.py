"""Figures that were taken earlier, found again in a folder of results and judged by the entries' own rules."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from papers.catalogue import entries
from papers.cells import Results, Store
from papers.entry import Entry
from papers.headlines import report_of
from papers.report import Report

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
