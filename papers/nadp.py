"""Numbers as the papers print them, to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedveil.uplink.noise_plan import collusion_strength
from papers.cells import (
    EMPTY,
    Cell,
    Check,
    Figures,
    Report,
    Results,
    difference,
    mean,
    numbers,
    paper,
    rising,
    shown,
    trained,
)
from papers.stage import Entry, OnRound, Stage

COLLUDING = (0.1, 0.2, 0.3, 0.4, 0.5)

TABLE3: dict[tuple[float, float], tuple[float, ...]] = {
    (1.0, 25): (1.0565, 1.1239, 1.2060, 1.3093, 1.4446),
    (1.0, 50): (1.0553, 1.1209, 1.2005, 1.2999, 1.4289),
    (1.0, 100): (1.0547, 1.1194, 1.1978, 1.2954, 1.4214),
    (1.0, math.inf): (1.0541, 1.1180, 1.1952, 1.2910, 1.4142),
    (1.5, 25): (1.3029, 1.3860, 1.4873, 1.6147, 1.7815),
    (1.5, 50): (1.2968, 1.3775, 1.4753, 1.5974, 1.7559),
    (1.5, 100): (1.2939, 1.3733, 1.4695, 1.5892, 1.7438),
    (1.5, math.inf): (1.2910, 1.3693, 1.4639, 1.5811, 1.7321),
    (2.0, 25): (1.5097, 1.6059, 1.7233, 1.8708, 2.0642),
    (2.0, 50): (1.5000, 1.5933, 1.7064, 1.8476, 2.0310),
    (2.0, 100): (1.4953, 1.5871, 1.6983, 1.8365, 2.0152),
    (2.0, math.inf): (1.4907, 1.5811, 1.6903, 1.8257, 2.0000),
}
"""NADP-FL, Table 3: λ by ((|D_max|/|D_min|)², number of clients), one number per share of colluders."""

TABLE1_EPSILONS = (3.0, 2.0, 1.0, 0.5)

TABLE1: dict[tuple[str, int], tuple[float, tuple[tuple[float, float], ...]]] = {
    ("mnist", 10): (92.94, ((81.76, 82.20), (80.27, 82.05), (77.23, 81.65), (67.44, 78.41))),
    ("mnist", 50): (93.30, ((83.94, 85.55), (81.52, 85.58), (65.47, 85.19), (29.97, 80.39))),
    ("mnist", 100): (92.91, ((85.09, 87.37), (76.69, 87.33), (46.97, 86.84), (10.44, 80.58))),
    ("imdb", 10): (89.71, ((85.32, 87.24), (82.93, 85.29), (79.46, 83.79), (59.32, 78.22))),
    ("imdb", 50): (88.56, ((84.97, 86.68), (79.86, 84.80), (68.37, 84.61), (50.68, 80.29))),
    ("imdb", 100): (90.87, ((84.25, 87.09), (78.19, 84.14), (61.89, 83.98), (49.19, 79.63))),
    ("fashion-mnist", 10): (80.46, ((80.02, 80.84), (79.08, 80.48), (76.34, 79.29), (70.76, 76.88))),
    ("fashion-mnist", 50): (82.44, ((78.90, 81.61), (77.12, 81.36), (71.16, 80.17), (60.21, 77.19))),
    ("fashion-mnist", 100): (83.23, ((77.97, 82.33), (74.88, 82.02), (67.41, 81.08), (52.81, 77.71))),
}
"""NADP-FL, Table 1: accuracy in percent by (data, N): without DP, then (LDP, NADP) for each ε."""

MPDP_CIFAR10 = {"fedavg": 84.60, "mp-cdp": 84.21, "mpdp": 83.15}
"""MP-DP, Table 2: accuracy in percent at ε = 3 (per round), CIFAR-10, ResNet-20."""


def table1(data: str, clients: int, *, scheme: str, epsilon: float | None = None) -> float | None:
    """NADP-FL's Table 1: the accuracy of "fedavg" (no DP), "ldp" or "nadp"; None where the table has no such cell."""
    row = TABLE1.get((data, clients))
    if row is None:
        return None
    if scheme == "fedavg":
        return row[0]
    if epsilon not in TABLE1_EPSILONS or scheme not in ("ldp", "nadp"):
        return None
    return row[1][TABLE1_EPSILONS.index(epsilon)][scheme == "nadp"]


PARAAEGIS_PARTITIONS = ("iid", "dirichlet-1", "dirichlet-0.5")

_Three = tuple[float, float, float]

PARAAEGIS_TABLE1: dict[str, tuple[_Three, _Three, _Three]] = {
    "fedavg": ((80.93, 79.38, 77.98), (3571, 3665, 3699), (2.27, 2.17, 2.11)),
    "dp-fedavg": ((20.28, 17.12, 12.87), (3007, 3084, 3112), (0.67, 0.56, 0.41)),
    "ckks-fedavg": ((81.14, 79.28, 77.63), (18527, 14971, 14568), (0.44, 0.53, 0.53)),
    "serial": ((10.54, 11.29, 12.35), (19956, 16718, 16370), (0.05, 0.07, 0.08)),
    "varying-dp": ((24.21, 21.76, 19.85), (2494, 2534, 2789), (0.97, 0.86, 0.71)),
    "stevens": ((18.78, 17.07, 13.75), (3635, 3708, 3543), (0.52, 0.46, 0.39)),
    "r1": ((67.85, 63.48, 57.16), (6149, 6006, 5577), (1.1, 1.06, 1.02)),
    "r5": ((73.03, 70.07, 66.19), (6888, 6962, 6099), (1.06, 1.01, 1.09)),
    "r10": ((75.63, 73.63, 71.1), (7776, 7706, 6379), (0.97, 0.96, 1.11)),
    "r20": ((77.53, 75.37, 73.39), (9530, 9565, 7153), (0.81, 0.79, 1.03)),
    "r5-x0.99": ((72.09, 68.91, 64.4), (5561, 5536, 5299), (1.3, 1.24, 1.22)),
    "r10-x0.99": ((74.5, 71.75, 68.5), (6238, 6210, 5679), (1.19, 1.16, 1.21)),
    "r10-x0.95": ((68.82, 65.13, 58.97), (5619, 5628, 5400), (1.22, 1.16, 1.09)),
    "r10-x0.9": ((70.87, 67.01, 60.33), (8762, 8732, 7073), (0.81, 0.77, 0.85)),
}
"""ParaAegis, Table 1: accuracy in percent, seconds, and 100 × accuracy / seconds, each by partition.

rP encrypts P percent of the parameters, rP-xL a share that starts there and shrinks by the factor L per round.
"""

PARAAEGIS_TABLE2 = {"max": 63.64, "min": 12.40, "random": 15.78}
"""ParaAegis, Table 2: accuracy in percent by which parameters are encrypted (r = 10 %, T = 20)."""


def paraaegis_table1(row: str, partition: str, *, what: str = "accuracy") -> float | None:
    """ParaAegis's Table 1: "accuracy", "seconds" or "efficiency"; None where the table has no such cell."""
    if row not in PARAAEGIS_TABLE1 or partition not in PARAAEGIS_PARTITIONS:
        return None
    figures = PARAAEGIS_TABLE1[row][("accuracy", "seconds", "efficiency").index(what)]
    return float(figures[PARAAEGIS_PARTITIONS.index(partition)])


def _name(ratio: float, clients: float) -> str:
    return f"ratio{ratio:g}/k{clients:g}"


_KEYS = {_name(*key): key for key in TABLE3}


def _table3_cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(Cell(name) for name in _KEYS)


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    ratio, clients = _KEYS[cell.name]
    return {"strengths": [collusion_strength(clients=clients, colluding=one, ratio_squared=ratio) for one in COLLUDING]}


def _table3_report(results: Results, quick: bool) -> Report:
    rows, equal, compared = [], 0, 0
    for name, (ratio, clients) in _KEYS.items():
        published = TABLE3[ratio, clients]
        ours = results.get(name, {}).get(1, {}).get("strengths", [])
        assert isinstance(ours, list)
        equal += sum(round(one, 4) == other for one, other in zip(ours, published, strict=False))
        compared += len(ours)
        cells = [f"{theirs:.4f} / {f'{ours[place]:.4f}' if ours else EMPTY}" for place, theirs in enumerate(published)]
        rows.append((f"{ratio:g}", "∞" if clients == float("inf") else f"{clients:g}", *cells))
    held = None if compared < 60 else equal == 60
    return Report(
        title="NADP-FL, Table 3: λ against a share τ of colluders (paper / ours)",
        columns=("(|D_max|/|D_min|)²", "k", *(f"τ = {one:g}" for one in COLLUDING)),
        rows=tuple(rows),
        checks=(Check("all 60 values agree to four decimals", held, f"{equal} of {compared} agree"),),
        notes=(
            "λ = √((k·α² − 1)/((1 − τ)·k − 1)); it covers pair noise only: colluders also know their own residual "
            "noise, so that `nadp` with accounting = exact asks for more.",
        ),
    )


TABLE3_ENTRY = Entry(
    name="nadp-table3",
    paper="NADP-FL",
    what="Table 3: the strength of pair noise, 60 values to four decimals",
    takes="a second",
    needs="nothing",
    cells=_table3_cells,
    report=_table3_report,
    work=_work,
    random=False,
    has_quick=False,
)

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


def _table1_cells(quick: bool) -> tuple[Cell, ...]:
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


def _table1_report(results: Results, quick: bool) -> Report:
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


TABLE1_ENTRY = Entry(
    name="nadp-table1",
    paper="NADP-FL",
    what="Table 1: no DP, LDP and NADP on Fashion-MNIST (--full: MNIST, N = 50 and ε = 3, 2 too)",
    takes="ten minutes on a GPU, hours without",
    takes_quick="three minutes",
    needs="fashion-mnist (--full: mnist)",
    cells=_table1_cells,
    report=_table1_report,
)

_RATES = (0.1, 0.3, 0.5)
_SIZES = (20, 50, 100)
_FIG3_QUICK: dict[str, object] = {"rounds": 30, "lr": 0.3, "clip": 1.0}
_FIG3_QUICK_SAMPLES = 2000


def _sizes(quick: bool) -> Sequence[int]:
    return (20,) if quick else _SIZES


def _fig3_name(clients: int, rate: float, scheme: str) -> str:
    return f"mnist/n{clients}/q{rate:g}/{scheme}"


def _fig3_cells(quick: bool) -> tuple[Cell, ...]:
    changes = _FIG3_QUICK if quick else {}
    samples = _FIG3_QUICK_SAMPLES if quick else None
    found = []
    for clients in _sizes(quick):
        for rate in _RATES:
            shared: dict[str, object] = {**PAPER, "dataset": "mnist", "clients": clients, "cohort": rate}
            plain = {key: value for key, value in changes.items() if key != "clip"}
            found.append(
                Cell(_fig3_name(clients, rate, "fedavg"), {**shared, **plain, "scheme": "fedavg"}, samples, TIERS)
            )
            found += [
                Cell(
                    _fig3_name(clients, rate, one),
                    {**shared, **NOISE, **changes, **SCHEMES[one], "epsilon": 1.0},
                    samples,
                    TIERS,
                )
                for one in ("ldp", "nadp")
            ]
    return tuple(found)


def _fig3_report(results: Results, quick: bool) -> Report:
    plain = {
        f"N = {clients}, q = {rate:g}": mean(numbers(results, _fig3_name(clients, rate, "fedavg")))
        for clients in _sizes(quick)
        for rate in _RATES
    }
    rows, checks = [], [trained(plain)]
    for clients in _sizes(quick):
        same = math.sqrt(2.0 / clients)
        margins = []
        for rate in _RATES:
            ours = [numbers(results, _fig3_name(clients, rate, one)) for one in ("fedavg", "ldp", "nadp")]
            gap = difference(ours[2], ours[1])
            margins.append(mean(gap))
            noise = [mean(numbers(results, _fig3_name(clients, rate, one), "noise")) for one in ("ldp", "nadp")]
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
            *([f"Quick form: {_FIG3_QUICK_SAMPLES} samples, 30 rounds, C = 1, learning rate 0.3."] if quick else []),
        ),
        quick=quick,
    )


FIG3_ENTRY = Entry(
    name="nadp-fig3",
    paper="NADP-FL",
    what="Figure 3: LDP and NADP over sampling rates, N = 20, 50, 100",
    takes="ten minutes on a GPU",
    takes_quick="a minute",
    needs="mnist",
    cells=_fig3_cells,
    report=_fig3_report,
)

_DROPOUT_RATES = (0.1, 0.3, 0.5)
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


def _fig4_name(rate: float, scheme: str) -> str:
    return f"mnist/n25/d{rate:g}/{scheme}"


def _fig4_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for rate in _DROPOUT_RATES[:: 2 if quick else 1]:
        for label, own in _SCHEMES.items():
            noise = {} if label == "fedavg" else {**NOISE, "clip": 1.0, "epsilon": 2.0}
            changes = {"rounds": 20} if quick else {}
            settings = {**_BASE, **noise, **own, **changes, "simulate_dropout": rate}
            found.append(Cell(_fig4_name(rate, label), settings, _SAMPLES))
    return tuple(found)


def _fig4_report(results: Results, quick: bool) -> Report:
    rates = _DROPOUT_RATES[:: 2 if quick else 1]
    rows = tuple(
        (f"{rate:g}", *(shown(numbers(results, _fig4_name(rate, label))) for label in _SCHEMES)) for rate in rates
    )
    ends = {
        label: tuple(mean(numbers(results, _fig4_name(rate, label))) for rate in (rates[0], rates[-1]))
        for label in _SCHEMES
    }
    falls = {label: None if a is None or b is None else a - b for label, (a, b) in ends.items()}
    seen = ", ".join(f"{label}: {EMPTY if fall is None else f'{fall:+.1f}'}" for label, fall in falls.items())
    fedavg, ldp, weak, strong = falls.values()
    plain = {f"rate {rate:g}": mean(numbers(results, _fig4_name(rate, "fedavg"))) for rate in (rates[0], rates[-1])}
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


FIG4_ENTRY = Entry(
    name="nadp-fig4",
    paper="NADP-FL",
    what="Figure 4: dropout rates with tolerated noise, N = 25, at reduced size",
    takes="six minutes on two cores",
    takes_quick="two minutes",
    needs="mnist, and the package cryptography",
    cells=_fig4_cells,
    report=_fig4_report,
)
