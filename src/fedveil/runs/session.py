"""A run in a folder: begun, resumed or continued in another, trained, and what it leaves there."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedveil.config import RunConfig
from fedveil.data.description import Description
from fedveil.downlink import Weights, assemble
from fedveil.errors import CheckpointError, ConfigError, DataError, FedVeilError, NumericError, ProtocolError, spelled
from fedveil.plain import IN_PYTHON, read_named
from fedveil.roles.server import ServerState
from fedveil.runs.best import BestRound, Watch
from fedveil.runs.callbacks import WARNING, Callbacks, Follower, Progress, Row, Say, working
from fedveil.runs.checkpoint import ClientMemory, newest_good, save_checkpoint
from fedveil.runs.folder import RunFolder, chosen
from fedveil.runs.job import Job, job_from_config, located, settled
from fedveil.runs.loop import Outcome, fresh_state, summarise, train_job
from fedveil.runs.model_file import load_weights, save_model
from fedveil.runs.preflight import preflight, with_found_rate
from fedveil.work.messages import keeps_for_itself

_LOG = logging.getLogger(__name__)

_KINDS = {"server": "server", "clients": "client"}


def run(
    config: RunConfig,
    out: str | Path,
    *,
    quiet: bool = False,
    say: Say = lambda text: None,
    follow: Sequence[Follower] = (),
    understood: Callable[[Description], None] = lambda description: None,
) -> dict[str, Any]:
    """Train a new run into the folder `out`.

    Args:
        config: The run's settings.
        out: A folder that is empty or not there yet.
        quiet: Whether to leave out the progress bar.
        say: Gets warnings and remarks, a line each.
        follow: Callbacks that see the run begin, each round, and the end.
        understood: Told what was understood of the data, before training.

    Returns:
        The summary, as the folder's summary.json holds it.

    Raises:
        ConfigError: Settings do not go together, or with the data or the model.
        DataError: The data cannot be read.
        CheckpointError: The folder holds something already.
        ProtocolError: The run cannot start, or every round failed.
    """
    config = located(settled(config))
    folder = RunFolder(out)
    with folder.starting(config):
        job = _ready(config, folder, quiet=quiet, say=say, understood=understood)
        if config.record:
            chosen(job)
    return train_into(job, folder, fresh_state(job), quiet=quiet, say=say, follow=follow)


def resume(
    out: str | Path,
    *,
    changes: dict[str, Any] | None = None,
    quiet: bool = False,
    say: Say = lambda text: None,
    follow: Sequence[Follower] = (),
) -> dict[str, Any]:
    """Continue the run in `out` from its newest good checkpoint.

    Args:
        out: The run's folder.
        changes: Settings to replace, like a higher number of rounds; checkpoints of another model are refused.
        quiet: Whether to leave out the progress bar.
        say: Gets warnings and remarks, a line each.
        follow: Callbacks that see the run begin, each round, and the end.

    Returns:
        The summary of the whole run; that of before where the run had ended.

    Raises:
        CheckpointError: The folder holds no run, another process is using it, or its files are damaged or do not fit.
        ConfigError: Changed settings do not go together, or with the data or the model.
        ProtocolError: The run cannot start, or every round failed.
    """
    folder = RunFolder(out)
    config = folder.config(changes or {}, say=say)
    if config.dataset == IN_PYTHON:
        raise ConfigError(
            f"The run in {out} was begun in Python, with samples that were handed over there: go on with it there, "
            f"fedveil.train(…, out={str(out)!r}, resume=True)."
        )
    if config.seed is None:
        raise CheckpointError(f"{folder.config_file} is damaged: it does not say the seed, as every run's does.")
    job = _ready(config, None, quiet=quiet, say=say)
    return continue_in(job, folder, quiet=quiet, say=say, follow=follow)[0]


def _ready(
    config: RunConfig,
    folder: RunFolder | None,
    *,
    quiet: bool,
    say: Say,
    understood: Callable[[Description], None] = lambda description: None,
) -> Job:
    """The job of settings, tried out; one that begins in `folder` leaves there what was found for it."""
    with working("loading the data and tracing the model", quiet=quiet):
        job = job_from_config(config, describe=True)
        if folder is not None and job.description is not None:
            _refuse_shared(job.description, config)
        warnings = [*job.remarks, *preflight(job)] if folder is not None else []
    if config.lr == "auto":
        with working("trying learning rates", quiet=quiet):
            job, told = with_found_rate(job)
        warnings.append(told)
    if folder is not None:
        folder.settled(job.config)
        assert job.description is not None
        folder.write_data(job.description)
        understood(job.description)
        warnings += [f"warning: {text}" for text in job.description.warnings]
    for text in warnings:
        (say if folder is None else _noted(folder, say))(text)
    return job


def _refuse_shared(description: Description, config: RunConfig) -> None:
    """Refuse parts that have groups in common, as files of their own may; what is drawn here never does."""
    shared = [count for others in description.shared_groups.values() for count in others.values()]
    if config.split != "rows" and any(shared):
        raise DataError(
            f"{config.dataset}: {max(shared):,} groups are in two of its parts (training, validation, test), so that "
            "figures would be better than on groups that the model has never seen. Move each group's samples to one "
            f"part, or let parts be drawn from one file; {spelled('split', 'rows')} takes the parts as they are, and "
            "says so."
        )


def continue_in(
    job: Job,
    folder: RunFolder,
    *,
    quiet: bool = False,
    say: Say = lambda text: None,
    train: Trainer = train_job,
    follow: Sequence[Follower] = (),
) -> tuple[dict[str, Any], ServerState]:
    """Continue a job from its folder's newest good checkpoint; returns the summary and the final state."""
    config = job.config
    folder.take()
    told = _noted(folder, say)
    done = folder.finished(config)
    if done is not None:
        try:
            callbacks = Callbacks(follow)
            callbacks.begin(folder, config, folder.metrics())
            callbacks.finish(done, say)
            final = _final_state(job, folder, rounds=done["rounds"])
            _write_again(job, folder, done, final, told)
        finally:
            folder.release()
        say(f"The run is finished, with {done['rounds']} rounds: nothing is left to do. {_more(job)}")
        return done, final
    try:
        if folder.changed(config) is None and (other := folder.check_data(job.description)):
            told(f"{WARNING}{other}")
    except FedVeilError:
        folder.release()
        raise
    state, refused = _newest_good(job, folder)
    for reason in refused:
        told(f"{reason} Using the previous one.")
    if state is None:
        state, reached = fresh_state(job), folder.reached()
        lost = f"The checkpoints of {reached} rounds are gone" if reached > rounds_between(job) > 0 else ""
        told(f"{lost or 'No checkpoint yet'}: starting from the first round.")
    state.groups = folder.groups()
    lasting = config.robust_groups if config.robust_groups and not job.scheme.readable else 0
    if (state.groups or state.round or folder.reached()) and len(state.groups) != lasting:
        folder.release()
        raise CheckpointError(
            f"attempts.json in {folder.path} does not tell of {lasting} groups of the run's clients, and sums of other "
            "ones could be solved for single clients. Put the file back, resume with the settings the run was started "
            f"with, or start anew with another {spelled('out')}."
        )
    state.attempt = folder.resume(config)
    earlier = folder.go_on(state.round)
    summary = train_into(job, folder, state, earlier=earlier, quiet=quiet, say=say, train=train, follow=follow)
    return summary, state


def _more(job: Job) -> str:
    scheduled = job.config.lr_schedule not in (None, "constant") or job.config.warm_up is not None
    if not scheduled and job.scheme.plan is None:
        return f"More rounds: {spelled('rounds')}."
    why = "learning rate is scheduled" if scheduled else "noise is made for what all of its rounds may cost"
    over = " over all rounds" if scheduled else ""
    return f"Its {why}{over}: for more of them start anew with another {spelled('out')}."


def _write_again(job: Job, folder: RunFolder, summary: dict[str, Any], state: ServerState, say: Say) -> None:
    """What a finished run has lost of its files and what is left of it tells."""
    if job.model_here:
        try:
            load_weights(folder.model_file, job.architecture, job.weights)
        except FedVeilError:
            _write_model(job, folder.model_file, state.weights)
            say(f"{folder.model_file.name} was gone or damaged: it is written again from the last checkpoint.")
    try:
        whole = read_named(folder.ledger_file) == summary["ledger"]
    except (FedVeilError, OSError):
        whole = False
    if not whole:
        folder.write_ledger(summary["ledger"])
        say(f"{folder.ledger_file.name} was gone or not the run's: it is written again.")


def rounds_between(job: Job) -> int:
    """How many rounds lie between two checkpoints: one, where what clients show in a round is spent for good."""
    given = job.config.checkpoint_every
    return (1 if job.scheme.plan is not None else _USUAL) if given is None else given


_USUAL = 10


def _newest_good(job: Job, folder: RunFolder) -> tuple[ServerState | None, list[str]]:
    like = job.optimiser.start(job.weights.parameters)
    try:
        return newest_good(folder.checkpoints, job.weights, fingerprint=job.config.fingerprint(), velocity=like)
    except CheckpointError as reason:
        raise CheckpointError(f"{reason}{folder.changed(job.config) or ''}") from reason


def _final_state(job: Job, folder: RunFolder, *, rounds: int) -> ServerState:
    """The state a finished run ended in: its last checkpoint's, or its model without the server's momentum."""
    try:
        state, _ = _newest_good(job, folder)
    except CheckpointError:
        state = None
    if state is None or state.round != rounds:
        weights = load_weights(folder.model_file, job.architecture, job.weights)
        state = ServerState.fresh(weights, job.optimiser.start(weights.parameters))
        state.round = rounds
    return state


class Trainer(Protocol):
    """Trains a job from a state to its last round; see `train_job`."""

    def __call__(
        self,
        job: Job,
        *,
        state: ServerState,
        on_round: Callable[[Row, ServerState], None],
        on_begin: Callable[[int], None],
        on_answer: Callable[[int, int], None] | None,
        journal: Path | None,
        record: Path | None,
        say: Say,
    ) -> Outcome:
        """What the run leaves."""


def train_into(
    job: Job,
    folder: RunFolder,
    state: ServerState,
    *,
    earlier: Sequence[Row] = (),
    quiet: bool,
    say: Say = lambda text: None,
    train: Trainer = train_job,
    follow: Sequence[Follower] = (),
) -> dict[str, Any]:
    """Train a job from `state`, writing metrics and checkpoints as they come; `follow` is told of them.

    `earlier` are the rows of the rounds before.
    """
    config, fingerprint, told = job.config, job.config.fingerprint(), _noted(folder, say)
    memory = ClientMemory(folder.checkpoints) if job.pool.clients and keeps_for_itself(job.scheme.work) else None
    try:
        watch = Watch(job, follow)
        if memory is not None:
            if state.round:
                memory.load(state.round)
            train = partial(train_job, memory=memory)
    except FedVeilError:
        folder.release()
        raise

    every, kept, whole = rounds_between(job), state.round, _marks(state)

    def keep(now: ServerState, last: bool) -> None:
        nonlocal kept
        if job.model_here and every and (last or now.round % every == 0 or now.round == config.rounds):
            if watch.best is not None:
                watch.best.save(folder.checkpoints, fingerprint=fingerprint)
            if memory is not None:  # first: a checkpoint without it is of no use
                memory.save(now.round)
            save_checkpoint(folder.checkpoints, now, fingerprint=fingerprint)
            kept = now.round
            _LOG.info("round %d: checkpoint in %s", now.round, folder.checkpoints)
            watch.callbacks.kept()

    def keep_last(now: ServerState) -> None:
        """A checkpoint of the last boundary, unless a round was being added up when the run was stopped."""
        if now.round > kept and memory is None and _marks(now) == whole:
            keep(now, True)

    def begins(round: int) -> None:
        folder.keep_groups(state.groups)
        watch.round_begins(round)

    def boundary(row: Row, now: ServerState) -> None:
        nonlocal whole
        folder.append_metrics(row)
        whole = _marks(now)
        try:
            watch.round(row, now)
        finally:
            bar.update(row)

    watch.keep = keep
    if config.device == "auto":
        say(f"Computing on {job.weights.parameters.device} ({spelled('device', 'auto')}).")
    if watch.best is not None and watch.best.monitor.startswith("test_"):
        say(f"{watch.best.monitor} chooses the round to keep: the test figures of that round then say too much for it.")
    try:
        if watch.best is not None:
            watch.best.resume(earlier, folder.checkpoints, job.weights, fingerprint=fingerprint, say=told)
        begun = f"the run goes on after round {state.round}" if state.attempt else "the run begins"
        folder.note("resumed" if state.attempt else "began", begun, round=state.round, attempt=state.attempt)
        watch.callbacks.begin(folder, config, earlier)
        with Progress(job.scheme.name, total=config.rounds, done=state.round, quiet=quiet) as bar:
            record = folder.record if config.record else None
            outcome = train(
                job,
                state=state,
                on_round=boundary,
                on_begin=begins,
                on_answer=bar.listener,
                journal=folder.privacy_journal,
                record=record,
                say=told,
            )
        outcome.rows = [*earlier, *outcome.rows]
        if outcome.state.round > kept:  # the run has ended before its last round
            keep(outcome.state, True)
        summary = _leave(job, folder, outcome, told, watch.best)
        folder.note("ended", f"the run has ended after round {summary['rounds']}", round=summary["rounds"])
        watch.callbacks.finish(summary, told)
    except BaseException as reason:
        with contextlib.suppress(OSError):  # the disk may be what is full
            if isinstance(reason, Exception | KeyboardInterrupt | SystemExit):
                with contextlib.suppress(Exception):  # a callback that is told of it may fail: the reason stays
                    keep_last(state)
            folder.note("stopped", f"{type(reason).__name__}: {reason}".rstrip(": "))
        watch.callbacks.stopped(reason)
        files = sorted(folder.checkpoints.glob("round-*.safetensors"))
        if isinstance(reason, (NumericError, ProtocolError)) and files:
            say(f"The model of the last checkpoint is untouched ({files[-1].name}).")
        raise
    finally:
        folder.release()
    return summary


def _marks(state: ServerState) -> tuple[object, ...]:
    """Which values a state has: they change with every number that is written into its tensors."""
    weights = state.weights
    tensors = (weights.parameters, weights.statistics, weights.epsilon, state.velocity, *weights.buffers.values())
    return (state.round, *((id(one), one._version) for one in tensors))


def _noted(folder: RunFolder, say: Say) -> Say:
    """Says it, and writes it down in events.jsonl."""

    def told(text: str) -> None:
        folder.note("note", text)
        say(text)

    return told


def _leave(job: Job, folder: RunFolder, outcome: Outcome, say: Say, best: BestRound | None = None) -> dict[str, Any]:
    """Write the model, the ledger and the summary of a run that is over; what has come further stays."""
    reached, stands = folder.reached(), folder.summary()
    if stands is not None and reached > outcome.state.round:
        say(
            f"This attempt ended after {outcome.state.round} rounds, and the run had come to {reached} before: the "
            f"model of round {reached} stays. What was asked of clients again is counted in the ledger."
        )
        summary = {**stands, "ledger": outcome.privacy_journal.ledger(rounds=reached).as_data()}
        folder.write_ledger(summary["ledger"])
        folder.write_summary(summary)
        return summary
    folder.settle()
    summary = summarise(job, outcome)
    files = {folder.model_file: outcome.state.weights} if job.model_here else {}
    if best is not None and best.weights is not None:
        files[folder.best_file] = best.weights
        summary["best"] = best.as_data()
    for file, weights in files.items():
        _write_model(job, file, weights)
    folder.write_ledger(summary["ledger"])
    folder.write_summary(summary)
    return summary


def _write_model(job: Job, file: Path, weights: Weights) -> None:
    module = assemble(job.architecture, weights).eval()
    kind, settings = _KINDS[job.scheme.holder], dataclasses.asdict(job.config)
    save_model(file, module, job.facts, kind=kind, config=settings, shape=None)
