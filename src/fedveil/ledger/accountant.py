"""What each client has spent: μ² per adversary, over every round and attempt; budgets over unlike rounds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError, ProtocolError, spelled
from fedveil.ledger.correlated import NoiseLayout, by_peer, central, charges, only, without, worst_collusion
from fedveil.ledger.gaussian import epsilon_of, mu_of, sampled_epsilon
from fedveil.ledger.sparse import OWN_ALONE

SERVER = "server"
COLLUSION = "server and colluding clients"
CLIENTS = "clients"

_ROUNDING = 1e-9

Prices = NDArray[np.float64]


@dataclass
class Accountant:
    """μ² of every client against the server, against it with dishonest clients, and against those clients alone.

    Dishonest are `collusion`·k of the k clients that a round has `asked`, whoever is away (of those that are there if
    they are more), and at `least` so many: they tell what they know, or add no noise, which comes to the same.
    `limit` is the μ² no client may exceed against any of them (None: no target), `limits` every client's own where they
    differ. With `trusted`, the server adds the noise itself and only clients are adversaries. `honest_arrivals` takes
    the server's word for whose upload did not arrive.
    """

    clients: int
    limit: float | None = None
    collusion: float = 0.0
    least: int = 0
    asked: int = 0
    trusted: bool = False
    honest_arrivals: bool = False
    limits: Prices | None = None
    spent: dict[str, Prices] = field(default_factory=dict)
    rounds: int = 0
    certified: bool = True
    how: str = ""

    def __post_init__(self) -> None:
        for name in self.adversaries:
            self.spent.setdefault(name, np.zeros(self.clients))

    @property
    def adversaries(self) -> tuple[str, ...]:
        """Against whom is counted."""
        if self.trusted:
            return (CLIENTS,)
        return (SERVER, COLLUSION, CLIENTS) if self.collusion > 0 or self.least > 0 else (SERVER, CLIENTS)

    def dishonest(self, count: int) -> int:
        """How many of a round's `count` clients may be dishonest; one of them is honest in any case."""
        among = max(count, self.asked)
        return min(max(math.ceil(self.collusion * among - _ROUNDING), self.least), count - 1)

    def prices(
        self,
        noise_layout: NoiseLayout,
        *,
        arrived: Collection[int] | None = None,
        revealed: Collection[tuple[int, int]] = (),
        published: bool = True,
        seen: Collection[int] | None = None,
    ) -> dict[str, Prices]:
        """μ² of one round, per adversary, in the order of the noise layout's members.

        `arrived` are the uploads in the sum (None: all), `seen` those that the server has got, refused ones among them
        (None: those in the sum). Clients see the sum only if it was `published`, that is, if the model was moved by it.
        """
        if self.trusted:
            # The server's noise does not depend on who stayed away.
            here = (
                np.ones(len(noise_layout.members)) if arrived is None else np.isin(noise_layout.members, list(arrived))
            )
            return {CLIENTS: np.where(here, central(noise_layout), 0.0) if published else np.zeros(len(here))}
        dishonest = self.dishonest(len(noise_layout.members))
        by_clients = np.zeros(len(noise_layout.members))
        if published:
            by_clients = by_peer(noise_layout, arrived=arrived, revealed=revealed, colluders=max(1, dishonest))
        # Under masks the sum is all there is to see, and it lacks the noise of whoever is missing. One that was not
        # opened is charged as planned, neither more nor less: clients may yet be asked to open what was kept back.
        if noise_layout.summed:
            seen = arrived if published else None
        elif not self.honest_arrivals:
            seen = None
        else:
            seen = arrived if seen is None else seen
        prices = {SERVER: charges(noise_layout, arrived=seen, revealed=revealed), CLIENTS: by_clients}
        if COLLUSION in self.adversaries:
            prices[COLLUSION] = np.maximum(self._with_colluders(noise_layout, seen, revealed), prices[SERVER])
        return prices

    def _with_colluders(
        self, noise_layout: NoiseLayout, seen: Collection[int] | None, revealed: Collection[tuple[int, int]]
    ) -> Prices:
        # What the masks can be made to open does not depend on who is said to have arrived.
        fixed = noise_layout.summed and noise_layout.removable
        if seen is None or fixed:
            return self._worst(noise_layout, without(noise_layout, revealed))
        among, here = only(noise_layout, seen), set(seen)
        alone = self._worst(noise_layout, without(among, [pair for pair in revealed if here.issuperset(pair)]))
        if revealed or noise_layout.summed:
            return alone
        # Some uploads tell no more than all of them would, and what these share with the others still covers them.
        everything = self._worst(noise_layout, noise_layout)
        return np.where(np.isin(noise_layout.members, list(here)), np.minimum(alone, everything), 0.0)

    def _worst(self, noise_layout: NoiseLayout, hidden: NoiseLayout) -> Prices:
        """μ² of all members by what is `hidden` from the worst colluders."""
        result = np.zeros(len(noise_layout.members))
        if not hidden.members:
            return result
        colluders = self.dishonest(len(noise_layout.members))
        worst = worst_collusion(hidden, min(colluders, len(hidden.members) - 1))
        # Nothing is spent against a limit by an estimate.
        held = self.limit is not None
        self.certified &= held or worst.certified
        self.how = OWN_ALONE if held and not worst.certified else worst.how
        result[np.isin(noise_layout.members, hidden.members)] = worst.proven if held else worst.mu2
        return result

    def exceeded_by(
        self,
        noise_layout: NoiseLayout,
        *,
        arrived: Collection[int] | None = None,
        revealed: Collection[tuple[int, int]] = (),
        seen: Collection[int] | None = None,
    ) -> set[int]:
        """The members that this round would bring over the limit, against whomever."""
        if self.limit is None:
            return set()
        members = np.asarray(noise_layout.members)
        limit = self.limit if self.limits is None else self.limits[members]
        over = np.zeros(len(members), dtype=np.bool_)
        for name, price in self.prices(noise_layout, arrived=arrived, revealed=revealed, seen=seen).items():
            over |= self.spent[name][members] + price > limit * (1 + _ROUNDING)
        return set(members[over].tolist())

    def charge(
        self,
        noise_layout: NoiseLayout,
        *,
        arrived: Collection[int] | None = None,
        revealed: Collection[tuple[int, int]] = (),
        published: bool = True,
        seen: Collection[int] | None = None,
    ) -> None:
        """Book one round.

        A client that stayed away pays too, unless arrivals are taken on the server's word; one whose upload was refused
        pays in any case, since the server has it.
        """
        members = np.asarray(noise_layout.members)
        prices = self.prices(noise_layout, arrived=arrived, revealed=revealed, published=published, seen=seen)
        for name, price in prices.items():
            self.spent[name][members] += price
        self.rounds += 1

    def worst(self, adversary: str) -> tuple[int, float]:
        """(client, μ) of whoever has spent most."""
        client = int(np.argmax(self.spent[adversary]))
        return client, math.sqrt(float(self.spent[adversary][client]))

    def epsilon(self, adversary: str, delta: float) -> float:
        """ε at δ of the client who has spent most."""
        return epsilon_of(self.worst(adversary)[1], delta)


@dataclass
class SampledAccountant(Accountant):
    """Every client adds noise for itself, σ/C = `noise_multiplier`, to a batch drawn secretly with probability `rate`.

    Nobody but the client knows the batch, so that everybody else is the same adversary. `limit` is a
    number of rounds here, and `spent` counts them.
    """

    noise_multiplier: float = 0.0
    rate: float = 1.0
    delta: float = 1e-5

    def prices(
        self,
        noise_layout: NoiseLayout,
        *,
        arrived: Collection[int] | None = None,
        revealed: Collection[tuple[int, int]] = (),
        published: bool = True,
        seen: Collection[int] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """One round each."""
        return {name: np.ones(len(noise_layout.members)) for name in self.adversaries}

    def worst(self, adversary: str) -> tuple[int, float]:
        """(client, the μ of a Gaussian mechanism with the same ε at `delta`) of whoever took part most often."""
        client = int(np.argmax(self.spent[adversary]))
        reached = self.epsilon(adversary, self.delta)
        return client, mu_of(reached, self.delta) if 0 < reached < math.inf else reached

    def epsilon(self, adversary: str, delta: float) -> float:
        """ε at δ of whoever took part most often, by privacy loss distributions, replace-one."""
        rounds = round(float(self.spent[adversary].max()))
        if rounds == 0:
            return 0.0
        return sampled_epsilon(
            noise_multiplier=self.noise_multiplier, sampling_rate=self.rate, rounds=rounds, delta=delta
        )


# --- what rounds of pure differential privacy add up to
#
# T mechanisms that are ε-private each, chosen one after the other, are at every ε′ exactly as private as T answers by
# randomised response (Kairouz, Oh and Viswanath 2015):
#
#     δ(ε′) = Σ_{l ≤ T} C(T, l)·max(0, e^((T − l)·ε) − e^(ε′ + l·ε)) / (1 + e^ε)^T.

_MARGIN = 1e-9


def composed_pure_epsilon(epsilon: float, *, rounds: int, delta: float) -> float:
    """The least ε′ (not rounded downwards) at which `rounds` releases of `epsilon` each are (ε′, δ)-private."""
    if not (math.isfinite(epsilon) and epsilon > 0) or rounds < 1 or not 0 < delta < 1:
        raise ConfigError(f"{rounds} rounds of ε = {epsilon} at δ = {delta} make no figure.")
    low, high = 0.0, rounds * epsilon
    while high - low > _MARGIN * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(middle, epsilon, rounds) * (1 + _MARGIN) <= delta else (middle, high)
    return high


def _delta(target: float, epsilon: float, rounds: int) -> float:
    whole = rounds * (epsilon + math.log1p(math.exp(-epsilon)))  # ln (1 + e^ε)^T
    terms = []
    for lies in range(rounds + 1):
        gain = (rounds - 2 * lies) * epsilon - target
        if gain <= 0:
            break
        ways = math.lgamma(rounds + 1) - math.lgamma(lies + 1) - math.lgamma(rounds - lies + 1)
        terms.append(math.exp(ways + (rounds - lies) * epsilon - whole) * -math.expm1(-gain))
    return math.fsum(terms)


# --- noise that shrinks from round to round, and how a run's budget is shared among rounds that cost unlike amounts
#
# Of T rounds, round t = 0 … T − 1 has noise of deviation σ_t = σ_0·ρᵗ. What a round costs, μ_t² = (S/σ_t)², grows as
# ρ^(−2t), and costs of Gaussian releases add up exactly, whatever each of them is. Whoever takes part in P rounds pays
# most if those are the last P, so that the budget μ² is met by everybody, whichever rounds are theirs, if
#
#     μ_t² = μ² / n_t,      n_t = Σ_{j < P} ρ^(2(t − (T − 1 − j)))
#
# where n_t is how many rounds like round t the budget would pay for: P for all t where ρ = 1.

MOST_SHRINKING = 2.0**20
"""How many times the noise of the last round that of the first may be: beyond, early rounds are nothing but noise."""


def check_decay(decay: float, *, rounds: int) -> None:
    """Refuse a factor a round that is none, or that makes first rounds of so much noise that no number holds it."""
    if not 0 < decay <= 1:
        raise ConfigError(
            f"{spelled('noise_decay')} is the factor by which noise shrinks each round: above 0 and at most 1, not "
            f"{decay}; 1 keeps it as it is."
        )
    if (rounds - 1) * -math.log(decay) > math.log(MOST_SHRINKING):
        least = MOST_SHRINKING ** (-1 / (rounds - 1))
        raise ConfigError(
            f"Noise that shrinks to {decay:g} of itself in each of {rounds} rounds is more than {MOST_SHRINKING:,.0f} "
            f"times as large in the first as in the last. Give fewer rounds, or a {spelled('noise_decay')} of at least "
            f"{math.ceil(least * 1000) / 1000:g}."
        )


def affordable_rounds(round: int | None, *, decay: float, rounds: int, participations: int) -> float:
    """How many rounds with the noise of `round` (from 0) the whole budget pays for; never rounded downwards.

    Args:
        round: Which of the run's rounds; None will do where all are alike.
        decay: The factor on the noise's deviation from one round to the next.
        rounds: How many rounds the run has.
        participations: In how many of them one client takes part at most.

    Returns:
        n_t: what one such round costs is a budget's n_t-th part.
    """
    if decay == 1:
        return float(participations)
    if round is None or not 0 <= round < rounds:
        which = "a round of no number" if round is None else f"round {round + 1}"
        raise ProtocolError(f"noise that shrinks is planned for rounds 1 to {rounds}, not for {which}")
    latest = math.fsum(decay ** (2 * place) for place in range(participations))
    return latest * decay ** (2 * (round - rounds + 1)) * (1 + 1e-12)
