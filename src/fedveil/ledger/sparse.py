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
is what is left but for a chance of 2⁻³⁰ a run. A client with too few neighbours left is charged for the way to r that
have enough, and for what is proven of those: 1/(w·r) + that bound. docs/mathematics.md has the proofs; graphs of
logarithmic degree in place of everybody are from Bell et al. 2020, steps at random whose circle expands from Alon and
Roichman 1994.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

LEAST_BITS = 30
"""A run's chance that more colluders are around some client is at most 2 to the power of minus this."""

MISSING = 0.25
"""The share of a round's clients that may be missing at random where the number of neighbours is left to FedVeil."""

AWAY_BITS = 10
"""A round's chance that more of those are around some client. No privacy rests on it: who is missing is known."""

OWN_ALONE = "who shares noise with whom proves nothing against so many: each client's own noise is all that counts"

_TRIES = 32
_WIDTHS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
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

    @property
    def missing(self) -> int:
        """A quarter of the clients, which may be missing at random."""
        return math.ceil(self.count * MISSING)

    @property
    def away(self) -> int:
        """How many of those are around one client at most, but for a chance of 2⁻¹⁰ a round."""
        return _near(self.count, self.degree, self.missing, 1, AWAY_BITS)

    def near(self, colluders: int) -> int:
        """How many of so many colluders are around one honest client at most, but for a chance of 2⁻³⁰ a run.

        All of them where that leaves the graph in one piece, whoever they are, and as long as a quarter may be missing.
        """
        every = min(colluders, self.degree)
        if not self.degree - every > self.second:
            return self._drawn(colluders)
        left = self.degree - self.away - self.second
        costly = left - every < 1 <= left - self._drawn(colluders)
        return self._drawn(colluders) if costly else every

    def _drawn(self, colluders: int) -> int:
        return _near(self.count, self.degree, colluders, self.draws, LEAST_BITS)

    def whoever(self, colluders: int) -> bool:
        """Whether what `near` says holds of every set of so many, and not only of one settled before the graph."""
        return self.near(colluders) == min(colluders, self.degree)

    def gap(self, colluders: int) -> float:
        """g − θ: how much of the pair noise counts in the worst direction; not positive where nothing is proven."""
        return self.degree - self.near(colluders) - self.second

    def withstands(self, colluders: int) -> bool:
        """Whether something is proven of everybody even if a quarter of the clients is missing at random."""
        return self.gap(colluders) - self.away >= 1


@lru_cache(maxsize=64)  # every simulated client asks for the same
def least_circle(count: int, *, colluders: int, draws: int) -> Circle | None:
    """About the smallest circle that proves something even if a quarter of the clients is missing, too; or None."""
    picks = 2
    while picks <= (count - 1) // 2:
        circle = Circle(count, picks, draws)
        # Counting takes less time than an eigenvalue, which is about the root of the degree at least.
        left = circle.degree - circle.away - _near(count, circle.degree, colluders, draws, LEAST_BITS)
        if left >= math.sqrt(picks) and circle.withstands(colluders):
            return circle
        picks += max(1, picks // 16)
    return None


def bound(*, residual: float, pairs: float, size: int) -> float:
    """(Σ⁻¹)_ii at most: of `size` members with so much residual noise each and `pairs` = w·(g − θ) > 0."""
    value = 1 / (residual * size) + (1 - 1 / size) / (residual + pairs)
    return value * (1 + _ROUNDING)


def core_bounds(
    pairs: csr_array,
    label: NDArray[np.int64],
    residual: NDArray[np.float64],
    circle: Circle,
    *,
    each: float,
    colluders: int,
) -> NDArray[np.float64]:
    """(Σ⁻¹)_ii at most, of members of a circle, whichever of them collude; infinite where that is not known.

    Args:
        pairs: positive where two members share noise.
        label: of which part each member is; a part has all pairs among its members, and none with others.
        residual: the members' own noise.
        circle: on which they are, and others may have been.
        each: the variance of a pair.
        colluders: how many collude.
    """
    result, near = np.full(len(residual), math.inf), circle.near(colluders)
    joined = csr_array(pairs > 0, dtype=np.float64)
    for part in np.flatnonzero(np.bincount(label) > colluders):
        inside = np.flatnonzero(label == part)
        among = joined[inside][:, inside]
        result[inside] = _peeled(among, residual[inside], circle.second, near, each=each, colluders=colluders)
    return result


def _peeled(
    joined: csr_array, residual: NDArray[np.float64], second: float, near: int, *, each: float, colluders: int
) -> NDArray[np.float64]:
    """Who has too few neighbours left is peeled off until everybody in the rest, the core, has enough of them there.

    It is charged for the way into the core and for the core. Cores of several widths are tried: each holds.
    """
    result, core = np.full(len(residual), math.inf), np.ones(len(residual), dtype=np.bool_)
    for width in _WIDTHS:
        inside = joined @ core.astype(np.float64)
        while bool(np.any(short := core & (inside - near - second <= width))):
            core = core & ~short
            inside = joined @ core.astype(np.float64)
        size = int(core.sum()) - colluders
        if size < 1 or not residual[core].min() > 0:
            break
        left = float(inside[core].min()) - near - second
        value = bound(residual=float(residual[core].min()), pairs=each * left, size=size)
        with np.errstate(divide="ignore"):
            way = 1 / (each * np.maximum(inside - near, 0.0)) * (1 + _ROUNDING)
        result = np.minimum(result, np.where(core, value, way + value))
    return result


@lru_cache(maxsize=1024)
def _steps(count: int, picks: int) -> tuple[tuple[int, ...], float]:
    """The best of a few draws that follow from the two numbers alone, and its θ: everybody computes the same."""
    choices, best, least = (count - 1) // 2, (), math.inf
    for number in range(_TRIES):
        drawn = hashlib.shake_256(f"fedveil circle 1 {count} {picks} {number}".encode()).digest(8 * choices)
        order = np.argsort(np.frombuffer(drawn, dtype="<u8"), kind="stable")
        steps = np.sort(order[:picks]) + 1
        joined: NDArray[np.float64] = np.zeros(count)
        joined[steps] = 2.0
        value = float(np.fft.rfft(joined).real[1:].max())  # the sums of cosines, all at once
        if value < least - _ROUNDING:  # not by last bits, in which machines differ
            best, least = tuple(steps.tolist()), value
    return best, least + _ROUNDING * picks


@lru_cache(maxsize=1024)
def _near(count: int, degree: int, colluders: int, draws: int, bits: int) -> int:
    """The least b with P[more than b of `degree` among count − 1 collude] · honest clients · draws ≤ 2⁻ᵇⁱᵗˢ."""
    others, honest = count - 1, count - colluders
    bare, all_ways = others - colluders, math.comb(others, degree)
    most = min(degree, colluders)
    ways = each = math.comb(colluders, most) * math.comb(bare, degree - most)
    for inside in range(most, 0, -1):
        if ways * honest * draws << bits > all_ways:
            return inside
        # From one term of the distribution to the next, in whole numbers: large binomials take long.
        each = each * inside * (bare - degree + inside) // ((colluders - inside + 1) * (degree - inside + 1))
        ways += each
    return 0
