"""The figures of a finished run."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from fedveil.runs.job import Job
from fedveil.runs.training import Outcome
from fedveil.version import __version__


def summarise(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The figures of a finished run."""
    config = job.config
    rows = outcome.rows
    summary: dict[str, Any] = {
        "scheme": config.scheme,
        "dataset": config.dataset,
        "model": config.model,
        "clients": len(job.pool),
        "rounds": outcome.state.round,
        "seed": config.seed,
        "simulation": job.secrets.simulation,
        "loss": job.loss.name,
        "train_loss": rows[-1]["loss"] if rows else None,
        "parameters": job.blueprint.size,
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        "bytes_down": outcome.bytes_down,
        "bytes_up": outcome.bytes_up,
        "device": config.device,
        "dtype": config.dtype,
        "fedveil": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if outcome.scores is not None:
        summary |= outcome.scores.as_data()
    if outcome.client_view is not None:
        summary |= outcome.client_view.as_data()
    if rows and rows[0]["loss"] and not rows[-1]["loss"] < 10 * rows[0]["loss"]:
        summary["warning"] = "the training loss has grown more than tenfold: lower the learning rate"
    if job.coverage is not None:
        summary["coverage"] = job.coverage.fraction
        summary["visible"] = [one.name for one in job.coverage.visible]
    summary["releases"] = [dataclasses.asdict(one) for one in job.scheme.releases(job.blueprint)]
    return summary
