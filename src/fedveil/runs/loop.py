"""The loop of a run: the two roles of a job, the steps of its server, and the record that is kept of them."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedveil.client_held.client import HolderRole
from fedveil.client_held.messages import Begin, Divide
from fedveil.client_held.server import RelayRole, RelayState
from fedveil.data import Dataset
from fedveil.data.lazy import LazyTensor
from fedveil.downlink import assemble
from fedveil.engine.local import Listen, LocalEngine, OnAnswer, SharedWork
from fedveil.errors import (
    CheckpointError,
    Code,
    ConfigError,
    FedVeilError,
    NumericError,
    ProtocolError,
    StopTraining,
    spelled,
)
from fedveil.ledger.accountant import Accountant
from fedveil.processes import undisturbed
from fedveil.protocol.client_state import Held
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.parts import Authority, clip_factor
from fedveil.protocol.phases import Engine, RoundBegins, RoundDone, RunJudged, RunStopped, asked
from fedveil.roles.client import ClientRole, ClientTerms
from fedveil.roles.server import RunTerms, ServerRole, ServerState
from fedveil.runs.best import LossGuard, check_guard, refused_round, too_many, why_stopped
from fedveil.runs.callbacks import WARNING, Row
from fedveil.runs.evaluation import ClientScores, Scores, named_figures, predict, score_client_view, score_outputs
from fedveil.runs.folder import Recording, recorder_for
from fedveil.runs.job import Job
from fedveil.runs.judgement import Judgement, judge
from fedveil.runs.monitor import target_reached
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.runs.recipe import rate_of, schedule_of
from fedveil.secrets import SeededSecrets
from fedveil.version import __version__
from fedveil.work.batches import mixed_seed

if TYPE_CHECKING:
    from fedveil.runs.checkpoint import ClientMemory  # which needs packages that in-memory training does not

_LOG = logging.getLogger(__name__)


def server_role(
    job: Job,
    state: ServerState,
    accountant: Accountant | None = None,
    *,
    name: str = "",
    behind: Collection[int] = (),
    announced: Mapping[int, int] | None = None,
) -> ServerRole | RelayRole:
    """The server of a run, whose name begins with `name` and in which clients have `announced` sizes before.

    Where the model lives with the clients, `state` is the run's record and not the server's: the server is given the
    number of the round and nothing else.
    """
    run: RunTerms = {
        "secrets": job.secrets,
        "cohort": job.cohort,
        "rounds": job.config.rounds,
        "accountant": accountant,
        "name": name,
        "announced": announced,
    }
    if job.scheme.holder == "server":
        return ServerRole(job.scheme, job.architecture, state, optimiser=job.optimiser, **run)
    relayed = RelayState(state.round, state.attempt)
    return RelayRole(job.scheme, job.architecture, relayed, behind=behind, **run)


def client_role(job: Job, state: ServerState | None = None) -> ClientRole | HolderRole:
    """The clients of a job, with secrets that do not lead to the server's.

    `state` is where clients that hold the model themselves begin (default: with the job's own weights).
    """
    source = job.secrets.branch("clients") if isinstance(job.secrets, SeededSecrets) else job.secrets
    guard = job.guard
    own: ClientTerms = {
        "secrets": source,
        "policy": guard.policy,
        "roster": guard.roster,
        "identities": guard.identities,
        "schedule": (job.config.rounds, job.cohort),
    }
    if job.scheme.holder == "server":
        return ClientRole(job.scheme, job.architecture, **own)
    begun = fresh_state(job) if state is None else state
    start = Held.fresh(begun.weights.clone(), begun.velocity.clone())
    return HolderRole(job.scheme, job.architecture, start=start, optimiser=job.optimiser, **own)


def authority_role(job: Job) -> Authority | None:
    """The key authority of a job, where its scheme has one, with secrets that lead to nobody else's."""
    source = job.secrets.branch("authority") if isinstance(job.secrets, SeededSecrets) else job.secrets
    guard = job.guard
    return job.scheme.uplink.authority_role(secrets=source, roster=guard.roster, identities=guard.identities)


OnRound = Callable[[Row, ServerState], None]
OnBegin = Callable[[int], None]

_DROPOUT = 0xD0D0
_MOST_FAILURES = 10


@dataclass(eq=False)
class Outcome:
    """What a finished run leaves."""

    state: ServerState
    privacy_journal: PrivacyJournal
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    scores: Scores | None = None
    judged: Judgement | None = None
    client_view: ClientScores | None = None
    validation: dict[str, float] = field(default_factory=dict)
    held_back: dict[str, float] = field(default_factory=dict)
    """What samples that clients hold back say of the last model."""
    stopped: str = ""
    diverged: bool = False
    failed_metrics: set[str] = field(default_factory=set)
    """Of which that was said."""
    lost: int = 0
    """Rounds of earlier attempts that count in the account and are not in the model this attempt began with."""

    def stop(self, reason: str, say: Callable[[str], None]) -> None:
        """The run ends here, with what it has; one without a round has nothing."""
        done = self.state.round
        if done == 0:
            raise ProtocolError(f"The run cannot start: {reason}.{self._why_lost()}")
        self.stopped = reason
        say(f"The run ends after {done} round{'s' * (done != 1)}: {reason}.{self._why_lost()}")

    def tell_failed(self, metrics: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Warn of metrics of the user's own that have failed, of each once: training goes on without their figures."""
        for name in metrics.keys() - self.failed_metrics:
            self.failed_metrics.add(name)
            say(
                f"{WARNING}the metric {name!r} has failed in round {self.state.round}, {metrics[name]}. It has no "
                "figure there (see failed_metrics); training goes on."
            )

    def _why_lost(self) -> str:
        if not self.lost:
            return ""
        rounds = "round was begun" if self.lost == 1 else "rounds were begun"
        return (
            f" {self.lost} {rounds} before that no checkpoint holds: what clients showed in them is spent and "
            "cannot be spent again. Checkpoints that were moved away can be put back; a run with another "
            f"{spelled('out')} has a budget of its own."
        )

    @property
    def bytes_down(self) -> float:
        """Mean bytes a client receives in a round."""
        return float(sum(row.get("bytes_down") or 0.0 for row in self.rows) / max(len(self.rows), 1))

    @property
    def bytes_up(self) -> float:
        """Mean bytes a client sends in a round."""
        return float(sum(row.get("bytes_up") or 0.0 for row in self.rows) / max(len(self.rows), 1))


def fresh_state(job: Job) -> ServerState:
    """The state before the first round."""
    return ServerState.fresh(job.weights.clone(), job.optimiser.start(job.weights.parameters))


def train_job(
    job: Job,
    *,
    state: ServerState,
    on_round: OnRound | None = None,
    on_begin: OnBegin | None = None,
    on_answer: OnAnswer | None = None,
    journal: Path | None = None,
    record: Path | Recording | None = None,
    listen: Listen | None = None,
    memory: ClientMemory | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train from `state` to the last round, with every client in this process.

    Args:
        job: What is trained, with which scheme, on whose data.
        state: Where to begin; it is moved on in place.
        on_round: Told every boundary's metrics and state; may raise StopTraining, as may `on_begin`.
        on_begin: Told the number of every round before it is asked for.
        on_answer: Told how many of how many clients have answered a phase of a round, as they do.
        journal: The file in which spent privacy is written down as it is spent.
        record: The folder in which messages are kept for an audit, and the server's secrets with them.
        listen: Hears every message as it passes, where nothing is recorded.
        memory: With what clients begin that their work has kept for itself; it can then tell what they keep.
        say: Told what a person should know.
    """
    if job.config.record and record is None:
        raise ConfigError("record keeps messages in the run's folder, and this run has none: give one (out).")
    privacy_journal = privacy_journal_of(job, journal, state)
    role = client_role(job, state)
    shared = SharedWork(job.scheme.work, job.pool.clients, workers=job.config.workers)
    role.work_by(shared)
    recorder = None if record is None else recorder_for(job, record, attempt=state.attempt)
    engine = LocalEngine(
        role,
        job.pool,
        absent=_simulated_dropout(job),
        spent=privacy_journal.remembered(),
        grouped=state.groups,
        kept=None if memory is None else memory.kept(),
        listen=listen if recorder is None else recorder.hear,
        on_answer=on_answer,
        authority=authority_role(job),
    )
    if memory is not None:
        memory.kept = engine.kept
    server = server_role(
        job if recorder is None else replace(job, scheme=recorder.scheme), state, privacy_journal.accountant
    )
    written = partial(taken_from_a_client, role, engine, state) if isinstance(role, HolderRole) else None
    try:
        return conduct(
            job,
            engine,
            server,
            privacy_journal,
            state=state,
            written=written,
            on_round=on_round,
            on_begin=on_begin,
            say=say,
        )
    finally:
        shared.end()
        for client, why in server.left_out.items():
            say(f"Client {client} took no part: it {why}.")
        if recorder is not None:
            recorder.close()


def privacy_journal_of(job: Job, journal: Path | None, state: ServerState) -> PrivacyJournal:
    """The privacy journal of a run that goes on from `state`; a journal that knows less than that is refused."""
    privacy_journal = PrivacyJournal(job, journal)
    known = privacy_journal.accountant
    if journal is None or known is None:
        return privacy_journal
    privacy_journal.check_graph()
    from fedveil.runs.folder import RunFolder  # which needs packages that in-memory training does not

    folder = RunFolder(journal.parent)
    rows = folder.metrics()
    done = sum("failed" not in row for row in rows)
    for rounds, what in ((state.round, "the checkpoint is of round"), (done, "metrics.jsonl has rows of")):
        if known.rounds < rounds:
            raise CheckpointError(
                f"{journal} tells of {known.rounds} rounds, but {what} {rounds}: what was spent is no longer known. "
                f"Put the file back, or start anew with another {spelled('out')}."
            )
    privacy_journal.check_rounds(row["round"] for row in rows)
    privacy_journal.check_mark(folder.journal_mark)
    privacy_journal.on_plan = folder.mark_journal
    return privacy_journal


def conduct(
    job: Job,
    engine: Engine,
    server: ServerRole | RelayRole,
    privacy_journal: PrivacyJournal,
    *,
    state: ServerState,
    written: Callable[[RoundDone], RoundDone] | None = None,
    on_round: OnRound | None = None,
    on_begin: OnBegin | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """The loop of a run, whatever the engine: the server's steps one after the other, and the run's record with them.

    `written`, where clients hold the model, puts a round's sums where the record keeps it.
    """
    outcome = Outcome(state, privacy_journal)
    if privacy_journal.accountant is not None:
        outcome.lost = max(privacy_journal.accountant.rounds - state.round, 0)
    about = (job.scheme.name, state.round, job.config.rounds, len(job.pool), job.cohort.size)
    _LOG.info("%s begins after round %d of %d: %d clients, %d in a round", *about)
    guard = None
    if job.config.max_loss_jump is not None:
        check_guard(job)
        guard = LossGuard(job.config.max_loss_jump, state, lambda: evaluated(job, state, on=job.validation)[1].loss)
    rates = schedule_of(job.config, rate_of(job.config, job.loss), job.shape)
    started = last = time.perf_counter()
    failures = 0
    for step in asked(server.run(), engine):
        if isinstance(step, RunStopped):
            outcome.stop(step.reason, say)
            continue
        if isinstance(step, RunJudged):
            outcome.held_back = named_figures(job.scheme, step.held_back)
            if step.failed:
                say(f"{WARNING}clients could not judge the last model by what they hold back: {step.failed}.")
            continue
        if isinstance(step, RoundBegins):
            if on_begin is not None and step.arrived is None:
                try:
                    on_begin(step.round + 1)
                except StopTraining as reason:  # nothing of this round has been asked for
                    outcome.stop(str(reason), say)
                    break
            if privacy_journal.accountant is not None:
                privacy_journal.begin(step)
            continue
        done = step
        declined = not done.gathered.arrived and _all_refused(Code.ENDED, done)
        if privacy_journal.accountant is not None:
            privacy_journal.end(done, void=declined and not done.gathered.missing)
        failures += bool(done.failed) and not done.bad and not done.skipped
        # Whoever is missing has not said so: one client's word does not end the run for it.
        if declined and done.round > 0 and (not done.gathered.missing or failures >= _MOST_FAILURES):
            state.round = done.round  # nobody takes part any more: what was trained before this round is the result
            outcome.stop(f"round {done.round + 1} failed: {next(iter(done.gathered.refused.values()))}", say)
            break
        for spoilt in done.taken_back:
            _LOG.warning(
                "the sums of round %d are taken back: most clients whose uploads are in them cannot read them, since "
                "somebody has spoilt them; the run goes on from the model before",
                spoilt + 1,
            )
        state.round = done.round + 1
        if guard is not None and not done.failed:
            done = guard.judged(done, state)
        # Nothing but a good round ends a row: whoever spoils rounds in two ways by turns spoils them all the same.
        if done.bad:
            state.bad_rounds += 1
        elif not done.failed:
            failures = state.bad_rounds = 0
        if done.failed and (_all_refuse(done) or failures >= _MOST_FAILURES):
            raise _failure(done)
        if done.aggregate is not None and written is not None:
            try:
                done = written(done)
            except ProtocolError as reason:  # the clients will refuse it too, and the server then takes it back
                done = replace(done, failed=str(reason), aggregate=None)
        with undisturbed():  # what has moved the model is written down before anybody stops
            row = _row(job, done, state, rate=rates.at(done.round), seconds=time.perf_counter() - last)
            last = time.perf_counter()
            outcome.rows.append(row)
            _log(row)
            outcome.tell_failed(row.get("failed_metrics", {}), say)
            if not outcome.diverged and _runs_away(outcome.rows[0], row):
                outcome.diverged = True
                say(f"{WARNING}{_diverged(outcome.rows[0], row)} {_cure(job)}")
            if done.bad:
                say(f"{WARNING}{refused_round(row)}")
            if done.skipped:
                say(f"Round {row['round']} is skipped, and costs nothing: {done.failed}.")
            try:
                if on_round is not None:
                    on_round(row, state)
            except StopTraining as reason:
                outcome.stop(str(reason), say)
                server.end()
        if done.bad and not outcome.stopped and too_many(job, state):
            outcome.stop(why_stopped(job, state), say)
            server.end()
    outcome.seconds = time.perf_counter() - started
    _LOG.info("%s ends after round %d, in %.1f seconds", job.scheme.name, state.round, outcome.seconds)
    if outcome.rows and all("failed" in row for row in outcome.rows) and not outcome.stopped:
        raise ProtocolError(f"Every round failed; the last because {outcome.rows[-1]['failed']}.")
    if job.test is not None:
        outputs, outcome.scores = evaluated(job, state)
        outcome.tell_failed(outcome.scores.failed, say)
        square = {"target_scale": job.config.target_scale, "true_weight": job.config.true_weight}
        outcome.judged = judge(outputs, job.test, loss=job.loss.name, **square)
        outcome.client_view = None if job.scheme.holder == "clients" else _client_view(job, state)
    outcome.validation = _validated(job, state)
    return outcome


def taken_from_a_client(role: HolderRole, engine: LocalEngine, state: ServerState, done: RoundDone) -> RoundDone:
    """Write the model that a client puts together into the run's record; only clients know the training loss."""
    assert done.aggregate is not None
    held = role.moved(engine.state_of(int(done.aggregate.contributors[0])), done.aggregate)
    for own, theirs in (
        (state.weights.parameters, held.weights.parameters),
        (state.weights.statistics, held.weights.statistics),
        (state.velocity, held.velocity),
    ):
        own.copy_(theirs)
    return replace(done, loss=held.loss)


def _log(row: Row) -> None:
    _LOG.debug("round %d: loss %s from %d clients", row["round"], row["loss"], row["clients"])
    for client, why in row.get("refused", {}).items():
        _LOG.info("round %d: client %s refused: %s", row["round"], client, why)
    if "failed" in row and "skipped" not in row:
        _LOG.warning("round %d failed: %s", row["round"], row["failed"])


def _simulated_dropout(job: Job) -> Callable[[Request, int], bool] | None:
    rate, seed = job.config.simulate_dropout, job.config.seed
    if not rate:
        return None
    assert seed is not None

    def absent(request: Request, client: int) -> bool:
        if not isinstance(request, (Train, Begin, Divide)):
            return False
        # Whoever stays for the vote may still vanish before the upload.
        when = _DROPOUT + isinstance(request, Divide)
        return mixed_seed(seed, when, request.round, request.attempt, client) / 2.0**63 < rate

    return absent


def _all_refused(code: Code, done: RoundDone) -> bool:
    """Whether somebody refused, and everybody who did for this reason."""
    refused = done.gathered.refused
    return bool(refused) and all(refusal.code is code for refusal in refused.values())


def _all_refuse(done: RoundDone) -> bool:
    """Everybody gone for one round is what networks do; everybody refusing is not, unless the last sums alone, which
    the server then takes back."""
    refuses = not done.gathered.arrived and not done.gathered.missing and bool(done.gathered.refused)
    return refuses and not _all_refused(Code.UNREADABLE, done)


def _failure(done: RoundDone) -> FedVeilError:
    """Why a run cannot go on: numbers that have run away, or clients that refuse or are gone."""
    refused = done.gathered.refused
    numeric = {client: refusal for client, refusal in refused.items() if refusal.code is Code.NUMBERS}
    client, refusal = next(iter([*numeric.items(), *refused.items()]), (None, None))
    said = "" if refusal is None else f" Client {client}: {refusal.text.rstrip('.')}."
    hint = (
        " Training has probably diverged: lower the learning rate (the square loss often wants 0.01 or less), or check "
        "the clients' data."
        if numeric and not done.gathered.arrived
        else ""
    )
    text = f"Round {done.round + 1} failed: {done.failed}.{said}{hint}"
    return NumericError(text) if numeric else ProtocolError(text)


def _row(job: Job, done: RoundDone, state: ServerState, *, rate: float, seconds: float) -> Row:
    gathered = done.gathered
    row: Row = {
        "round": done.round + 1,
        "lr": rate,
        "loss": done.loss,
        "clients": len(gathered.arrived),
        "seconds": round(seconds, 6),
        "bytes_down": gathered.bytes_down / max(len(done.cohort), 1),
        "bytes_up": gathered.bytes_up / max(len(done.cohort), 1),
    }
    if done.failed:
        row["failed"] = done.failed
    if done.skipped:
        row["skipped"] = True
    if done.bad:
        row |= {"code": str(done.code), "suspects": list(gathered.arrived)}
    if gathered.refused:
        row["refused"] = {str(client): refusal.text for client, refusal in gathered.refused.items()}
    if state.clip is not None:
        row["clip"] = state.clip
    elif job.scheme.work.clip is not None and clip_factor(job.scheme.work, 1) != 1:
        row["clip"] = job.scheme.work.clip * clip_factor(job.scheme.work, done.round)
    if done.held_back is not None:
        row |= named_figures(job.scheme, done.held_back)
    every = job.config.evaluate_every
    if every and (done.round + 1) % every == 0:
        if job.test is not None:
            _, scores = evaluated(job, state)
            row |= {**scores.as_data(), **scores.own_data()}
        row |= _validated(job, state)
    return row


def _validated(job: Job, state: ServerState) -> dict[str, float]:
    """validation_loss and the others, of the server's model now; nothing where there is no validation part."""
    if job.validation is None:
        return {}
    _, scores = evaluated(job, state, on=job.validation)
    return {f"validation_{name.removeprefix('test_')}": value for name, value in scores.as_data().items()}


def evaluated(job: Job, state: ServerState, *, on: Dataset | None = None) -> tuple[Tensor, Scores]:
    """The outputs of the server's model on the test samples (or those it is to be judged `on`), and their scores."""
    samples = job.test if on is None else on
    assert samples is not None
    outputs = predict(assemble(job.architecture, state.weights).eval(), samples.x)
    return outputs, score_outputs(outputs, samples, job.loss, job.metrics if on is None else None)


_TENFOLD = 10.0
_READ = 64
"""Targets that are read to know about them all, of samples that are read when they are asked for."""
_FAR = 100.0
"""Times the loss of a model that answers 0 to everything: what ends there has come off in its first round already."""


def _loss_in(row: Row) -> float | None:
    """The training loss, or, where clients do not report it, that of the test set."""
    loss = row.get("loss")
    return row.get("test_loss") if loss is None else loss


def _runs_away(first: Row, row: Row) -> bool:
    """Whether the loss is far beyond that of the first round, when nothing was learned yet; NaN is."""
    begun, now = _loss_in(first), _loss_in(row)
    return begun is not None and begun > 0 and now is not None and not now < _TENFOLD * begun


def _away(job: Job, rows: Sequence[Row]) -> Row | None:
    """The round in which training has come off; of one that ends far out, the first that was so far."""
    if not rows or _loss_in(rows[0]) is None:
        return None
    found = next((row for row in rows if _runs_away(rows[0], row)), None)
    limit = _FAR * _of_nothing(job, rows[0])
    out = [row for row in rows if (now := _loss_in(row)) is not None and not now < limit]
    return out[0] if found is None and out and out[-1] is rows[-1] else found


def _diverged(first: Row, row: Row) -> str:
    """What to say of a round in which training has come off."""
    begun, now = _loss_in(first), _loss_in(row)
    return (
        f"training has diverged in round {row['round']}: the loss is {now:.4g}, after {begun:.4g} in round "
        f"{first['round']}."
    )


def _of_nothing(job: Job, first: Row) -> float:
    """The loss of having learned nothing: that of the first round, or of zeros, whichever is less."""
    begun = _loss_in(first)
    assert begun is not None
    y = job.test.y if job.test is not None else job.pool.clients[0].y if job.pool.clients else None
    if y is None:
        return begun
    y = y[:_READ] if isinstance(y, LazyTensor) else y
    zeros = torch.zeros(len(y), job.facts.outputs, dtype=job.weights.parameters.dtype, device=y.device)
    return min(begun, float(job.loss.mean(zeros, y)))


def _cure(job: Job) -> str:
    assert isinstance(job.config.lr, float)
    noise = (
        ""
        if job.scheme.plan is None
        else f", or, if it is the noise that drowns the updates, a smaller {spelled('clip')}"
    )
    warm = "" if job.config.warm_up else f", or with one that is warmed up, {spelled('warm_up', 0.05)}"
    lower = spelled("lr", float(f"{job.config.lr / 10:.1g}"))
    return f"Start anew with a lower learning rate, like {lower}{warm}{noise}."


def _client_view(job: Job, state: ServerState) -> ClientScores:
    assert job.test is not None
    veil = job.scheme.downlink.veil(
        job.architecture,
        state.weights,
        stream=job.secrets.stream("client view", state.round),
        head_level=state.head_level,
    )
    return score_client_view(job.architecture, state.weights, veil.broadcast(), job.test, job.loss)


def summarise(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The figures of a finished run."""
    config = job.config
    rows = outcome.rows
    summary: dict[str, Any] = {
        "engine": job.around.engine,
        "scheme": job.scheme.name,
        "holder": job.scheme.holder,
        "dataset": config.dataset,
        "model": config.model,
        "clients": len(job.pool),
        "rounds": outcome.state.round,
        "seed": config.seed,
        "simulation": job.secrets.simulation,
        "loss": job.loss.name,
        "loss_because": job.loss_because,
        "train_loss": next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None),
        "parameters": job.architecture.size,
        "seconds": round(sum(row.get("seconds") or 0.0 for row in rows), 3),
        "bytes_down": outcome.bytes_down,
        "bytes_up": outcome.bytes_up,
        "device": str(job.weights.parameters.device) if config.device == "auto" else config.device,
        "dtype": config.dtype,
        "fedveil": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if spared := job.scheme.downlink.spared(job.architecture):
        spared *= job.weights.parameters.element_size()
        summary |= {f"needed_{way}": max(summary[way] - spared, 0.0) for way in ("bytes_down", "bytes_up")}
    if job.client_names:
        summary["client_names"] = list(job.client_names)
    if job.description is not None:
        summary["data"] = job.description.summary()
    if outcome.scores is not None:
        summary |= {**outcome.scores.as_data(), **outcome.scores.own_data()}
    if outcome.judged is not None:
        summary["judged"] = outcome.judged.as_data()
    summary |= {**outcome.validation, **outcome.held_back}
    if outcome.client_view is not None:
        summary |= outcome.client_view.as_data()
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    away = _away(job, rows)
    if away is not None:
        last, nothing = _loss_in(rows[-1]), _of_nothing(job, rows[0])
        summary["diverged"], summary["recovered"] = away["round"], last is not None and last < nothing
        advice = " It has recovered." if summary["recovered"] else f" {_cure(job)}"
        ended = "A" if last is None else f"It ended at {last:.4g}; a"
        untrained = f" {ended} model that is not trained, or answers 0 to everything, has {nothing:.4g}."
        summary["warning"] = _diverged(rows[0], away) + advice + untrained
    limit = job.scheme.uplink.loss_limit
    if limit is not None and losses and max(losses) >= limit:
        summary["warning"] = (
            f"the training loss has reached value_range = {limit:g}, beyond which numbers are cut off: lower the "
            "learning rate, or clip if it is the noise that drowns the updates"
        )
    if job.coverage is not None:
        summary["family"], summary["coverage"] = job.coverage.family, job.coverage.fraction
        summary["visible"] = [parameter.name for parameter in job.coverage.visible]
        if job.coverage.family != "scale":
            summary["levels"] = job.coverage.levels
            summary["secret_bits"], summary["secret_reals"] = job.coverage.bits, job.coverage.reals
    if outcome.stopped:
        summary["stopped"] = outcome.stopped
    if config.target_accuracy is not None:
        summary["target"] = target_reached(config.target_accuracy, rows)
    if weights := getattr(job.loss, "class_weights", ()):
        summary["class_weights"] = list(weights)
    skipped = sum("skipped" in row for row in rows)
    failed = sum("failed" in row for row in rows) - skipped
    summary |= {"skipped_rounds": skipped} if skipped else {}
    if failed:
        summary["failed_rounds"] = failed
    bad = [row["round"] for row in rows if "suspects" in row]
    if bad:
        summary["bad_rounds"] = bad
    summary["ledger"] = outcome.privacy_journal.ledger(rounds=outcome.state.round).as_data()
    return summary
