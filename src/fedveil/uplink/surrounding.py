"""The chance that colluding clients surround an honest one on a random ring, and the degree that makes it small.

A client's secrets lie with its n neighbours, and t of them open one. Two stories about it open both of its
masks if c ≥ 2t − n of the neighbours collude (`protocol/shares.py`). On a ring in random order the neighbours
are a uniform set of n of the other clients, so that c is hypergeometric. The same holds where a round asks some of
the clients, by the same beacon: of all clients, not of the round's, the neighbours are then a uniform set. Which
clients collude must not depend on the draw: whoever is won over after a graph is known is outside this figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from fedveil.uplink.graph import default_degree

LEAST_BITS = 30
"""A run's chance of a surrounded client is to be at most 2 to the power of minus this."""

COLLUSION = 0.1
"""The share of clients that masks withstand by default."""

Needed = Callable[[int], int]
"""How many of n holders open a secret."""


def colluding(clients: int, share: float) -> int:
    """How many of so many clients that share is."""
    return math.floor(share * clients + 1e-9)


def surrounded_bits(size: int, *, of: int, degree: int, share: float, needed: Needed, draws: int) -> float:
    """−log₂ of a bound on the chance that in one of `draws` graphs some honest client is surrounded.

    A graph is of `size` clients, drawn from `of` of which the share colludes. Infinite where it cannot happen. Exact
    for one client (a hypergeometric tail), then a union bound over clients and graphs; the tail is summed in whole
    numbers.
    """
    others, near, allied = of - 1, min(degree, size - 1), colluding(of, share)
    from_here = max(2 * needed(near) - near, 0)
    if from_here > min(allied, near) or allied >= of:
        return math.inf
    least = max(from_here, near - (others - allied))
    ways = sum(math.comb(allied, c) * math.comb(others - allied, near - c) for c in range(least, min(allied, near) + 1))
    if not ways:
        return math.inf
    return math.log2(math.comb(others, near)) - math.log2(ways) - math.log2((of - allied) * size / of * draws)


@lru_cache(maxsize=256)
def masking_degree(size: int, *, of: int, share: float, needed: Needed, draws: int) -> int:
    """The smallest even degree, from what dropouts call for upwards, that keeps the chance at 2⁻³⁰ a run.

    Where none does, everybody is a neighbour of everybody.
    """
    for degree in range(default_degree(size), size - 1, 2):
        if surrounded_bits(size, of=of, degree=degree, share=share, needed=needed, draws=draws) >= LEAST_BITS:
            return degree
    return size - 1
