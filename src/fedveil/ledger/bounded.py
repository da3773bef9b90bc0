"""Bounded noise gives no (ε, δ) worth the name: how large δ is at the least, whatever ε.

Given the scales R, the noise of the faithful `mpdp` scheme is a sum over k clients of variables uniform on
(−√2σ, √2σ), per coordinate, before R is undone. A change of S in the gradient shifts coordinate j by S_j/R_j.
What falls outside the support of the unshifted noise betrays the change with certainty, so its probability
is a lower bound on δ for every ε. A small bound is no promise: the true δ at a given ε is larger.

In units of one variable's width, the distance from the edge of the support is a sum of k variables uniform on
(0, 1), so a shift by s escapes with probability F_k(s/(2√2σ)), F_k the Irwin–Hall distribution

    F_k(t) = (1/k!)·Σ_{j ≤ t} (−1)^j·C(k, j)·(t − j)^k,        t^k/k! for t ≤ 1.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from fedveil.errors import ConfigError

GRID = 128
_STEPS = 2**32


def delta_floor(*, scale: float, clients: int, shift: float) -> float:
    """The least δ, at any ε, when one coordinate moves by `shift`: F_k(|shift|/(2√2·scale)), rounded down.

    `scale` is the σ of one client's noise. The sharpest shift puts all of S on the smallest scale: S/min R.
    """
    _check(scale, clients, abs(shift))
    return float(_escapes(np.array([abs(shift) / (2 * math.sqrt(2) * scale)]), clients)[0])


def delta_floor_even(*, scale: float, clients: int, sensitivity: float, factors: NDArray[np.float64]) -> float:
    """The least δ, at any ε, when all d coordinates share the change evenly, S/(√d·R_j) on coordinate j.

    Each coordinate escapes on its own: 1 − Π_j (1 − F_k(S/(√d·|R_j|·2√2·scale))), rounded down. `factors` holds R.
    """
    _check(scale, clients, sensitivity)
    sizes = np.abs(np.asarray(factors, dtype=np.float64)).ravel()
    if not sizes.size or not bool(np.all(sizes > 0)):
        raise ConfigError("factors must hold the scale of every coordinate, none of them zero or missing.")
    widths = sensitivity / (math.sqrt(sizes.size) * sizes * 2 * math.sqrt(2) * scale)
    with np.errstate(divide="ignore"):
        return float(-np.expm1(np.log1p(-_escapes(widths, clients)).sum()))


def _escapes(widths: NDArray[np.float64], clients: int) -> NDArray[np.float64]:
    """A lower bound on F_k, exact up to rounding except where more than GRID widths exceed 1."""
    result = np.zeros_like(widths)
    small = (widths > 0) & (widths < 1)
    result[small] = np.exp(clients * np.log(widths[small]) - gammaln(clients + 1)) * (1 - 1e-9)
    large = np.flatnonzero(widths >= 1)
    if large.size:
        # F grows with its argument, so the nearest grid point below gives a lower bound.
        distinct = np.unique(widths[large])
        grid = distinct[np.unique(np.linspace(0, len(distinct) - 1, min(GRID, len(distinct))).astype(np.int64))]
        values = np.array([_irwin_hall(float(point), clients) for point in grid])
        result[large] = values[np.searchsorted(grid, widths[large], side="right") - 1]
    return result


def _irwin_hall(point: float, clients: int) -> float:
    """F_k(point) with the point rounded down to 32 binary places; rational, since the sum's terms cancel."""
    if point >= clients:
        return 1.0
    exact = Fraction(math.floor(point * _STEPS), _STEPS)
    return float(_lower(exact, clients) if 2 * exact <= clients else 1 - _lower(clients - exact, clients)) * (1 - 1e-12)


def _lower(point: Fraction, clients: int) -> Fraction:
    """The sum itself, over whole numbers: (t − j)^k = (n − j·2^32)^k / 2^(32k)."""
    numerator = int(point * _STEPS)
    total = sum(
        (-1) ** j * math.comb(clients, j) * (numerator - j * _STEPS) ** clients for j in range(numerator // _STEPS + 1)
    )
    return Fraction(total, _STEPS**clients * math.factorial(clients))


def _check(scale: float, clients: int, change: float) -> None:
    if not 0 < scale < math.inf:
        raise ConfigError(f"scale is {scale}: the noise needs a finite standard scale above 0.")
    if clients < 1:
        raise ConfigError(f"clients is {clients}: at least one client adds noise.")
    if not 0 <= change < math.inf:
        raise ConfigError(f"the change is {change}: it must be a finite number of at least 0.")
