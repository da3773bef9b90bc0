"""The figure that tells a run's best round, and what the ledger says of that choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.config import RunConfig
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.runs.job import Job

VALIDATION_LOSS = "validation_loss"


def monitor_of(job: Job) -> str | None:
    """The figure that tells the best round, if there is one."""
    config = job.config
    validated = job.validation is not None
    asked = config.monitor is not None or config.early_stopping is not None
    if not asked:
        return VALIDATION_LOSS if validated and config.evaluate_every else None
    monitor = config.monitor or VALIDATION_LOSS
    part = monitor.partition("_")[0]
    if part == "validation" and not validated:
        raise ConfigError(
            "The best round and early stopping go by a validation part, and there is none: hold one out "
            "(--validation-fraction 0.2), or name another figure: --monitor loss (the training loss), or --monitor "
            "test_loss, whose figures then say too much, since the test part has chosen the round."
        )
    if part == "test" and job.test is None:
        raise ConfigError(f"monitor = {monitor!r}, but there are no test samples.")
    if part in ("test", "validation") and not config.evaluate_every:
        raise ConfigError(f"monitor = {monitor!r}, but nothing is evaluated before the end: set evaluate_every.")
    if monitor == "loss" and not job.scheme.work.reports:
        raise ConfigError(
            f"monitor = 'loss', but under {job.scheme.name} clients do not tell their training loss: name a figure of "
            "samples that the server holds."
        )
    return monitor


def best_note(job: Job) -> tuple[str, ...]:
    """What a ledger says of the choice of a round."""
    try:
        monitor = monitor_of(job)
    except ConfigError:
        return ()
    if monitor is None:
        return ()
    chosen = f"the best round{_and_end(job.config)} is chosen by {monitor}"
    own = job.metrics is not None and not monitor.startswith("validation_") and monitor in job.metrics.names
    if monitor.startswith("test_") or own:
        chosen += ", whose figures for that round say too much for it"
    if monitor.startswith(("validation_", "test_")) or own:
        return (
            f"{chosen}, on samples that the server holds: clients' data are as protected as the models that were "
            "judged, and nothing is promised about those samples",
        )
    return (f"{chosen}, which is computed from what clients send, and tells no more than that",)


def _and_end(config: RunConfig) -> str:
    return "" if config.early_stopping is None else ", and with it the run's end,"
