"""The bank data of PBPFL's Table 1, which accuracy-lossless perturbation repeats. Settings are in pbpfl.toml."""

from __future__ import annotations

from papers.cells import Cell, Results, number
from papers.entries import read_paper
from papers.report import Check, Report, short

_BANK = read_paper("pbpfl").table("bank")


def cell(clients: int, layers: int, scheme: str) -> str:
    """A cell's name."""
    return f"n{clients}/l{layers}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            cell(clients, layers, scheme),
            {
                **_BANK["settings"],
                "clients": clients,
                "model_options": {"depth": layers, "width": _BANK["width"]},
                "scheme": scheme,
            },
        )
        for clients, layers, *_ in _BANK["printed"]
        for scheme in _BANK["schemes"]
    )


def _report(results: Results, quick: bool) -> Report:
    rows, spreads = [], []
    for clients, layers, *printed in _BANK["printed"]:
        ours = [number(results, cell(clients, layers, one), "mse") for one in _BANK["schemes"]]
        there = [one for one in ours if one is not None]
        spread = max(there) - min(there) if len(there) == len(ours) else None
        spreads.append(spread)
        figures = [short(one, "{:.6f}") for one in ours]
        theirs = ", ".join(f"{one:.3f}" for one in printed)
        rows.append((str(clients), str(layers), *figures, short(spread, "{:.1e}"), theirs))
    known = [one for one in spreads if one is not None]
    held = None if len(known) < len(spreads) else max(known) < _BANK["decimals"]
    seen = f"largest difference {max(known):.1e}" if known else ""
    checks = [Check("pbpfl and lossless end at FedAvg's error, to three decimals", held, seen)]
    return _BANK.report(rows, checks, quick=quick, notes=_BANK.notes())


ENTRIES = (_BANK.entry(_cells, _report),)
