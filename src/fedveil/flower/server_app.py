"""FedVeil's own app on the server's side: one run, from the app's configuration to the summary in its folder."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid

from fedveil.client_held.messages import Finish
from fedveil.client_held.server import RelayRole
from fedveil.config import RunConfig
from fedveil.engine import ClientPool
from fedveil.errors import CheckpointError, ConfigError, FedVeilError
from fedveil.flower import messages
from fedveil.flower.app_folder import Extras, merged_settings, settings_of
from fedveil.flower.commands import Events, tell
from fedveil.flower.engine import FlowerEngine, Standing, read_progress
from fedveil.flower.home import described
from fedveil.flower.messages import Setup
from fedveil.framing import pack
from fedveil.own_code import typed
from fedveil.roles.server import ServerState
from fedveil.runs.callbacks import Row, Say
from fedveil.runs.folder import RunFolder, chosen, recorder_for, write_atomically
from fedveil.runs.job import (
    Guard,
    Job,
    Surroundings,
    agreed,
    assemble_job,
    first_model,
    first_seed,
    located,
    read_roster,
    settled,
)
from fedveil.runs.loop import Outcome, conduct, fresh_state, privacy_journal_of, server_role
from fedveil.runs.preflight import preflight
from fedveil.runs.session import continue_in, train_into


@dataclass(frozen=True, eq=False)
class RelayProgress(Standing[Setup]):
    """After `round` rounds clients hold, or will with `farewell`, what `setup`'s attempt has brought them to.

    `row` are the last round's metrics, which may not have been written yet.
    """

    round: int
    row: dict[str, Any]

    @staticmethod
    def of(role: RelayRole, setup: Setup, *, round: int, row: dict[str, Any]) -> RelayProgress:
        """How far a relay has come."""
        return RelayProgress(setup, Finish(*role.standing), round, row)

    def write(self, path: Path) -> None:
        """Replace what was kept."""
        facts: dict[str, Any] = {"round": self.round, "row": self.row}
        parts: dict[str, bytes] = {}
        self.put_into(facts, parts)
        write_atomically(path, pack(facts, parts))

    @staticmethod
    def read(path: Path) -> RelayProgress | None:
        """What was kept; None where no round has ended yet."""

        def kept(facts: dict[str, Any], parts: dict[str, bytes]) -> RelayProgress:
            found = Standing.found_in(facts, parts, Setup.parse)
            return RelayProgress(found.setup, found.farewell, int(facts["round"]), dict(facts["row"]))

        left = "the run cannot be resumed. Its clients have their models (in their own folders)."
        return read_progress(path, kept, damaged=left)


_TRUST = (
    "trust level worker, on Flower: whoever may submit runs chooses the code of the app that SuperNodes execute. A "
    "client's data and secrets are in its worker, which takes no code from there; run it as another user, or submit "
    "runs only from where every client trusts"
)


def serve(grid: Grid, context: Context) -> None:
    """One run, from the app's configuration to the summary in its folder."""
    os.umask(0o077)  # the run folder holds the server's model
    try:
        _serve(grid, context)
    except FedVeilError as reason:
        tell("failed", text=str(reason), exit_code=reason.exit_code)
        raise
    except Exception as reason:
        tell("failed", text=f"{type(reason).__name__}: {reason}", exit_code=1)
        raise


def _serve(grid: Grid, context: Context) -> None:
    config, extras = settings_of(context.run_config)
    folder = RunFolder(Path(extras.out or f"runs/flower-{context.run_id}").resolve(), engine="flower")
    if extras.resume:
        config = folder.config(_given(context))
    else:
        folder.require_free()
        # The app is code that whoever submits it has run here, and what it names is no less theirs.
        config = config.with_changes(model=typed(config.model))
    config = located(settled(config))
    if config.lr == "auto":
        raise ConfigError("lr = 'auto' tries rates where all clients are in one process: give a number here.")
    job = server_job(config, extras.data)
    warnings = preflight(job, begins=not extras.resume)
    if config.record:
        chosen(job)
    if not extras.resume:
        folder.start(job.config)
        folder.remember_own_data(extras.data)
    else:
        folder.take()
    events = Events(folder)
    for text in warnings:
        events.note("note", text)
    prune_beside(folder, days=extras.keep_days)
    standing = _standing(folder, config) if extras.resume and not job.model_here else None
    train = partial(train_on_flower, grid=grid, folder=folder, extras=extras, events=events, standing=standing)

    def say(text: str) -> None:
        tell("said", text=text)

    if not extras.resume:
        summary = train_into(job, folder, fresh_state(job), quiet=True, say=say, train=train)
    elif job.model_here:
        summary, _ = continue_in(job, folder, quiet=True, say=say, train=train)
    elif (done := folder.finished(config)) is not None:
        say(f"The run is finished, with {done['rounds']} rounds: nothing is left to do.")
        summary = done
    else:
        state = fresh_state(job)
        state.round = 0 if standing is None else standing.round
        state.attempt = folder.resume(config)
        kept = folder.go_on(state.round)
        if standing is not None and len(kept) < standing.round:  # killed between the two files
            folder.append_metrics(standing.row)
            kept.append(standing.row)
        summary = train_into(job, folder, state, earlier=kept, quiet=True, say=say, train=train)
    tell("done", out=str(folder.path), summary=summary)


def _going_on(folder: RunFolder) -> list[Path]:
    return [folder.checkpoints, folder.relay_file]


def prune_beside(
    folder: RunFolder,
    *,
    days: float,
    engine: str = "flower",
    going_on: Callable[[RunFolder], list[Path]] = _going_on,
) -> list[Path]:
    """Delete what only `going_on` needs of finished runs of this engine that lie beside this one and ended `days` ago.

    Models, ledgers, privacy journals, metrics and events stay. Returns the folders that were pruned.
    """
    before = time.time() - 86_400.0 * days
    pruned = []
    for path in _beside(folder.path):
        other = RunFolder(path, engine=engine)
        try:
            if other.summary_file.stat().st_mtime > before:
                continue
            other.stored_settings()  # refuses the folders of another engine
            places = [place for place in going_on(other) if place.exists()]
            if places:
                other.take()
                for place in places:
                    if place.is_dir():
                        shutil.rmtree(place, ignore_errors=True)
                    else:
                        place.unlink()
                other.note("pruned", f"the run ended more than {days:g} days ago: what only going on needs is deleted")
                pruned.append(path)
        except (CheckpointError, ConfigError, OSError):
            continue  # not finished, in use, damaged, or somebody else's: it is left as it is
        finally:
            other.release()
    return pruned


def _beside(path: Path) -> list[Path]:
    try:
        return sorted(other for other in path.parent.iterdir() if other != path and not other.is_symlink())
    except OSError:
        return []


def _standing(folder: RunFolder, config: RunConfig) -> RelayProgress | None:
    standing = RelayProgress.read(folder.relay_file)
    if standing is None and (reached := folder.reached()) and folder.finished(config) is None:
        raise CheckpointError(
            f"{folder.relay_file} is gone, which says how far clients came in {reached} rounds: the run cannot go on. "
            "Its clients have their models (in their own folders). Begin a new run."
        )
    return standing


def _given(context: Context) -> dict[str, Any]:
    """What the app and the command line say about the run, without what is about Flower."""
    own = {field.name for field in dataclasses.fields(Extras)}
    given = {name: value for name, value in merged_settings(context.run_config).items() if name not in own}
    return {**given, "model": typed(str(given["model"]))} if "model" in given else given


def server_job(config: RunConfig, module: str) -> Job:
    """A job whose clients are elsewhere: the server's model, its scheme, and what it may judge the model by."""
    if config.simulate_dropout:
        raise ConfigError("simulate_dropout is for the local engine: on Flower clients drop out by themselves.")
    description = described(config, module)
    facts, seed = description.facts, config.seed
    assert seed is not None
    common = agreed(config, clients=config.clients, task=facts.task, outputs=facts.outputs)
    held_here = common.scheme.holder == "server"
    if config.weights is not None and not held_here:
        raise ConfigError(
            "weights are read by the server, and in this scheme clients begin by themselves: leave them out."
        )
    if config.record and not held_here:
        raise ConfigError(
            "record keeps what a server knows, and in this scheme it has no model: record a run of the local engine, "
            "or have clients record what they see (record = true in client.toml)."
        )
    # Clients are told the seed, for their batches: a model that is to be secret must not follow from it.
    own = first_seed(config) if held_here else seed
    pool = ClientPool((), elsewhere=config.clients)
    guard = Guard(roster=None if config.roster is None else read_roster(config.roster))
    test, validation = (description.test, description.validation) if held_here else (None, None)
    model = first_model(config, facts, seed=own)
    job = assemble_job(config, model, pool, test, facts, common=common, guard=guard, validation=validation)
    return dataclasses.replace(job, around=Surroundings("flower", messages.RELEASES, (_TRUST,)))


def train_on_flower(
    job: Job,
    *,
    state: ServerState,
    on_round: Callable[[Row, ServerState], None],
    on_begin: Callable[[int], None],
    on_answer: Callable[[int, int], None] | None,
    journal: Path | None,
    record: Path | None,
    say: Say,
    grid: Grid,
    folder: RunFolder,
    extras: Extras,
    events: Events,
    standing: RelayProgress | None,
) -> Outcome:
    """Train from `state` to the last round, with clients behind Flower nodes; `standing` is how far they came before,
    where they hold the model. What is recorded is what the server sees: what clients know is not here."""
    config = job.config
    start = 0 if standing is None else standing.reached
    facts = dataclasses.asdict(job.facts)
    setup = Setup.of(config, facts, lineage=folder.lineage, attempt=state.attempt, start=start)
    recorder = None if record is None else recorder_for(job, record, attempt=state.attempt)
    authority = job.scheme.uplink.authority
    engine = FlowerEngine(
        grid,
        setup,
        clients=config.clients + (authority is not None),  # which is one more node
        deadline=extras.deadline,
        events=events,
        roster=job.guard.roster,
        listen=None if recorder is None else recorder.hear,
        workers=True,
    )
    tell("began", scheme=config.scheme, rounds=config.rounds, round=state.round, out=str(folder.path))
    engine.assemble()
    if authority is not None and not engine.has(authority):
        raise ConfigError(
            f"{config.scheme} needs a key authority, and no node says that it is number {authority}: on a machine that "
            f"is not the server's, `fedveil flower client HOME --number {authority} --authority`, and a SuperNode with "
            "that home. For a trial on one machine, `fedveil flower up --authority`."
        )
    behind: tuple[int, ...] = ()
    if standing is not None:
        behind = engine.bring_up_to_date(standing)
    privacy_journal = privacy_journal_of(job, journal, state)
    role = server_role(
        job if recorder is None else dataclasses.replace(job, scheme=recorder.scheme),
        state,
        privacy_journal.accountant,
        name=setup.name,
        behind=behind,
        announced=privacy_journal.announced,
    )

    def boundary(row: Row, now: ServerState) -> None:
        if isinstance(role, RelayRole):
            RelayProgress.of(role, setup, round=now.round, row=row).write(folder.relay_file)
        try:
            on_round(row, now)
        finally:
            tell("round", **row)

    try:
        outcome = conduct(
            job, engine, role, privacy_journal, state=state, on_round=boundary, on_begin=on_begin, say=say
        )
    finally:
        if recorder is not None:
            recorder.close()
    for client, why in role.left_out.items():
        say(f"Client {client} took no part: it {why}.")
    privacy_journal.pinned = engine.pinned
    return outcome
