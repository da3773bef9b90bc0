"""What a run would prove and how much noise that takes, answered without training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fedveil import schemes
from fedveil.downlink import Blueprint, draw
from fedveil.errors import ConfigError
from fedveil.ledger.account import Account
from fedveil.ledger.correlated import Covering
from fedveil.ledger.statement import Ledger
from fedveil.protocol import Cohort, Scheme
from fedveil.protocol.parts import bounded
from fedveil.runs.assumed_noise import composed, floors
from fedveil.runs.attendance import attended
from fedveil.runs.pricing import Rounds, charge
from fedveil.runs.privacy import account_for, ledger_of
from fedveil.schemes import Setting
from fedveil.schemes.noised import DELTA
from fedveil.schemes.registry import Option
from fedveil.secrets import OsSecrets
from fedveil.uplink.plan import NoisePlan
from fedveil.work import Batches, Schedule, make_loss

_SAMPLING = "ldp"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run that is not to be trained. `samples` holds one count per client, `options` are the scheme's."""

    scheme: str
    samples: tuple[int, ...]
    rounds: int
    cohort: float | int | None = None
    batch_size: int = 0
    options: Mapping[str, Option] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.samples:
            raise ConfigError("There must be at least one client.")
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
    cohort = Cohort.of(len(question.samples), cohort=question.cohort, seed=question.seed)
    scheme, cohort = _scheme(question, cohort)
    participations = cohort.most_participations(question.rounds)
    scheme.uplink.fits(cohort.size)
    blueprint = _traced(scheme, model)
    answer = Planned(
        _unspent(question, scheme, blueprint, cohort, participations, concrete=model is not None),
        clients=len(question.samples),
        cohort=cohort.size,
        rounds=question.rounds,
        participations=participations,
    )
    plan = scheme.plan
    if plan is None:
        return answer
    rounds = Rounds(plan, bounded(scheme.work), cohort, question.samples, question.rounds)
    account = account_for(scheme, len(question.samples))
    assert account is not None
    charged = charge(account, rounds)
    other = _other(rounds)
    both = {plan.accounting: (plan, charged.first), other[0].accounting: other}
    notes = (charged.how,) if charged.how else ()
    releases = scheme.releases(blueprint)
    return replace(
        answer,
        ledger=ledger_of(scheme, releases, account, charged.first, simulation=False, notes=notes),
        accounting=plan.accounting,
        exact=_noise(*both["exact"], question.samples),
        paper=_noise(*both["paper"], question.samples),
        sampled=_sampled(plan),
    )


def _scheme(question: Question, cohort: Cohort) -> tuple[Scheme, Cohort]:
    loss = schemes.find(question.scheme).default_loss
    setting = Setting(
        make_loss("cross-entropy" if loss == "auto" else loss),
        Batches(question.batch_size, question.seed),
        Schedule(1.0),
        rounds=question.rounds,
    )
    return attended(question.scheme, setting, question.options, cohort=cohort, simulation=False)


def _traced(scheme: Scheme, model: tuple[nn.Module, torch.Tensor] | None) -> Blueprint:
    # Which fields leave a client does not depend on the network.
    stand_in = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), torch.randn(2, 8)
    net, example = stand_in if model is None else model
    return draw(net.train(), example, traced=scheme.downlink.traced)[0]


def _unspent(
    question: Question,
    scheme: Scheme,
    blueprint: Blueprint,
    cohort: Cohort,
    participations: int,
    *,
    concrete: bool,
) -> Ledger:
    """The ledger of a scheme that counts nothing, with what its paper's figure comes to."""
    delta = question.options.get("delta")
    figure = composed(scheme, rounds=participations, delta=DELTA if delta is None else float(delta))
    notes = [] if figure is None else [figure.said()]
    floor = floors(scheme, blueprint, clients=cohort.size, stream=OsSecrets().stream("ledger"))
    if floor is not None:
        notes.append(
            floor.said()
            if concrete
            else "if Ψ and Φ were hidden: given R the noise is bounded, so δ has a floor at every ε, which depends on "
            "the smallest R of the network (name one with --model)"
        )
    return ledger_of(scheme, scheme.releases(blueprint), None, None, simulation=False, notes=tuple(notes))


def _other(rounds: Rounds) -> tuple[NoisePlan, Covering]:
    """The same round under the other accounting."""
    plan = rounds.plan
    if plan.accounting == "exact":
        paper = replace(plan, accounting="paper", sampling=None)
        return paper, rounds.covering(plan=paper)
    exact = replace(plan, accounting="exact")
    spare = Account(
        len(rounds.samples),
        collusion=plan.collusion,
        least=plan.least_dishonest,
        asked=plan.asked or 0,
        trusted=plan.trusted,
    )
    return exact, charge(spare, replace(rounds, plan=exact, count=1)).first


def _noise(plan: NoisePlan, covering: Covering, samples: tuple[int, ...]) -> Noise:
    total = sum(samples[client] for client in covering.members)
    in_sum = math.sqrt(float(covering.residual.sum()))
    own = covering.residual**0.5
    if not len(covering.pairs):
        return Noise(in_sum, in_sum / total, (float(own.min()), float(own.max())))
    pair = covering.pairs**0.5
    strength = plan.pair_strength([samples[client] for client in covering.members])
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
