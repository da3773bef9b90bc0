"""The cells as a table, as rows with bounds, and as figures to keep."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.peers.contest import FEDVEIL_2, Cell, measured
from benchmarks.peers.environments import HOW_TO_MAKE, PEERS, made
from benchmarks.rows import Row
from benchmarks.timing import Timed, ratio

BOUNDS = {
    ("lr-mnist", "pfl 0.6, two processes"): 1.0,
    ("cnn", "pfl 0.6, two processes"): 1.0,
    ("resnet20", "pfl 0.6, two processes"): 1.0,
    ("lr-mnist", "Flower, Ray"): 15.0,
    ("clip-cnn", "Opacus, ghost clipping"): 1 / 1.3,
    ("clip-resnet20", "Opacus, ghost clipping"): 1 / 1.3,
}
"""How many times FedVeil's time a peer must take at least."""


def peers(*, turns: int) -> list[Row]:
    """The rows of whoever has an environment; without any, a line that says how to make them."""
    if not any(made(peer) for peer in PEERS):
        print(f"No peers to compare with: {HOW_TO_MAKE}.")
        return []
    cells, missing = measured(turns)
    print("\n".join(missing))
    return rows(cells)


def by_name(cells: Iterable[Cell]) -> dict[tuple[str, str], Cell]:
    """Cells by workload and candidate."""
    return {(cell.workload, cell.candidate): cell for cell in cells}


def best(cells: dict[tuple[str, str], Cell], workload: str) -> Cell:
    """FedVeil on this workload, on as many processes as it is faster with."""
    ours = [cells[key] for name in ("FedVeil", FEDVEIL_2) if (key := (workload, name)) in cells]
    return min(ours, key=lambda cell: cell.median)


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Every other candidate against FedVeil, with the bound where there is one."""
    named, made = by_name(cells), []
    for cell in cells:
        if cell.candidate.startswith("FedVeil"):
            continue
        ours = best(named, cell.workload)
        note = f"{1e3 * cell.median:.2f} ms against {1e3 * ours.median:.2f}{marks(cell) or marks(ours)}"
        measured = ratio(Timed(cell.seconds), Timed(ours.seconds))
        bound = BOUNDS.get((cell.workload, cell.candidate))
        made.append(Row(f"{cell.what}: {cell.candidate}", ours.candidate, measured, bound, at_least=True, note=note))
    return made


def marks(cell: Cell) -> str:
    """What to be wary of."""
    disturbed = f", load {cell.load:.1f}: DISTURBED" if cell.disturbed else ""
    return disturbed + ("" if cell.agrees else f", ANOTHER MODEL ({cell.apart:.0e})")


def show(cells: Iterable[Cell]) -> None:
    """Milliseconds a round, median and range over the turns, with the load beside each."""
    print(f"{'workload':46} {'candidate':30} {'ms a round':>11}  {'range':>17}  {'load':>5}  {'apart':>7}")
    for cell in cells:
        spread = f"{1e3 * min(cell.seconds):.2f}–{1e3 * max(cell.seconds):.2f}"
        apart = "" if cell.apart is None else f"{cell.apart:.0e}"
        figures = f"{1e3 * cell.median:11.2f}  {spread:>17}  {cell.load:5.2f}  {apart:>7}"
        print(f"{cell.what:46} {cell.candidate:30} {figures}{marks(cell)}")


def keep(path: Path, cells: Iterable[Cell], *, load_before: float, missing: Sequence[str]) -> None:
    """The figures, for `page`."""
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    data = {"machine": machine, "load_before": load_before, "missing": list(missing)}
    path.write_text(json.dumps({**data, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n", encoding="utf-8")


def kept(path: Path) -> tuple[dict[str, object], list[Cell]]:
    """What `keep` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    cells = [Cell(**{**cell, "seconds": tuple(cell["seconds"])}) for cell in data.pop("cells")]
    return data, cells
