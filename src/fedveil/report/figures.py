"""What the page shows in figures: the Pareto front, curves and tables, and how good models are."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.report.sources import DASH, Curve, Grid, Run, SourceGroup, duration, percent, plain, sentence, size, spread
from fedveil.runs.judgement import TITLES, Judgement, Subset, shown, told


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


# --- how good models are, as the page shows it: figures with intervals, by class and by group, and what is mistaken

_MOST_CONFUSED = 25  # classes of a table that can still be read
_KEEP = "\u00a0"
_JOIN = "\u2060"  # no line ends beside it


@dataclass(frozen=True)
class JudgedView:
    """One group's judgement: that of its only run, or of the run that is worst off."""

    label: str
    note: str
    judged: Judgement
    figures: Grid
    classes: Grid
    parts: Grid
    confusion: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    """By true class: how many samples got each answer, and which share of the class that is."""


def judged_views(groups: Sequence[SourceGroup]) -> tuple[JudgedView, ...]:
    """Every group of which a run was judged."""
    return tuple(_view(group, run, run.judged) for group in groups if (run := _worst(group)) and run.judged)


def _worst(group: SourceGroup) -> Run | None:
    """The run whose deciding figure is lowest, or has none."""
    judged = [(run, run.judged.figures[run.judged.primary].value) for run in group.runs if run.judged is not None]
    return min(judged, key=lambda pair: -1e300 if pair[1] is None else pair[1])[0] if judged else None


def _view(group: SourceGroup, run: Run, judged: Judgement) -> JudgedView:
    several = f"of the seed that is worst off ({run.seed})" if len(group.runs) > 1 else ""
    rows = tuple(
        (
            sentence(judged.title(name)),
            _whole(told(name, figure)) if figure.value is not None else f"{DASH} ({figure.reason})",
            _whole(shown(name, figure.baseline)),
            figure.interval or DASH,
        )
        for name, figure in judged.figures.items()
    )
    names = [part.name for part in judged.classes]
    shares = [(row, max(sum(row), 1)) for row in judged.confusion]
    return JudgedView(
        label=group.label,
        note=several,
        judged=judged,
        figures=Grid(
            ("Figure", "This model [95\u00a0% interval]", sentence(judged.constant_answer), "Interval by"), rows
        ),
        classes=_subsets("Label" if judged.task == "multilabel" else "Class", judged.classes),
        parts=_subsets(sentence(judged.parted_by), judged.parts),
        confusion=tuple(
            (name, tuple((count, count / size) for count in row))
            for name, (row, size) in zip(names, shares, strict=True)
        )
        if 0 < len(shares) <= _MOST_CONFUSED
        else (),
    )


def _subsets(what: str, subsets: Sequence[Subset]) -> Grid:
    names = list(dict.fromkeys(name for subset in subsets for name in subset.figures))
    rows = tuple(
        (
            subset.name,
            str(subset.samples),
            *(_whole(told(name, subset.figures[name])) if name in subset.figures else DASH for name in names),
        )
        for subset in subsets
    )
    return Grid((what, "Samples", *(_title(name) for name in names)), rows)


def judged_table(groups: Sequence[SourceGroup]) -> Grid:
    """Schemes side by side: means over seeds with the lowest and highest, or an interval; the constant answer below."""
    names = list(dict.fromkeys(name for judged in _judged(groups) for name in judged.figures))
    rows = [(group.label, *(_measured(group, name) for name in names)) for group in groups]
    beside = [constant_answer(groups, name) for name in names]
    rows += [(beside[0][0], *(figure for _, figure in beside))] if beside else []
    return Grid(("Scheme", *(_title(name) for name in names)), tuple(rows))


def _judged(groups: Sequence[SourceGroup]) -> list[Judgement]:
    return [judged for group in groups for run in group.runs if (judged := run.judged) is not None]


def constant_answer(groups: Sequence[SourceGroup], name: str) -> tuple[str, str]:
    """The best constant answer and what it gets; splits differ between seeds, and so does that."""
    judged = _judged(groups)
    answers = {sentence(each.constant_answer) for each in judged}
    figures = [each.figures[name].baseline for each in judged if name in each.figures]
    return (
        answers.pop() if len(answers) == 1 else "A constant answer",
        spread([value for value in figures if value is not None], lambda value: shown(name, value)),
    )


def _measured(group: SourceGroup, name: str) -> str:
    figures = [run.judged.figures[name] for run in group.runs if run.judged is not None and name in run.judged.figures]
    if len(figures) == 1:
        return _whole(told(name, figures[0]))
    values = [figure.value for figure in figures if figure.value is not None]
    return spread(values, lambda value: shown(name, value))


def reliability(groups: Sequence[SourceGroup]) -> Figure | None:
    """How often answers are right, by how sure the model is of them."""
    lines, told_of = [], []
    for group in groups:
        run = _worst(group)
        judged = None if run is None else run.judged
        if judged is None or not judged.reliability:
            continue
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(group),
                "x": [each.confidence for each in judged.reliability],
                "y": [each.accuracy for each in judged.reliability],
                "customdata": [
                    f"{each.confidence:.0%} sure, {each.accuracy:.0%} right, {each.samples} samples"
                    for each in judged.reliability
                ],
                "hovertemplate": "%{customdata}",
                "line": {"width": 2, "dash": group.dash},
                "marker": {"size": 6, "symbol": group.symbol},
                "meta": {"slot": group.slot, "role": "line"},
            }
        )
        told_of.append(f"{group.label} is off by {shown('ece', judged.figures['ece'].value)} on average")
    if not lines:
        return None
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "name": "as sure as right",
        "x": [0, 1],
        "y": [0, 1],
        "line": {"width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {"slot": None, "role": "front"},
    }
    axis = {"tickformat": ".0%", "range": [0, 1.02]}
    return Figure(
        name="reliability",
        title="Sure and right",
        reading="Answers by how sure the model is of them. On the dotted line it is right as often as it says; below "
        "it, it is too sure.",
        alternative=f"Line chart of how often answers are right by confidence: {'; '.join(told_of)}.",
        drawing={
            "data": [diagonal, *lines],
            "layout": {
                "xaxis": {"title": {"text": "How sure"}, **axis},
                "yaxis": {"title": {"text": "How often right"}, **axis},
                "hovermode": "closest",
            },
        },
    )


def _title(name: str) -> str:
    return sentence(TITLES[name])


def _whole(text: str) -> str:
    """A figure keeps its unit in one line; its interval, whole too, may go to the next."""
    return text.replace(" %", f"{_KEEP}%").replace("–", f"{_JOIN}–{_JOIN}").replace(" to ", f"{_KEEP}to{_KEEP}")
