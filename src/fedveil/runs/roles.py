"""The two roles of a job: who holds the model decides which they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fedveil.engines import LocalEngine
from fedveil.ledger.account import Account
from fedveil.protocol import (
    ClientRole,
    Held,
    HolderRole,
    RelayRole,
    RelayState,
    RoundDone,
    ServerRole,
    ServerState,
)
from fedveil.runs.job import Job
from fedveil.secrets import SeededSecrets


def server_role(
    job: Job,
    state: ServerState,
    account: Account | None = None,
    *,
    name: str = "",
    behind: Collection[int] = (),
    announced: Mapping[int, int] | None = None,
) -> ServerRole | RelayRole:
    """The server of a run, whose name begins with `name` and in which clients have `announced` sizes before.

    Where the model lives with the clients, `state` is the run's record and not the server's: the server is given the
    number of the round and nothing else.
    """
    if job.scheme.holder == "server":
        return ServerRole(
            job.scheme,
            job.blueprint,
            state,
            secrets=job.secrets,
            cohort=job.cohort,
            optimiser=job.optimiser,
            rounds=job.config.rounds,
            account=account,
            name=name,
            announced=announced,
        )
    return RelayRole(
        job.scheme,
        job.blueprint,
        RelayState(state.round, state.attempt),
        secrets=job.secrets,
        cohort=job.cohort,
        rounds=job.config.rounds,
        account=account,
        name=name,
        behind=behind,
        announced=announced,
    )


def client_role(job: Job, state: ServerState | None = None) -> ClientRole | HolderRole:
    """The clients of a job, with secrets that do not lead to the server's.

    `state` is where clients that hold the model themselves begin (default: with the job's own weights).
    """
    source = job.secrets.branch("clients") if isinstance(job.secrets, SeededSecrets) else job.secrets
    guard = job.guard
    if job.scheme.holder == "server":
        return ClientRole(
            job.scheme,
            job.blueprint,
            secrets=source,
            policy=guard.policy,
            roster=guard.roster,
            identities=guard.identities,
        )
    start = (
        Held.fresh(job.weights.clone()) if state is None else Held.fresh(state.weights.clone(), state.velocity.clone())
    )
    return HolderRole(
        job.scheme,
        job.blueprint,
        start=start,
        optimiser=job.optimiser,
        secrets=source,
        policy=guard.policy,
        roster=guard.roster,
        identities=guard.identities,
    )


def taken_from_a_client(role: HolderRole, engine: LocalEngine, done: RoundDone, state: ServerState) -> RoundDone:
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
