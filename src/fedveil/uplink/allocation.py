"""How much noise each client keeps and each pair shares (NADP-FL, its Algorithm 2 and Table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Allocation:
    """Variances in units of the sum's noise variance, by position in the list of clients.

    `residual[i]` is what client i adds alone; pair (i, j) shares `steps[min(rank i, rank j)]`, where
    ranks sort the clients by their number of records.
    """

    residual: NDArray[np.float64]
    steps: NDArray[np.float64]
    rank: NDArray[np.int64]

    def between(self, one: int, other: int) -> float:
        """The variance of the noise that clients at two positions share; none with oneself."""
        if one == other:
            return 0.0
        return float(self.steps[min(self.rank[one], self.rank[other])])

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        """All shared variances as a dense symmetric matrix with a zero diagonal."""
        if not len(self.steps):
            return np.zeros((1, 1))
        # The last rank never is the smaller of two; it needs a place on the diagonal only.
        padded = np.append(self.steps, 0.0)
        matrix: NDArray[np.float64] = padded[np.minimum(self.rank[:, None], self.rank[None, :])]
        np.fill_diagonal(matrix, 0.0)
        return matrix


def allocate(sizes: Sequence[int]) -> Allocation:
    """Residual shares x_i = |D_i|/|D| and pair shares whose row sums are β_i = |D_i|²/|D_min|² − |D_i|/|D|.

    With β ascending, and β_{k−1} raised to β_k: θ_n = (β_n − Σ_{i<n} θ_i)/(k − n), x_ij = θ_{min(i,j)}.
    What is left of β_n, namely s_n = β_n − Σ_{i<n} θ_i, is carried along as
    s_{n+1} = s_n·(k−n−1)/(k−n) + (β_{n+1} − β_n): a sum of non-negative terms, so that rounding can
    neither make a share negative nor lose its digits when sizes differ by orders of magnitude.
    """
    counts = [int(size) for size in sizes]
    if not counts:
        raise ConfigError("Noise is shared among at least one client, not none.")
    for place, size in enumerate(counts):
        if size < 1:
            raise ConfigError(f"Every client needs at least one record, but number {place} in the list has {size}.")
    clients, total = len(counts), sum(counts)
    order = sorted(range(clients), key=counts.__getitem__)
    rank = np.empty(clients, dtype=np.int64)
    rank[order] = np.arange(clients)
    ascending = [counts[place] for place in order]
    if clients > 1:
        ascending[-2] = ascending[-1]
    steps = np.empty(clients - 1)
    smallest = counts[order[0]]
    left = 0.0
    before = 0
    for place in range(clients - 1):
        size = ascending[place]
        # β's growth, in whole numbers up to the division: (b − a)·((a + b)·|D| − m²)/(m²·|D|)
        grown = (size - before) * ((size + before) * total - smallest**2) / (smallest**2 * total)
        left = left * ((clients - place - 1) / (clients - place)) + grown
        steps[place] = left / (clients - place - 1)
        before = size
    return Allocation(residual=np.array(counts) / total, steps=steps, rank=rank)


def collusion_strength(*, clients: float, colluding: float, ratio_squared: float) -> float:
    """λ = √((k·α² − 1)/((1 − τ)·k − 1)): what pair noise is multiplied by against a share τ of colluders.

    k clients (math.inf for the limit √(α²/(1 − τ))), α² = (|D_max|/|D_min|)². The bound is the paper's,
    and covers the pair noise only: colluders also know their own residual noise.
    """
    if not 0.0 <= colluding < 1.0:
        raise ConfigError(f"The share of colluding clients must be at least 0 and below 1, not {colluding}.")
    if not 1.0 <= ratio_squared < math.inf:
        raise ConfigError(f"The squared ratio of largest to smallest client is at least 1, not {ratio_squared}.")
    if not (1.0 - colluding) * clients > 1.0:
        raise ConfigError(
            f"With {clients:g} clients of which a share of {colluding:g} collude, no two honest ones are left to "
            "share noise. Lower the share or let more clients take part."
        )
    if math.isinf(clients):
        return math.sqrt(ratio_squared / (1.0 - colluding))
    return math.sqrt((clients * ratio_squared - 1.0) / ((1.0 - colluding) * clients - 1.0))
