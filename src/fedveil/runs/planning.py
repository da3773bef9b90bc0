"""Charging an account for rounds that were never run: every round, one for all of them, or a certified bound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil import schemes
from fedveil.downlink import Architecture, draw_for
from fedveil.errors import ConfigError, spelled
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.caveats import sampled_clients
from fedveil.ledger.correlated import (
    DENSE_UP_TO,
    NoiseGraph,
    NoiseLayout,
    by_peer,
    worst,
    worst_candidate,
)
from fedveil.ledger.sparse import OWN_ALONE
from fedveil.ledger.statement import Ledger
from fedveil.protocol.directory import Cohort, graph_seed
from fedveil.protocol.parts import BoundedWork, Scheme, bounded
from fedveil.runs.job import attended
from fedveil.runs.privacy_journal import accountant_for, composed, floors, ledger_of
from fedveil.schemes import Setting
from fedveil.schemes.options import Budget
from fedveil.schemes.registry import Option
from fedveil.secrets import OsSecrets
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.work import Batches, Schedule, make_loss

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

    @property
    def times(self) -> float:
        """How many times what the first round costs, whoever takes part most and in the dearest rounds pays at most."""
        return self.plan.target.affordable(0)

    def told(self, what: str) -> str:
        """In a sentence."""
        often = f"{self.participations} times"
        if self.plan.target.decay != 1:
            often = f"{self.times:,.6g} times, as the {self.participations} rounds with the least noise cost"
        return f"{what}, taken {often}"

    def noise_layout(self, round: int = 0, *, plan: NoisePlan | None = None) -> NoiseLayout:
        """The noise of a round."""
        members = self.cohort.draw(round)
        if self.cohort.rate:  # of usual size, large and small clients alike
            count, size = self.cohort.clients, self.cohort.expected
            members = tuple(place * count // size for place in range(size))
        samples = [self.samples[client] for client in members]
        reach = [self.work.sensitivity(count) for count in samples]
        seed = graph_seed(beacon=b"planned", round=round, members=members)
        return (plan or self.plan).noise_layout(members, samples, reach, seed=seed, round=round)


@dataclass(frozen=True, eq=False)
class Charged:
    """The noise of the first round, and how the account was charged, in a sentence (nothing to add: empty)."""

    first: NoiseLayout
    how: str = ""


def charge(accountant: Accountant, rounds: Rounds) -> Charged:
    """Charge `accountant` for a whole run in which everybody answers."""
    plan, size = rounds.plan, rounds.cohort.expected
    paired = plan.layout == "pairs" and plan.circle(size) is None  # what a circle proves is alike every round
    sparse = paired and plan.neighbours is not None
    each = min(plan.neighbours or size, size - 1)
    if paired and size > LARGEST_COMPLETE and size * each > LARGEST_COMPLETE**2:
        raise ConfigError(
            f"{size} clients who share noise with {each:,} others each make {size * each // 2:,} pairs and more. Give "
            f"fewer {spelled('neighbours')}: a few for each are enough."
        )
    if sparse and size > DENSE_UP_TO:
        return _bounded(accountant, rounds)
    first = rounds.noise_layout()
    if rounds.cohort.everybody and not sparse:
        accountant.charge(first)
        _repeat(accountant, rounds.times, rounds=rounds.count)
        return Charged(first)
    # Any client may have the busiest seats, or be drawn most often.
    if size <= ROUND_BY_ROUND_UP_TO and not rounds.cohort.shuffled and not rounds.cohort.rate:
        for round in range(rounds.count):
            accountant.charge(rounds.noise_layout(round))
        return Charged(first)
    accountant.charge(first)
    for name, spent in accountant.spent.items():
        client = int(np.argmax(spent))
        accountant.spent[name] = _one(accountant.clients, client, float(spent[client]))
    _repeat(accountant, rounds.times, rounds=rounds.count)
    return Charged(first, rounds.told("the worst client of one round"))


def _bounded(accountant: Accountant, rounds: Rounds) -> Charged:
    """A large sparse graph: one round's worst client, with a certified bound over everybody, for all rounds."""
    plan = rounds.plan
    # The paper's size needs no accounting; what the exact one is follows from the bound.
    pinned = replace(plan, accounting="paper", strength=plan.pair_strength(rounds.samples))
    unscaled = rounds.noise_layout(plan=pinned)
    graph = NoiseGraph(unscaled.residual, unscaled.first, unscaled.second, unscaled.pairs)
    dearest = worst(graph, unscaled.sensitivity)
    colluders = accountant.dishonest(len(unscaled.members))
    peers = by_peer(unscaled, colluders=max(1, colluders))
    prices = {
        SERVER: (unscaled.members[dearest.position], dearest.upper),
        CLIENTS: (unscaled.members[int(np.argmax(peers))], float(peers.max())),
    }
    if COLLUSION in accountant.adversaries:
        if plan.accounting == "exact":  # a target is not met by an estimate
            own = unscaled.sensitivity**2 / unscaled.residual
            prices[COLLUSION] = unscaled.members[int(np.argmax(own))], float(own.max())
            accountant.how = OWN_ALONE
        else:
            client, estimate = _colluding(unscaled, colluders, weakest=dearest.position)
            prices[COLLUSION] = max((client, estimate), prices[SERVER], key=lambda pair: pair[1])
            accountant.certified = False
            tried = f"worst candidate of {_DRAWS} random draws of {colluders} colluders"
            if colluders == 1:
                tried = "worst candidate against each neighbour of the client that is worst off"
            accountant.how = f"{tried}; colluders may do better"
    scale = 1.0
    if plan.accounting == "exact":
        scale = max(price for _, price in prices.values()) / plan.target.per_round(0)
    for name, (client, price) in prices.items():
        accountant.spent[name] = _one(accountant.clients, client, rounds.times * price / scale)
    accountant.rounds = rounds.count
    first = replace(unscaled, residual=unscaled.residual * scale, pairs=unscaled.pairs * scale)
    how = (
        rounds.told("server: one round's graph")
        + f"; client {prices[SERVER][0]} is charged at least {dearest.lower / dearest.upper:.4f} of this, and a "
        "certified bound says that nobody is charged more"
    )
    return Charged(first, how)


def _colluding(noise_layout: NoiseLayout, colluders: int, *, weakest: int) -> tuple[int, float]:
    """(client, μ²) of the worst candidate over a few sets of colluders: an estimate from below.

    One colluder alone is a neighbour of the member at `weakest`; more are drawn at random.
    """
    random = np.random.default_rng(0)
    members, best = np.asarray(noise_layout.members), (noise_layout.members[0], 0.0)
    drawn = (random.permutation(len(members))[:colluders] for _ in range(_DRAWS))
    touching = (noise_layout.first == weakest) | (noise_layout.second == weakest)
    near = (noise_layout.first + noise_layout.second - weakest)[touching]
    for chosen in drawn if colluders > 1 else iter(near[:, None]):
        honest = np.ones(len(members), dtype=np.bool_)
        honest[chosen] = False
        kept = honest[noise_layout.first] & honest[noise_layout.second]
        place = np.cumsum(honest) - 1
        ends = place[noise_layout.first[kept]], place[noise_layout.second[kept]]
        graph = NoiseGraph(noise_layout.residual[honest], *ends, noise_layout.pairs[kept])
        dearest = worst_candidate(graph, noise_layout.sensitivity[honest], slack=1e-3)
        best = max(best, (int(members[honest][dearest.position]), dearest.upper), key=lambda pair: pair[1])
    return best


def _repeat(accountant: Accountant, times: float, *, rounds: int) -> None:
    """Whatever was charged, so many times over, as the price of so many rounds."""
    for spent in accountant.spent.values():
        spent *= times
    accountant.rounds = rounds


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
    return tuple(max(1, round(size)) for size in np.linspace(least, ratio * least, clients).tolist())


def check_sizes(sizes: Sequence[int], *, clients: int) -> tuple[int, ...]:
    """Sample counts as given, one per client."""
    if len(sizes) != clients:
        raise ConfigError(f"{len(sizes)} sample counts for {clients} clients: give one for each, or --size-ratio.")
    if min(sizes) < 1:
        raise ConfigError(f"A client needs at least one sample (got {min(sizes)}).")
    return tuple(sizes)


_SAMPLING = "ldp"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run that is not to be trained. `samples` holds one count per client, `options` are the scheme's."""

    scheme: str
    samples: tuple[int, ...]
    rounds: int
    cohort: float | int | None = None
    sampling_rate: float | None = None
    batch_size: int = 0
    options: Mapping[str, Option] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("There must be at least one client.")
        if self.sampling_rate is not None and not 0 < self.sampling_rate <= 1:
            raise ConfigError(f"sampling_rate must lie above 0 and be at most 1 (got {self.sampling_rate}).")
        if self.rounds < 1:
            raise ConfigError(f"rounds must be positive (got {self.rounds}).")
        if self.batch_size < 0:
            raise ConfigError(f"batch_size must not be negative (got {self.batch_size}).")
        if self.options.get("secret_sampling") is not None and self.scheme != _SAMPLING:
            raise ConfigError(
                f"Secret sampling amplifies nothing under {self.scheme}. Only a sample that nobody else sees does: "
                f"under {_SAMPLING} a client draws its own records. Clients are drawn by the server, which therefore "
                "knows the sample."
            )


@dataclass(frozen=True)
class Noise:
    """The noise of a round. `in_sum` is what stays in the sum of gradients, `on_mean` the same on their mean.

    `own` is the least and most a client adds for itself, `shared` the same for the noise of one pair.
    `strength` is λ, how strong shared noise is made.
    """

    in_sum: float
    on_mean: float
    own: tuple[float, float]
    shared: tuple[float, float] | None = None
    strength: float | None = None


@dataclass(frozen=True)
class Sampled:
    """What secret sampling is worth: σ over the clipping bound that meets the target with and without it."""

    rate: float
    relation: str
    multiplier: float
    multiplier_without: float


@dataclass(frozen=True)
class Planned:
    """The answer: the ledger such a run would end with, and its noise, exact and by the paper's formula."""

    ledger: Ledger
    clients: int
    cohort: int
    rounds: int
    participations: int
    sampling_rate: float | None = None
    accounting: str | None = None
    exact: Noise | None = None
    paper: Noise | None = None
    sampled: Sampled | None = None

    @property
    def saving(self) -> float | None:
        """How much less noise exact accounting needs in the sum than the paper's formula asks for."""
        if self.exact is None or self.paper is None:
            return None
        return 1.0 - self.exact.in_sum / self.paper.in_sum

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        return {**dataclasses.asdict(self), "ledger": self.ledger.as_data(), "saving": self.saving}


def plan_run(question: Question, *, model: tuple[nn.Module, torch.Tensor] | None = None) -> Planned:
    """Answer a question; `model` (with an example of its input) makes the bounds that depend on one concrete."""
    cohort = Cohort.of(
        len(question.samples),
        cohort=question.cohort,
        seed=question.seed,
        sampling_rate=question.sampling_rate,
        rounds=question.rounds,
    )
    scheme, cohort = _scheme(question, cohort)
    participations = cohort.most_participations(question.rounds)
    cohort.check_fits(scheme.uplink)
    architecture = _traced(scheme, model)
    answer = Planned(
        _unspent(question, scheme, architecture, cohort, participations, concrete=model is not None),
        clients=len(question.samples),
        cohort=cohort.expected,
        rounds=question.rounds,
        participations=participations,
        sampling_rate=cohort.rate or None,
    )
    plan = scheme.plan
    if plan is None:
        return answer
    rounds = Rounds(plan, bounded(scheme.work), cohort, question.samples, question.rounds)
    accountant = accountant_for(scheme, len(question.samples))
    assert accountant is not None
    charged = charge(accountant, rounds)
    other = _other(rounds)
    both = {plan.accounting: (plan, charged.first), other[0].accounting: other}
    notes = (charged.how,) if charged.how else ()
    if cohort.rate:
        notes = (*notes, sampled_clients(cohort.rate, most=plan.target.participations, rounds=plan.target.rounds))
    releases = scheme.releases(architecture)
    return replace(
        answer,
        ledger=ledger_of(scheme, releases, accountant, charged.first, simulation=False, notes=notes),
        accounting=plan.accounting,
        exact=_noise(*both["exact"], question.samples),
        paper=_noise(*both["paper"], question.samples),
        sampled=_sampled(plan),
    )


def _scheme(question: Question, cohort: Cohort) -> tuple[Scheme, Cohort]:
    info = schemes.find(question.scheme)
    loss = info.default_loss
    setting = Setting(
        make_loss("cross-entropy" if loss == "auto" else loss),
        Batches(question.batch_size, question.seed),
        Schedule(1.0),
        rounds=question.rounds,
    )
    return attended(info, setting, question.options, cohort=cohort, simulation=False)


def _traced(scheme: Scheme, model: tuple[nn.Module, torch.Tensor] | None) -> Architecture:
    # Which fields leave a client does not depend on the network.
    stand_in = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), torch.randn(2, 8)
    net, example = stand_in if model is None else model
    return draw_for(scheme.downlink, net.train(), example)[0]


def _unspent(
    question: Question,
    scheme: Scheme,
    architecture: Architecture,
    cohort: Cohort,
    participations: int,
    *,
    concrete: bool,
) -> Ledger:
    """The ledger of a scheme that counts nothing, with what its paper's figure comes to."""
    delta = question.options.get("delta")
    figure = composed(scheme, rounds=participations, delta=Budget.delta if delta is None else float(delta))
    notes = [] if figure is None else [figure.said()]
    floor = floors(scheme, architecture, clients=cohort.size, stream=OsSecrets().stream("ledger"))
    if floor is not None:
        notes.append(
            floor.said()
            if concrete
            else "if Ψ and Φ were hidden: given R the noise is bounded, so δ has a floor at every ε, which depends on "
            f"the smallest R of the network (name one with {spelled('model')})"
        )
    return ledger_of(scheme, scheme.releases(architecture), None, None, simulation=False, notes=tuple(notes))


def _other(rounds: Rounds) -> tuple[NoisePlan, NoiseLayout]:
    """The same round under the other accounting."""
    plan = rounds.plan
    if plan.accounting == "exact":
        paper = replace(plan, accounting="paper", sampling=None)
        return paper, rounds.noise_layout(plan=paper)
    exact = replace(plan, accounting="exact")
    spare = Accountant(
        len(rounds.samples),
        collusion=plan.collusion,
        least=plan.least_dishonest,
        asked=plan.asked or 0,
        trusted=plan.trusted,
    )
    return exact, charge(spare, replace(rounds, plan=exact, count=1)).first


def _noise(plan: NoisePlan, noise_layout: NoiseLayout, samples: tuple[int, ...]) -> Noise:
    total = sum(samples[client] for client in noise_layout.members)
    in_sum = math.sqrt(float(noise_layout.residual.sum()))
    own = noise_layout.residual**0.5
    if not len(noise_layout.pairs):
        return Noise(in_sum, in_sum / total, (float(own.min()), float(own.max())))
    pair = noise_layout.pairs**0.5
    strength = plan.pair_strength([samples[client] for client in noise_layout.members])
    return Noise(
        in_sum,
        in_sum / total,
        (float(own.min()), float(own.max())),
        (float(pair.min()), float(pair.max())),
        strength,
    )


def _sampled(plan: NoisePlan) -> Sampled | None:
    if plan.sampling is None:
        return None
    # Replacing a record moves the sum of a batch by 2·C.
    without = 2.0 / math.sqrt(plan.target.per_round())
    return Sampled(plan.sampling, "replace-one", plan.noise_multiplier(), without)
