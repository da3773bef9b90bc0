"""How far a run has come whose model lives with its clients: what the server keeps so that no round is lost.

The sums of the last round are on their way to the clients only with the next one. They are kept here, and given to the
clients first when the run is resumed.
"""

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
from fedveil.client_held.server import Farewells, RelayRole
from fedveil.config import RunConfig
from fedveil.engine import ClientPool
from fedveil.errors import CheckpointError, ConfigError, FedVeilError, ProtocolError
from fedveil.flower import messages
from fedveil.flower.app_folder import Extras, merged_settings, settings_of
from fedveil.flower.commands import Events, tell
from fedveil.flower.engine import FlowerEngine
from fedveil.flower.home import described
from fedveil.flower.messages import Setup
from fedveil.framing import pack, unpack
from fedveil.own_code import typed
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.phases import Ask
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
class RelayProgress:
    """After `round` rounds clients hold, or will with `farewell`, what `setup`'s attempt has brought them to.

    `row` are the last round's metrics, which may not have been written yet.
    """

    round: int
    setup: Setup
    farewell: Finish
    row: dict[str, Any]

    @property
    def reached(self) -> int:
        """The model's version, counted through all attempts."""
        return self.setup.start + self.farewell.version

    @staticmethod
    def of(role: RelayRole, setup: Setup, *, round: int, row: dict[str, Any]) -> RelayProgress:
        """How far a relay has come."""
        return RelayProgress(round, setup, Finish(*role.standing), row)

    def write(self, path: Path) -> None:
        """Replace what was kept."""
        facts = {"round": self.round, "setup": self.setup.to_text(), "row": self.row}
        write_atomically(path, pack(facts, {"farewell": encode(self.farewell)}))

    @staticmethod
    def read(path: Path) -> RelayProgress | None:
        """What was kept; None where no round has ended yet."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            facts, parts = unpack(content)
            farewell = decode(parts["farewell"])
            assert isinstance(farewell, Finish)
            return RelayProgress(int(facts["round"]), Setup.parse(facts["setup"]), farewell, dict(facts["row"]))
        except (ProtocolError, KeyError, ValueError, AssertionError) as reason:
            raise CheckpointError(
                f"{path} is damaged: the run cannot be resumed. Its clients have their models (in their own folders)."
            ) from reason


def bring_up_to_date(engine: FlowerEngine, standing: RelayProgress, *, clients: int) -> tuple[int, ...]:
    """Give everybody the last sums of the earlier attempt, under its own keys; returns who is not known to have them,
    and has to be lent the model."""
    farewell = standing.farewell
    everybody = tuple(range(clients))
    ask = Ask(everybody, farewell, Farewells(farewell.version, everybody))
    done = engine.gather(ask, standing.setup)
    return tuple(client for client in ask.to if client not in done.arrived)


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


def prune_beside(folder: RunFolder, *, days: float) -> list[Path]:
    """Delete what only going on needs of finished runs on Flower that lie beside this one and ended `days` ago.

    Models, ledgers, privacy journals, metrics and events stay. Returns the folders that were pruned.
    """
    before = time.time() - 86_400.0 * days
    pruned = []
    for path in _beside(folder.path):
        other = RunFolder(path, engine="flower")
        try:
            if other.summary_file.stat().st_mtime > before:
                continue
            other.stored_settings()  # refuses the folders of another engine
            if other.checkpoints.is_dir() or other.relay_file.exists():
                other.take()
                shutil.rmtree(other.checkpoints, ignore_errors=True)
                other.relay_file.unlink(missing_ok=True)
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
    engine = FlowerEngine(
        grid,
        setup,
        clients=config.clients,
        deadline=extras.deadline,
        events=events,
        roster=job.guard.roster,
        listen=None if recorder is None else recorder.hear,
        workers=True,
    )
    tell("began", scheme=config.scheme, rounds=config.rounds, round=state.round, out=str(folder.path))
    engine.assemble()
    behind: tuple[int, ...] = ()
    if standing is not None:
        behind = bring_up_to_date(engine, standing, clients=config.clients)
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
