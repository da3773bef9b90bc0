"""A ledger as it was written, read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.errors import CheckpointError
from fedveil.ledger.statement import Ledger
from fedveil.plain import made, read_named
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import job_from_config
from fedveil.runs.privacy import Books


def read_ledger(run: str | Path, *, model: str | None = None, say: Callable[[str], None] = lambda text: None) -> Ledger:
    """The ledger of a run folder, or of a ledger.json; `model` is the caller's own code, for a run that goes on."""
    path = Path(run)
    file = RunFolder(path).ledger_file if path.is_dir() else path
    if not file.exists():
        if (path / "config.toml").exists():
            return _so_far(RunFolder(path), {} if model is None else {"model": model}, say)
        raise CheckpointError(f"There is no run at {path}: give a run folder or its ledger.json.")
    return ledger_from(read_named(file), where=str(file))


def _so_far(folder: RunFolder, changes: Mapping[str, Any], say: Callable[[str], None]) -> Ledger:
    """The ledger of a run that has not ended, from its journal."""
    config = folder.config(changes, say=say)
    if config.dataset == "python":
        raise CheckpointError(
            f"The run in {folder.path} was started from Python and has not ended: continue it there with resume=True."
        )
    job = job_from_config(config)
    rounds = len(folder.metrics())
    found = Books(job, folder.privacy_journal).ledger(rounds=rounds)
    return replace(found, notes=("the run has not ended: this is what it has spent so far", *found.notes))


def ledger_from(data: object, *, where: str = "the ledger") -> Ledger:
    """A ledger from plain data, as `Ledger.as_data` makes it."""
    paper = data.get("paper") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(paper, dict):  # what follows from other figures is not read back
        data = {**data, "paper": {name: value for name, value in paper.items() if name != "saving"}}
    return made(Ledger, data, where=f"{where} is not a ledger, or")
