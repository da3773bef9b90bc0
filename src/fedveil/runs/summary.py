"""The figures of a finished run."""

from __future__ import annotations

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
        "engine": job.around.engine,
        "scheme": config.scheme,
        "holder": job.scheme.holder,
        "dataset": config.dataset,
        "model": config.model,
        "clients": len(job.pool),
        "rounds": outcome.state.round,
        "seed": config.seed,
        "simulation": job.secrets.simulation,
        "loss": job.loss.name,
        "train_loss": next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None),
        "parameters": job.blueprint.size,
        "seconds": round(sum(row.get("seconds") or 0.0 for row in rows), 3),
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
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if losses and losses[0] and not losses[-1] < 10 * losses[0]:
        noise = "" if job.scheme.plan is None else ", or, if it is the noise that drowns the updates, clip"
        summary["warning"] = f"the training loss has grown more than tenfold: lower the learning rate{noise}"
    limit = getattr(getattr(job.scheme.uplink, "cipher", None), "value_range", None)
    if limit is not None and losses and max(losses) >= limit:
        summary["warning"] = (
            f"the training loss has reached value_range = {limit:g}, beyond which numbers are cut off: lower the "
            "learning rate, or clip if it is the noise that drowns the updates"
        )
    if job.coverage is not None:
        summary["coverage"] = job.coverage.fraction
        summary["visible"] = [one.name for one in job.coverage.visible]
    if outcome.stopped:
        summary["stopped"] = outcome.stopped
    failed = sum("failed" in row for row in rows)
    if failed:
        summary["failed_rounds"] = failed
    summary["ledger"] = outcome.books.ledger(rounds=outcome.state.round).as_data()
    return summary
