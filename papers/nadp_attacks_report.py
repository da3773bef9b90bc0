"""NADP-FL's Table 4 beside ours, and which of its claims hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from papers.cells import Results
from papers.nadp_attacks_notes import notes
from papers.nadp_attacks_table import (
    ALL,
    ATTACKS,
    CHANCE,
    FEDAVG,
    FULL,
    LDP,
    SHARPEST,
    TABLE4,
    Form,
    Printed,
    average,
    figures_of,
    form_of,
    ledger,
    listed,
    nadp_row,
    name_of,
)
from papers.report import EMPTY, Check, Report

FALSE_ALARMS = 1e-3
_RECOGNISED = 0.01
_ALIKE = 3.0
_MEASURES = ("mse", "ssim", "features")


def report(results: Results, quick: bool) -> Report:
    """The table and its verdict."""
    form = form_of(quick)
    return Report(
        title=f"NADP-FL, Table 4 ({'quick form, ' if quick else ''}paper / ours; each DLG, iDLG)",
        columns=(
            *("data", "|D_i| in σ", "row", "ε by the ledger", "noise / gradient", "measured / ledger"),
            *("MSE", "SSIM", "LPIPS / features", "labels told"),
        ),
        rows=tuple(_rows(results, form)),
        checks=tuple(checks(results, form)),
        notes=tuple(notes(results, form, quick)),
        quick=quick,
    )


def _rows(results: Results, form: Form) -> Iterator[tuple[str, ...]]:
    for data in form.data:
        blank = [_shortly(average(results, data, None, CHANCE, what)) for what in ("mse", "ssim", "features")]
        yield (
            data,
            EMPTY,
            "nothing seen: the mean picture",
            *([EMPTY] * 3),
            *(f"{EMPTY} / {one}" for one in blank),
            EMPTY,
        )
        yield _row(results, data, None, FEDAVG)
        for size in sorted(form.sizes, key=lambda one: one != form.fitted):
            for row in (LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
                yield _row(results, data, size, row)


def _row(results: Results, data: str, size: int | None, row: str) -> tuple[str, ...]:
    printed = TABLE4.get(data, {}).get(row)
    told, noise = ledger(results, data, size, row), listed(results, data, size, row, "noise")
    lengths = [
        float(one) for figures in figures_of(results, data, size, row) for one in _numbers(figures.get("lengths"))
    ]
    parameters = [figures.get("parameters") for figures in figures_of(results, data, size, row)]
    beside = EMPTY
    if told and lengths and isinstance(parameters[0], int):
        beside = f"{told * math.sqrt(parameters[0]) / (sum(lengths) / len(lengths)):.2g}"
    epsilon = ledger(results, data, size, row, "epsilon")
    same = f"{math.sqrt(sum(one**2 for one in noise) / len(noise)) / told:.4f}" if told and noise else EMPTY
    return (
        data,
        EMPTY if size is None else str(size),
        name_of(row),
        EMPTY if epsilon is None else f"{epsilon:.3g}",
        beside,
        same,
        *(_both(results, data, size, row, what, printed) for what in _MEASURES),
        _pair([average(results, data, size, row, f"{one} labels") for one in ATTACKS], "{:.0%}"),
    )


def _shortly(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.3g}"


def _numbers(value: object) -> list[float]:
    return [float(one) for one in value] if isinstance(value, list) else []


def _both(results: Results, data: str, size: int | None, row: str, what: str, printed: Printed | None) -> str:
    """The paper's (best of ten), ours (best of the victims), and our mean over victims."""
    best = max if what == "ssim" else min
    found = [listed(results, data, size, row, f"{one} {what}") for one in ATTACKS]
    theirs = EMPTY if printed is None else _pair(printed[what], "{:.3g}")
    ours = _pair([best(one, default=None) for one in found], "{:.3g}")
    mean = _pair([sum(one) / len(one) if one else None for one in found], "{:.3g}")
    return f"{theirs} / {ours} (mean {mean})"


def _pair(values: Sequence[float | None], form: str) -> str:
    return ", ".join(EMPTY if one is None else form.format(one) for one in values)


def checks(results: Results, form: Form) -> Iterator[Check]:
    """The paper's claims, and ours about the ledger."""
    yield _reconstructs(results, form)
    yield from (_same_sum(results, form), _disturbs_more(results, form), _falls(results, form))
    yield _as_ldp(results, form)
    yield _matches_ledger(results, form)
    if form is FULL:
        yield _figures_as_printed(results, form)


def _reconstructs(results: Results, form: Form) -> Check:
    worst = {
        f"{data} {attack}": average(results, data, None, FEDAVG, f"{attack} mse")
        for data in form.data
        for attack in ATTACKS
    }
    check = _all("without DP, DLG and iDLG reconstruct (MSE below 0.01)", worst, lambda one: one < _RECOGNISED)
    return replace(check, premise=True)


def _same_sum(results: Results, form: Form) -> Check:
    """LDP's noise on one upload is NADP's with nobody's pair noise left, so that their sums have the same noise too."""
    ratios = {
        data: _ratio(ledger(results, data, form.fitted, ALL), ledger(results, data, form.fitted, LDP))
        for data in form.data
    }
    claim = "NADP at ε = 5 and LDP at ε·√(qk/2) leave the same noise in the sum (residual noise, NADP over LDP)"
    return _all(claim, ratios, lambda one: abs(one - 1) < 1e-3, form_of_number="{:.5f}")


def _disturbs_more(results: Results, form: Form) -> Check:
    ratios = {}
    for data in form.data:
        for attack in ATTACKS:
            local = average(results, data, form.fitted, LDP, f"{attack} mse")
            for tau in form.taus:
                ours = average(results, data, form.fitted, nadp_row(tau), f"{attack} mse")
                ratios[f"{data} {attack} τ = {tau:g}"] = _ratio(ours, local)
    return _all("NADP disturbs more than LDP at equal utility (MSE, NADP over LDP)", ratios, lambda one: one > 1)


def _falls(results: Results, form: Form) -> Check:
    """The two ends decide; neighbouring τ are counted beside, since even the paper's own column is not in order."""
    apart: dict[str, float | None] = {}
    steps = []
    for data in form.data:
        for attack in ATTACKS:
            found = [average(results, data, form.fitted, nadp_row(tau), f"{attack} ssim") for tau in form.taus]
            there = [one for one in found if one is not None]
            apart[f"{data} {attack}"] = there[-1] - there[0] if len(there) == len(found) else None
            steps += [later < earlier for earlier, later in itertools.pairwise(there)]
    claim = f"protection falls as τ grows (SSIM at τ = {form.taus[-1]:g} less that at τ = {form.taus[0]:g})"
    check = _all(claim, apart, lambda one: one < 0, form_of_number="{:+.3f}")
    counted = f"; {sum(steps)} of {len(steps)} steps in between go this way" if steps else ""
    return replace(check, seen=check.seen + counted)


def _as_ldp(results: Results, form: Form) -> Check:
    ratios = {}
    for data in form.data:
        for attack in ATTACKS:
            pair = [average(results, data, form.fitted, row, f"{attack} mse") for row in (ALL, LDP)]
            ratios[f"{data} {attack}"] = _ratio(*pair)
    claim = f"once all others collude NADP is as LDP (MSE, NADP over LDP, within a factor of {_ALIKE:g})"
    return _all(claim, ratios, lambda one: 1 / _ALIKE < one < _ALIKE)


def _matches_ledger(results: Results, form: Form) -> Check:
    """Every victim's measured variance against the χ² interval of the ledger's, all together wrong once in 1000."""
    from scipy.stats import chi2

    trials = []
    for data in form.data:
        for size in form.sizes:
            for row in (LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
                told = ledger(results, data, size, row)
                cells = figures_of(results, data, size, row)
                if told is None or not isinstance(count := cells[0].get("parameters"), int):
                    continue
                trials += [(one / told, count) for one in listed(results, data, size, row, "noise")]
    claim = "the noise left on every upload is what the ledger says (standard deviation, measured over stated)"
    if not trials:
        return Check(claim, None)
    tail = FALSE_ALARMS / len(trials) / 2
    bounds = [(chi2.ppf(tail, count) / count, chi2.ppf(1 - tail, count) / count) for _, count in trials]
    held = all(low <= ratio**2 <= high for (ratio, _), (low, high) in zip(trials, bounds, strict=True))
    ratios = [ratio for ratio, _ in trials]
    low, high = (math.sqrt(bounds[0][place]) for place in (0, 1))
    seen = (
        f"{min(ratios):.4f} to {max(ratios):.4f} over {len(trials)} uploads; {low:.4f} to {high:.4f} is chance, with "
        f"one false alarm in {1 / FALSE_ALARMS:.0f}; runs of one seed share their draws, so that other sizes and data "
        "repeat the same test"
    )
    return Check(claim, held, seen)


def _figures_as_printed(results: Results, form: Form) -> Check:
    """Whether LDP's printed MSE comes about with σ by the formula for one sample a client, as the paper describes."""
    ratios = {}
    for data in form.data:
        for place, attack in enumerate(ATTACKS):
            ours = listed(results, data, 1, LDP, f"{attack} mse")
            ratios[f"{data} {attack}"] = _ratio(min(ours, default=None), TABLE4[data][LDP]["mse"][place])
    claim = f"LDP's printed MSE follows from its formula with one sample a client (best of ours over it, ≤ {_ALIKE:g})"
    return _all(claim, ratios, lambda one: one <= _ALIKE)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None or other <= 0 else one / other


def _all(
    claim: str, values: dict[str, float | None], holds: Callable[[float], bool], *, form_of_number: str = "{:.3g}"
) -> Check:
    there = {name: value for name, value in values.items() if value is not None}
    seen = ", ".join(f"{name}: {form_of_number.format(value)}" for name, value in there.items())
    if not there or len(there) < len(values):
        failed = any(not holds(value) for value in there.values())
        return Check(claim, False if failed else None, seen)
    return Check(claim, all(holds(value) for value in there.values()), seen)
