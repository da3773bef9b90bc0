"""A dry run of what clients would refuse, so that a wrong setting ends a run before it has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.correlated import DENSE_UP_TO
from fedveil.protocol.directory import graph_seed
from fedveil.protocol.parts import bounded
from fedveil.runs.loop import client_role
from fedveil.runs.monitor import monitor_of
from fedveil.uplink.graph import n_out

if TYPE_CHECKING:
    from fedveil.protocol.cohort import Cohort
    from fedveil.runs.job import Job

_GRAPHS = 16


def preflight(job: Job) -> None:
    """Refuse settings under which the first round could not be, or some round probably not: nothing is sent."""
    scheme, policy = job.scheme, job.guard.policy
    monitor_of(job)
    client_role(job)
    scheme.uplink.prepare()
    uplink, first = scheme.uplink, job.cohort.draw(0)
    neighbours = uplink.noise_neighbours
    if neighbours is not None:
        _check_graphs(job.cohort, neighbours, rounds=job.config.rounds)
    try:
        if policy is not None and uplink.introduction != "none":
            policy.check_cohort(first[0], len(first))
        if scheme.plan is None or len(first) > DENSE_UP_TO or not job.pool.clients:
            return
        samples = [len(job.pool.clients[client]) for client in first]
        reach = [bounded(scheme.work).sensitivity(count) for count in samples]
        noise_layout = scheme.plan.noise_layout(first, samples, reach, seed=_seed(first, 0))
        if policy is not None and scheme.central is None:
            for client in first:
                policy.charged(noise_layout, client=client, spent=0.0)
    except ProtocolError as reason:
        raise ConfigError(f"The clients' policy lets not even one round be: {reason}.") from reason


def _check_graphs(cohort: Cohort, neighbours: int, *, rounds: int) -> None:
    """Every round draws a graph of its own; one that falls apart would end the run there."""
    fewer = min(neighbours, cohort.size - 1)
    for round in range(min(rounds, _GRAPHS)):
        members = cohort.draw(round)
        if not n_out(members, neighbours=fewer, seed=_seed(members, round)).connected():
            raise ConfigError(
                f"Graphs of {cohort.size} clients of which each picks {neighbours} fall apart (one of "
                f"{min(rounds, _GRAPHS)} drawn did), so that a group would be covered by its own noise alone. Raise "
                "--neighbours; 3 are mostly enough, 5 nearly always."
            )


def _seed(members: tuple[int, ...], round: int) -> bytes:
    return graph_seed(beacon=b"rehearsal", round=round, members=members)
