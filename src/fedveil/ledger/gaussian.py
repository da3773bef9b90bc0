"""What a Gaussian mechanism proves: the exact (ε, δ) curve, and the papers' looser formula.

A mechanism of strength μ (sensitivity over standard deviation; μ² adds over releases) is as private as
telling N(0, 1) from N(μ, 1), which gives exactly (Balle and Wang, 2018)

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ).

With x = ε/μ − μ/2, y = ε/μ + μ/2 and Mills' ratio m(t) = (1 − Φ(t))/φ(t), the identity e^ε·φ(y) = φ(x)
turns this into φ(x)·(m(x) − m(y)), in which nothing overflows and no large terms cancel. Every result
is rounded to the side that claims less privacy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.special import erfcx, ndtr, ndtri

from fedveil.errors import ConfigError, missing_extra, unknown_name

_ROOT_HALF_PI = math.sqrt(math.pi / 2)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_SMALLEST = math.nextafter(0.0, 1.0)


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest δ for which a mechanism of strength μ is (ε, δ)-private; ε = 0 gives the total variation."""
    _check_strength(mu)
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}: it must be a finite number, at least 0.")
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if low > 40:  # below exp(−800): smaller than any float, but not zero
        return _SMALLEST
    value = float(ndtr(-low)) - _scaled_tail(high, low) if low < -5 else _middle(low, high, mu)
    # The functions are good to a few ulps; an error of `low` by ulps of `high` enters through exp(−low²/2).
    margin = 1e-12 + 8 * sys.float_info.epsilon * max(1.0, abs(low)) * high
    return min(1.0, max(value * (1 + margin), _SMALLEST))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest ε ≥ 0 for which a mechanism of strength μ is (ε, δ)-private (infinite for infinite μ)."""
    _check_strength(mu)
    _check_delta(delta)
    if mu == math.inf:
        return math.inf
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    # δ(ε) ≤ Φ(μ/2 − ε/μ), which is δ at this ε.
    high = mu * mu / 2 - mu * float(ndtri(delta))
    while high < math.inf and (high <= 0 or delta_of(mu, high) > delta):
        high = max(2 * high, mu * mu, _SMALLEST)
    if high == math.inf:
        return math.inf
    return _bisect(lambda epsilon: delta_of(mu, epsilon) <= delta, wrong=0.0, right=high)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest strength μ that is (ε, δ)-private."""
    _check_epsilon(epsilon)
    _check_delta(delta)
    wrong = 1.0
    while delta_of(wrong, epsilon) <= delta:
        wrong *= 2
    right = wrong
    while delta_of(right, epsilon) > delta:
        right /= 2
    return _bisect(lambda mu: delta_of(mu, epsilon) <= delta, wrong=wrong, right=right)


def sigma_of(epsilon: float, delta: float) -> float:
    """The smallest standard deviation, in units of the sensitivity, that is (ε, δ)-private."""
    return math.nextafter(1 / mu_of(epsilon, delta), math.inf)


def paper_sigma(epsilon: float, delta: float, rounds: float = 1) -> float:
    """What the papers would add, in units of the sensitivity: √(2·T·ln(1/δ))/ε for T (expected) rounds."""
    _check_epsilon(epsilon)
    return _paper_product(delta, rounds) / epsilon


def paper_epsilon(sigma: float, delta: float, rounds: float = 1) -> float:
    """What the papers would claim for noise of σ sensitivities in each of T rounds: √(2·T·ln(1/δ))/σ."""
    if not sigma >= 0:
        raise ConfigError(f"sigma is {sigma}: a standard deviation is not negative.")
    return _paper_product(delta, rounds) / sigma if sigma else math.inf


def _middle(low: float, high: float, mu: float) -> float:
    """φ(low)·(m(low) − m(high)) where neither factor overflows."""
    if mu > 0.1:
        return _scaled_tail(low, low) - _scaled_tail(high, low)
    # The two ratios agree in most digits when μ is small: integrate −m'(t) = 1 − t·m(t) between them instead.
    points = (low + high) / 2 + mu / 2 * _NODES
    slope = 1 - points * _ROOT_HALF_PI * erfcx(points / math.sqrt(2))
    return math.exp(-low * low / 2) / math.sqrt(2 * math.pi) * mu / 2 * float(_WEIGHTS @ slope)


def _scaled_tail(point: float, at: float) -> float:
    """φ(at)·m(point)."""
    return math.exp(-at * at / 2) / 2 * float(erfcx(point / math.sqrt(2)))


def _bisect(holds: Callable[[float], bool], *, wrong: float, right: float) -> float:
    """The number nearest to `wrong` for which `holds` was seen to be true, down to neighbouring floats."""
    while True:
        middle = wrong + (right - wrong) / 2
        if middle in (wrong, right):
            return right
        if holds(middle):
            right = middle
        else:
            wrong = middle


def _paper_product(delta: float, rounds: float) -> float:
    _check_delta(delta)
    if not rounds > 0:
        raise ConfigError(f"rounds is {rounds}: it must be a number above 0.")
    return math.sqrt(2 * rounds * -math.log(delta))


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon is {epsilon}: a privacy target needs a finite number above 0, such as 1.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}: it must lie strictly between 0 and 1, such as 1e-5.")


def _check_strength(mu: float) -> None:
    if not mu >= 0:
        raise ConfigError(f"mu is {mu}: the strength of a mechanism is a number of at least 0.")


Relation = Literal["replace-one", "add-remove"]
RELATIONS = ("replace-one", "add-remove")


def sampled_epsilon(
    *, noise_multiplier: float, sampling_rate: float, rounds: int, delta: float, relation: Relation = "replace-one"
) -> float:
    """ε of `rounds` releases of a sum over Poisson-sampled records, each clipped to norm C, with noise of σ.

    `noise_multiplier` is σ/C. Under "replace-one" a record becomes another one, which moves the sum by up to 2·C;
    under "add-remove" it comes or goes, which moves it by C and is the weaker claim with the smaller number.
    """
    _check(noise_multiplier, sampling_rate, rounds, delta)
    if relation not in RELATIONS:
        raise unknown_name("neighbouring relation", relation, RELATIONS)
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise missing_extra("dp-accounting", "accounting", "Accounting for secretly sampled records") from error
    if noise_multiplier == 0:
        return math.inf
    meaning = {
        "replace-one": NeighboringRelation.REPLACE_ONE,
        "add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    }
    accountant = PLDAccountant(meaning[relation])
    accountant.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier)), rounds)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def sampled_noise(*, epsilon: float, sampling_rate: float, rounds: int, delta: float) -> float:
    """The smallest σ/C (to 0.1 %, never below) with which secretly sampled records meet (ε, δ), replace-one."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"epsilon is {epsilon}: it must be a positive number.")

    def meets(noise: float) -> bool:
        reached = sampled_epsilon(noise_multiplier=noise, sampling_rate=sampling_rate, rounds=rounds, delta=delta)
        return reached <= epsilon

    high = 1.0
    while not meets(high):
        high *= 2.0
    low = high / 2.0
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _check(noise_multiplier: float, sampling_rate: float, rounds: int, delta: float) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise ConfigError(f"noise_multiplier is {noise_multiplier}: it must be a finite number of at least 0.")
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"sampling_rate is {sampling_rate}: it must be above 0 and at most 1.")
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}: at least one round is needed.")
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}: it must lie strictly between 0 and 1, such as 1e-5.")
