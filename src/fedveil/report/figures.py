"""The Pareto front: what nothing else beats in both respects."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.report.sources import Curve, SourceGroup, duration, percent, plain, size


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points (cost, worth) no other beats: none costs no more, is worth no less, and is better in one.

    By rising cost.
    """
    kept = [
        index
        for index, (cost, worth) in enumerate(points)
        if not any(other <= cost and value >= worth and (other < cost or value > worth) for other, value in points)
    ]
    return sorted(kept, key=lambda index: points[index])


Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture: how it is called, drawn, read by a person and by a screen reader."""

    name: str
    title: str
    reading: str
    alternative: str
    drawing: dict[str, Any]


@dataclass(frozen=True)
class Worth:
    """What counts as good: a figure's name, whether more is better, and how it is shown."""

    name: str
    title: str
    higher: bool
    shown: Callable[[float | None], str]
    ticks: str


ACCURACY = Worth("test_accuracy", "Test accuracy", True, percent, ".0%")
ERROR = Worth("test_mse", "Test error (MSE)", False, plain, "")


def worth_of(groups: Sequence[SourceGroup]) -> Worth:
    """Accuracy where classes are told, the mean square error otherwise."""
    named = any(group.values(ERROR.name) for group in groups)
    return ERROR if named and not any(group.values(ACCURACY.name) for group in groups) else ACCURACY


def label(group: SourceGroup) -> str:
    """A group's name where plotly reads a little HTML: escaped."""
    return html.escape(group.label)


_MANY_ROUNDS = 60
_DECADES = 30.0


def curves(groups: Sequence[SourceGroup]) -> list[Figure]:
    """Accuracy (or error) and training loss over rounds."""
    worth = worth_of(groups)
    loss = Worth("loss", "Training loss", False, plain, "")
    several = any(len(group.runs) > 1 for group in groups)
    lines = " Each line is the mean over seeds; its band reaches from the lowest to the highest." if several else ""
    silent = [group.label for group in groups if not _known(group.curve(loss.name))]
    said = f" No loss leaves the clients of {', '.join(silent)}." if silent else ""
    kinds = sorted({str(run.summary["loss"]) for group in groups for run in group.runs if "loss" in run.summary})
    said += f" Different losses ({', '.join(kinds)}) have different scales." if len(kinds) > 1 else ""
    reach = "The share of right answers" if worth.higher else "The mean square error (lower is better)"
    made = [
        _over_rounds(groups, worth, f"{reach} on data nobody trained on, after each round.{lines}"),
        _over_rounds(groups, loss, f"How far the model is from the clients' own data: lower is closer.{lines}{said}"),
    ]
    return [figure for figure in made if figure is not None]


def _known(curve: Curve) -> list[float]:
    return [value for value in curve.mean if value is not None]


def _over_rounds(groups: Sequence[SourceGroup], worth: Worth, reading: str) -> Figure | None:
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


def _line(group: SourceGroup, curve: Curve, worth: Worth) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(curve.rounds) <= _MANY_ROUNDS else "lines",
        "name": label(group),
        "x": list(curve.rounds),
        "y": list(curve.mean),
        "connectgaps": True,
        "customdata": [worth.shown(value) for value in curve.mean],
        "hovertemplate": "%{customdata}",
        "line": {"width": 2, "dash": group.dash},
        "marker": {"size": 4, "symbol": group.symbol},
        "meta": {"slot": group.slot, "role": "line"},
    }


def _band(group: SourceGroup, curve: Curve) -> Trace:
    ends = [
        (round, low, high)
        for round, low, high in zip(curve.rounds, curve.low, curve.high, strict=True)
        if low is not None and high is not None
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(group),
        "x": [point[0] for point in ends] + [point[0] for point in reversed(ends)],
        "y": [point[2] for point in ends] + [point[1] for point in reversed(ends)],
        "fill": "toself",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "meta": {"slot": group.slot, "role": "band"},
    }


def trade_offs(groups: Sequence[SourceGroup]) -> list[Figure]:
    """Accuracy against ε, bytes and time; nothing where there is only one point."""
    worth = worth_of(groups)
    scored = [group for group in groups if group.values(worth.name)]
    if len(scored) < 2:
        return []
    made = [
        _against_epsilon(scored, worth, "server", "the server"),
        _against_epsilon(scored, worth, "clients", "the other clients"),
        _against(
            scored,
            worth,
            name="bytes",
            title="Bytes per client over the run",
            cost=lambda group: group.totals("bytes_down", "bytes_up"),
            shown=size,
            ticks={"tickformat": "~s"},
            what="what a client that takes part in every round sends and receives",
        ),
        _against(
            scored,
            worth,
            name="time",
            title="Seconds of training",
            cost=lambda group: group.values("seconds"),
            shown=duration,
            ticks={"tickformat": "~g"},
            what="the time all rounds took, with all clients on the machine that ran them",
        ),
    ]
    return [figure for figure in made if figure is not None]


_PROVEN = "differential privacy"
_FRONT = "Ringed points joined by a line are the front: nothing here beats them in both respects."


def _against(
    groups: Sequence[SourceGroup],
    worth: Worth,
    *,
    name: str,
    title: str,
    cost: Callable[[SourceGroup], list[float]],
    shown: Callable[[float | None], str],
    ticks: dict[str, Any],
    what: str,
) -> Figure | None:
    known = [(group, costs) for group in groups if (costs := cost(group))]
    if len(known) < 2:
        return None
    spots = [(_mean(costs), group) for group, costs in known]
    traces, best = _with_front(spots, worth)
    traces += [_point(group, x, worth, f"{shown(x)}") for x, group in spots]
    values = [x for x, _ in spots]
    logarithmic = min(values) > 0 and max(values) > 4 * min(values)
    axis = {"title": {"text": title}, "type": "log" if logarithmic else "linear", **ticks}
    axis |= {"dtick": "D2", "nticks": 6} if logarithmic else {"rangemode": "tozero", "nticks": 6}
    return Figure(
        name=f"against-{name}",
        title=f"{worth.title} against {title[0].lower()}{title[1:]}",
        reading=f"Further left is cheaper ({what}); {'higher' if worth.higher else 'lower'} is better. {_FRONT}",
        alternative=f"Scatter chart: {_told(spots, worth, shown)}. On the front: {', '.join(best)}.",
        drawing={"data": traces, "layout": {"xaxis": axis, "yaxis": _worth_axis(worth), "hovermode": "closest"}},
    )


def _against_epsilon(groups: Sequence[SourceGroup], worth: Worth, adversary: str, who: str) -> Figure | None:
    lines = [(group, group.line(adversary)) for group in groups]
    proven = [(line.epsilon, group) for group, line in lines if line is not None and line.epsilon is not None]
    if not proven:
        return None
    verdicts = {group.slot: line.verdict for group, line in lines if line is not None}
    units = {
        group.slot: "all data of a client" if line.unit.startswith("all data") else "one record"
        for group, line in lines
        if line is not None and line.epsilon is not None
    }
    others = {
        group.slot: "" if (other := line.add_remove_epsilon) is None else f" (add/remove: {plain(other)})"
        for group, line in lines
        if line is not None
    }
    without = [group for group, line in lines if line is None or line.epsilon is None]
    outright = [(x, group) for x, group in proven if verdicts[group.slot] == _PROVEN]
    traces, best = _with_front(outright, worth) if outright else ([], [])
    for x, group in proven:
        verdict = verdicts[group.slot]
        note = "" if verdict == _PROVEN else f", {verdict}"
        point = _point(group, x, worth, f"ε = {plain(x)} for {units[group.slot]}{others[group.slot]}{note}")
        if note:
            point["marker"]["symbol"] += "-open"
        traces.append(point)
    for place, group in enumerate(without, start=1):
        point = _point(group, place / (len(without) + 1), worth, f"no ε: {verdicts.get(group.slot, 'no ledger')}")
        traces.append(point | {"xaxis": "x2"})
    layout = {
        "xaxis": {
            "title": {"text": f"ε towards {who}"},
            "type": "log",
            "domain": [0, 0.74] if without else [0, 1],
            "range": _decades([x for x, _ in proven]),
            "dtick": "D2",
            "tickformat": "~g",
        },
        "yaxis": _worth_axis(worth),
        "hovermode": "closest",
    }
    if without:
        layout["xaxis2"] = {"domain": [0.8, 1], "range": [0, 1], "tickvals": [0.5], "ticktext": ["no ε"], "anchor": "y"}
    told = [f"{group.label} {worth.shown(_mean(group.values(worth.name)))} without an ε" for group in without]
    opened = len(outright) < len(proven)
    hollow = " Hollow points hold under a condition or are estimates, and are not on the front." if opened else ""
    mixed = len(set(units.values())) > 1
    hollow += " ε for one record and ε for all data of a client are different promises: see the ledger." * mixed
    aside = " Schemes on the right promise no ε: what protects them, if anything, is in the ledger." if without else ""
    return Figure(
        name=f"against-epsilon-{adversary}",
        title=f"{worth.title} against ε towards {who}",
        reading=f"Further left is a stronger promise; {'higher' if worth.higher else 'lower'} is better."
        f"{aside}{hollow} {_FRONT}",
        alternative="Scatter chart: "
        f"{'; '.join([_told(proven, worth, lambda x: f'ε = {plain(x)}'), *told])}. On the front: "
        f"{', '.join(best) or 'none'}.",
        drawing={"data": traces, "layout": layout},
    )


def _decades(values: Sequence[float]) -> list[float]:
    """A logarithmic range that has at least a decade around what is shown."""
    low, high = math.log10(max(min(values), 1e-9)), math.log10(max(*values, 1e-9))
    room = max(0.15, (1.0 - (high - low)) / 2)
    return [low - room, high + room]


def _with_front(spots: Sequence[tuple[float, SourceGroup]], worth: Worth) -> tuple[list[Trace], list[str]]:
    sign = 1 if worth.higher else -1
    heights = [_mean(group.values(worth.name)) for _, group in spots]
    best = front([(x, sign * y) for (x, _), y in zip(spots, heights, strict=True)])
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "front",
        "x": [spots[index][0] for index in best],
        "y": [heights[index] for index in best],
        "line": {"width": 1.5, "dash": "dot"},
        "marker": {"size": 20, "symbol": "circle-open", "line": {"width": 1.5}},
        "hoverinfo": "skip",
        "meta": {"slot": None, "role": "front"},
    }
    return [trace], [spots[index][1].label for index in best]


def _point(group: SourceGroup, x: float, worth: Worth, cost: str) -> Trace:
    values = group.values(worth.name)
    mean = _mean(values)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(group),
        "x": [x],
        "y": [mean],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [max(values) - mean],
            "arrayminus": [mean - min(values)],
            "thickness": 1.5,
            "width": 0,
            "visible": len(values) > 1,
        },
        "marker": {"size": 11, "symbol": group.symbol},
        "customdata": [[worth.shown(mean), html.escape(cost)]],
        "hovertemplate": "%{customdata[0]}, %{customdata[1]}",
        "meta": {"slot": group.slot, "role": "point"},
    }


def _worth_axis(worth: Worth) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": worth.title}}
    return axis | ({"tickformat": worth.ticks, "range": [0, 1.05]} if worth.ticks else {"rangemode": "tozero"})


def _told(spots: Sequence[tuple[float, SourceGroup]], worth: Worth, shown: Callable[[float | None], str]) -> str:
    return "; ".join(
        f"{group.label} {worth.shown(_mean(group.values(worth.name)))} at {shown(x)}" for x, group in spots
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
