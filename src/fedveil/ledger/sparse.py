"""What a sparse noise graph proves, in time that grows with its edges only.

Clients stand in a circle, in an order that the epoch's beacon draws, and each shares noise with those a few fixed
`steps` away, on both sides. Whatever the order, the graph is the same up to names, and its spectrum is known:

    θ = max over k = 1 … n − 1 of 2·Σ_s cos(2πks/n)

is the second largest eigenvalue of its adjacency A, and xᵀAx ≤ θ·|x|² for every x whose entries add up to 0. Take away
whatever clients you like, and let every one of the h that are left have at least g of its neighbours left. For x on
those, filled up with zeros, xᵀL_Hx = Σ deg_i·x_i² − xᵀAx ≥ (g − θ)·|x|²: pairs of variance w and residual noise of at
least ρ each leave, by e_i = 1/h·1 + (e_i − 1/h·1),

    (Σ_H⁻¹)_ii ≤ 1/(ρ·h) + 1/(ρ + w·(g − θ)).

So what is gone is counted, and nothing has to be inverted: c colluders, whoever they are, leave g ≥ d − c. Where they
are many, but were not chosen by who is whose neighbour, how many of them are around one client is hypergeometric, and g
is what is left but for a chance of 2⁻³⁰ a run. docs/mathematics.md has the proof; graphs of logarithmic degree in place
of everybody are from Bell et al. 2020, steps at random whose circle expands from Alon and Roichman 1994.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEAST_BITS = 30
"""A run's chance that more colluders are around some client is at most 2 to the power of minus this."""

_TRIES = 32
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Circle:
    """`count` clients around a circle, each joined to those `steps` away; drawn anew `draws` times in a run."""

    count: int
    picks: int
    draws: int

    @property
    def degree(self) -> int:
        """How many neighbours each has."""
        return 2 * self.picks

    @property
    def steps(self) -> tuple[int, ...]:
        """How far away the neighbours on either side are."""
        return _steps(self.count, self.picks)[0]

    @property
    def second(self) -> float:
        """θ, not rounded downwards."""
        return _steps(self.count, self.picks)[1]

    def near(self, colluders: int) -> int:
        """How many of so many colluders are around one honest client at most, but for a chance of 2⁻³⁰ a run.

        All of them where that leaves the graph in one piece, whoever they are.
        """
        if self.degree - min(colluders, self.degree) > self.second:
            return min(colluders, self.degree)
        return _near(self.count, self.degree, colluders, self.draws)

    def whoever(self, colluders: int) -> bool:
        """Whether what `near` says holds of every set of so many, and not only of one settled before the graph."""
        return self.near(colluders) == min(colluders, self.degree)

    def gap(self, colluders: int) -> float:
        """g − θ: how much of the pair noise counts in the worst direction; not positive where nothing is proven."""
        return self.degree - self.near(colluders) - self.second


def least_circle(count: int, *, colluders: int, draws: int) -> Circle | None:
    """The smallest circle that proves something even if a quarter of any neighbourhood is missing, too; or None."""
    for picks in range(2, (count - 1) // 2 + 1):
        circle = Circle(count, picks, draws)
        if circle.gap(colluders) >= circle.degree / 4 + 1:
            return circle
    return None


def bound(*, residual: float, pairs: float, size: int) -> float:
    """(Σ⁻¹)_ii at most: of `size` members with so much residual noise each and `pairs` = w·(g − θ) > 0."""
    value = 1 / (residual * size) + (1 - 1 / size) / (residual + pairs)
    return value * (1 + _ROUNDING)


@lru_cache(maxsize=1024)
def _steps(count: int, picks: int) -> tuple[tuple[int, ...], float]:
    """The best of a few draws that follow from the two numbers alone, and its θ: everybody computes the same."""
    choices, best, least = (count - 1) // 2, (), math.inf
    cosine: NDArray[np.float64] = np.cos(2 * np.pi * np.arange(count) / count)
    others = np.arange(1, count // 2 + 1)
    for number in range(_TRIES):
        drawn = hashlib.shake_256(f"fedveil circle 1 {count} {picks} {number}".encode()).digest(8 * choices)
        order = np.argsort(np.frombuffer(drawn, dtype="<u8"), kind="stable")
        steps = np.sort(order[:picks]) + 1
        value = float(np.sum([2 * cosine[others * int(step) % count] for step in steps], axis=0).max())
        if value < least - _ROUNDING:  # not by last bits, in which machines differ
            best, least = tuple(steps.tolist()), value
    return best, least + _ROUNDING * picks


@lru_cache(maxsize=1024)
def _near(count: int, degree: int, colluders: int, draws: int) -> int:
    """The least b with P[more than b of `degree` among count − 1 collude] · honest clients · draws ≤ 2⁻³⁰."""
    others, honest = count - 1, count - colluders
    ways, all_ways = 0, math.comb(others, degree)
    for inside in range(min(degree, colluders), -1, -1):
        ways += math.comb(colluders, inside) * math.comb(others - colluders, degree - inside)
        if ways * honest * draws << LEAST_BITS > all_ways:
            return inside
    return 0
