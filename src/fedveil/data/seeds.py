"""The random draws of this package: no two purposes share a stream, whatever the seed."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fedveil.errors import ConfigError


class Purpose(IntEnum):
    """What a generator is for."""

    SPLIT = 1
    PARTITION = 2


def generator(seed: int, *, purpose: Purpose) -> np.random.Generator:
    """The generator of ``purpose`` under ``seed``."""
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or a positive whole number.")
    return np.random.default_rng([seed, int(purpose)])
