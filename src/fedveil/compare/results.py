"""Where the cells of a comparison stand, while they run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.compare.plan import Cell, Plan
from fedveil.errors import CheckpointError
from fedveil.plain import read_named
from fedveil.runs.folder import ledger_from, write_atomically
from fedveil.runs.judgement import judgement_from
from fedveil.version import __version__

State = Literal["waiting", "starting", "running", "finished", "kept", "failed"]
OVER = ("finished", "kept", "failed")


@dataclass
class CellProgress:
    """One cell, as it stands now."""

    cell: Cell
    state: State = "waiting"
    round: int = 0
    loss: float | None = None
    score: float | None = None
    """Test accuracy, or for a regression the test MSE."""
    regression: bool = False
    seconds: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    summary: dict[str, Any] | None = None
    reason: str = ""
    exit_code: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in OVER

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a round's figures."""
        self.state = "running"
        self.round = row["round"]
        self.loss = row["loss"] if row["loss"] is not None else self.loss
        self._judge(row)
        self.seconds += row["seconds"]
        self.bytes_up, self.bytes_down = row["bytes_up"], row["bytes_down"]

    def finish(self, summary: dict[str, Any], *, kept: bool = False) -> None:
        """Take in the figures of the finished run; `kept`: it was there already."""
        self.state = "kept" if kept else "finished"
        self.summary = summary
        self.round = summary["rounds"]
        self.loss = summary["train_loss"]
        self._judge(summary)
        self.seconds = summary["seconds"]
        self.bytes_up, self.bytes_down = summary["bytes_up"], summary["bytes_down"]

    def _judge(self, figures: Mapping[str, Any]) -> None:
        self.regression = self.regression or "test_mse" in figures
        self.score = figures.get("test_accuracy", figures.get("test_mse", self.score))

    def fail(self, reason: str, *, code: int) -> None:
        """Take in why it failed."""
        self.state, self.reason, self.exit_code = "failed", reason, code


@dataclass(frozen=True)
class CellEvent:
    """Something happened to a cell; `text` is what its run said, where it said something."""

    standing: CellProgress
    kind: Literal["start", "round", "over", "say"]
    text: str = ""


FORMAT = "fedveil-compare-1"
FIGURES = (
    *("test_accuracy", "test_mse", "test_loss", "train_loss", "client_view_accuracy", "client_view_mse"),
    *("bytes_down", "bytes_up", "seconds", "rounds"),
)
_LINE = ("verdict", "epsilon", "delta", "outright", "unit", "add_remove_epsilon")


def results_of(plan: Plan, standings: Sequence[CellProgress]) -> dict[str, Any]:
    """Everything a comparison found, as plain data."""
    return {
        "format": FORMAT,
        "fedveil": __version__,
        "common": plan.common,
        "only": plan.only,
        "left_out": {scheme: list(names) for scheme, names in plan.left_out.items()},
        "seeds": list(plan.seeds),
        "runs": [_run(progress) for progress in standings],
        "schemes": {
            name: _scheme([progress for progress in standings if progress.cell.scheme == name]) for name in plan.schemes
        },
    }


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write compare.json."""
    write_atomically(file, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def read_results(file: Path) -> dict[str, Any]:
    """A compare.json as it was written; anything else is refused."""
    return _checked(read_named(file), file)


def _checked(data: dict[str, Any], file: Path) -> dict[str, Any]:
    kinds: dict[str, type | tuple[type, ...]] = {"common": dict, "only": dict, "seeds": list, "schemes": dict}
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a comparison's compare.json.")
    if not all(isinstance(data.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError(f"{file} is damaged: it names no settings, schemes or seeds.")
    own = data["only"].values()
    if not all(type(seed) is int for seed in data["seeds"]) or not all(isinstance(settings, dict) for settings in own):
        raise CheckpointError(f"{file} is damaged: a seed is no number, or a scheme's settings have no names.")
    return data


def verdicts_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ledger's verdict and figures against each adversary."""
    lines = ledger_from(summary["ledger"], where="a summary's ledger").lines
    return {line.adversary: {name: getattr(line, name) for name in _LINE} for line in lines}


def _run(progress: CellProgress) -> dict[str, Any]:
    run: dict[str, Any] = {
        "scheme": progress.cell.scheme,
        "seed": progress.cell.seed,
        "folder": progress.cell.folder,
        "ok": progress.summary is not None,
        "reason": progress.reason if progress.over else "has not ended",
    }
    if progress.exit_code:
        run["exit_code"] = progress.exit_code
    if progress.summary is not None:
        run |= {"privacy": verdicts_of(progress.summary), "summary": progress.summary}
    return run


def _scheme(standings: Sequence[CellProgress]) -> dict[str, Any]:
    summaries = [progress.summary for progress in standings if progress.summary is not None]
    result: dict[str, Any] = {"n": len(summaries), "failed": sum(progress.state == "failed" for progress in standings)}
    for name in FIGURES:
        values = [float(summary[name]) for summary in summaries if summary.get(name) is not None]
        if values:
            result[name] = {"mean": statistics.fmean(values), "deviation": _deviation(values)}
    if summaries:
        result["loss"] = summaries[0]["loss"]
        if "family" in summaries[0]:
            result["family"] = summaries[0]["family"]
        result |= _judged(summaries)
        result["privacy"] = _weakest([verdicts_of(summary) for summary in summaries])
    return result


def _judged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure's mean over runs, and its interval where there is one run; and how many beat a constant answer."""
    judged = [judgement_from(each["judged"], where="a summary") for each in summaries if "judged" in each]
    if not judged:
        return {}
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in judged for name in each.figures):
        measured = [each.figures[name] for each in judged if name in each.figures]
        values = [each.value for each in measured if each.value is not None]
        if not values:
            continue
        constant = [each.baseline for each in measured if each.baseline is not None]
        figures[name] = {
            "mean": statistics.fmean(values),
            "deviation": _deviation(values),
            "baseline": statistics.fmean(constant) if constant else None,
        }
        if len(judged) == 1:
            figures[name] |= {"low": measured[0].low, "high": measured[0].high}
    return {"judged": figures, "beat_baseline": sum(each.beats_baseline is True for each in judged)}


def _deviation(values: Sequence[float]) -> float | None:
    """The sample's standard deviation; None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def _weakest(runs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Against each adversary the verdict of the run that is worst off: none at all, or else the largest ε."""

    def badness(line: dict[str, Any]) -> tuple[bool, float]:
        return line["verdict"] == "none", line["epsilon"] or 0.0

    return {name: max((run[name] for run in runs if name in run), key=badness) for name in runs[0]}
