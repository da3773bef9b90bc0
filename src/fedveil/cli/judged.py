"""A judgement on the terminal: every figure with its interval and what a constant answer gets, then a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.cli.tables import plainly, table
from fedveil.errors import unknown_name
from fedveil.runs.intervals import Measured
from fedveil.runs.judgement import TITLES, Judgement, Subset, bracket, judgement_from, shown, told

_MOST_ROWS = 12
_BY_CLASS = {"classification": ("recall", "precision", "f1", "auroc"), "multilabel": ("accuracy", "auroc", "f1")}
_BY_GROUP = {"regression": ("rmse", "r2")}
_WITH_INTERVAL = 2  # as many as a terminal of 80 columns has room for


def show_judgement(judged: Judgement, *, what: str = "test samples") -> None:
    """Tables by figure, by class and by group, and how the model stands to the constant answer."""
    columns = ("", "figure", "95 % interval", judged.constant_answer)
    rows = [
        (judged.title(name), shown(name, figure.value), bracket(name, figure) or "–", shown(name, figure.baseline))
        for name, figure in judged.figures.items()
    ]
    table(f"On {judged.samples} {what}", columns, rows, right=(1, 2, 3), whole=(1, 2))
    names = _BY_CLASS.get(judged.task, ())[: 3 if judged.positive else None]  # the AUROC of two classes is the same
    _subsets("By label" if judged.task == "multilabel" else "By class", judged.classes, names)
    _subsets(
        f"By {judged.parted_by or 'group'}",
        judged.parts,
        _BY_GROUP.get(judged.task, ("accuracy", "auroc")),
    )
    for name, figure in judged.figures.items():
        if figure.value is None:
            plainly(f"no {TITLES[name]}: {figure.reason}")
    for note in judged.notes:
        plainly(note)
    plainly(judged.verdict)


def _subsets(title: str, subsets: tuple[Subset, ...], names: tuple[str, ...]) -> None:
    subsets = tuple(subset for subset in subsets if all(name in subset.figures for name in names))
    if not 0 < len(subsets) <= _MOST_ROWS:
        return
    rows = [
        (
            subset.name,
            str(subset.samples),
            *(told(name, subset.figures[name]) for name in names[:_WITH_INTERVAL]),
            *(shown(name, subset.figures[name].value) for name in names[_WITH_INTERVAL:]),
        )
        for subset in subsets
    ]
    right = range(1, 2 + len(names))
    table(title, ("", "samples", *(TITLES[name] for name in names)), rows, right=right, whole=right)


def judgements(results: dict[str, Any]) -> list[tuple[dict[str, Any], Judgement]]:
    """Every run that was judged."""
    return [
        (run, judgement_from(run["summary"]["judged"], where=run["folder"]))
        for run in results["runs"]
        if "judged" in run.get("summary", {})
    ]


def usual_metrics(results: dict[str, Any], judged: Sequence[tuple[dict[str, Any], Judgement]]) -> tuple[str, ...]:
    """Accuracy, and AUROC beside it where one of two classes is rare or samples have several labels; or the MSE."""
    if any("test_mse" in figures for figures in results["schemes"].values()):
        return ("mse", "r2") if judged else ("mse",)
    return ("accuracy", "auroc") if any(each.imbalanced for _, each in judged) else ("accuracy",)


def not_beating(judged: Sequence[tuple[dict[str, Any], Judgement]]) -> list[str]:
    """What to say of runs that do not beat a constant answer."""
    behind = [(run, each) for run, each in judged if not each.beats_baseline]
    if not behind:
        return []
    told = [f"{run['scheme']}, seed {run['seed']}: {each.verdict}" for run, each in behind]
    return [f"{len(behind)} of {len(judged)} runs do not beat a constant answer:", *told]


def measured(figures: dict[str, Any], metric: str) -> str:
    """The mean over seeds and its deviation, or one run's figure and its interval; runs of before have neither."""
    figure = figures.get("judged", {}).get(metric) or figures.get(f"test_{metric}")
    if figure is None:
        return "–"
    if figure["deviation"] is not None:
        return f"{shown(metric, figure['mean'])} ± {shown(metric, figure['deviation'])}"
    return told(metric, Measured(figure["mean"], figure.get("low"), figure.get("high")))


def named_metrics(given: Sequence[str]) -> list[str]:
    """The figures that --metric names."""
    names = [name.strip().replace("-", "_") for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TITLES:
            raise unknown_name("metric", name, TITLES)
    return list(dict.fromkeys(names))
