"""Accuracy against what it costs: ε, bytes, time, with the front that nothing beats."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from fedveil.report.figures import SYMBOLS, Figure, Trace, Worth, label, worth_of
from fedveil.report.front import front
from fedveil.report.groups import Group
from fedveil.report.values import duration, plain, size


def trade_offs(groups: Sequence[Group]) -> list[Figure]:
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
    return [one for one in made if one is not None]


_PROVEN = "differential privacy"
_FRONT = "Ringed points joined by a line are the front: nothing here beats them in both respects."


def _against(
    groups: Sequence[Group],
    worth: Worth,
    *,
    name: str,
    title: str,
    cost: Callable[[Group], list[float]],
    shown: Callable[[float | None], str],
    ticks: dict[str, Any],
    what: str,
) -> Figure | None:
    known = [(group, found) for group in groups if (found := cost(group))]
    if len(known) < 2:
        return None
    spots = [(_mean(found), group) for group, found in known]
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


def _against_epsilon(groups: Sequence[Group], worth: Worth, adversary: str, who: str) -> Figure | None:
    lines = [(group, group.line(adversary)) for group in groups]
    proven = [(line.epsilon, group) for group, line in lines if line is not None and line.epsilon is not None]
    if not proven:
        return None
    verdicts = {group.slot: line.verdict for group, line in lines if line is not None}
    without = [group for group, line in lines if line is None or line.epsilon is None]
    units: dict[int, str] = {}
    outright = [(x, group) for x, group in proven if verdicts[group.slot] == _PROVEN]
    traces, best = _with_front(outright, worth) if outright else ([], [])
    for x, group in proven:
        verdict = verdicts[group.slot]
        units[group.slot] = "all data of a client" if _by_client(group, adversary) else "one record"
        note = "" if verdict == _PROVEN else f", {verdict}"
        point = _point(group, x, worth, f"ε = {plain(x)} for {units[group.slot]}{note}")
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


def _by_client(group: Group, adversary: str) -> bool:
    """Whether a group's ε is for all data of a client, not for one record."""
    line = group.line(adversary)
    return line is not None and line.unit.startswith("all data")


def _decades(values: Sequence[float]) -> list[float]:
    """A logarithmic range that has at least a decade around what is shown."""
    low, high = math.log10(max(min(values), 1e-9)), math.log10(max(*values, 1e-9))
    room = max(0.15, (1.0 - (high - low)) / 2)
    return [low - room, high + room]


def _with_front(spots: Sequence[tuple[float, Group]], worth: Worth) -> tuple[list[Trace], list[str]]:
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


def _point(group: Group, x: float, worth: Worth, cost: str) -> Trace:
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
        "marker": {"size": 11, "symbol": SYMBOLS[group.slot % len(SYMBOLS)]},
        "customdata": [[worth.shown(mean), html.escape(cost)]],
        "hovertemplate": "%{customdata[0]}, %{customdata[1]}",
        "meta": {"slot": group.slot, "role": "point"},
    }


def _worth_axis(worth: Worth) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": worth.title}}
    return axis | ({"tickformat": worth.ticks, "range": [0, 1.05]} if worth.ticks else {"rangemode": "tozero"})


def _told(spots: Sequence[tuple[float, Group]], worth: Worth, shown: Callable[[float | None], str]) -> str:
    return "; ".join(
        f"{group.label} {worth.shown(_mean(group.values(worth.name)))} at {shown(x)}" for x, group in spots
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
