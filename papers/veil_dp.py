"""FedVeil's own scheme for both directions beside those of the papers, at the same ε. Settings are in veil_dp.toml."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from fedveil.ledger.gaussian import paper_sigma
from papers.cells import Cell, Results, difference, mean, mean_of, numbers, standard_error
from papers.entries import read_paper
from papers.report import Check, Report, short, shown
from papers.stage import composed

_TABLE = read_paper("veil_dp").table("accuracy")
_FASHION = read_paper("veil_dp").table("fashion")


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
    rows, costs, plain_prices = [], {}, {}
    for epsilon in _TABLE["epsilons"]:
        nadp, veiled, turned, mpdp = (numbers(results, cell(one, epsilon)) for one in _TABLE["schemes"])
        cost, price = difference(veiled, nadp), difference(turned, nadp)
        costs[epsilon], plain_prices[epsilon] = mean(cost), price
        whole = composed(epsilon, delta=_TABLE["delta"], rounds=rounds, sigma=paper_sigma)
        proven = short(mean_of(results, cell("veil-dp", epsilon), "epsilon"))
        figures = (shown(plain), shown(nadp), shown(veiled), proven, shown(cost, signed=True))
        more = (shown(turned), shown(price, signed=True), shown(mpdp))
        rows.append((f"{epsilon:g}", *figures, *more, f"{whole:.3g}"))
    there = {epsilon: cost for epsilon, cost in costs.items() if cost is not None}
    held = all(cost >= -_TABLE["cost"] for cost in there.values()) if len(there) == len(costs) else None
    seen = ", ".join(f"ε = {epsilon:g}: {cost:+.1f}" for epsilon, cost in there.items())
    claim = f"the veil costs veil-dp at most {_TABLE['cost']:g} points of nadp's accuracy"
    checks = [Check(claim, held, seen), *(_free(*one) for one in plain_prices.items())]
    return _TABLE.report(rows, checks, quick=quick, notes=_TABLE.notes(rounds=rounds))


def _fashion_cells(quick: bool) -> tuple[Cell, ...]:
    base = {**_FASHION["settings"], "rounds": _FASHION.form(quick)["rounds"]}
    return tuple(
        Cell(f"fashion/eps{epsilon:g}/{label}", {**base, **own, "epsilon": epsilon}, samples=_FASHION["samples"])
        for epsilon, (label, own) in itertools.product(_FASHION["epsilons"], _FASHION["schemes"].items())
    )


def _fashion_report(results: Results, quick: bool) -> Report:
    rows, checks = [], []
    for epsilon in _FASHION["epsilons"]:
        nadp, scaled, turned = (numbers(results, f"fashion/eps{epsilon:g}/{one}") for one in _FASHION["schemes"])
        cost, price = difference(scaled, nadp), difference(turned, nadp)
        figures = (shown(nadp), shown(scaled), shown(cost, signed=True), shown(turned), shown(price, signed=True))
        rows.append((f"{epsilon:g}", *figures))
        checks.append(_free(epsilon, price))
    notes = _FASHION.notes(rounds=_FASHION.form(quick)["rounds"], samples=f"{_FASHION['samples']:,}")
    return _FASHION.report(rows, checks, quick=quick, notes=notes)


def _free(epsilon: float, price: Mapping[int, float]) -> Check:
    """Whether isometries leave nadp's accuracy as it is; open where one seed cannot tell."""
    claim = (
        f"ε = {epsilon:g}: under isometries veil-dp is as accurate as nadp, within {_TABLE['errors']:g} standard errors"
    )
    error, middle = standard_error(price), mean(price)
    if error is None or middle is None:
        return Check(claim, None)
    return Check(claim, abs(middle) <= _TABLE["errors"] * error, f"{middle:+.1f} points, standard error {error:.1f}")


ENTRIES = (_TABLE.entry(_cells, _report), _FASHION.entry(_fashion_cells, _fashion_report))
