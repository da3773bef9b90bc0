"""How much noise each client keeps and each pair shares (NADP-FL, its Algorithm 2 and Table 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError, ProtocolError, spelled, unknown_name
from fedveil.ledger.accountant import affordable_rounds, check_decay
from fedveil.ledger.correlated import NoiseLayout, by_peer, charges, worst_collusion
from fedveil.ledger.gaussian import mu_of, paper_sigma, sampled_noise
from fedveil.ledger.sparse import Circle, least_circle
from fedveil.uplink.graph import Graph, circulant, complete, covering_graph, default_degree
from fedveil.uplink.grid import check_pairs, rounding_of


@dataclass(frozen=True, eq=False)
class Allocation:
    """Variances in units of the sum's noise variance, by position in the list of clients.

    `residual[i]` is what client i adds alone; pair (i, j) shares `steps[min(rank i, rank j)]`, where
    ranks sort the clients by their number of records.
    """

    residual: NDArray[np.float64]
    steps: NDArray[np.float64]
    rank: NDArray[np.int64]

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        """All shared variances as a dense symmetric matrix with a zero diagonal."""
        if not len(self.steps):
            return np.zeros((1, 1))
        # The last rank never is the smaller of two; it needs a place on the diagonal only.
        padded = np.append(self.steps, 0.0)
        matrix: NDArray[np.float64] = padded[np.minimum(self.rank[:, None], self.rank[None, :])]
        np.fill_diagonal(matrix, 0.0)
        return matrix


def allocate(sizes: Sequence[int]) -> Allocation:
    """Residual shares x_i = |D_i|/|D| and pair shares whose row sums are β_i = |D_i|²/|D_min|² − |D_i|/|D|.

    With β ascending, and β_{k−1} raised to β_k: θ_n = (β_n − Σ_{i<n} θ_i)/(k − n), x_ij = θ_{min(i,j)}.
    What is left of β_n, namely s_n = β_n − Σ_{i<n} θ_i, is carried along as
    s_{n+1} = s_n·(k−n−1)/(k−n) + (β_{n+1} − β_n): a sum of non-negative terms, so that rounding can
    neither make a share negative nor lose its digits when sizes differ by orders of magnitude.
    """
    counts = [int(size) for size in sizes]
    if not counts:
        raise ConfigError("Noise is shared among at least one client, not none.")
    for place, size in enumerate(counts):
        if size < 1:
            raise ConfigError(f"Every client needs at least one record, but number {place} in the list has {size}.")
    clients, total = len(counts), sum(counts)
    order = sorted(range(clients), key=counts.__getitem__)
    rank = np.empty(clients, dtype=np.int64)
    rank[order] = np.arange(clients)
    ascending = [counts[place] for place in order]
    if clients > 1:
        ascending[-2] = ascending[-1]
    steps = np.empty(clients - 1)
    smallest = counts[order[0]]
    left = 0.0
    before = 0
    for place in range(clients - 1):
        size = ascending[place]
        # β's growth, in whole numbers up to the division: (b − a)·((a + b)·|D| − m²)/(m²·|D|)
        grown = (size - before) * ((size + before) * total - smallest**2) / (smallest**2 * total)
        left = left * ((clients - place - 1) / (clients - place)) + grown
        steps[place] = left / (clients - place - 1)
        before = size
    return Allocation(residual=np.array(counts) / total, steps=steps, rank=rank)


def collusion_strength(*, clients: float, colluding: float, ratio_squared: float) -> float:
    """λ = √((k·α² − 1)/((1 − τ)·k − 1)): what pair noise is multiplied by against a share τ of colluders.

    k clients (math.inf for the limit √(α²/(1 − τ))), α² = (|D_max|/|D_min|)². The bound is the paper's,
    and covers the pair noise only: colluders also know their own residual noise.
    """
    if not 0.0 <= colluding < 1.0:
        raise ConfigError(f"The share of colluding clients must be at least 0 and below 1, not {colluding}.")
    if not 1.0 <= ratio_squared < math.inf:
        raise ConfigError(f"The squared ratio of largest to smallest client is at least 1, not {ratio_squared}.")
    if not (1.0 - colluding) * clients > 1.0:
        raise ConfigError(
            f"With {clients:g} clients of which a share of {colluding:g} collude, no two honest ones are left to "
            "share noise. Lower the share or let more clients take part."
        )
    if math.isinf(clients):
        return math.sqrt(ratio_squared / (1.0 - colluding))
    return math.sqrt((clients * ratio_squared - 1.0) / ((1.0 - colluding) * clients - 1.0))


Layout = Literal["local", "pairs", "sum"]
Accounting = Literal["exact", "paper"]
Rules = Literal["circle", "everybody"]
RULES: tuple[Rules, ...] = get_args(Rules)
ACCOUNTING: tuple[Accounting, ...] = get_args(Accounting)

COMPLETE_UP_TO = 128
"""The largest number of clients of which each shares noise with every other by default."""

COMPLETE_STRENGTH = 10.0
SPARSE_STRENGTH = math.sqrt(1000.0)
"""Pair over residual standard deviation on a sparse graph, where fewer pairs have to carry the cover."""

_SAFE = 1 + 1e-11
"""So much more variance that μ², added over thousands of rounds, does not end above the target by rounding."""


LEAST_EPSILON = 1e-9
LEAST_DELTA = 1e-100


@dataclass(frozen=True)
class Target:
    """(ε, δ) over a run in which one client takes part at most `participations` times.

    From each round to the next the noise's deviation is multiplied by `decay`. `each` has every client's own ε, by its
    number, where they differ; `epsilon` is then the strictest of them.
    """

    epsilon: float
    delta: float
    rounds: int
    participations: int
    rate: float = 1.0
    decay: float = 1.0
    each: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "each", tuple(self.each))  # a journal has lists
        for client, epsilon in enumerate(self.each):
            if not (math.isfinite(epsilon) and epsilon >= LEAST_EPSILON):
                raise ConfigError(f"epsilon_per_client: client {client} asks for {epsilon:g}, which is no ε.")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be a positive number (got {self.epsilon}).")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must lie strictly between 0 and 1 (got {self.delta}); 1e-5 is usual.")
        if self.epsilon < LEAST_EPSILON or self.delta < LEAST_DELTA:
            raise ConfigError(
                f"epsilon = {self.epsilon:g} at delta = {self.delta:g} asks for more noise than can be counted: at "
                f"least {LEAST_EPSILON:g} and {LEAST_DELTA:g} are taken."
            )
        if not 1 <= self.participations <= self.rounds:
            raise ConfigError(
                f"A client takes part in between 1 and all {self.rounds} rounds, not in {self.participations}."
            )
        check_decay(self.decay, rounds=self.rounds)

    @property
    def mu(self) -> float:
        """The largest μ of the whole run that meets the target."""
        return mu_of(self.epsilon, self.delta)

    def of(self, client: int) -> Target:
        """A client's own."""
        return replace(self, epsilon=self.each[client], each=()) if self.each else self

    def per_round(self, round: int | None = None) -> float:
        """μ² of one round, counted from 0: its part of the whole, an equal one where noise is the same in all."""
        return self.mu**2 / self.affordable(round)

    def affordable(self, round: int | None = None) -> float:
        """How many rounds with the noise of this one the target pays for."""
        return affordable_rounds(round, decay=self.decay, rounds=self.rounds, participations=self.participations)

    def shrinking(self) -> tuple[float, int, float, float]:
        """The factor a round, how many rounds, and the first and last one's deviation over one that stays the same."""
        first, last = (math.sqrt(self.affordable(t) / self.participations) for t in (0, self.rounds - 1))
        return self.decay, self.rounds, first, last


def dishonest(count: int, share: float) -> int:
    """How many of so many clients that share is, at least."""
    return math.ceil(share * count - 1e-9)


def smallest_sum(count: int, colluders: int) -> int:
    """Of how many of `count` clients a sum is that a key opens: as many as are honest, and two of those."""
    return min(max(count - colluders, colluders + 2), count)


@dataclass(frozen=True)
class NoisePlan:
    """Where noise goes ("local": each client enough for itself; "pairs": shared, with pair noise that
    cancels; "sum": shared, under masks that open with a `quorum` of a neighbourhood, or added once by a `trusted`
    server) and how its size is found.

    `per_sample`: the paper divides a client's reach by the largest number of samples, though what it clips is a whole
    update; under paper accounting, so do we.

    `asked` is how many clients a round asks: a share `collusion` of those may side with the server, however many of the
    others it says are away. `draws` is how many graphs the run allows; more than any run does, where nobody says.

    `decrypted` says that the sum is opened by a key, which clients hold together or an authority gives, of at least
    `smallest_sum` of them; or by masks in a key's place, of as many. `word_bits` is how long the words are that sums
    are made of.

    `graph` says by which rules pairs are made, so that a journal's rounds stay what they were: "everybody" are those
    from before there were circles, in which noise was also sized by estimates.
    """

    target: Target
    layout: Layout
    accounting: Accounting = "exact"
    strength: float | None = None
    collusion: float = 0.0
    neighbours: int | None = None
    tolerant: bool = False
    trusted: bool = False
    sampling: float | None = None
    quorum: float | None = None
    per_sample: bool = False
    asked: int | None = None
    draws: int = 1 << 34
    graph: Rules = "circle"
    decrypted: bool = False
    word_bits: int = 64

    def __post_init__(self) -> None:
        if self.sampling is not None and (self.layout != "local" or self.accounting != "exact"):
            raise ConfigError(
                "Secret sampling of records amplifies noise that a client adds for itself, by exact accounting: use "
                f"{spelled('scheme', 'ldp')} {spelled('accounting', 'exact')}."
            )
        if self.sampling is not None and self.target.each:
            raise ConfigError(
                "Under secret sampling one noise is found for all clients: leave out "
                f"{spelled('secret_sampling')} or {spelled('epsilon_per_client')}."
            )
        if self.sampling is not None and self.target.decay != 1:
            raise ConfigError(
                "Under secret sampling the noise of all rounds is found together and is the same in each: leave out "
                f"{spelled('secret_sampling')} or {spelled('noise_decay')}."
            )
        if self.accounting not in ACCOUNTING:
            raise unknown_name("accounting", self.accounting, ACCOUNTING)
        if self.graph not in RULES:
            raise unknown_name("graph", self.graph, RULES)
        if not 0 <= self.collusion < 1:
            raise ConfigError(f"collusion must lie in [0, 1) (got {self.collusion}).")
        if self.strength is not None and not (math.isfinite(self.strength) and self.strength >= 0):
            raise ConfigError(f"pair_strength must not be negative (got {self.strength}).")

    def target_of(self, client: int) -> Target:
        """What noise is made for: a client's own target where noise is its own, the strictest where it is shared."""
        return self.target.of(client) if self.layout == "local" else self.target

    def removable(self, count: int) -> int:
        """How many of `count` members a sum under masks may lack: all but a quorum of a neighbourhood, and oneself.

        Of a sum that a key opens, all but the smallest there is one for.
        """
        if self.decrypted:
            return count - smallest_sum(count, dishonest(max(count, self.asked or 0), self.collusion))
        if self.quorum is None:
            return 0
        holders = min(default_degree(count) if self.neighbours is None else self.neighbours, count - 1)
        needed = min(int(self.quorum * holders + 1e-9) + 1, holders)
        return count - 1 - needed

    @property
    def least_dishonest(self) -> int:
        """Where clients share noise, one of them is always counted as adding none or telling what it adds."""
        return 0 if self.layout == "local" or self.trusted else 1

    def colluders(self, count: int) -> int:
        """How many of `count` clients may side with the server or add no noise."""
        among = count if self.asked is None else max(count, self.asked)
        share = min(math.ceil(self.collusion * among - 1e-9), count)
        return max(share, min(self.least_dishonest, count - 1))

    def pair_strength(self, samples: Sequence[int]) -> float:
        """λ: as given, or 10 (√1000 where each picks a few); where dropouts leave pair noise behind, the paper's.

        On a circle so much more that the worst direction has as much pair noise as on a complete graph.
        """
        if self.strength is not None:
            return self.strength
        if self.accounting == "paper":
            return _paper_strength(samples, self.collusion)
        usual = _paper_strength([1] * len(samples), self.collusion) if self.tolerant else COMPLETE_STRENGTH
        circle = self.circle(len(samples))
        if circle is not None:
            return usual * math.sqrt(circle.count / circle.gap(self.colluders(circle.count)))
        return usual if self.tolerant or self.neighbours is None else SPARSE_STRENGTH

    def check_draws(self, draws: int, *, size: int) -> None:
        """Refuse rounds of `size` clients in a run of more graphs than are counted on: one could suit the server."""
        if self._around(size) and draws > self.draws:
            raise ProtocolError(
                f"the server speaks of a run of up to {draws:,} graphs, and the settings this client knows allow "
                f"{self.draws:,}: the chance that colluders surround somebody is bounded for those only. Both must be "
                "set up for the same number of rounds"
            )

    def _around(self, count: int) -> bool:
        exact = self.layout == "pairs" and self.accounting == "exact"
        return exact and self.graph == "circle" and count > COMPLETE_UP_TO

    def circle(self, count: int) -> Circle | None:
        """The circle on which so many clients share noise; None where each does with all, or with a few it picks."""
        if not self._around(count):
            return None
        colluders, draws = self.colluders(count), self.draws
        if self.neighbours is None:
            return least_circle(count, colluders=colluders, draws=draws)
        given = Circle(count, self.neighbours, draws) if 1 < self.neighbours <= (count - 1) // 2 else None
        return given if given is not None and given.gap(colluders) > 0 else None

    def noise_layout(
        self,
        members: Sequence[int],
        samples: Sequence[int],
        sensitivity: Sequence[float],
        *,
        seed: bytes,
        round: int | None = None,
    ) -> NoiseLayout:
        """The noise of a round with these clients (ascending), scaled to the target.

        Which `round` it is, counted from 0, must be said where noise shrinks over rounds.
        """
        # Everybody computes this alone; another order would deal the same pairs other shares.
        if any(later <= earlier for earlier, later in itertools.pairwise(members)):
            raise ProtocolError("a round must name each of its clients once, in ascending order")
        fixed = self.neighbours is None and self.circle(len(members)) is None
        drawn = b"" if fixed else seed  # without a graph to draw, every round is alike
        which = None if self.target.decay == 1 else round
        self.target.affordable(which)  # refuses a round that noise is not planned for
        return _noise_layout(self, tuple(members), tuple(samples), tuple(sensitivity), drawn, which)

    def noise_multiplier(self) -> float:
        """σ over the reach of one record, for secretly sampled records."""
        assert self.sampling is not None
        return sampled_noise(
            epsilon=self.target.epsilon,
            sampling_rate=self.sampling,
            rounds=self.target.participations,
            delta=self.target.delta,
        )

    def paper_scale(self, sensitivity: float, round: int | None = None) -> float:
        """The papers' s: S·√(4·T·ln(1/δ))/ε for pairs (two queries a round), S·√(2·q·T·ln(1/δ))/ε for local noise,
        S·√(2·T·ln(1/δ))/ε for noise added once. Where it shrinks, T is Σ_s ρ^(2(t − s)) in round t.

        Where n clients decrypt the sum, t of them honest, each adds S·√(2·ln(1.25/δ))/(ε·√(t − 1)) in every round.
        """
        target = self.target
        if self.decrypted:
            clients = max(self.asked or 0, 2)
            others = max(clients - dishonest(clients, self.collusion) - 1, 1)
            sigma = math.sqrt(2 * math.log(1.25 / target.delta)) / target.epsilon
            return sensitivity * sigma * math.sqrt(clients / others) * target.decay ** (round or 0)
        count = replace(target, participations=target.rounds).affordable(round)
        rounds = {"pairs": 2.0 * count, "local": target.rate * count, "sum": count}
        return sensitivity * paper_sigma(target.epsilon, target.delta, rounds[self.layout])


def _paper_strength(samples: Sequence[int], collusion: float) -> float:

    if collusion == 0 or len(samples) < 3:
        return 1.0
    ratio = (max(samples) / min(samples)) ** 2
    return collusion_strength(clients=len(samples), colluding=collusion, ratio_squared=ratio)


@lru_cache(maxsize=8)
def noise_graph(plan: NoisePlan, members: tuple[int, ...], seed: bytes) -> Graph:
    """Who shares noise with whom in a round of these clients (ascending)."""
    circle = plan.circle(len(members))
    if circle is not None:
        return circulant(members, circle, seed=seed)
    if plan.neighbours is None:
        return complete(members)
    alone = ", so that a group of clients would be covered by its own noise alone"
    return covering_graph(members, neighbours=plan.neighbours, seed=seed, because=alone)


@lru_cache(maxsize=32)
def _noise_layout(
    plan: NoisePlan,
    members: tuple[int, ...],
    samples: tuple[int, ...],
    sensitivity: tuple[float, ...],
    seed: bytes,
    round: int | None,
) -> NoiseLayout:
    if plan.layout == "local" or (plan.layout == "pairs" and len(members) == 1):
        reach, nobody = _reach(sensitivity, plan.word_bits), np.empty(0, dtype=np.int64)
        own = [plan.target_of(client) for client in members] if plan.target.each else [plan.target] * len(members)
        if plan.accounting == "paper":
            scales = np.asarray(
                [
                    replace(plan, target=one).paper_scale(bound, round)
                    for one, bound in zip(own, sensitivity, strict=True)
                ]
            )
            if plan.per_sample:
                scales /= max(samples)
        elif plan.sampling is not None:
            scales = reach / 2.0 * plan.noise_multiplier()
        else:
            costs = {one: one.per_round(round) for one in set(own)}
            scales = reach * np.sqrt(np.asarray([_SAFE / costs[one] for one in own]))
        return NoiseLayout(members, reach, scales**2, nobody, nobody, np.empty(0))
    unit, worst = _unscaled(plan, members, samples, sensitivity, seed)
    if plan.accounting == "paper":
        scale = plan.paper_scale(max(sensitivity), round) ** 2
    else:
        scale = worst / plan.target.per_round(round) * _SAFE
    if not math.isfinite(scale):
        raise ConfigError(
            "No amount of this noise meets the target: a client could be left with no noise that others do not know. "
            "Lower collusion, or raise the number of clients or neighbours."
        )
    return replace(unit, residual=unit.residual * scale, pairs=unit.pairs * scale)


def _reach(sensitivity: tuple[float, ...], word_bits: int) -> NDArray[np.float64]:
    return np.asarray(sensitivity, dtype=np.float64) * (1.0 + rounding_of(word_bits))


@lru_cache(maxsize=8)  # rounds whose noise differs in nothing but its size
def _unscaled(
    plan: NoisePlan, members: tuple[int, ...], samples: tuple[int, ...], sensitivity: tuple[float, ...], seed: bytes
) -> tuple[NoiseLayout, float]:
    """Shared noise in units of the sum's, and the μ² of whoever is worst off under it, where the plan is exact."""
    count, reach, nobody = len(members), _reach(sensitivity, plan.word_bits), np.empty(0, dtype=np.int64)
    by_size = np.asarray(samples, dtype=np.float64) / sum(samples)
    sized = plan.accounting == "paper" and not plan.decrypted
    residual = by_size if sized else np.full(count, 1 / count)
    if plan.layout == "sum":
        unit = NoiseLayout(members, reach, residual, nobody, nobody, np.empty(0), True, plan.removable(count))
    else:
        pairs = _pairs(plan, members, samples, seed)
        unit = NoiseLayout(members, reach, residual, *pairs, circle=plan.circle(count))
        check_pairs(unit)
    if plan.accounting == "paper":
        return unit, math.nan
    colluders = plan.colluders(count)
    worst = worst_of(unit, colluders, estimated=plan.graph == "everybody")
    if not plan.trusted:
        worst = np.maximum(worst, by_peer(unit, colluders=max(1, colluders)))
    return unit, float(worst.max())


def worst_of(noise_layout: NoiseLayout, colluders: int, *, estimated: bool = False) -> NDArray[np.float64]:
    """μ² per member against a server with that many clients on its side; may be `estimated` where nothing is proven."""
    alone = charges(noise_layout)
    if colluders == 0:
        return alone
    colluding = worst_collusion(noise_layout, colluders)
    # No set of colluders can make do with less than the server alone, but an estimate could.
    return np.maximum(alone, colluding.mu2 if estimated else colluding.proven)


def _pairs(
    plan: NoisePlan, members: tuple[int, ...], samples: tuple[int, ...], seed: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Pair variances in units of s²."""
    strength, graph = plan.pair_strength(samples), noise_graph(plan, members, seed)
    if plan.neighbours is None and plan.accounting == "paper":
        shares = allocate(samples).pairs[graph.first, graph.second]
        return graph.first, graph.second, shares * strength**2
    return graph.first, graph.second, np.full(len(graph.first), strength**2 / len(members))
