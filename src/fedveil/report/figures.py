"""What the page shows in figures: the Pareto front, curves, trade-offs, and every scheme in one picture."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.errors import ConfigError, missing_extra
from fedveil.report.sources import (
    CAME_OFF,
    Curve,
    SourceGroup,
    Spot,
    duration,
    percent,
    plain,
    size,
    spots_of,
    what_was_compared,
)


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
    wide: bool = False
    """Whether it takes the whole width of the page."""


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
        alternative=f"Scatter chart: {'; '.join([_told(proven, worth, lambda x: f'ε = {plain(x)}'), *told])}. On the "
        f"front: {', '.join(best) or 'none'}.",
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


# --- every scheme in one picture: what it reaches, costs, proves and gives away


COSTS = {
    "bytes": ("Bytes a client sends and receives in a round", size),
    "seconds": ("Seconds of processors for the run, all clients and the server", duration),
}
PROVEN = {
    "none": ("nothing proven", "#6b7280", 5),
    "clients": ("ε towards clients alone", "#56b4e9", 6),
    "sums": ("no ε: the server sees sums or ciphertexts", "#e69f00", 1),
    "conditional": ("ε given what is hidden", "#cc79a7", 3),
    "record": ("ε for one record", "#0072b2", 0),
    "client": ("ε for all data of a client", "#009e73", 2),
}
"""What is proven towards the server, in words, its colour, and its series of the page's."""
GIVEN = {
    "all": ("rebuilt, as if unprotected", "X", "x"),
    "part": ("traces of it", "^", "triangle-up"),
    "nothing": ("nothing", "o", "circle"),
    "unread": ("there is nothing to read", "s", "square"),
    "open": ("not decided", "D", "diamond"),
}
"""What the server, or who reads the wire, got of a client's data by quick attacks."""
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""
_RINGS = (1.2, 1.8, 2.6, 3.6, 4.8, 6.2, 7.8, 9.6, 11.6, 14.0)
_TURNS = tuple((math.cos(turn), math.sin(turn)) for turn in (k * math.pi / 12 for k in range(24)))


def placed(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    *,
    dot: float,
    lines: Sequence[Box] = (),
) -> list[Box]:
    """Where labels of these sizes go so that none covers another, or a point: near their own, within the area.

    `dot` is a point's radius, `lines` are kept free where that costs little. Each label takes the cheapest of many
    places around its point, in turn and then again, beside where the others are.
    """
    taken: dict[int, Box] = {}
    dots = [(x - dot, y - dot, x + dot, y + dot) for x, y in points]
    for _ in range(5):
        for index, (x, y) in enumerate(points):
            wide, high = sizes[index]
            others = [box for other, box in taken.items() if other != index]
            best: tuple[float, Box] | None = None
            for ring in _RINGS:
                for right, up in _TURNS:
                    cx, cy = x + right * (ring * dot + wide / 2), y + up * (ring * dot + high / 2)
                    box = (cx - wide / 2, cy - high / 2, cx + wide / 2, cy + high / 2)
                    out = (area[0] - box[0], area[1] - box[1], box[2] - area[2], box[3] - area[3])
                    covered = 2 * sum(_shared(box, each) for each in others) + sum(_shared(box, each) for each in dots)
                    crossed = sum(_crosses((x, y), (cx, cy), each) for each in others)
                    passed = sum(_crosses((x, y), (cx, cy), each) for place, each in enumerate(dots) if place != index)
                    covered += 0.5 * sum(_shared(box, each) for each in lines)
                    worth = dot * (ring + 5 * crossed + 2 * passed) + covered + 50 * sum(max(0.0, side) for side in out)
                    if best is None or worth < best[0]:
                        best = worth, box
            assert best is not None
            taken[index] = best[1]
    return [taken[index] for index in range(len(points))]


def _shared(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _crosses(start: tuple[float, float], end: tuple[float, float], box: Box) -> bool:
    """Whether the line from a point to its label runs through another's."""
    along = (
        (start[0] + t * (end[0] - start[0]), start[1] + t * (end[1] - start[1])) for t in (0.15, 0.3, 0.45, 0.6, 0.75)
    )
    return any(box[0] <= x <= box[2] and box[1] <= y <= box[3] for x, y in along)


_TICKS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)


def _stretched(share: Any) -> Any:
    """Room by orders of magnitude of the error: most schemes are near one another at the top."""
    return -np.log10(np.maximum(1.005 - np.asarray(share), 1e-6))


def _size_tick(value: float, _: object) -> str:
    return size(value).replace(".0 ", " ")


def _back(height: Any) -> Any:
    return 1.005 - 10.0 ** -np.asarray(height)


def draw_overview(results: Mapping[str, Any], file: Path) -> Path:
    """Draw every scheme of a comparison, accuracy over bytes and over seconds, as a PNG and, beside it, an SVG.

    Raises:
        ConfigError: No scheme has all that is drawn of it.
        MissingExtraError: matplotlib is not installed.
    """
    spots = spots_of(results)
    if not spots:
        raise ConfigError("no scheme was trained to tell classes, and attacked.")
    try:
        from matplotlib.figure import Figure as Canvas
        from matplotlib.lines import Line2D
        from matplotlib.patheffects import withStroke
        from matplotlib.ticker import LogLocator
    except ImportError:
        raise missing_extra("matplotlib", "plots", "The picture of a comparison") from None
    canvas = Canvas(figsize=(9.2, 12.0), dpi=150)
    panels = canvas.subplots(2, 1)
    canvas.subplots_adjust(left=0.08, right=0.985, top=0.97, bottom=0.175, hspace=0.15)
    ticks = [tick for tick in _TICKS if tick <= max(spot.high for spot in spots) + 0.05]
    for panel, (cost, (title, _)) in zip(panels, COSTS.items(), strict=True):
        sound = [(spot.costs[cost], spot.height) for spot in spots if not spot.label.endswith(CAME_OFF)]
        if sound:
            panel.plot(*zip(*(sound[k] for k in front(sound)), strict=True), ":", color="#555", lw=1.4)
        for spot in spots:
            colour, x = PROVEN[spot.proven][1], spot.costs[cost]
            panel.plot([x, x], [spot.low, spot.high], color=colour, lw=1, zorder=2)
            inside = "white" if spot.hidden else colour
            panel.plot(x, spot.height, GIVEN[spot.given][1], ms=8, mec=colour, mfc=inside, mew=1.6, zorder=3)
        panel.set_xscale("log")
        panel.set_yscale("function", functions=(_stretched, _back))
        panel.set(xlabel=title, ylabel="Test accuracy", ylim=(0, ticks[-1] + 0.02))
        panel.set_yticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks])
        panel.margins(x=0.1)
        values = [spot.costs[cost] for spot in spots]
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 300 * min(values) else (1, 3)))
        panel.xaxis.set_major_formatter(_size_tick if cost == "bytes" else lambda value, _: f"{value:,g} s")
        panel.xaxis.set_minor_formatter(lambda value, _: "")
        panel.grid(color="#e4e6ea", lw=0.6)
        panel.set_axisbelow(True)
    panels[0].set_title(what_was_compared(results), fontsize=10, loc="left")
    canvas.canvas.draw()
    for panel, cost in zip(panels, COSTS, strict=True):
        halo = [withStroke(linewidth=2.5, foreground="white")]
        style: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "va": "center", "zorder": 4, "path_effects": halo}
        texts = [panel.text(0.5, 0.5, spot.label, **style) for spot in spots]
        extents = [text.get_window_extent() for text in texts]
        points = [tuple(panel.transData.transform((spot.costs[cost], spot.height))) for spot in spots]
        around = panel.get_window_extent()
        area = (around.x0 + 3, around.y0 + 3, around.x1 - 3, around.y1 - 3)
        bars = [panel.transData.transform([(spot.costs[cost], end) for end in (spot.low, spot.high)]) for spot in spots]
        lines = [(x - 3, low, x + 3, high) for (x, low), (_, high) in bars]
        boxes = placed(points, [(one.width + 6, one.height + 3) for one in extents], area, dot=12.0, lines=lines)
        back = panel.transData.inverted()
        for text, box, (x, y), spot in zip(texts, boxes, points, spots, strict=True):
            text.set_gid(spot.label)
            text.set_position(back.transform(((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)))
            near = (min(max(x, box[0] + 3), box[2] - 3), min(max(y, box[1] + 1), box[3] - 1))
            if math.dist(near, (x, y)) > 20:
                ends = [back.transform(near), back.transform((x, y))]
                panel.plot(*zip(*ends, strict=True), color=PROVEN[spot.proven][1], lw=0.7, zorder=1)
    used = {spot.proven for spot in spots}, {spot.given for spot in spots}
    colours = [
        Line2D([], [], ls="", marker="o", ms=8, color=colour, label=words)
        for key, (words, colour, _) in PROVEN.items()
        if key in used[0]
    ]
    marks = [
        Line2D([], [], ls="", marker=mark, ms=8, color="#444", label=words)
        for key, (words, mark, _) in GIVEN.items()
        if key in used[1]
    ]
    mark: dict[str, Any] = {"ls": "", "marker": "o", "ms": 8, "mec": "#444", "mew": 1.6}
    others = [
        Line2D([], [], **mark, mfc="white", label="hollow: clients do not know\nthe model's numbers"),
        Line2D(
            [], [], ls="", marker="$=$", ms=8, color="#444", label="trained under masks, its\ncipher timed on a slice"
        ),
        Line2D([], [], ls=":", lw=1.4, color="#555", label="nothing is cheaper and better"),
    ]
    if any(spot.label.endswith(CAME_OFF) for spot in spots):
        others.append(Line2D([], [], ls="", marker="$†$", ms=8, color="#444", label="its training came off"))
    epsilon = results["common"].get("epsilon")
    of = "" if epsilon is None else f", ε = {epsilon:g} where there is one"
    style = {"fontsize": 8.5, "title_fontsize": 8.5, "frameon": False, "alignment": "left"}
    for handles, title, left in (
        (colours, f"Proven towards the server{of}", 0.02),
        (marks, "What the server got of a client's data", 0.42),
        (others, "", 0.73),
    ):
        canvas.legend(handles=handles, title=title, loc="upper left", bbox_to_anchor=(left, 0.135), **style)
    canvas.savefig(file)
    canvas.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    return file


def overview(results: Mapping[str, Any], slots: Mapping[str, int]) -> list[Figure]:
    """The same for the page, a figure for each cost; `slots` are those of its groups by label."""
    spots = spots_of(results)
    return [_overview(spots, cost, slots) for cost in COSTS] if len(spots) > 1 else []


_WIDE, _HIGH = 980.0, 520.0


def _overview(spots: Sequence[Spot], cost: str, slots: Mapping[str, int]) -> Figure:
    title, shown = COSTS[cost]
    values = [math.log10(max(spot.costs[cost], 1e-9)) for spot in spots]
    low, high = min(values) - 0.3, max(values) + 0.3
    top = float(_stretched(max(spot.high for spot in spots) + 0.02))
    heights = [float(_stretched(spot.height)) for spot in spots]
    points = [(_WIDE * (x - low) / (high - low), _HIGH * y / top) for x, y in zip(values, heights, strict=True)]
    boxes = placed(points, [(6.6 * len(spot.label) + 6, 15.0) for spot in spots], (0, 0, _WIDE, _HIGH), dot=8.0)
    traces, notes = [], []
    for spot, value, height, (x, y), box in zip(spots, values, heights, points, boxes, strict=True):
        slot = slots.get(spot.label.removeprefix("= ").removesuffix(CAME_OFF))
        told = (
            f"{html.escape(spot.label)}: {percent(spot.height)}, {shown(spot.costs[cost])}<br>"
            f"{PROVEN[spot.proven][0]}<br>data: {GIVEN[spot.given][0]}"
            f"<br>the model's numbers are {'hidden from' if spot.hidden else 'open to'} clients"
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": html.escape(spot.label),
                "x": [spot.costs[cost]],
                "y": [height],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [float(_stretched(spot.high)) - height],
                    "arrayminus": [height - float(_stretched(spot.low))],
                    "thickness": 1.5,
                    "width": 0,
                },
                "marker": {"size": 11, "symbol": GIVEN[spot.given][2] + "-open" * spot.hidden},
                "hovertemplate": f"{told}<extra></extra>",
                "meta": {"slot": slot, "role": "point", "paint": PROVEN[spot.proven][2]},
            }
        )
        notes.append(
            {
                "x": value,
                "y": height,
                "text": html.escape(spot.label),
                "showarrow": True,
                "arrowhead": 0,
                "arrowwidth": 0.6,
                "ax": (box[0] + box[2]) / 2 - x,
                "ay": y - (box[1] + box[3]) / 2,
                "font": {"size": 11},
                "borderpad": 0,
                "standoff": 6,
                "name": "" if slot is None else str(slot),
            }
        )
    used = {spot.proven for spot in spots}
    colours = "; ".join(f"{words} ({_SERIES[series]})" for key, (words, _, series) in PROVEN.items() if key in used)
    marks = "; ".join(f"{symbol} {words}" for _, (words, _, symbol) in GIVEN.items())
    axis = {"title": {"text": title}, "type": "log", "range": [low, high], "dtick": "D2", "tickformat": "~s"}
    told = "; ".join(f"{one.label} {percent(one.height)} at {shown(one.costs[cost])}" for one in spots)
    return Figure(
        name=f"overview-{cost}",
        title=f"Every scheme: test accuracy against {title[0].lower()}{title[1:]}",
        reading="Room goes by the size of the error, since most are near one another at the top. "
        f"Colour is what is proven towards the server: {colours}. Shape is what the server got of a client's "
        f"data: {marks}. Hollow: a client does not know the model's numbers. With = in front: trained under masks that "
        "open the same sums, its cipher timed on a slice and scaled.",
        alternative=f"Scatter chart: {told}.",
        drawing={
            "data": traces,
            "layout": {
                "xaxis": axis,
                "yaxis": {
                    "title": {"text": ACCURACY.title},
                    "range": [0, top],
                    "tickvals": [float(_stretched(tick)) for tick in _TICKS],
                    "ticktext": [f"{100 * tick:.0f} %" for tick in _TICKS],
                },
                "annotations": notes,
                "hovermode": "closest",
                "height": 600,
            },
        },
        wide=True,
    )


_SERIES = ("blue", "orange", "green", "purple", "yellow", "grey", "cyan", "pink")
