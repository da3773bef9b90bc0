"""FedVeil's own scheme for both directions beside those of the papers, at the same ε. Settings are in veil_dp.toml."""

from __future__ import annotations

import itertools

from fedveil.ledger.gaussian import paper_sigma
from papers.cells import Cell, Results, difference, mean, mean_of, numbers
from papers.entries import read_paper
from papers.report import Check, Report, short, shown
from papers.stage import composed

_TABLE = read_paper("veil_dp").table("accuracy")


def cell(scheme: str, epsilon: float) -> str:
    """A cell's name."""
    return f"digits/eps{epsilon:g}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    base = {**_TABLE["settings"], "rounds": _TABLE.form(quick)["rounds"]}
    found = [Cell("digits/fedavg", {**base, "scheme": "fedavg", "loss": "cross-entropy"})]
    for epsilon, (label, own) in itertools.product(_TABLE["epsilons"], _TABLE["schemes"].items()):
        found.append(Cell(cell(label, epsilon), {**base, **own, "epsilon": epsilon}))
    return tuple(found)


def _report(results: Results, quick: bool) -> Report:
    rounds, plain = _TABLE.form(quick)["rounds"], numbers(results, "digits/fedavg")
    rows, costs = [], {}
    for epsilon in _TABLE["epsilons"]:
        nadp, veiled, mpdp = (numbers(results, cell(one, epsilon)) for one in _TABLE["schemes"])
        cost = difference(veiled, nadp)
        costs[epsilon] = mean(cost)
        whole = composed(epsilon, delta=_TABLE["delta"], rounds=rounds, sigma=paper_sigma)
        proven = short(mean_of(results, cell("veil-dp", epsilon), "epsilon"))
        figures = (shown(plain), shown(nadp), shown(veiled), proven, shown(cost, signed=True), shown(mpdp))
        rows.append((f"{epsilon:g}", *figures, f"{whole:.3g}"))
    there = {epsilon: cost for epsilon, cost in costs.items() if cost is not None}
    held = all(cost >= -_TABLE["cost"] for cost in there.values()) if len(there) == len(costs) else None
    seen = ", ".join(f"ε = {epsilon:g}: {cost:+.1f}" for epsilon, cost in there.items())
    claim = f"the veil costs veil-dp at most {_TABLE['cost']:g} points of nadp's accuracy"
    return _TABLE.report(rows, [Check(claim, held, seen)], quick=quick, notes=_TABLE.notes(rounds=rounds))


ENTRIES = (_TABLE.entry(_cells, _report),)
