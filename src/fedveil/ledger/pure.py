"""What rounds of pure differential privacy add up to.

T mechanisms that are ε-private each, chosen one after the other, are at every ε′ exactly as private as T answers by
randomised response (Kairouz, Oh and Viswanath 2015):

    δ(ε′) = Σ_{l ≤ T} C(T, l)·max(0, e^((T − l)·ε) − e^(ε′ + l·ε)) / (1 + e^ε)^T.
"""

from __future__ import annotations

import math

from fedveil.errors import ConfigError

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
