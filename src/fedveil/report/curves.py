"""Accuracy and loss over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.report.figures import DASHES, SYMBOLS, Figure, Trace, Worth, label, worth_of
from fedveil.report.groups import Curve, Group
from fedveil.report.values import plain

_MANY_ROUNDS = 60
_DECADES = 30.0


def curves(groups: Sequence[Group]) -> list[Figure]:
    """Accuracy (or error) and training loss over rounds."""
    worth = worth_of(groups)
    loss = Worth("loss", "Training loss", False, plain, "")
    several = any(len(group.runs) > 1 for group in groups)
    lines = " Each line is the mean over seeds; its band reaches from the lowest to the highest." if several else ""
    silent = [group.label for group in groups if not _known(group.curve(loss.name))]
    said = f" No loss leaves the clients of {', '.join(silent)}." if silent else ""
    kinds = sorted({str(run.summary["loss"]) for group in groups for run in group.runs if "loss" in run.summary})
    said += f" Different losses ({', '.join(kinds)}) have different scales." if len(kinds) > 1 else ""
    made = [
        _over_rounds(groups, worth, f"{_reach(worth)} on data nobody trained on, after each round.{lines}"),
        _over_rounds(groups, loss, f"How far the model is from the clients' own data: lower is closer.{lines}{said}"),
    ]
    return [one for one in made if one is not None]


def _known(curve: Curve) -> list[float]:
    return [value for value in curve.mean if value is not None]


def _reach(worth: Worth) -> str:
    return "The share of right answers" if worth.higher else "The mean square error (lower is better)"


def _over_rounds(groups: Sequence[Group], worth: Worth, reading: str) -> Figure | None:
    bands: list[Trace] = []
    lines: list[Trace] = []
    told: list[str] = []
    lowest: list[float] = []
    for group in groups:
        curve = group.curve(worth.name)
        known = _known(curve)
        if not known:
            continue
        lowest += [value for value in curve.low if value is not None]
        if any(low != high for low, high in zip(curve.low, curve.high, strict=True)):
            bands.append(_band(group, curve))
        lines.append(_line(group, curve, worth))
        told.append(f"{group.label} ends at {worth.shown(known[-1])}")
    if not lines:
        return None
    logarithmic = not worth.ticks and min(lowest) > 0 and max(_seen(lines)) > _DECADES * min(lowest)
    axis: dict[str, Any] = {"title": {"text": worth.title}, "type": "log" if logarithmic else "linear"}
    if worth.ticks:
        axis |= {"tickformat": worth.ticks, "range": [0, 1.02]}
    layout = {
        "xaxis": {"title": {"text": "Round"}, "tickformat": "d"},
        "yaxis": axis,
        "hovermode": "x unified",
        "hoverdistance": -1,
    }
    return Figure(
        name=f"curve-{worth.name.replace('_', '-')}",
        title=f"{worth.title} by round",
        reading=reading + (" The scale is logarithmic." if logarithmic else ""),
        alternative=f"Line chart of {worth.title.lower()} by round: {'; '.join(told)}.",
        drawing={"data": bands + lines, "layout": layout},
    )


def _seen(lines: Sequence[Trace]) -> list[float]:
    return [value for line in lines for value in line["y"] if value is not None]


def _line(group: Group, curve: Curve, worth: Worth) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve.rounds) <= _MANY_ROUNDS else "lines",
        "name": label(group),
        "x": list(curve.rounds),
        "y": list(curve.mean),
        "connectgaps": True,
        "customdata": [worth.shown(value) for value in curve.mean],
        "hovertemplate": "%{customdata}",
        "line": {"width": 2, "dash": DASHES[group.slot % len(DASHES)]},
        "marker": {"size": 4, "symbol": SYMBOLS[group.slot % len(SYMBOLS)]},
        "meta": {"slot": group.slot, "role": "line"},
    }


def _band(group: Group, curve: Curve) -> Trace:
    ends = [
        (one, low, high)
        for one, low, high in zip(curve.rounds, curve.low, curve.high, strict=True)
        if low is not None and high is not None
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(group),
        "x": [one[0] for one in ends] + [one[0] for one in reversed(ends)],
        "y": [one[2] for one in ends] + [one[1] for one in reversed(ends)],
        "fill": "toself",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"slot": group.slot, "role": "band"},
    }
