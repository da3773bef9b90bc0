"""The figure that tells a run's best round, what the ledger says of that choice, and when a target was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedveil.config import RunConfig
from fedveil.errors import ConfigError, spelled, unknown_name
from fedveil.runs.metrics import KINDS

if TYPE_CHECKING:
    from fedveil.protocol.parts import Scheme
    from fedveil.runs.job import Job

VALIDATION_LOSS = "validation_loss"


# What an evaluated round's row has of each part.
_LOSS = "loss"
_IN_ROWS = {_LOSS: False} | {
    name: KINDS[name].higher_is_better for name in ("accuracy", "balanced_accuracy", "f1", "auroc", "mse", "mae", "r2")
}


@dataclass(frozen=True)
class Monitor:
    """A figure by its name in rows, and whether more of it is better."""

    name: str
    higher_is_better: bool


def monitor_of(job: Job) -> Monitor | None:
    """The figure that tells the best round, if there is one.

    Raises:
        ConfigError: Settings name one that is not there, or that does not say whether more of it is better.
    """
    config = job.config
    validated = job.validation is not None
    asked = config.monitor is not None or config.early_stopping is not None
    if not asked:
        return Monitor(VALIDATION_LOSS, higher_is_better=False) if validated and config.evaluate_every else None
    monitor = config.monitor or VALIDATION_LOSS
    part = monitor.partition("_")[0]
    if part == "validation" and not validated:
        raise ConfigError(
            "The best round and early stopping go by a validation part, and there is none: hold one out "
            f"({spelled('validation_fraction', 0.2, argument='validation=(inputs, targets)')}), or name another "
            f"figure: {spelled('monitor', 'loss')} (the training loss), or {spelled('monitor', 'test_loss')}, whose "
            "figures then say too much, since the test part has chosen the round."
        )
    if part == "test" and job.test is None:
        raise ConfigError(f"monitor = {monitor!r}, but there are no test samples.")
    if part in ("test", "validation") and not config.evaluate_every:
        raise ConfigError(
            f"monitor = {monitor!r}, but nothing is evaluated before the end: {spelled('evaluate_every', 1)}."
        )
    if monitor == "loss" and not job.scheme.work.reports:
        raise ConfigError(
            f"monitor = 'loss', but under {job.scheme.name} clients do not tell their training loss: name a figure of "
            "samples that the server holds."
        )
    return Monitor(monitor, higher_is_better=_higher_is_better(monitor, job))


def _higher_is_better(monitor: str, job: Job) -> bool:
    if job.metrics is not None and (own := job.metrics.behind(monitor)) is not None:
        direction = job.metrics.higher_is_better(own)
        if direction is None:
            raise ConfigError(
                f"monitor = {monitor!r}, and the metric {own!r} does not say whether more of it is better: give it an "
                "attribute higher_is_better, True or False (metrics of torchmetrics have it)."
            )
        return direction
    part, _, figure = monitor.partition("_")
    if monitor == _LOSS or (part in ("test", "validation") and figure in _IN_ROWS):
        there = _figures_of(job.facts.task, job.facts.outputs)
        if figure and figure not in there:
            why = " (of many classes it is taken at the end alone)" if figure == "auroc" else ""
            raise ConfigError(
                f"monitor = {monitor!r}, but an evaluated round of {job.facts.task} has no {figure}{why}; it has "
                f"{', '.join(f'{part}_{name}' for name in there)}."
            )
        return _IN_ROWS[figure or _LOSS]
    known = [_LOSS, *(f"validation_{name}" for name in _IN_ROWS), *(f"test_{name}" for name in _IN_ROWS)]
    raise unknown_name("monitor", monitor, [*known, *(job.metrics.names if job.metrics is not None else ())])


def _figures_of(task: str, outputs: int) -> tuple[str, ...]:
    """What an evaluated round has of each part."""
    if task == "regression":
        return (_LOSS, "mse", "mae", "r2")
    ranked = ("auroc",) if task == "classification" and outputs == 2 else ()
    return (_LOSS, "accuracy", "balanced_accuracy", "f1", *ranked)


def check_target_accuracy(job: Job) -> None:
    """Refuse a target that no round could be seen to reach.

    Raises:
        ConfigError: There is nothing to test on, or it is not classes or labels, or nothing is tested before the end.
    """
    if job.config.target_accuracy is None:
        return
    if job.test is None or job.facts.task == "regression":
        lacks = "there are no test samples" if job.test is None else "targets that are numbers have no accuracy"
        raise ConfigError(f"target_accuracy = {job.config.target_accuracy:g}, but {lacks}.")
    if not job.config.evaluate_every:
        raise ConfigError(
            f"target_accuracy = {job.config.target_accuracy:g}, but nothing is evaluated before the end: set "
            f"{spelled('evaluate_every', 1)}."
        )


def target_reached(target: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """For the summary: the first evaluated round with this test accuracy, and the seconds of all rounds up to it.

    Both are None where no round had it. Evaluations take time too, and are not counted.
    """
    seconds = 0.0
    for row in rows:
        seconds += row.get("seconds") or 0.0
        if row.get("test_accuracy", -1.0) >= target:
            return {"accuracy": target, "round": row["round"], "seconds": round(seconds, 3)}
    return {"accuracy": target, "round": None, "seconds": None}


def best_note(job: Job) -> tuple[str, ...]:
    """What a ledger says of the choice of a round."""
    try:
        chosen_by = monitor_of(job)
    except ConfigError:
        return ()
    if chosen_by is None:
        return ()
    monitor = chosen_by.name
    chosen = f"the best round{_and_end(job.config)} is chosen by {monitor}"
    own = job.metrics is not None and job.metrics.behind(monitor) is not None
    if monitor.startswith("test_") or own:
        chosen += ", whose figures for that round say too much for it"
    if monitor.startswith(("validation_", "test_")) or own:
        return (
            f"{chosen}, on samples that the server holds: clients' data are as protected as the models that were "
            "judged, and nothing is promised about those samples",
        )
    return (f"{chosen}, which is computed from what clients send, and tells no more than that",)


def skips_bad_rounds(config: RunConfig, scheme: Scheme) -> bool:
    """Whether a run goes on after a bad round; where sums without noise are all that hides clients, if it is told to.

    The next round asks for sums of the same model again, and two of those that differ in one client show its part.
    """
    if config.on_bad_round is not None:
        return config.on_bad_round == "skip"
    return not _bare_sums(scheme) or config.max_bad_rounds is not None


def _bare_sums(scheme: Scheme) -> bool:
    return scheme.holder == "server" and not scheme.readable and not scheme.noisy


def guard_note(config: RunConfig, scheme: Scheme) -> tuple[str, ...]:
    """What a ledger says of rounds that are taken back."""
    said: list[str] = []
    if config.max_loss_jump is not None:
        said.append(
            f"a round that makes the loss on held-out samples more than {config.max_loss_jump:g} times as large is "
            "taken back. For clients' training data that is a choice among models that are counted already, and costs "
            "nothing more; of the held-out samples every round's choice is a release without noise, which no ε counts, "
            "clients' own or not"
        )
    if _bare_sums(scheme) and skips_bad_rounds(config, scheme):
        said.append(
            "a round that is refused or taken back is followed by one on the same model: of a client that is in one "
            "of the two sums and not in the other the server reads the part, exactly, if whoever spoilt the round "
            "tells it with what"
        )
    return tuple(said)


def _and_end(config: RunConfig) -> str:
    return "" if config.early_stopping is None else ", and with it the run's end,"
