"""The chance that colluding clients surround an honest one on a random ring, and the degree that makes it small.

A client's secrets lie with its n neighbours, and t of them open one. Two stories about it open both of its
masks if c ≥ 2t − n of the neighbours collude (`protocol/shares.py`). On a ring in random order the neighbours
are a uniform set of n of the other clients, so that c is hypergeometric. The same holds where a round asks some of
the clients, by the same beacon: of all clients, not of the round's, the neighbours are then a uniform set. Which
clients collude must not depend on the draw: whoever is won over after a graph is known is outside this figure.
Colluding clients are a share of all, and all of them are counted as there: it is the server that says who is away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypedDict

from fedveil.uplink.graph import default_degree

LEAST_BITS = 30
"""A run's chance of a surrounded client is to be at most 2 to the power of minus this."""

COLLUSION = 0.1
"""The share of clients that masks withstand by default."""

Needed = Callable[[int], int]
"""How many of n holders open a secret."""


class Facts(TypedDict):
    """What a run's chance depends on beside its clients and their graph."""

    share: float
    needed: Needed
    draws: int


def colluding(clients: int, share: float) -> int:
    """How many of so many clients that share is."""
    return math.floor(share * clients + 1e-9)


def surrounded_bits(
    size: int, *, of: int, degree: int, share: float, needed: Needed, draws: int, asked: int | None = None
) -> float:
    """−log₂ of a bound on the chance that in one of `draws` graphs some honest client is surrounded.

    A graph is of `size` clients, drawn from the `of` that are there. The share that colludes is of all that might have
    been `asked` (of those there if None), and all of it is there. Infinite where it cannot happen. Exact for one client
    (a hypergeometric tail), then a union bound over clients and graphs; the tail is summed in whole numbers.
    """
    others, near, allied = of - 1, min(degree, size - 1), colluding(asked or of, share)
    from_here = max(2 * needed(near) - near, 0)
    if from_here > min(allied, near):
        return math.inf
    if allied > others - 1:  # at most one honest client is left, and everybody around it colludes
        return -math.inf
    least = max(from_here, near - (others - allied))
    ways = sum(math.comb(allied, c) * math.comb(others - allied, near - c) for c in range(least, min(allied, near) + 1))
    if not ways:
        return math.inf
    return math.log2(math.comb(others, near)) - math.log2(ways) - math.log2((of - allied) * size / of * draws)


@lru_cache(maxsize=256)
def masking_degree(
    size: int,
    *,
    of: int,
    share: float,
    needed: Needed,
    draws: int,
    asked: int | None = None,
    given: int | None = None,
) -> int:
    """The smallest even degree, from what dropouts call for upwards, that keeps the chance at 2⁻³⁰ a run.

    With a degree `given` it is that one, and more only where some of the `asked` clients are away: then the chance is
    not to be larger for it. Where no degree does, everybody is a neighbour of everybody.
    """
    facts: Facts = {"share": share, "needed": needed, "draws": draws}
    wanted = float(LEAST_BITS)
    if given is not None:
        if asked is None or asked == of or given >= size - 1:
            return min(given, size - 1)
        wanted = min(wanted, surrounded_bits(max(size, size * asked // of), of=asked, degree=given, **facts))
    least = default_degree(size) if given is None else given
    for degree in range(least, size - 1, 2):
        if surrounded_bits(size, of=of, degree=degree, asked=asked, **facts) >= wanted:
            return degree
    return size - 1


def withstood(clients: int, *, share: float, needed: Needed, asked: int | None = None) -> bool:
    """Whether colluding clients surround nobody where everybody is a neighbour of everybody."""
    facts: Facts = {"share": share, "needed": needed, "draws": 1}
    return surrounded_bits(clients, of=clients, degree=clients - 1, asked=asked, **facts) == math.inf
