"""NADP-FL: Tables 1 to 4, Figures 3 and 4. Settings and printed numbers are in nadp.toml."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedveil.audit.metrics import feature_mse, mse, ssim
from fedveil.audit.views import View
from fedveil.errors import AttackError
from fedveil.protocol.messages import Request, Train
from fedveil.uplink.noise_plan import collusion_strength
from fedveil.work.batches import mixed_seed
from papers.attacks import as_text, draw_sheet, from_text, judge_of, reason_of, side_by_side, tried
from papers.attacks import short as digits
from papers.cells import (
    Cell,
    Figures,
    Results,
    average,
    difference,
    figures_of,
    listed,
    mean,
    mean_of,
    number,
    numbers,
)
from papers.collusion import Seen, seen_round
from papers.costs import exponent, job_of, round_costs
from papers.entries import read_paper
from papers.report import EMPTY, Check, Report, above, all_above, compared, paper, ratio, rising, short, shown, trained
from papers.stage import OnRound, Stage

_PAPER = read_paper("nadp")
_T1, _T2, _T3, _T4, _F3, _F4 = (_PAPER.table(one) for one in ("table1", "table2", "table3", "table4", "fig3", "fig4"))

# Table 3: the strength of pair noise.

COLLUDING: tuple[float, ...] = tuple(_T3["colluding"])
TABLE3: dict[tuple[float, float], tuple[float, ...]] = {
    (squared, clients): tuple(strengths) for squared, clients, *strengths in _T3["printed"]
}
"""λ by ((|D_max|/|D_min|)², number of clients), one number per share of colluders."""

_KEYS = {f"ratio{squared:g}/k{clients:g}": (squared, clients) for squared, clients in TABLE3}


def _strengths(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    squared, clients = _KEYS[cell.name]
    found = [collusion_strength(clients=clients, colluding=one, ratio_squared=squared) for one in COLLUDING]
    return {"strengths": found}


def _table3_report(results: Results, quick: bool) -> Report:
    rows, equal, compared = [], 0, 0
    for name, (squared, clients) in _KEYS.items():
        published, ours = TABLE3[squared, clients], listed(results, name, "strengths")[: len(COLLUDING)]
        equal += sum(round(one, 4) == other for one, other in zip(ours, published, strict=False))
        compared += len(ours)
        cells = [f"{theirs:.4f} / {f'{ours[place]:.4f}' if ours else EMPTY}" for place, theirs in enumerate(published)]
        rows.append((f"{squared:g}", "∞" if clients == math.inf else f"{clients:g}", *cells))
    held = None if compared < 60 else equal == 60
    checks = [Check("all 60 values agree to four decimals", held, f"{equal} of {compared} agree")]
    return _T3.report(rows, checks, quick=quick, notes=_T3.notes())


# Table 1: accuracy of LDP and NADP.

SCHEMES = tuple(one for one in _PAPER["schemes"] if one != "fedavg")
_FASHION = "fashion-mnist"
SECAGG, AWAY = "secagg", "secagg-away"


def cell(data: str, clients: int, scheme: str, epsilon: float | None = None) -> str:
    """The name of a cell of Table 1."""
    return f"{data}/n{clients}/{scheme}" if epsilon is None else f"{data}/n{clients}/eps{epsilon:g}/{scheme}"


def printed(data: str, clients: int, *, scheme: str, epsilon: float | None = None) -> float | None:
    """Table 1's accuracy of "fedavg" (no DP), "ldp" or "nadp"; None where the table has no such cell."""
    row = next((pairs for name, count, *pairs in _T1["printed"] if (name, count) == (data, clients)), None)
    if row is None or (scheme != "fedavg" and epsilon not in _T1["printed_epsilons"]):
        return None
    if scheme == "fedavg":
        return float(row[0])
    return float(row[1 + _T1["printed_epsilons"].index(epsilon)][("ldp", "nadp").index(scheme)])


def _table1_cells(quick: bool) -> tuple[Cell, ...]:
    form, found = _T1.form(quick), []
    base = {**_PAPER["setting"], **form.get("settings", {})}
    noise, samples, usual = {**_PAPER["noise"], **form.get("noise", {})}, form.get("samples"), form["usual"]
    for data, count in itertools.product(form["data"], form["clients"]):
        shared = {**base, **_T1["networks"].get(data, {}), "dataset": data, "clients": count}
        expected = data in usual["data"] and count in usual["clients"]
        plain = {**shared, "scheme": "fedavg"}
        found.append(Cell(cell(data, count, "fedavg"), plain, samples, _T1["tiers"], expected))
        for epsilon, label in itertools.product(form["epsilons"], SCHEMES):
            settings = {**shared, **noise, **_PAPER["schemes"][label], "epsilon": epsilon}
            wanted = expected and label != "ldp-exact" and epsilon in usual["epsilons"]
            found.append(Cell(cell(data, count, label, epsilon), settings, samples, _T1["tiers"], wanted))
    # What decides the verdict first, so that a run that is cut short has it.
    return tuple(found if quick else sorted(found, key=lambda one: not one.usual))


def _table1_report(results: Results, quick: bool) -> Report:
    form = _T1.form(quick)
    sizes, epsilons = sorted(form["clients"]), sorted(form["epsilons"], reverse=True)
    rows = [
        _table1_row(results, data, count, epsilon, quick)
        for data, count, epsilon in itertools.product(form["data"], sizes, epsilons)
    ]
    skipped, how = _T1.notes()
    judged = form["usual"]["epsilons"]
    notes = [skipped, *_proven_epsilons(results, sizes, judged), how]
    checks = _table1_checks(results, sizes, judged, quick)
    for data in (one for one in form["data"] if one != _FASHION):
        if any(name.startswith(f"{data}/") for name in results):
            every = _table1_checks(results, sizes, epsilons, quick, data=data)
            checks += [replace(one, claim=f"{data}: {one.claim}") for one in every]
        elif data in form["had"]:
            checks.append(Check(f"{data}: the same claims", None, "not run"))
    return _T1.report(rows, checks, quick=quick, notes=[form["note"], *notes] if quick else notes)


def _table1_row(results: Results, data: str, count: int, epsilon: float, quick: bool) -> tuple[str, ...]:
    def theirs(scheme: str) -> float | None:
        return None if quick else printed(data, count, scheme=scheme, epsilon=epsilon)

    ours = {label: numbers(results, cell(data, count, label, epsilon)) for label in SCHEMES}
    ours["fedavg"] = numbers(results, cell(data, count, "fedavg"))
    nadp, ldp = theirs("nadp"), theirs("ldp")
    gap = None if nadp is None or ldp is None else nadp - ldp
    return (
        *(data, str(count), f"{epsilon:g}"),
        *(f"{paper(theirs(one))} / {shown(ours[one])}" for one in ("fedavg", "ldp", "nadp")),
        *(shown(ours["nadp-exact"]), shown(ours["ldp-exact"])),
        f"{paper(gap)} / {shown(difference(ours['nadp'], ours['ldp']), signed=True)}",
    )


def _table1_checks(
    results: Results, sizes: Sequence[int], epsilons: Sequence[float], quick: bool, *, data: str = _FASHION
) -> list[Check]:
    def gain(count: int, epsilon: float, one: str, other: str) -> dict[int, float]:
        """One scheme − another, in points, by seed."""
        return difference(*(numbers(results, cell(data, count, each, epsilon)) for each in (one, other)))

    def margin(count: int, epsilon: float) -> dict[int, float]:
        return gain(count, epsilon, "nadp", "ldp")

    named = [f"N = {count}" for count in sizes]
    plain = {name: mean_of(results, cell(data, count, "fedavg")) for name, count in zip(named, sizes, strict=True)}
    margins = {f"N = {count}, ε = {one:g}": margin(count, one) for count in sizes for one in epsilons}
    checks = [trained(plain), all_above("NADP is ahead of LDP at every N and ε", margins)]
    checks += [
        rising(
            f"the margin NADP − LDP grows with N at ε = {one:g}",
            [margin(count, one) for count in sizes],
            named,
            runs=_OF_MARGINS,
        )
        for one in epsilons
    ]
    checks += _over_clients(results, sizes, epsilons[-1], data)
    falling = [f"ε = {one:g}" for one in epsilons]
    checks += [
        rising(
            f"the margin grows as ε falls at N = {count}",
            [margin(count, one) for one in epsilons],
            falling,
            runs=_OF_MARGINS,
        )
        for count in sizes
        if quick or count != 50 or margin(count, epsilons[0])
    ]
    if not quick:
        least = _T1["least_margin"]
        checks.append(above(f"the margin is at least {least:g} points at N = 100, ε = 0.5", margin(100, 0.5), least))
    gains = {
        f"N = {count}, ε = {epsilon:g}": mean(gain(count, epsilon, "nadp-exact", "nadp"))
        for count in sizes
        for epsilon in epsilons
    }
    there = {name: gain for name, gain in gains.items() if gain is not None}
    claim = f"exact accounting is at least as accurate as the paper's (up to {_T1['chance']} points of chance)"
    exact = compared(claim, there, lambda gain: gain >= -_T1["chance"], form="{:+.1f}")
    return [*checks, replace(exact, ours=True)]


_OF_MARGINS = 4
"""Runs in the difference of two margins."""


def _over_clients(results: Results, sizes: Sequence[int], epsilon: float, data: str) -> Iterator[Check]:
    """The paper's claim: with many clients NADP is almost as accurate as with few, while LDP's accuracy drops."""
    few, many = (sizes[0], sizes[-1])
    fall = {
        label: difference(*(numbers(results, cell(data, count, label, epsilon)) for count in (few, many)))
        for label in ("nadp", "ldp")
    }
    where = f"from N = {few} to {many} at ε = {epsilon:g}"
    claim = f"NADP loses at most {_T1['almost']:g} points {where}"
    yield above(claim, fall["nadp"], _T1["almost"], below=True)
    yield above(f"LDP loses more than NADP {where}", difference(fall["ldp"], fall["nadp"]))


def _proven_epsilons(results: Results, sizes: Sequence[int], epsilons: Sequence[float]) -> Iterator[str]:
    """What the paper's noise proves by the exact accountant."""
    for label, name in (("nadp", "NADP"), ("ldp", "LDP")):
        found = {
            f"N = {count}, ε = {epsilon:g}": mean_of(results, cell(_FASHION, count, label, epsilon), "epsilon")
            for count in sizes
            for epsilon in epsilons
        }
        there = [f"{where}: {value:.2f}" for where, value in found.items() if value is not None]
        if there:
            yield f"What {name}'s noise by the paper's formula proves, exactly: {', '.join(there)}."


# Table 2: what a round costs.


def cost_cell(scheme: str, clients: int, size: int) -> str:
    """The name of a cell of Table 2."""
    return f"{scheme}/n{clients}/m{size}"


def _table2_cells(quick: bool) -> tuple[Cell, ...]:
    form, found = _T2.form(quick), []
    for (clients, size), (label, own) in itertools.product(_edges(form), _T2["schemes"].items()):
        complete = {"neighbours": clients + clients % 2} if own["scheme"] == "secagg" else {}
        width = round((size - _T2["outputs"]) / _T2["per_unit"])
        network = {**_T2["settings"], "model_options": {"depth": 2, "width": width}, "clients": clients}
        away = {"away": _T2["away"]} if label == AWAY else {}
        found.append(Cell(cost_cell(label, clients, size), {**network, **own, **complete}, more=away))
    return tuple(found)


def _edges(form: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Every number of clients with the largest model, and every model with the most clients."""
    clients, sizes = sorted(form["clients"]), sorted(form["sizes"])
    return [*((one, sizes[-1]) for one in clients), *((clients[-1], one) for one in sizes[:-1])]


def _table2_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    job = job_of(cell.settings, shape=(1, 8, 8), samples=_T2["samples"])
    every = cell.more.get("away")

    def absent(request: Request, client: int) -> bool:
        return every is not None and isinstance(request, Train) and client % every == 1

    return {"device": stage.describe(), "torch": torch.__version__, **round_costs(job, absent=absent)}


@dataclass(frozen=True)
class _Grown:
    """How a cost grows, read back."""

    results: Results
    form: Mapping[str, Any]

    def cost(self, scheme: str, what: str, *, clients: int = 0, size: int = 0) -> float | None:
        """At the most clients and the largest model, unless others are given."""
        name = cost_cell(scheme, clients or max(self.form["clients"]), size or max(self.form["sizes"]))
        return number(self.results, name, what)

    def exponents(self, scheme: str, what: str) -> tuple[float | None, float | None]:
        """Of n, and of m."""
        by_clients = {float(one): self.cost(scheme, what, clients=one) for one in self.form["clients"]}
        by_size = {float(one): self.cost(scheme, what, size=one) for one in self.form["sizes"]}
        return exponent(by_clients), exponent(by_size)


def _table2_report(results: Results, quick: bool) -> Report:
    grown, rows, checks = _Grown(results, _T2.form(quick)), [], []
    for what, printed in _T2["printed"].items():
        for label, title in _T2["titles"].items():
            words, *theirs = printed[label if label in printed else SECAGG]
            ours = grown.exponents(label, what)
            powers = [f"{one:g} / {short(other, '{:.2f}')}" for one, other in zip(theirs, ours, strict=True)]
            rows.append((_T2["names"][what], title, words, *powers, _amount(what, grown.cost(label, what))))
            claim = f"{title}, {_T2['names'][what]}: grows no faster than {words}"
            if None in ours:
                checks.append(Check(claim, None))
            else:
                held = all(other <= one + _T2["slack"] for one, other in zip(theirs, ours, strict=True) if other)
                checks.append(Check(claim, held, f"n^{ours[0]:.2f}, m^{ours[1]:.2f}"))
    checks += _table2_claims(grown)
    told = {name: ", ".join(f"{one:,}" for one in _T2.form(quick)[name]) for name in ("clients", "sizes")}
    return _T2.report(rows, checks, quick=quick, notes=_T2.notes(**told))


def _amount(what: str, value: float | None) -> str:
    if value is None:
        return EMPTY
    return f"{value:.3g} s" if what.endswith("seconds") else f"{value / 1e6:,.2f} MB"


def _table2_claims(grown: _Grown) -> Iterator[Check]:
    what = "client seconds"
    ldp, nadp = (grown.exponents(one, what)[0] for one in ("ldp", "nadp"))
    held = None if ldp is None or nadp is None else nadp - ldp >= _T2["apart"]
    seen = "" if ldp is None or nadp is None else f"n^{nadp:.2f} and n^{ldp:.2f}"
    yield Check("NADP's client works n times as long as LDP's: its time grows with n, LDP's does not", held, seen)
    for what in ("client seconds", "server seconds", "client bytes", "server bytes", "server state"):
        over = ratio(grown.cost(SECAGG, what), grown.cost("nadp", what))
        claim = f"NADP costs less than secure aggregation: {_T2['names'][what]}"
        yield Check(claim, None if over is None else over > 1, "" if over is None else f"SA / NADP = {over:.2f}")


# Figure 3: sampling rates.


def sampled(clients: int, rate: float, scheme: str, epsilon: float | None = None) -> str:
    """The name of a cell of Figure 3; the ε of most goes without saying."""
    start = f"mnist/n{clients}/q{rate:g}"
    return f"{start}/{scheme}" if epsilon in (None, _F3["epsilon"]) else f"{start}/eps{epsilon:g}/{scheme}"


def _fig3_epsilons(form: Mapping[str, Any]) -> list[float]:
    return [_F3["epsilon"], *form.get("more_epsilons", ())]


def _fig3_cells(quick: bool) -> tuple[Cell, ...]:
    form, found = _F3.form(quick), []
    for clients, rate in itertools.product(form["clients"], _F3["rates"]):
        shared = {
            **_PAPER["setting"],
            **form.get("settings", {}),
            "dataset": "mnist",
            "clients": clients,
            "cohort": rate,  # q·N clients, as stored figures have it; `sampling_rate` would draw each by itself
        }
        noise, samples, tiers = {**_PAPER["noise"], **form.get("noise", {})}, form.get("samples"), _F3["tiers"]
        plain = {**shared, **_PAPER["schemes"]["fedavg"]}
        found.append(Cell(sampled(clients, rate, "fedavg"), plain, samples, tiers))
        for epsilon, label in itertools.product(_fig3_epsilons(form), ("ldp", "nadp")):
            settings = {**shared, **noise, "epsilon": epsilon, **_PAPER["schemes"][label]}
            name, usual = sampled(clients, rate, label, epsilon), epsilon == _F3["epsilon"]
            found.append(Cell(name, settings, samples, tiers, usual))
    return tuple(found)


def _fig3_report(results: Results, quick: bool) -> Report:
    form, rates = _F3.form(quick), _F3["rates"]
    plain = {
        f"N = {clients}, q = {rate:g}": mean_of(results, sampled(clients, rate, "fedavg"))
        for clients in form["clients"]
        for rate in rates
    }
    rows, checks = [], [trained(plain)]
    meets: dict[str, float] = {}
    most: dict[int, dict[float, dict[int, float]]] = {}
    for clients in form["clients"]:
        by_epsilon: dict[float, list[dict[int, float]]] = {}
        for epsilon, rate in itertools.product(_fig3_epsilons(form), rates):
            names = [sampled(clients, rate, one, epsilon) for one in ("ldp", "nadp")]
            ours = [numbers(results, one) for one in (sampled(clients, rate, "fedavg"), *names)]
            gap = difference(ours[2], ours[1])
            by_epsilon.setdefault(epsilon, []).append(gap)
            shares = [short(mean_of(results, one, "noise"), "{:.4f}") for one in names]
            start = (str(clients), f"{rate:g}", f"{epsilon:g}")
            rows.append((*start, *map(shown, ours), *shares, shown(gap, signed=True)))
        margins = by_epsilon[_F3["epsilon"]]
        most[clients] = {epsilon: gaps[-1] for epsilon, gaps in by_epsilon.items()}
        gains = [mean(one) for one in margins]
        if (place := _crossing(dict(zip(rates, gains, strict=True)))) is not None:
            meets[f"N = {clients}"] = place
        named = [f"q = {rate:g}" for rate in rates]
        checks.append(rising(f"NADP gains on LDP with the sampling rate at N = {clients}", margins, named))
        if clients == 20:
            checks.append(above("LDP is ahead at N = 20, q = 0.1 (two clients)", margins[0], below=True))
        claim = f"NADP is ahead at N = {clients}, q = 0.5, beyond q_same = √(2/N) = {math.sqrt(2.0 / clients):.2f}"
        checks.append(above(claim, margins[-1]))
    if len(form["clients"]) > 1:
        claim = "the more clients there are, the lower the sampling rate from which on NADP is ahead"
        checks.append(_in_order(claim, meets, rising=False))
        checks += _larger_advantage(most, rates[-1])
    notes = [*_F3.notes(), *([form["note"]] if quick else [])]
    return _F3.report(rows, checks, quick=quick, notes=notes)


def _larger_advantage(most: Mapping[int, Mapping[float, Mapping[int, float]]], rate: float) -> Iterator[Check]:
    """The paper's claim of NADP's advantage: it grows as ε falls, and as there are more clients."""
    for clients, by_epsilon in most.items():
        named = [f"ε = {epsilon:g}" for epsilon in by_epsilon]
        claim = f"NADP's advantage grows as ε falls at N = {clients}, q = {rate:g}"
        yield rising(claim, list(by_epsilon.values()), named, runs=_OF_MARGINS)
    claim, margins = f"NADP's advantage grows with N at q = {rate:g}", [one[_F3["epsilon"]] for one in most.values()]
    yield rising(claim, margins, [f"N = {clients}" for clients in most], runs=_OF_MARGINS)


# Figure 4: dropouts.


@dataclass(frozen=True)
class Drops:
    """One panel of Figure 4: so many clients and an ε, at reduced size or at the paper's."""

    clients: int
    epsilon: float
    whole: bool
    usual: bool

    def cell(self, rate: float, scheme: str) -> str:
        """A cell's name."""
        start = f"paper/n{self.clients}/eps{self.epsilon:g}" if self.whole else f"mnist/n{self.clients}"
        return f"{start}/d{rate:g}/{scheme}"

    def ran(self, results: Results) -> bool:
        """Whether there is anything of it."""
        start = self.cell(0, "").rsplit("/", 2)[0]
        return any(name.startswith(f"{start}/") for name in results)


def panels(quick: bool) -> list[Drops]:
    """Reduced ones first, which two cores can run; then the paper's."""
    form, main = _F4.form(quick), _F4["settings"]["clients"]
    found = [Drops(one, _F4["noise"]["epsilon"], False, one == main) for one in form["clients"]]
    return [*found, *(Drops(*one, True, False) for one in itertools.product(form["clients"], form.get("epsilons", ())))]


def _fig4_cells(quick: bool) -> tuple[Cell, ...]:
    form, found = _F4.form(quick), []
    for panel in panels(quick):
        shared, samples, tiers = (
            {**_PAPER["setting"], **_F4["settings"], "rounds": form["rounds"]},
            _F4["samples"],
            None,
        )
        noise, schemes = {**_PAPER["noise"], **_F4["noise"]}, _F4["schemes"]
        if panel.whole:
            shared, samples, tiers = {**_PAPER["setting"], "dataset": "mnist"}, None, _F4["tiers"]
            noise, schemes = {**_PAPER["noise"], "epsilon": panel.epsilon}, {**schemes, **_F4["more_schemes"]}
        for rate, (label, own) in itertools.product(form["rates"], schemes.items()):
            settings = {**shared, "clients": panel.clients, **({} if label == "fedavg" else noise), **own}
            name = panel.cell(rate, label)
            found.append(Cell(name, {**settings, "simulate_dropout": rate}, samples, tiers, panel.usual))
    return tuple(found)


def _fig4_report(results: Results, quick: bool) -> Report:
    form, labels, rows, checks = _F4.form(quick), (*_F4["schemes"], *_F4["more_schemes"]), [], []
    for panel in (one for one in panels(quick) if one.usual or one.ran(results) or not quick):
        size = "the paper's" if panel.whole else "reduced"
        for rate in form["rates"]:
            ours = [shown(numbers(results, panel.cell(rate, label))) for label in sorted(labels)]
            rows.append((size, str(panel.clients), f"{panel.epsilon:g}", f"{rate:g}", *ours))
        where = "" if panel.usual else f"{size} size, N = {panel.clients}, ε = {panel.epsilon:g}: "
        if panel.usual or panel.ran(results):
            made = _fig4_checks(results, panel, form["rates"])
            checks += [replace(one, claim=f"{where}{one.claim}") for one in made]
        else:
            checks.append(Check(f"{where}the same claims", None, "not run"))
    if len(form["clients"]) > 1:
        checks += _crossings(results, panels(quick), form["rates"])
    return _F4.report(rows, checks, quick=quick, notes=_F4.notes(rounds=form["rounds"]))


def _fig4_checks(results: Results, panel: Drops, rates: Sequence[float]) -> list[Check]:
    ours = {label: [numbers(results, panel.cell(rate, label)) for rate in rates] for label in _F4["schemes"]}
    named = [f"rate {rate:g}" for rate in rates]
    falls = {label: difference(curve[0], curve[-1]) for label, curve in ours.items()}
    ahead = [difference(one, other) for one, other in zip(ours["nadp-1.0"], ours["ldp"], strict=True)]
    dearest = [difference(one, other) for one, other in zip(ours["nadp-1.0"], ours["nadp-1.4"], strict=True)]
    dearer = {
        where: gain
        for where, one, other in zip(named, ours["nadp-1.4"], ours["nadp-1.0"], strict=True)
        if (gain := mean(difference(one, other))) is not None
    }
    most, chance, slight = _F4["most"], _F4["chance"], _F4["slight"]
    claim = f"a larger λ is no more accurate (up to {chance:g} point of chance)"
    return [
        trained({name: mean(one) for name, one in zip(named, ours["fedavg"], strict=True)}),
        above(f"without DP, dropouts cost at most {most:g} points", falls["fedavg"], most, below=True),
        *(
            rising(f"{name}'s accuracy falls as more drop out", ours[label][::-1], named[::-1], signed=False)
            for label, name in (("ldp", "LDP"), ("nadp-1.0", "NADP"))
        ),
        above("dropouts cost NADP more than LDP", difference(falls["nadp-1.0"], falls["ldp"])),
        above("NADP is ahead of LDP where few drop out", ahead[0]),
        above("NADP is behind LDP where half drop out", ahead[-1], below=True),
        above(
            f"NADP is at most {slight:g} points behind LDP where half drop out (the paper: slightly)",
            ahead[-1],
            -slight,
        ),
        all_above(
            f"λ = 1.4 costs at most {slight:g} points (the paper: quite limited)",
            dict(zip(named, dearest, strict=True)),
            slight,
            below=True,
        ),
        compared(claim, dearer, lambda gain: gain <= chance, form="{:+.1f}"),
    ]


def _crossings(results: Results, found: Sequence[Drops], rates: Sequence[float]) -> Iterator[Check]:
    """The paper's claim of several numbers of clients: the more there are, the later LDP overtakes NADP."""
    for whole, epsilon in sorted({(one.whole, one.epsilon) for one in found}):
        places: dict[str, float] = {}
        for panel in (one for one in found if (one.whole, one.epsilon) == (whole, epsilon)):
            ours, theirs = (
                [mean_of(results, panel.cell(rate, label)) for rate in rates] for label in ("ldp", "nadp-1.0")
            )
            behind = [None if a is None or b is None else a - b for a, b in zip(ours, theirs, strict=True)]
            if (place := _crossing(dict(zip(rates, behind, strict=True)))) is not None:
                places[f"N = {panel.clients}"] = place
        size = "the paper's" if whole else "reduced"
        claim = f"{size} size, ε = {epsilon:g}: LDP overtakes NADP at a higher dropout rate the more clients there are"
        yield _in_order(claim, places, rising=True)
        yield _diminished(results, [one for one in found if (one.whole, one.epsilon) == (whole, epsilon)], rates)


def _diminished(results: Results, panels: Sequence[Drops], rates: Sequence[float]) -> Check:
    """The paper's claim of λ: what a larger one costs is less the more clients there are."""
    costs = []
    for panel in panels:
        each = [
            difference(*(numbers(results, panel.cell(rate, f"nadp-{strength}")) for strength in ("1.0", "1.4")))
            for rate in rates
        ]
        seeds = set.intersection(*(set(one) for one in each))
        costs.append({seed: sum(one[seed] for one in each) / len(each) for seed in sorted(seeds)})
    size = "the paper's" if panels[0].whole else "reduced"
    claim = f"{size} size, ε = {panels[0].epsilon:g}: λ = 1.4 costs less the more clients there are (mean over rates)"
    named = [f"N = {panel.clients}" for panel in panels]
    return rising(claim, costs[::-1], named[::-1], runs=_OF_MARGINS)


def _in_order(claim: str, places: Mapping[str, float], *, rising: bool) -> Check:
    """Whether crossings move one way; two that lie beyond all that was tried tell nothing of each other."""
    seen = ", ".join(f"{name}: {place:.2f}" for name, place in places.items())
    steps = [(other - one) if rising else (one - other) for one, other in itertools.pairwise(places.values())]
    if any(step < 0 for step in steps):
        return Check(claim, False, seen)
    return Check(claim, True if steps and all(step > 0 for step in steps) else None, seen)


def _crossing(gains: Mapping[float, float | None]) -> float | None:
    """Where a gain turns positive, between two of its places: 0 if it is from the first on, infinity if never."""
    there = {place: gain for place, gain in gains.items() if gain is not None}
    if len(there) < len(gains):
        return None
    for (place, one), (later, other) in itertools.pairwise(there.items()):
        if one <= 0 < other:
            return place + (later - place) * one / (one - other)
    return 0.0 if there[min(there)] > 0 else math.inf


# Table 4: DLG and iDLG under collusion. A cell records a run; its rows are what coalitions of different sizes see.

FEDAVG, LDP, BOTH, ROUNDS = "fedavg", "ldp", "nadp", "nadp-rounds"
ALL, SHARPEST = "nadp-all", "nadp-sharpest"
CHANCE, UNNAMED = "chance", "unnamed"
ATTACKS = ("dlg", "idlg")
STRONGER = "inverting"
MOST = 0.9
"""The share of colluders in the largest coalition that the paper's table has."""

FALSE_ALARMS = 1e-3
_RECOGNISED, _ALIKE = 0.01, 3.0
_PRINTED = "{:.4g}"
"""As many digits as the paper prints."""
_MEASURES = ("mse", "ssim", "features")
_STILL = 1e-9
_LEAST = 1 / 3
_NAMES = {
    FEDAVG: "no DP",
    LDP: "LDP",
    ALL: "NADP, all others collude",
    SHARPEST: "NADP τ = 0.9, others' parts known",
}
Form = Mapping[str, Any]


def nadp_row(tau: float) -> str:
    """A row's name."""
    return f"nadp-{tau:g}"


def name_of(row: str) -> str:
    """A row as it is shown."""
    return _NAMES.get(row, f"NADP τ = {row.removeprefix('nadp-')}")


def cell_of(data: str, size: int | None, kind: str) -> str:
    """A cell's name."""
    return f"{data}/{kind}" if size is None else f"{data}/d{size}/{kind}"


def cell_of_row(data: str, size: int | None, row: str) -> str:
    """The name of the cell that fills a row."""
    if row in (FEDAVG, CHANCE):
        return cell_of(data, None, FEDAVG)
    return cell_of(data, size, row if row in (LDP, ROUNDS) else BOTH)


def printed_attack(data: str, row: str, what: str) -> tuple[float, float] | None:
    """Table 4's (DLG, iDLG); beside our distance in features stands the paper's LPIPS."""
    if data not in _T4["printed"] or row not in _T4["printed_rows"]:
        return None
    first, second = _T4["printed"][data][{"features": "lpips"}.get(what, what)][_T4["printed_rows"].index(row)]
    return float(first), float(second)


def honest(form: Form) -> int:
    """How many clients of a round the largest coalition of the table leaves."""
    cohort: int = form["cohort"]
    return cohort - round(MOST * cohort)


def equal_utility(epsilon: float, *, cohort: int, rate: float) -> float:
    """ε·√(q·k/2): LDP's ε for which the mean of k uploads has the noise of NADP at ε (20√2 for 5, k = 80, q = 0.8)."""
    return epsilon * math.sqrt(rate * cohort / 2)


def _table4_cells(quick: bool) -> tuple[Cell, ...]:
    form = _T4.form(quick)
    clients, fitted = form["clients"], form["fitted"]
    base = {**_T4["settings"], "clients": clients, "record_rounds": "1", "record_clients": f"0-{clients - 1}"}
    found = [
        Cell(cell_of(data, None, FEDAVG), {**base, "dataset": data, "scheme": "fedavg"}, clients)
        for data in form["data"]
    ]
    # What decides the verdict first, so that a run that is cut short has it.
    for size, data in itertools.product(sorted(form["sizes"], key=lambda one: one != fitted), form["data"]):
        shared = {**base, **_T4["noise"], "clip": form["clip"], "dataset": data}
        epsilon = _T4["epsilon"] * size
        nadp = {**shared, "scheme": "nadp", "pair_strength": _T4["strength"], "epsilon": epsilon}
        fair = equal_utility(epsilon, cohort=form["cohort"], rate=base["cohort"])
        found.append(Cell(cell_of(data, size, LDP), {**shared, "scheme": "ldp", "epsilon": fair}, clients))
        found.append(Cell(cell_of(data, size, BOTH), nadp, clients))
        if size == fitted:
            still = {**nadp, "lr": _STILL, "record_rounds": f"1-{form['rounds']}"}
            found.append(Cell(cell_of(data, size, ROUNDS), still, clients))
    return tuple(found)


def _table4_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    form, kind = _T4.form(stage.quick), cell.name.rsplit("/", 1)[-1]
    with TemporaryDirectory(prefix="fedveil-nadp-") as folder:
        seen = seen_round(
            stage.job(cell, seed=seed),
            Path(folder),
            victims=form["averaged"] if kind == ROUNDS else form["victims"],
            honest=honest(form) if kind == BOTH else 1,
            least=form["clip"] * _LEAST,
            rounds=form["rounds"] if kind == ROUNDS else 1,
        )
        x, y = seen.pictures()
        figures: Figures = {
            "device": stage.describe(),
            "torch": torch.__version__,
            "parameters": seen.subject.job.architecture.size,
            "labels": [float(one) for one in y],
            "lengths": [round(float(seen.contribution(one).norm()), 4) for one in seen.victims],
            "originals": as_text(x, box=seen.box),
            "shape": [float(one) for one in x.shape[1:]],
        }
        attacked = _Attacked(stage, str(cell.settings["dataset"]), seen, seed)
        if kind == FEDAVG:
            guess = stage.split(attacked.data).test.x.mean(0, keepdim=True).cpu()
            figures |= attacked.measured(CHANCE, guess.expand(len(seen.victims), *guess.shape[1:]))
        if kind == ROUNDS:
            return figures | attacked.over_rounds(honest(form))
        return figures | attacked.rows(kind, form, fitted=f"/d{form['fitted']}/" in cell.name)


@dataclass(frozen=True, eq=False)
class _Attacked:
    """Attacks on the victims of one recorded run."""

    stage: Stage
    data: str
    seen: Seen
    seed: int

    def rows(self, kind: str, form: Form, *, fitted: bool) -> Figures:
        """Every row that a cell fills: so many colluders, and whether the honest others' contributions are known."""
        seen, views, figures = self.seen, {}, Figures()
        colluders = {kind: 0}
        if kind == BOTH:
            cohort = form["cohort"]
            colluders = {nadp_row(tau): round(tau * cohort) for tau in form["taus"]}
            colluders |= {ALL: cohort - 1, SHARPEST: cohort - honest(form)}
        for row, count in colluders.items():
            look = seen.sharpest_view if row == SHARPEST else seen.view
            views[row] = [look(one, colluders=count) for one in seen.victims]
            figures[f"{row} noise"] = [seen.noise(view) for view in views[row]]
            left = seen.left(seen.victims[0], colluders=count)
            if left is not None:
                stated = left.sharpest if row == SHARPEST else left.alone
                figures |= {f"{row} ledger": stated, f"{row} epsilon": left.epsilon}
        stronger = {row: views[row][: form["few"]] for row in views if fitted and row in form["stronger"]}
        return figures | self.attacked(dict.fromkeys(ATTACKS, views) | ({STRONGER: stronger} if stronger else {}))

    def over_rounds(self, honest: int) -> Figures:
        """The same samples round after round, on a model that all but stands still: the mean of uploads is attacked."""
        found = [self.seen.history(one, honest=honest) for one in self.seen.victims]
        figures: Figures = {
            f"{ROUNDS} rounds": [float(len(variances)) for _, variances in found],
            f"{ROUNDS} noise": [self.seen.averaged_noise(history, variances) for history, variances in found],
            f"{ROUNDS} ledger": [math.sqrt(1 / math.fsum(1 / one for one in variances)) for _, variances in found],
        }
        told = [{"variances": variances, "with": "idlg"} for _, variances in found]
        return figures | self.attacked({"averaging": {ROUNDS: [history for history, _ in found]}}, told)

    def attacked(
        self, wanted: Mapping[str, Mapping[str, Sequence[View]]], told: Sequence[Mapping[str, object]] = ()
    ) -> Figures:
        """Each attack on the views of each row, attacks side by side; MSE, SSIM and distance in features of each."""
        shared = {"quick": True, "box": list(self.seen.box), "device": self.stage.device}

        def run(attack: str) -> dict[str, tuple[Tensor, Tensor]]:
            rows = wanted[attack]
            # The clipping bound lies above every gradient, so their sizes count, as in the papers' own attacks.
            own = shared if attack == STRONGER else {**shared, "clipped": False}
            settings = [
                {**own, "seed": mixed_seed(self.seed, place) % 2**31, **(told[place] if told else {})}
                for views in rows.values()
                for place in range(len(views))
            ]
            found = tried(attack, [view for views in rows.values() for view in views], settings)
            if reason := reason_of(found):
                raise AttackError(f"{attack} on {self.data}: {reason}")
            left, made = iter([one for one in found if not isinstance(one, str)]), {}
            for row, views in rows.items():
                parts = list(itertools.islice(left, len(views)))
                inputs, labels = ([one[what] for one in parts] for what in ("inputs", "labels"))
                made[row] = torch.cat(inputs).float(), torch.cat(labels)
            return made

        figures, truth = Figures(), self.seen.pictures()[1]
        for attack, rows in side_by_side(list(wanted), run).items():
            for row, (inputs, labels) in rows.items():
                figures |= self.measured(f"{row} {attack}", inputs)
                figures[f"{row} {attack} labels"] = [float(one) for one in labels == truth[: len(labels)]]
                if attack == "idlg":
                    figures[f"{row} {attack} pictures"] = as_text(inputs, box=self.seen.box)
        return figures

    def measured(self, what: str, inputs: Tensor) -> Figures:
        """MSE and SSIM on a scale from 0 to 1, and the distance in the judge's features over that of two pictures."""
        x, (low, high) = self.seen.pictures()[0][: len(inputs)], self.seen.box
        judge, apart = judge_of(self.stage, self.data, held_out=True)
        ours, theirs = (((one - low) / (high - low)).clamp(0.0, 1.0) for one in (inputs, x))
        values = {
            "mse": mse(ours, theirs),
            "ssim": ssim(ours, theirs),
            "features": feature_mse(inputs, x, extractor=judge.features).cpu() / apart,
        }
        return {f"{what} {name}": [digits(float(one)) for one in found] for name, found in values.items()}


@dataclass(frozen=True)
class _Rows:
    """Figures of Table 4, found by data, the |D_i| of the noise's formula, and row."""

    results: Results
    form: Form
    quick: bool

    def listed(self, data: str, size: int | None, row: str, what: str) -> list[float]:
        """One figure for every victim of every seed."""
        return listed(self.results, cell_of_row(data, size, row), f"{row} {what}")

    def average(self, data: str, row: str, what: str, *, size: int | None = None) -> float | None:
        """Its mean over victims, under noise through which attacks see unless a size is given."""
        place = self.form["fitted"] if size is None else size
        return average(self.results, cell_of_row(data, place, row), f"{row} {what}")

    def ledger(self, data: str, size: int | None, row: str, what: str = "ledger") -> float | None:
        """What the ledger says of a row."""
        return number(self.results, cell_of_row(data, size, row), f"{row} {what}")

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every data set with each attack."""
        return itertools.product(self.form["data"], ATTACKS)

    @property
    def coalitions(self) -> list[str]:
        """The rows of NADP under growing coalitions."""
        return [nadp_row(tau) for tau in self.form["taus"]]


def _table4_report(results: Results, quick: bool) -> Report:
    rows = _Rows(results, _T4.form(quick), quick)
    return _T4.report(list(_lines(rows)), list(_checks(rows)), quick=quick, notes=list(_notes(rows)))


def _lines(rows: _Rows) -> Iterator[tuple[str, ...]]:
    form = rows.form
    for data in form["data"]:
        blank = [short(average(rows.results, cell_of(data, None, FEDAVG), f"{CHANCE} {one}")) for one in _MEASURES]
        yield (
            *(data, EMPTY, "nothing seen: the mean picture", EMPTY, EMPTY, EMPTY),
            *(f"{EMPTY} / {one}" for one in blank),
            EMPTY,
        )
        yield _line(rows, data, None, FEDAVG)
        for size in sorted(form["sizes"], key=lambda one: one != form["fitted"]):
            for row in (LDP, ALL, SHARPEST, *rows.coalitions):
                yield _line(rows, data, size, row)
    if not rows.quick:
        for row in _T4["printed_rows"]:
            theirs = (printed_attack(UNNAMED, row, what) for what in _MEASURES)
            told = (f"{_pair(one or (), _PRINTED)} / {EMPTY}" for one in theirs)
            yield ("the paper's third", EMPTY, name_of(row), EMPTY, EMPTY, EMPTY, *told, EMPTY)


def _line(rows: _Rows, data: str, size: int | None, row: str) -> tuple[str, ...]:
    cell = cell_of_row(data, size, row)
    stated, noise = rows.ledger(data, size, row), rows.listed(data, size, row, "noise")
    lengths, parameters = listed(rows.results, cell, "lengths"), number(rows.results, cell, "parameters")
    beside = same = EMPTY
    if stated and lengths and parameters:
        beside = f"{stated * math.sqrt(parameters) / (sum(lengths) / len(lengths)):.2g}"
    if stated and noise:
        same = f"{math.sqrt(sum(one**2 for one in noise) / len(noise)) / stated:.4f}"
    labels = [average(rows.results, cell, f"{row} {one} labels") for one in ATTACKS]
    return (
        *(data, EMPTY if size is None else str(size), name_of(row)),
        *(short(rows.ledger(data, size, row, "epsilon")), beside, same),
        *(_both(rows, data, size, row, what) for what in _MEASURES),
        _pair(labels, "{:.0%}"),
    )


def _both(rows: _Rows, data: str, size: int | None, row: str, what: str) -> str:
    """The paper's (best of ten), ours (best of the victims), and our mean over victims."""
    best = max if what == "ssim" else min
    found = [rows.listed(data, size, row, f"{one} {what}") for one in ATTACKS]
    theirs = printed_attack(data, row, what)
    ours, mean = ([of(one) if one else None for one in found] for of in (best, lambda one: sum(one) / len(one)))
    return f"{EMPTY if theirs is None else _pair(theirs, _PRINTED)} / {_pair(ours)} (mean {_pair(mean)})"


def _pair(values: Sequence[float | None], form: str = "{:.3g}") -> str:
    return ", ".join(short(one, form) for one in values)


def _checks(rows: _Rows) -> Iterator[Check]:
    """The paper's claims, and ours about the ledger."""
    form, size, pairs = rows.form, rows.form["fitted"], list(rows.pairs())

    def over(row: str, other: str, data: str, attack: str) -> float | None:
        return ratio(*(rows.average(data, one, f"{attack} mse") for one in (row, other)))

    worst = {f"{data} {attack}": rows.average(data, FEDAVG, f"{attack} mse") for data, attack in pairs}
    claim = "without DP, DLG and iDLG reconstruct (MSE below 0.01)"
    yield compared(claim, worst, lambda one: one < _RECOGNISED, premise=True)
    # LDP's noise on one upload is NADP's with nobody's pair noise left, so that their sums have the same noise too.
    claim = "NADP at ε = 5 and LDP at ε·√(qk/2) leave the same noise in the sum (residual noise, NADP over LDP)"
    same = {data: ratio(rows.ledger(data, size, ALL), rows.ledger(data, size, LDP)) for data in form["data"]}
    yield compared(claim, same, lambda one: abs(one - 1) < 1e-3, form="{:.5f}")
    claim = "NADP disturbs more than LDP at equal utility (MSE, NADP over LDP)"
    more = {
        f"{data} {attack} τ = {tau:g}": over(nadp_row(tau), LDP, data, attack)
        for data, attack in pairs
        for tau in form["taus"]
    }
    yield compared(claim, more, lambda one: one > 1)
    yield _falls(rows)
    claim = f"once all others collude NADP is as LDP (MSE, NADP over LDP, within a factor of {_ALIKE:g})"
    alike = {f"{data} {attack}": over(ALL, LDP, data, attack) for data, attack in pairs}
    yield compared(claim, alike, lambda one: 1 / _ALIKE < one < _ALIKE)
    yield replace(_matches_ledger(rows), ours=True)
    if not rows.quick:
        # With σ by the formula for one sample a client, as the paper describes it.
        claim = (
            f"LDP's printed MSE follows from its formula with one sample a client (best of ours over it, ≤ {_ALIKE:g})"
        )
        best: dict[str, float | None] = {}
        for data, attack in pairs:
            theirs = printed_attack(data, LDP, "mse")
            ours = min(rows.listed(data, 1, LDP, f"{attack} mse"), default=None)
            best[f"{data} {attack}"] = ratio(ours, None if theirs is None else theirs[ATTACKS.index(attack)])
        yield replace(compared(claim, best, lambda one: one <= _ALIKE), ours=True)


def _falls(rows: _Rows) -> Check:
    """The two ends decide; neighbouring τ are counted beside, since even the paper's own column is not in order."""
    taus, apart, steps = rows.form["taus"], {}, []
    for data, attack in rows.pairs():
        found = [rows.average(data, row, f"{attack} ssim") for row in rows.coalitions]
        there = [one for one in found if one is not None]
        apart[f"{data} {attack}"] = there[-1] - there[0] if len(there) == len(found) else None
        steps += [later < earlier for earlier, later in itertools.pairwise(there)]
    claim = f"protection falls as τ grows (SSIM at τ = {taus[-1]:g} less that at τ = {taus[0]:g})"
    check = compared(claim, apart, lambda one: one < 0, form="{:+.3f}")
    counted = f"; {sum(steps)} of {len(steps)} steps in between go this way" if steps else ""
    return replace(check, seen=check.seen + counted)


def _matches_ledger(rows: _Rows) -> Check:
    """Every victim's measured variance against the χ² interval of the ledger's, all together wrong once in 1000."""
    from scipy.stats import chi2

    trials: list[tuple[float, int]] = []
    for data, size in itertools.product(rows.form["data"], rows.form["sizes"]):
        for row in (LDP, ALL, SHARPEST, *rows.coalitions):
            stated, count = (
                rows.ledger(data, size, row),
                number(rows.results, cell_of_row(data, size, row), "parameters"),
            )
            if stated is not None and count is not None:
                trials += [(one / stated, int(count)) for one in rows.listed(data, size, row, "noise")]
    claim = "the noise left on every upload is what the ledger says (standard deviation, measured over stated)"
    if not trials:
        return Check(claim, None)
    tail = FALSE_ALARMS / len(trials) / 2
    bounds = [(chi2.ppf(tail, count) / count, chi2.ppf(1 - tail, count) / count) for _, count in trials]
    held = all(low <= found**2 <= high for (found, _), (low, high) in zip(trials, bounds, strict=True))
    ratios = [found for found, _ in trials]
    low, high = (math.sqrt(bounds[0][place]) for place in (0, 1))
    seen = (
        f"{min(ratios):.4f} to {max(ratios):.4f} over {len(trials)} uploads; {low:.4f} to {high:.4f} is chance, with "
        f"one false alarm in {1 / FALSE_ALARMS:.0f}; runs of one seed share their draws, so that other sizes and data "
        "repeat the same test"
    )
    return Check(claim, held, seen)


def _notes(rows: _Rows) -> Iterator[str]:
    """What the paper claims, how it was run here, and what adaptive attacks get."""
    form, words = rows.form, _T4["words"]
    taus = ", ".join(f"{tau:g}" for tau in form["taus"])
    if rows.quick:
        yield words["quick"].format(clients=form["clients"], taus=taus)
    yield words["how"].format(**{name: form[name] for name in ("clients", "cohort", "victims")})
    yield words["clipping"].format(clip=form["clip"])
    spent = rows.ledger(form["data"][0], form["fitted"], LDP, "epsilon")
    worth = "" if spent is None else f"; by the ledger, LDP's ε is then {spent:.2g}, which is no privacy"
    fitted = words["fitted_quick" if rows.quick else "fitted_full"].format(size=form["fitted"], worth=worth)
    yield words["noise"].format(fitted=fitted, not_met=_not_met(rows, taus), elsewhere=_elsewhere(rows))
    proven = {name_of(row): rows.ledger(form["data"][0], 1, row, "epsilon") for row in (LDP, ALL, *rows.coalitions)}
    there = [f"{name}: {value:.3g}" for name, value in proven.items() if value is not None]
    yield words["real"].format(epsilons=words["epsilons"].format(told=", ".join(there)) if there else "")
    yield from _adaptive(rows)
    yield words["averaging"]


def _not_met(rows: _Rows, taus: str) -> str:
    """How far NADP's figures are from the printed ones at the size that was fitted to LDP's."""
    told = []
    for data in rows.form["data"]:
        ratios = []
        for row in rows.coalitions:
            ours, theirs = rows.listed(data, rows.form["fitted"], row, "idlg mse"), printed_attack(data, row, "mse")
            if ours and theirs is not None:
                ratios.append(f"{min(ours) / theirs[1]:.2g}")
        if ratios:
            told.append(f"{data} {', '.join(ratios)}")
    return str(_T4["words"]["not_met"]).format(taus=taus, told="; ".join(told)) if told else ""


def _elsewhere(rows: _Rows) -> str:
    """How LDP and NADP compare under the other sizes."""
    told = []
    for size in (one for one in rows.form["sizes"] if one != rows.form["fitted"]):
        for data in rows.form["data"]:
            found = [rows.average(data, row, "idlg mse", size=size) for row in (LDP, *rows.coalitions)]
            if None not in found:
                told.append(f"{data}, |D_i| = {size}: {', '.join(f'{one:.2g}' for one in found)}")
    names = ", ".join(f"τ = {tau:g}" for tau in rows.form["taus"])
    return f"iDLG's MSE under the other sizes (LDP, then NADP at {names}): {'; '.join(told)}." if told else ""


def _adaptive(rows: _Rows) -> Iterator[str]:
    """What those get who adapt: to several rounds, to what others computed, to noise in the gradient."""
    size, most = rows.form["fitted"], nadp_row(MOST)

    def both(data: str, one: tuple[str, str], other: tuple[str, str]) -> tuple[float, float] | None:
        """The mean MSE of two (row, attack) over the victims that both have."""
        found = [rows.listed(data, size, row, f"{attack} mse") for row, attack in (one, other)]
        common = list(zip(*found, strict=False))
        return (sum(a for a, _ in common) / len(common), sum(b for _, b in common) / len(common)) if common else None

    for data in rows.form["data"]:
        told = []
        rounds = rows.average(data, ROUNDS, "rounds")
        if rounds is not None and (pair := both(data, (ROUNDS, "averaging"), (most, "idlg"))):
            told.append(
                f"the mean of {rounds:.3g} rounds' uploads, τ = 0.9: MSE {pair[0]:.3g} instead of {pair[1]:.3g}"
            )
        if pair := both(data, (SHARPEST, "idlg"), (most, "idlg")):
            told.append(f"what honest others computed being known, τ = 0.9: {pair[0]:.3g} instead of {pair[1]:.3g}")
        told += [
            f"Inverting Gradients on {name_of(row)}: {pair[0]:.3g} instead of iDLG's {pair[1]:.3g}"
            for row in rows.form["stronger"]
            if (pair := both(data, (row, STRONGER), (row, "idlg")))
        ]
        if told:
            yield f"Who adapts, {data}, |D_i| = {size}: {'; '.join(told)} (the same victims in both)."


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Pictures for a contact sheet: the originals, then what iDLG made of them, a row for each scheme."""
    form, found = _T4.form(quick), []
    for row in ("originals", FEDAVG, LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form["taus"])):
        what = row if row == "originals" else f"{row} idlg pictures"
        cells = [cell_of_row(data, form["fitted"], FEDAVG if row == "originals" else row) for data in form["data"]]
        parts = [next((from_text(one, what) for one in figures_of(results, cell)), None) for cell in cells]
        there = [one for one in parts if one is not None]
        if len(there) == len(parts):
            found.append((row if row == "originals" else name_of(row), torch.cat(there)))
    return found


ENTRIES = (
    _T3.entry(lambda quick: tuple(map(Cell, _KEYS)), _table3_report, work=_strengths),
    _T1.entry(_table1_cells, _table1_report),
    _T2.entry(_table2_cells, _table2_report, work=_table2_work),
    _F3.entry(_fig3_cells, _fig3_report),
    _F4.entry(_fig4_cells, _fig4_report),
    _T4.entry(_table4_cells, _table4_report, work=_table4_work, draw=draw_sheet(sheet_rows)),
)
