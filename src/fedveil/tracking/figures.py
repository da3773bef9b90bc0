"""What a tracker is told of a run: numbers by name, settings as text, the ledger in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fedveil.config import RunConfig
from fedveil.runs.ledger_file import ledger_from


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one round, under the names of metrics.jsonl; a round that failed has failed = 1."""
    numbers = {name: float(value) for name, value in row.items() if name != "round" and _is_number(value)}
    if "failed" in row:
        numbers["failed"] = 1.0
    if "refused" in row:
        numbers["refused"] = float(len(row["refused"]))
    return numbers


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings of a run that are set; a model's own options as model.NAME."""
    plain = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    options = plain.pop("model_options")
    return {name: str(value) for name, value in {**plain, **{f"model.{k}": v for k, v in options.items()}}.items()}


def epsilons_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """ε against each adversary for whom the ledger has one, as epsilon_ADVERSARY."""
    lines = summary["ledger"]["lines"]
    return {f"epsilon_{slug(line['adversary'])}": line["epsilon"] for line in lines if line["epsilon"] is not None}


def closing_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The figures that only a finished run has: ε by adversary, the final scores, and what a client sees."""
    final = {
        f"final_{name}": float(value)
        for name, value in summary.items()
        if name.startswith(("test_", "client_view_")) or name in ("coverage", "train_loss")
        if _is_number(value)
    }
    return {**epsilons_of(summary), **final}


def ledger_in_words(summary: Mapping[str, Any]) -> str:
    """The ledger as Markdown: against whom what is proven, what that assumes, and what is not protected."""
    ledger = ledger_from(summary["ledger"])
    said = [
        f"# Ledger of {ledger.scheme} after {ledger.rounds} rounds",
        "",
        "| against | result | protected | why |",
        "| --- | --- | --- | --- |",
        *(
            f"| {one.adversary} | {one.result} | {one.unit or '–'} | {one.why} |".replace("\n", " ")
            for one in ledger.lines
        ),
    ]
    assumed = list(dict.fromkeys(text for line in ledger.lines for text in line.assumptions))
    for heading, texts in (("Assumed", assumed), ("Not protected", ledger.unprotected), ("Note", ledger.notes)):
        if texts:
            said += ["", f"## {heading}", "", *(f"- {text}" for text in texts)]
    if ledger.simulation:
        said += ["", "SIMULATION: secrets and noise follow from the seed."]
    return "\n".join(said) + "\n"


def slug(name: str) -> str:
    """A name of lower-case words joined by underscores, as every tracker takes it."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
