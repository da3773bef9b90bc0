"""What a guessing game says about a claim: lower bounds on ε from the canaries of one run.

m canaries each take one of two places by a fair coin S_i = ±1. An observer of the run guesses `guesses` of the coins,
as many as were fixed before it looked, and is right about W of them. Canaries share a run, so W is no binomial
variable; what holds of it follows from what is claimed of each coin given all others.

**Any (ε, δ)** (Steinke, Nasr and Jagielski 2023, Theorem 5.2). With f(v) = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v],

    P[W ≥ v] ≤ f(v) + 2·m·δ·max_{1 ≤ i ≤ m} (f(v − i) − f(v))/i.

**A Gaussian mechanism of strength μ**, of which more is claimed than one (ε, δ): no event B has M(+) ∈ B with a
probability above g(P[M(−) ∈ B]), g(x) = Φ(Φ⁻¹(x) + μ). Fix a coin i, the others, and let B_b be the outcomes on which
the guess at i is b and v − 1 or more of the others are right. Where S_i = b these are right about i and W ≥ v; where
S_i = −b they are wrong about i and W ≥ v − 1. As g is concave, the mean over b, the other coins and i keeps the
inequality:

    E[W·1(W ≥ v)]/m ≤ g(E[(r − W)·1(W ≥ v − 1)]/m).

In tails t_v = P[W ≥ v] this is a lower bound of t_{v−1} that grows with every t_i, i ≥ v:

    t_{v−1} ≥ (m·g⁻¹((v·t_v + Σ_{i>v} t_i)/m) + Σ_{i≥v} t_i)/(r − v + 1).

So t_c ≥ τ forces tails down to t_0, and where that exceeds 1 the premise was wrong: P[W ≥ c] < τ. (Mahloujifar, Melis
and Chaudhuri 2024 bound W for any trade-off function in this way.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import ndtr, ndtri

from fedveil.errors import ConfigError
from fedveil.ledger.gaussian import epsilon_of, mu_of

CONFIDENCE = 0.95
MOST = 1_000_000
"""So many canaries a game has at the most."""
_HIGHEST = 50.0
_EXACT = 1e-4
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
_LEAST_GUESSES = 20
_TOO_LITTLE = 2.0


@dataclass(frozen=True)
class Guesses:
    """How a game went: of `canaries` coins so many were guessed, so many of them rightly."""

    canaries: int
    guessed: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guessed <= self.canaries or self.canaries < 1:
            raise ConfigError(
                f"{self.correct} right of {self.guessed} guesses at {self.canaries} canaries is no outcome of a game."
            )


def tail_bound(game: Guesses, *, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at the most, where each coin has (ε, δ): Theorem 5.2."""
    from scipy.stats import binom  # slow to import, and a run that trains has no use for it

    counts = np.arange(game.correct + 1)
    tails = binom.sf(counts - 1, game.guessed, 1.0 / (1.0 + math.exp(-epsilon)))
    least = float(tails[game.correct])
    if not game.correct or not delta:
        return least
    steps = counts[1:]
    slope = float(np.max((tails[game.correct - steps] - least) / steps))
    # Beyond v steps f stays at 1, and the quotient falls.
    return min(1.0, least + 2.0 * game.canaries * delta * slope)


def gaussian_excludes(game: Guesses, *, mu: float, tau: float) -> bool:
    """Whether a Gaussian mechanism of strength μ gives so many right guesses with a probability below τ."""
    canaries, guessed, right = game.canaries, game.guessed, game.correct
    tail, above, summed = tau, 0.0, tau  # t_v, Σ_{i>v} t_i, Σ_{i≥v} t_i
    for v in range(right, 0, -1):
        forced = canaries * float(ndtr(ndtri(min((v * tail + above) / canaries, 1.0)) - mu)) + summed
        above, tail = summed, max(tail, forced / (guessed - v + 1))
        if tail > 1.0:
            return True
        summed += tail
    return False


def epsilon_at_least(game: Guesses, *, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest ε that the game rules out at this confidence, whatever the mechanism; 0 where it rules out none."""
    return _largest(lambda epsilon: tail_bound(game, epsilon=epsilon, delta=delta) <= 1.0 - confidence)


def mu_at_least(game: Guesses, *, confidence: float = CONFIDENCE) -> float:
    """The largest μ that the game rules out at this confidence for a Gaussian mechanism; 0 where it rules out none."""
    return _largest(lambda mu: gaussian_excludes(game, mu=mu, tau=1.0 - confidence))


def _largest(excluded: Callable[[float], bool]) -> float:
    """The end of an interval [0, x) of excluded values, from below."""
    if not excluded(0.0):
        return 0.0
    low, high = 0.0, _HIGHEST
    while high - low > _EXACT:
        middle = (low + high) / 2.0
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class GuessPlan:
    """How many coins are guessed, and what bound on ε a mechanism that spends all of its claim shows on average."""

    guesses: int
    expected: float


def plan_guesses(canaries: int, *, mu: float, delta: float, gaussian: bool) -> GuessPlan:
    """How many guesses a game should make, from the claim alone: to choose after looking would void the bound.

    Where a claim is spent to the full, scores are N(±μ/2, 1). The observer guesses at the largest of either sign, and
    among those beyond t a share of Φ(μ/2 − t)/(Φ(μ/2 − t) + Φ(−μ/2 − t)) is right. Few guesses show most of honest
    noise, but even if all are right they rule out little: noise of half the size has to contradict its claim, where
    any number of guesses lets it.
    """
    if not math.isfinite(mu) or mu <= 0:
        return GuessPlan(canaries, math.inf)
    plans = []
    for guesses in sorted({min(canaries, max(_LEAST_GUESSES, round(share * canaries))) for share in _SHARES}):
        honest, halved = (_expected(canaries, guesses, mu=mu * factor) for factor in (1.0, _TOO_LITTLE))
        shown = epsilon_of(mu_at_least(honest), delta) if gaussian else epsilon_at_least(honest, delta=delta)
        caught = excludes(halved, epsilon=epsilon_of(mu, delta), delta=delta, gaussian=gaussian)
        plans.append((caught, shown, guesses))
    _, expected, guesses = max(plans)
    return GuessPlan(guesses, expected)


def excludes(game: Guesses, *, epsilon: float, delta: float, gaussian: bool, confidence: float = CONFIDENCE) -> bool:
    """Whether a game rules an (ε, δ) out at this confidence; of `gaussian` noise, all that it would claim with it."""
    tau = 1.0 - confidence
    if gaussian:
        return gaussian_excludes(game, mu=mu_of(epsilon, delta), tau=tau)
    return tail_bound(game, epsilon=epsilon, delta=delta) <= tau


def follows(shown: float, game: Guesses, *, delta: float, gaussian: bool, confidence: float) -> bool:
    """Whether a bound on ε is the one that a game gives, without the search that found it."""
    if not 0 <= shown < math.inf:
        return False
    # What was searched for is exact in μ, or in ε.
    step = epsilon_of(mu_of(shown, delta) + 2 * _EXACT, delta) if gaussian else shown + 2 * _EXACT
    ruled_out = partial(excludes, game, delta=delta, gaussian=gaussian, confidence=confidence)
    below = max(0.0, shown - 1e-6 * (1 + shown))
    return (not shown or ruled_out(epsilon=below)) and not ruled_out(epsilon=step)


def _expected(canaries: int, guesses: int, *, mu: float) -> Guesses:
    right = _expected_right(guesses / canaries, mu) * canaries
    return Guesses(canaries, guesses, min(guesses, round(right)))


def _expected_right(share: float, mu: float) -> float:
    """Of all coins, how many are guessed rightly where those with the largest scores, so large a share, are guessed."""
    low, high = 0.0, mu + 40.0
    for _ in range(60):
        middle = (low + high) / 2.0
        beyond = float(ndtr(mu / 2 - middle) + ndtr(-mu / 2 - middle))
        low, high = (middle, high) if beyond > share else (low, middle)
    return float(ndtr(mu / 2 - low))
