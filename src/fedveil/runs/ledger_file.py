"""A ledger as it was written, read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.errors import CheckpointError
from fedveil.ledger.releases import Release
from fedveil.ledger.statement import Ledger, Line, PaperFigure
from fedveil.runs.folder import RunFolder


def read_ledger(run: str | Path) -> Ledger:
    """The ledger of a run folder, or of a ledger.json."""
    path = Path(run)
    file = RunFolder(path).ledger_file if path.is_dir() else path
    if not file.exists():
        if (path / "config.toml").exists():
            raise CheckpointError(
                f"The run in {path} has no ledger yet: it is written when the run ends. Continue it with "
                f"fedveil run --resume --out {path}."
            )
        raise CheckpointError(f"There is no run at {path}: give a run folder or its ledger.json.")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as reason:
        raise CheckpointError(f"{file} is damaged or not a ledger: {reason}.") from reason
    return ledger_from(data, where=str(file))


def ledger_from(data: Mapping[str, Any], *, where: str = "the ledger") -> Ledger:
    """A ledger from plain data, as `Ledger.as_data` makes it."""
    try:
        paper = data["paper"]
        return Ledger(
            scheme=data["scheme"],
            rounds=data["rounds"],
            lines=tuple(Line(**{**one, "assumptions": tuple(one["assumptions"])}) for one in data["lines"]),
            unprotected=tuple(data["unprotected"]),
            paper=None if paper is None else PaperFigure(**{k: v for k, v in paper.items() if k != "saving"}),
            simulation=data["simulation"],
            releases=tuple(Release(**{**one, "to": tuple(one["to"])}) for one in data["releases"]),
            notes=tuple(data["notes"]),
        )
    except (AttributeError, KeyError, TypeError) as reason:
        raise CheckpointError(f"{where} is damaged or not a ledger: {type(reason).__name__} {reason}.") from reason
