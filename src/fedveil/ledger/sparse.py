"""The diagonal of Σ⁻¹ for many clients on a sparse pair graph, bracketed without a dense matrix.

Σ = diag(d) + L, with d the residual variances and L the Laplacian of the pair variances. For any vector x
and its residual r = e_i − Σx the identity

    (Σ⁻¹)_ii = x_i + rᵀx + rᵀΣ⁻¹r      with      0 ≤ rᵀΣ⁻¹r ≤ Σ_j r_j²/d_j      (since L ⪰ 0)

brackets the entry, whatever x is: conjugate gradients only have to make r small, and their own rounding
does not matter. The residual is then evaluated afresh and the rounding of that evaluation (at most γ·|Σ||x|
per entry, γ = a row's number of terms in units of the last place) is added on the unfavourable side.

Strong pair noise makes Σ badly conditioned in one direction only, the constant vector (Σ·1 = d). Starting from
that vector's best multiple takes the direction out of r and leaves the conditioning of the graph itself: some
eight steps for random graphs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

BLOCK = 64
_ULP = sys.float_info.epsilon


@dataclass(frozen=True, eq=False)
class NoiseGraph:
    """Residual variances of the members, and the pair variances between positions `first` and `second`."""

    residual: Floats
    first: Positions
    second: Positions
    pairs: Floats

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.residual)

    @cached_property
    def degree(self) -> Floats:
        """Each member's pair variance in all."""
        ends = np.concatenate([self.first, self.second])
        both = np.concatenate([self.pairs, self.pairs])
        return np.bincount(ends, weights=both, minlength=self.size).astype(np.float64, copy=False)

    @cached_property
    def adjacency(self) -> sparse.csr_array:
        """The pair variances as a symmetric matrix."""
        half = sparse.coo_array((self.pairs, (self.first, self.second)), shape=(self.size, self.size))
        return sparse.csr_array(half + half.T)

    @cached_property
    def covariance(self) -> sparse.csr_array:
        """Σ = diag(residual) + Laplacian."""
        return sparse.csr_array(sparse.diags_array(self.residual + self.degree) - self.adjacency)


@dataclass(frozen=True)
class Worst:
    """The member at `position` is charged at least `lower`; nobody looked at is charged more than `upper`."""

    position: int
    lower: float
    upper: float


def diagonal_bounds(
    graph: NoiseGraph,
    columns: Positions,
    *,
    slack: float = 1e-3,
    enough: Floats | None = None,
    steps: int = 1000,
) -> tuple[Floats, Floats]:
    """Lower and upper bounds of (Σ⁻¹)_ii for the given members of a connected graph.

    Work on a member stops when its bounds are within `slack` of each other (relative), when its upper
    bound is below `enough`, when rounding allows no closer ones, or after `steps` steps: the bounds hold in
    every case. A member without residual noise makes the upper bounds infinite.
    """
    lower, upper = np.zeros(len(columns)), np.full(len(columns), np.inf)
    if not graph.residual.min() > 0:
        return lower, upper
    wanted = np.zeros(len(columns)) if enough is None else enough
    for start in range(0, len(columns), BLOCK):
        part = slice(start, start + BLOCK)
        lower[part], upper[part] = _bracket(graph, columns[part], slack=slack, enough=wanted[part], steps=steps)
    return lower, upper


def worst_candidate(graph: NoiseGraph, sensitivity: Floats, *, count: int = 64, slack: float = 1e-6) -> Worst:
    """The largest charge S_i²·(Σ⁻¹)_ii among the `count` members with the least noise of their own around them."""
    likely = _most_exposed_first(graph, sensitivity)[:count]
    lower, upper = diagonal_bounds(graph, likely, slack=slack)
    squares = sensitivity[likely] ** 2
    best = int(np.argmax(squares * lower))
    return Worst(int(likely[best]), float(squares[best] * lower[best]), float(np.max(squares * upper)))


def worst(graph: NoiseGraph, sensitivity: Floats, *, count: int = 64, slack: float = 1e-3) -> Worst:
    """The worst candidate, and a bound on the charge of every member.

    Members that are not candidates are worked on only until they are certainly no worse than the candidate.
    """
    found = worst_candidate(graph, sensitivity, count=count, slack=min(slack, 1e-6))
    rest = _most_exposed_first(graph, sensitivity)[count:]
    rest = rest[sensitivity[rest] > 0]
    squares = sensitivity[rest] ** 2
    lower, upper = diagonal_bounds(graph, rest, slack=slack, enough=found.lower / squares)
    if not len(rest):
        return found
    position, least = found.position, found.lower
    best = int(np.argmax(squares * lower))
    if squares[best] * lower[best] > least:
        position, least = int(rest[best]), float(squares[best] * lower[best])
    return Worst(position, least, max(found.upper, float(np.max(squares * upper))))


def _most_exposed_first(graph: NoiseGraph, sensitivity: Floats) -> Positions:
    """Members by an estimate of their charge: the noise of the sum, and the noise directly around them."""
    with np.errstate(divide="ignore"):
        estimate = sensitivity**2 * (1 / graph.residual.sum() + 1 / (graph.residual + graph.degree))
    return np.argsort(-estimate, kind="stable").astype(np.int64)


def _bracket(
    graph: NoiseGraph, columns: Positions, *, slack: float, enough: Floats, steps: int
) -> tuple[Floats, Floats]:
    """Conjugate gradients, scaled by the diagonal, on several columns at once."""
    covariance, d = graph.covariance, graph.residual
    scale, total = (1 / (d + graph.degree))[:, None], d.sum()
    lanes = np.arange(len(columns))
    x = np.full((graph.size, len(columns)), 1 / total)
    r = np.repeat(-d[:, None] / total, len(columns), axis=1)
    r[columns, lanes] += 1
    p, product = np.zeros_like(r), np.ones(len(columns))
    widest = np.inf
    for _ in range(steps):
        if bool(np.all(_stops(x[columns, lanes], (1 / d) @ (r * r), slack, enough))):
            lower, upper = _certify(graph, x, columns)
            before_that, widest = widest, float((upper - lower).max())
            # Where rounding alone keeps the bounds apart, further steps bring nothing.
            if bool(np.all(_stops(lower, upper - lower, slack, enough))) or widest > before_that / 2:
                return lower, upper
        z = scale * r
        before, product = product, _dots(r, z)
        p *= _ratio(product, before)
        p += z
        y = covariance @ p
        length = _ratio(product, _dots(p, y))
        p_step = p * length
        x += p_step
        y *= length
        r -= y
    return _certify(graph, x, columns)


def _stops(value: Floats, gap: Floats, slack: float, enough: Floats) -> NDArray[np.bool_]:
    return (gap <= slack * value) | (value + gap <= enough)


def _certify(graph: NoiseGraph, x: Floats, columns: Positions) -> tuple[Floats, Floats]:
    """The bracket the identity gives for x, with the rounding of its evaluation on the unfavourable side."""
    d, lanes = graph.residual, np.arange(len(columns))
    r = -(graph.covariance @ x)
    r[columns, lanes] += 1
    terms = int(np.diff(graph.covariance.indptr).max()) + 8
    size = np.abs(x)
    error = (terms * _ULP) * (d + 2 * graph.degree)[:, None] * size.max(axis=0)
    error[columns, lanes] += _ULP
    largest = np.abs(r) + error
    middle = x[columns, lanes] + _dots(r, x)
    summing = (graph.size + 8) * _ULP
    rounding = _dots(error, size) + summing * _dots(largest, size) + 4 * _ULP * np.abs(x[columns, lanes])
    rest = (1 / d) @ (largest * largest) * (1 + 2 * summing)
    return middle - rounding * (1 + summing), middle + (rounding + rest) * (1 + summing)


def _dots(one: Floats, two: Floats) -> Floats:
    """Column by column, the inner products."""
    return np.asarray(np.einsum("ij,ij->j", one, two), dtype=np.float64)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient, or 0 where a column has converged to the last bit."""
    usable = (denominator > 0) & (numerator > 0)
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=usable)
