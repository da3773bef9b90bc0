"""Amplification by sampling: what secret Poisson sampling of records adds to Gaussian noise.

Only sampling the adversary does not see amplifies: each record takes part in a round with probability q,
independently, and nobody learns which did. Clients sampled by the server amplify nothing against it.
The number comes from dp-accounting's privacy loss distributions, rounded towards less privacy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from fedveil.errors import ConfigError, missing_extra, unknown_name

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
