"""NADP-FL, Figure 3: where noise that annihilates overtakes local noise as more clients are sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from papers.cells import Cell, Results, numbers
from papers.entry import Entry
from papers.report import EMPTY, Check, Report, difference, mean, rising, shown, trained
from papers.table1 import NOISE, PAPER, SCHEMES, SKIPPED, TIERS

_RATES = (0.1, 0.3, 0.5)
_SIZES = (20, 50, 100)
_QUICK: dict[str, object] = {"rounds": 30, "lr": 0.3, "clip": 1.0}
_QUICK_SAMPLES = 2000


def _sizes(quick: bool) -> Sequence[int]:
    return (20,) if quick else _SIZES


def _name(clients: int, rate: float, scheme: str) -> str:
    return f"mnist/n{clients}/q{rate:g}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    changes = _QUICK if quick else {}
    samples = _QUICK_SAMPLES if quick else None
    found = []
    for clients in _sizes(quick):
        for rate in _RATES:
            shared: dict[str, object] = {**PAPER, "dataset": "mnist", "clients": clients, "cohort": rate}
            plain = {key: value for key, value in changes.items() if key != "clip"}
            found.append(Cell(_name(clients, rate, "fedavg"), {**shared, **plain, "scheme": "fedavg"}, samples, TIERS))
            found += [
                Cell(
                    _name(clients, rate, one),
                    {**shared, **NOISE, **changes, **SCHEMES[one], "epsilon": 1.0},
                    samples,
                    TIERS,
                )
                for one in ("ldp", "nadp")
            ]
    return tuple(found)


def _report(results: Results, quick: bool) -> Report:
    plain = {
        f"N = {clients}, q = {rate:g}": mean(numbers(results, _name(clients, rate, "fedavg")))
        for clients in _sizes(quick)
        for rate in _RATES
    }
    rows, checks = [], [trained(plain)]
    for clients in _sizes(quick):
        same = math.sqrt(2.0 / clients)
        margins = []
        for rate in _RATES:
            ours = [numbers(results, _name(clients, rate, one)) for one in ("fedavg", "ldp", "nadp")]
            gap = difference(ours[2], ours[1])
            margins.append(mean(gap))
            noise = [mean(numbers(results, _name(clients, rate, one), "noise")) for one in ("ldp", "nadp")]
            shares = [EMPTY if one is None else f"{one:.4f}" for one in noise]
            rows.append((str(clients), f"{rate:g}", *map(shown, ours), *shares, shown(gap, signed=True)))
        named = [f"q = {rate:g}" for rate in _RATES]
        checks.append(rising(f"NADP gains on LDP with the sampling rate at N = {clients}", margins, named))
        first, last = margins[0], margins[-1]
        if clients == 20:
            held = None if first is None else first < 0
            seen = "" if first is None else f"{first:+.1f}"
            checks.append(Check("LDP is ahead at N = 20, q = 0.1 (two clients)", held, seen))
        held = None if last is None else last > 0
        claim = f"NADP is ahead at N = {clients}, q = 0.5, beyond q_same = √(2/N) = {same:.2f}"
        checks.append(Check(claim, held, "" if last is None else f"{last:+.1f}"))
    return Report(
        title=f"NADP-FL, Figure 3: sampling rates, MNIST, ε = 1 ({'quick form, ' if quick else ''}accuracy in percent)",
        columns=("N", "q", "no DP", "LDP", "NADP", "noise LDP", "noise NADP", "NADP − LDP"),
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(
            "The paper shows curves without numbers. By its formulas both add equal noise to the mean at "
            "q_same = √(2/N) for equal sizes; noise is the standard deviation on a coordinate of the mean gradient.",
            SKIPPED,
            *([f"Quick form: {_QUICK_SAMPLES} samples, 30 rounds, C = 1, learning rate 0.3."] if quick else []),
        ),
        quick=quick,
    )


ENTRY = Entry(
    name="nadp-fig3",
    paper="NADP-FL",
    what="Figure 3: LDP and NADP over sampling rates, N = 20, 50, 100",
    takes="ten minutes on a GPU",
    takes_quick="a minute",
    needs="mnist",
    cells=_cells,
    report=_report,
)
