"""Charging an account for rounds that were never run: every round, one for all of them, or a certified bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedveil.errors import ConfigError
from fedveil.ledger.account import CLIENTS, COLLUSION, SERVER, Account
from fedveil.ledger.correlated import DENSE_UP_TO, Covering, by_peer
from fedveil.ledger.sparse import NoiseGraph, worst, worst_candidate
from fedveil.protocol import Cohort
from fedveil.protocol.parts import BoundedWork
from fedveil.uplink.graph import graph_seed
from fedveil.uplink.plan import NoisePlan

ROUND_BY_ROUND_UP_TO = 250
LARGEST_COMPLETE = 4000
_DRAWS = 4


@dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of a run: how noise is planned, who may take part and how often."""

    plan: NoisePlan
    work: BoundedWork
    cohort: Cohort
    samples: tuple[int, ...]
    count: int

    @property
    def participations(self) -> int:
        """How many rounds one client takes part in at most."""
        return self.plan.target.participations

    def covering(self, round: int = 0, *, plan: NoisePlan | None = None) -> Covering:
        """The noise of a round."""
        members = self.cohort.draw(round)
        samples = [self.samples[client] for client in members]
        reach = [self.work.sensitivity(count) for count in samples]
        seed = graph_seed(beacon=b"planned", round=round, members=members)
        return (plan or self.plan).covering(members, samples, reach, seed=seed)


@dataclass(frozen=True, eq=False)
class Charged:
    """The noise of the first round, and how the account was charged, in a sentence (nothing to add: empty)."""

    first: Covering
    how: str = ""


def charge(account: Account, rounds: Rounds) -> Charged:
    """Charge `account` for a whole run in which everybody answers."""
    plan, size = rounds.plan, rounds.cohort.size
    sparse = plan.layout == "pairs" and plan.neighbours is not None
    if plan.layout == "pairs" and not sparse and size > LARGEST_COMPLETE:
        raise ConfigError(
            f"{size} clients of which every two share noise make {size * (size - 1) // 2:,} pairs. Give --neighbours: "
            "a few for each are enough."
        )
    if sparse and size > DENSE_UP_TO:
        return _bounded(account, rounds)
    first = rounds.covering()
    if size == rounds.cohort.clients and not sparse:
        account.charge(first)
        _repeat(account, rounds.count)
        return Charged(first)
    if size <= ROUND_BY_ROUND_UP_TO and not rounds.cohort.shuffled:  # any client may have the busiest seats
        for round in range(rounds.count):
            account.charge(rounds.covering(round))
        return Charged(first)
    account.charge(first)
    for name, spent in account.spent.items():
        client = int(np.argmax(spent))
        account.spent[name] = _one(account.clients, client, float(spent[client]))
    _repeat(account, rounds.participations)
    account.rounds = rounds.count
    return Charged(first, f"the worst client of one round, taken {rounds.participations} times")


def _bounded(account: Account, rounds: Rounds) -> Charged:
    """A large sparse graph: one round's worst client, with a certified bound over everybody, for all rounds."""
    plan = rounds.plan
    # The paper's size needs no accounting; what the exact one is follows from the bound.
    pinned = replace(plan, accounting="paper", strength=plan.pair_strength(rounds.samples))
    unscaled = rounds.covering(plan=pinned)
    graph = NoiseGraph(unscaled.residual, unscaled.first, unscaled.second, unscaled.pairs)
    found = worst(graph, unscaled.sensitivity)
    colluders = account.dishonest(len(unscaled.members))
    peers = by_peer(unscaled, colluders=max(1, colluders))
    prices = {
        SERVER: (unscaled.members[found.position], found.upper),
        CLIENTS: (unscaled.members[int(np.argmax(peers))], float(peers.max())),
    }
    if COLLUSION in account.adversaries:
        client, estimate = _colluding(unscaled, colluders, weakest=found.position)
        prices[COLLUSION] = max((client, estimate), prices[SERVER], key=lambda one: one[1])
        account.certified = False
        tried = f"worst candidate of {_DRAWS} random draws of {colluders} colluders"
        if colluders == 1:
            tried = "worst candidate against each neighbour of the client that is worst off"
        account.how = f"{tried}; colluders may do better"
    scale = 1.0
    if plan.accounting == "exact":
        scale = max(price for _, price in prices.values()) / plan.target.per_round()
    for name, (client, price) in prices.items():
        account.spent[name] = _one(account.clients, client, rounds.participations * price / scale)
    account.rounds = rounds.count
    first = replace(unscaled, residual=unscaled.residual * scale, pairs=unscaled.pairs * scale)
    how = (
        f"server: one round's graph, taken {rounds.participations} times; client {prices[SERVER][0]} is charged at "
        f"least {found.lower / found.upper:.4f} of this, and a certified bound says that nobody is charged more"
    )
    return Charged(first, how)


def _colluding(covering: Covering, colluders: int, *, weakest: int) -> tuple[int, float]:
    """(client, μ²) of the worst candidate over a few sets of colluders: an estimate from below.

    One colluder alone is a neighbour of the member at `weakest`; more are drawn at random.
    """
    random = np.random.default_rng(0)
    members, best = np.asarray(covering.members), (covering.members[0], 0.0)
    drawn = (random.permutation(len(members))[:colluders] for _ in range(_DRAWS))
    touching = (covering.first == weakest) | (covering.second == weakest)
    near = (covering.first + covering.second - weakest)[touching]
    for chosen in drawn if colluders > 1 else iter(near[:, None]):
        honest = np.ones(len(members), dtype=np.bool_)
        honest[chosen] = False
        kept = honest[covering.first] & honest[covering.second]
        place = np.cumsum(honest) - 1
        ends = place[covering.first[kept]], place[covering.second[kept]]
        graph = NoiseGraph(covering.residual[honest], *ends, covering.pairs[kept])
        found = worst_candidate(graph, covering.sensitivity[honest], slack=1e-3)
        best = max(best, (int(members[honest][found.position]), found.upper), key=lambda one: one[1])
    return best


def _repeat(account: Account, times: int) -> None:
    """Whatever was charged, so many times over."""
    for spent in account.spent.values():
        spent *= times
    account.rounds = times


def _one(clients: int, client: int, value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    spent = np.zeros(clients)
    spent[client] = value
    return spent


def even_sizes(clients: int, *, mean: int, ratio: float) -> tuple[int, ...]:
    """Sample counts from smallest to largest in equal steps, the largest `ratio` times the smallest."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise ConfigError(f"The largest client's samples over the smallest's must be at least 1 (got {ratio}).")
    if clients < 1:
        raise ConfigError(f"There must be at least one client (got {clients}).")
    if mean < 1:
        raise ConfigError(f"A client needs at least one sample (got {mean}).")
    least = 2 * mean / (1 + ratio)
    return tuple(max(1, round(one)) for one in np.linspace(least, ratio * least, clients).tolist())


def check_sizes(sizes: Sequence[int], *, clients: int) -> tuple[int, ...]:
    """Sample counts as given, one per client."""
    if len(sizes) != clients:
        raise ConfigError(f"{len(sizes)} sample counts for {clients} clients: give one for each, or --size-ratio.")
    if min(sizes) < 1:
        raise ConfigError(f"A client needs at least one sample (got {min(sizes)}).")
    return tuple(sizes)
