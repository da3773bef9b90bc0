"""NADP-FL, Figure 4: what vanishing clients cost when the noise they leave behind is tolerated."""

from __future__ import annotations

from papers.cells import Cell, Results, numbers
from papers.entry import Entry
from papers.report import EMPTY, Check, Report, mean, shown, trained
from papers.table1 import NOISE, PAPER, SCHEMES

_RATES = (0.1, 0.3, 0.5)
_SCHEMES: dict[str, dict[str, object]] = {
    "fedavg": {"scheme": "fedavg"},
    "ldp": SCHEMES["ldp"],
    "nadp-1.0": {"scheme": "nadp", "accounting": "paper", "dropouts": "tolerate", "pair_strength": 1.0},
    "nadp-1.4": {"scheme": "nadp", "accounting": "paper", "dropouts": "tolerate", "pair_strength": 1.4},
}
_SAMPLES = 2000
_BASE: dict[str, object] = {
    **PAPER,
    "model_options": {"width": 4, "norm": "none"},
    "partition": "size",
    "dataset": "mnist",
    "clients": 25,
    "rounds": 40,
    "lr": 0.3,
}
_CHANCE = 1.0


def _name(rate: float, scheme: str) -> str:
    return f"mnist/n25/d{rate:g}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for rate in _RATES[:: 2 if quick else 1]:
        for label, own in _SCHEMES.items():
            noise = {} if label == "fedavg" else {**NOISE, "clip": 1.0, "epsilon": 2.0}
            changes = {"rounds": 20} if quick else {}
            settings = {**_BASE, **noise, **own, **changes, "simulate_dropout": rate}
            found.append(Cell(_name(rate, label), settings, _SAMPLES))
    return tuple(found)


def _report(results: Results, quick: bool) -> Report:
    rates = _RATES[:: 2 if quick else 1]
    rows = tuple((f"{rate:g}", *(shown(numbers(results, _name(rate, label))) for label in _SCHEMES)) for rate in rates)
    ends = {
        label: tuple(mean(numbers(results, _name(rate, label))) for rate in (rates[0], rates[-1])) for label in _SCHEMES
    }
    falls = {label: None if a is None or b is None else a - b for label, (a, b) in ends.items()}
    seen = ", ".join(f"{label}: {EMPTY if fall is None else f'{fall:+.1f}'}" for label, fall in falls.items())
    fedavg, ldp, weak, strong = falls.values()
    plain = {f"rate {rate:g}": mean(numbers(results, _name(rate, "fedavg"))) for rate in (rates[0], rates[-1])}
    checks = (
        trained(plain),
        Check("without DP, dropouts cost at most 2 points", None if fedavg is None else fedavg <= 2, seen),
        Check(
            "dropouts cost NADP more than LDP",
            None if ldp is None or weak is None else weak > ldp,
            seen,
        ),
        Check(
            f"a larger λ costs no less (up to {_CHANCE:g} point of chance)",
            None if weak is None or strong is None else strong >= weak - _CHANCE,
            seen,
        ),
    )
    return Report(
        title="NADP-FL, Figure 4: dropout rates, N = 25, tolerated (accuracy in percent)",
        columns=("dropout rate", "no DP", "LDP", "NADP λ = 1.0", "NADP λ = 1.4"),
        rows=rows,
        checks=checks,
        notes=(
            f"At reduced size throughout: {_SAMPLES} samples of MNIST, {20 if quick else 40} rounds, C = 1, ε = 2, "
            "learning rate 0.3. Here pair noise is real, since what vanished clients leave of it is the point. The "
            "paper shows curves without numbers. `nadp` repairs dropouts by default; this is `dropouts = tolerate`.",
        ),
        quick=quick,
    )


ENTRY = Entry(
    name="nadp-fig4",
    paper="NADP-FL",
    what="Figure 4: dropout rates with tolerated noise, N = 25, at reduced size",
    takes="six minutes on two cores",
    takes_quick="two minutes",
    needs="mnist, and the package cryptography",
    cells=_cells,
    report=_report,
)
