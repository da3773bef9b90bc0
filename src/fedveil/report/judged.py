"""How good models are, as the page shows it: figures with intervals, by class and by group, and what is mistaken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.report.figures import Figure, label
from fedveil.report.sources import DASH, Grid, Run, SourceGroup, sentence, spread
from fedveil.runs.judgement import TITLES, Judgement, Subset, shown, told

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
