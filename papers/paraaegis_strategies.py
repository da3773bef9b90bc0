"""ParaAegis, Table 2: encrypting the largest updates, the smallest, or any."""

from __future__ import annotations

from papers.cells import Cell, Results
from papers.entry import Entry
from papers.paraaegis_figures import Trained, trained
from papers.paraaegis_rows import BENCHES, BY_LABEL, QUICK, Bench
from papers.published import PARAAEGIS_TABLE2
from papers.report import EMPTY, Check, Report, paper, shown

_ROUNDS = 20
_QUICK_ROUNDS = 10
_CLEAR = 10.0
_TITLES = {"max": "max (the scheme)", "min": "min", "random": "random"}


def _benches(quick: bool) -> tuple[Bench, ...]:
    return (QUICK,) if quick else BENCHES


def _rounds(quick: bool) -> int:
    return _QUICK_ROUNDS if quick else _ROUNDS


def _name(bench: Bench, strategy: str) -> str:
    return f"{bench.name}/{strategy}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    row = BY_LABEL["r10"]
    return tuple(
        Cell(
            _name(bench, strategy),
            bench.settings(row, "iid", strategy=strategy, rounds=_rounds(quick)),
            usual=bench.usual,
        )
        for bench in _benches(quick)
        for strategy in _TITLES
    )


def _report(results: Results, quick: bool) -> Report:
    rows, judged, words = [], [], []
    ran = [bench for bench in _benches(quick) if any(_name(bench, one) in results for one in _TITLES)]
    for bench in ran or [bench for bench in _benches(quick) if bench.usual]:
        found = {one: trained(results, _name(bench, one), rounds=_rounds(quick)) for one in _TITLES}
        words.append(f"{bench.name}: {bench.words}.")
        rows += [
            (bench.name, _TITLES[one], f"{paper(None if quick else PARAAEGIS_TABLE2[one])} / {_text(found[one])}")
            for one in _TITLES
        ]
        judged.append(_clearly_best(bench, found))
    return Report(
        title=f"ParaAegis, Table 2{' (quick form)' if quick else ''}: which tenth is encrypted (paper / ours)",
        columns=("data", "strategy", "accuracy, %"),
        rows=tuple(rows),
        checks=tuple(judged),
        notes=(
            *words,
            f"r = 10 %, T = {_rounds(quick)}, IID, ε = {_benches(quick)[0].noise['epsilon']:g} by the paper's formula, "
            "which is no DP guarantee. "
            "`random`: all clients draw the same tenth anew every round.",
        ),
        quick=quick,
    )


def _text(found: Trained) -> str:
    if found.finished:
        return shown(found.finished)
    return ", ".join(f"{value:.1f} at round {round}" for value, round in found.unfinished.values()) or EMPTY


def _clearly_best(bench: Bench, found: dict[str, Trained]) -> Check:
    claim = f"{bench.name}: max is better than min and random by at least {_CLEAR:g} points"
    best, *others = (found[one].accuracy for one in ("max", "min", "random"))
    there = [one for one in others if one is not None]
    if best is None or len(there) < len(others):
        return Check(claim, None)
    seen = f"max − min {best - there[0]:+.1f}, max − random {best - there[1]:+.1f}"
    return Check(claim, best - max(there) >= _CLEAR, seen)


ENTRY = Entry(
    name="paraaegis-table2",
    paper="ParaAegis",
    what="Table 2: encrypting the largest, the smallest or random updates, r = 10 %",
    takes="ten minutes on a GPU",
    takes_quick="half a minute",
    needs="imagenette (--full: cifar10), and the packages cryptography and tenseal",
    cells=_cells,
    report=_report,
)
