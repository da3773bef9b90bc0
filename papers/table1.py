"""NADP-FL, Table 1: accuracy without DP, with local noise, and with noise that annihilates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers.cells import Cell, Results, numbers
from papers.entry import Entry
from papers.published import TABLE1_EPSILONS, table1
from papers.report import Check, Report, difference, mean, paper, rising, shown

PAPER: dict[str, object] = {
    "model": "cnn",
    "model_options": {"width": 16, "norm": "none"},
    "ratio": 2.0,
    "cohort": 0.8,
    "rounds": 200,
    "lr": 0.1,
    "lr_decay": 0.995,
    "loss": "cross-entropy",
}
"""The paper's setting; it fixes neither the network nor the scaling of inputs (ours are standardised)."""

TIERS = 10
"""Clients come in ten sizes within a factor of two."""

NOISE: dict[str, object] = {"clip": 10.0, "delta": 1e-5}
SCHEMES: dict[str, dict[str, object]] = {
    "ldp": {"scheme": "ldp", "accounting": "paper"},
    "nadp": {"scheme": "nadp", "accounting": "paper", "skip_cancelling": True},
    "nadp-exact": {"scheme": "nadp", "accounting": "exact", "pair_strength": 10.0, "skip_cancelling": True},
    "ldp-exact": {"scheme": "ldp", "accounting": "exact"},
}
SKIPPED = (
    "Pair noise is left out of the simulation, since it cancels in the sum: "
    "tests/papers/test_cancelling.py shows that runs with and without it end in the same model up to rounding."
)
_DATA = ("fashion-mnist", "mnist", "imdb")
_NETWORKS: dict[str, dict[str, object]] = {
    "imdb": {"model": "gru", "model_options": {"embedding": 32, "hidden": 64}},
}
_MARGIN = 20.0
_EQUAL = 0.5

_QUICK_SAMPLES = 2000
_QUICK: dict[str, object] = {**PAPER, "model_options": {"width": 8, "norm": "none"}, "rounds": 30, "lr": 0.3}
_QUICK_CLIP = 1.0
_EPSILONS = (1.0, 0.5)
_QUICK_EPSILONS = (4.0, 2.0)


def cell(data: str, clients: int, scheme: str, epsilon: float | None = None) -> str:
    """A cell's name."""
    return f"{data}/n{clients}/{scheme}" if epsilon is None else f"{data}/n{clients}/eps{epsilon:g}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    if quick:
        return tuple(_table(("fashion-mnist",), (10, 40), _QUICK_EPSILONS, quick=True))
    whole = list(_table(_DATA, (10, 100, 50), (1.0, 0.5, 3.0, 2.0), quick=False))
    # What decides the verdict first, so that a run that is cut short has it.
    return tuple(sorted(whole, key=lambda one: not one.usual))


def _table(data: Sequence[str], clients: Sequence[int], epsilons: Sequence[float], *, quick: bool) -> list[Cell]:
    found = []
    base = _QUICK if quick else PAPER
    clip = {"clip": _QUICK_CLIP} if quick else {}
    samples = _QUICK_SAMPLES if quick else None
    for name in data:
        for count in clients:
            shared = {**base, **_NETWORKS.get(name, {}), "dataset": name, "clients": count}
            usual = quick or (name == "fashion-mnist" and count != 50)
            found.append(Cell(cell(name, count, "fedavg"), {**shared, "scheme": "fedavg"}, samples, TIERS, usual))
            for epsilon in epsilons:
                for label, own in SCHEMES.items():
                    settings = {**shared, **NOISE, **clip, **own, "epsilon": epsilon}
                    expected = usual and label != "ldp-exact" and (quick or epsilon in _EPSILONS)
                    found.append(Cell(cell(name, count, label, epsilon), settings, samples, TIERS, expected))
    return found


def _report(results: Results, quick: bool) -> Report:
    sizes = (10, 40) if quick else (10, 50, 100)
    rows = []
    for data in ("fashion-mnist",) if quick else _DATA:
        for count in sizes:
            plain = numbers(results, cell(data, count, "fedavg"))
            shown_at = _QUICK_EPSILONS if quick else TABLE1_EPSILONS
            rows += [_row(results, data, count, epsilon, plain, quick) for epsilon in shown_at]
    notes = [SKIPPED, *_seen_epsilon(results, sizes, quick), _HOW]
    if quick:
        notes.insert(0, _QUICK_NOTE)
    form = "quick form, " if quick else ""
    return Report(
        title=f"NADP-FL, Table 1 ({form}accuracy in percent, paper / ours)",
        columns=("data", "N", "ε", "no DP", "LDP", "NADP", "NADP exact", "LDP exact", "NADP − LDP"),
        rows=tuple(rows),
        checks=tuple(_checks(results, sizes, quick)),
        notes=tuple(notes),
        quick=quick,
    )


_QUICK_NOTE = (
    f"Quick form: {_QUICK_SAMPLES} samples, 30 rounds, C = {_QUICK_CLIP:g}, cnn of width 8, learning rate 0.3, "
    "N = 10 and 40, ε = 4 and 2. It shows directions; its figures are not the paper's cells."
)
_HOW = (
    "NADP and LDP use the paper's formulas for the noise; NADP exact the least noise that the exact accountant allows, "
    "with λ = 10. No DP is plain federated averaging, without clipping. One full-batch step per client and round; "
    "inputs standardised; the catalogue's cnn (width 16, no normalisation layers), since the paper leaves it open; "
    "clients in ten sizes within a factor of two."
)


def _row(
    results: Results, data: str, count: int, epsilon: float, plain: Mapping[int, float], quick: bool
) -> tuple[str, ...]:
    def theirs(scheme: str) -> float | None:
        return None if quick else table1(data, count, scheme=scheme, epsilon=epsilon)

    def both(scheme: str, ours: Mapping[int, float]) -> str:
        return f"{paper(theirs(scheme))} / {shown(ours)}"

    ours = {label: numbers(results, cell(data, count, label, epsilon)) for label in SCHEMES}
    nadp, ldp = theirs("nadp"), theirs("ldp")
    gap = None if nadp is None or ldp is None else nadp - ldp
    return (
        data,
        str(count),
        f"{epsilon:g}",
        both("fedavg", plain),
        both("ldp", ours["ldp"]),
        both("nadp", ours["nadp"]),
        shown(ours["nadp-exact"]),
        shown(ours["ldp-exact"]),
        f"{paper(gap)} / {shown(difference(ours['nadp'], ours['ldp']), signed=True)}",
    )


def margin(results: Results, data: str, count: int, epsilon: float) -> float | None:
    """NADP − LDP, both with the paper's noise, in points."""
    both = [numbers(results, cell(data, count, label, epsilon)) for label in ("nadp", "ldp")]
    return mean(difference(*both))


def _checks(results: Results, sizes: Sequence[int], quick: bool) -> list[Check]:
    data = "fashion-mnist"
    weak, strong = epsilons = _QUICK_EPSILONS if quick else _EPSILONS
    checks = [
        rising(
            f"the margin NADP − LDP grows with N at ε = {epsilon:g}",
            [margin(results, data, count, epsilon) for count in sizes],
            [f"N = {count}" for count in sizes],
        )
        for epsilon in epsilons
    ]
    checks += [
        rising(
            f"the margin grows as ε falls at N = {count}",
            [margin(results, data, count, epsilon) for epsilon in epsilons],
            [f"ε = {weak:g}", f"ε = {strong:g}"],
        )
        for count in sizes
        if quick or count != 50 or margin(results, data, count, weak) is not None
    ]
    if not quick:
        found = margin(results, data, 100, 0.5)
        held = None if found is None else found >= _MARGIN
        seen = "" if found is None else f"{found:+.1f}"
        checks.append(Check("the margin is at least 20 points at N = 100, ε = 0.5", held, seen))
    gains = {
        f"N = {count}, ε = {epsilon:g}": mean(
            difference(*(numbers(results, cell(data, count, one, epsilon)) for one in ("nadp-exact", "nadp")))
        )
        for count in sizes
        for epsilon in epsilons
    }
    there = {name: gain for name, gain in gains.items() if gain is not None}
    checks.append(
        Check(
            f"exact accounting is at least as accurate as the paper's (up to {_EQUAL} points of chance)",
            all(gain >= -_EQUAL for gain in there.values()) if there else None,
            ", ".join(f"{name}: {gain:+.1f}" for name, gain in there.items()),
        )
    )
    return checks


def _seen_epsilon(results: Results, sizes: Sequence[int], quick: bool) -> list[str]:
    """What the paper's noise proves by the exact accountant."""
    told = []
    for label, name in (("nadp", "NADP"), ("ldp", "LDP")):
        found = {
            f"N = {count}, ε = {epsilon:g}": mean(
                numbers(results, cell("fashion-mnist", count, label, epsilon), "epsilon")
            )
            for count in sizes
            for epsilon in (_QUICK_EPSILONS if quick else _EPSILONS)
        }
        there = [f"{where}: {value:.2f}" for where, value in found.items() if value is not None]
        if there:
            told.append(f"What {name}'s noise by the paper's formula proves, exactly: {', '.join(there)}.")
    return told


ENTRY = Entry(
    name="nadp-table1",
    paper="NADP-FL",
    what="Table 1: no DP, LDP and NADP on Fashion-MNIST (--full: MNIST, N = 50 and ε = 3, 2 too)",
    takes="ten minutes on a GPU, hours without",
    takes_quick="three minutes",
    needs="fashion-mnist (--full: mnist)",
    cells=_cells,
    report=_report,
)
