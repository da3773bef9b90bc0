"""Discrete Gaussian noise: whole numbers z with probability ∝ exp(−z²/2σ²), for sums under masks.

Noise in floating point has gaps that depend on what it is added to, and those leak; whole numbers
have none.

How a number is drawn. The integers are cut into cells of B = 2ᵇ, with σ/B from 16 to 32 (B = 1 for
smaller σ). A cell q is drawn in proportion to the largest weight within it, w(q) = exp(−m(q)²/2σ²) with
m(q) the smallest |z| of the cell; a place r in the cell uniformly; and z = B·q + r is accepted with
probability exp(−(z² − m(q)²)/2σ²), which is above 0.95 on average and 1 for B = 1. Accepted numbers
have exactly the wanted distribution, down to the lowest bit: no rounded real number is involved.

What is exact and what is not, per draw, for ideal random words:

- the cell is found by comparing a 128-bit number (its lower half drawn only where the upper half
  does not decide) with cumulative weights computed to 60 decimal digits: off by less than 2⁻¹¹⁵,
  cells beyond 14 σ being left out included;
- the place within the cell is exactly uniform;
- acceptance compares a 64-bit number with a float64 exponential; where the two are closer than
  2⁻⁴⁰, far more than that arithmetic can err by, the decision is made again with a 128-bit number
  and 60 decimal digits.

The total distance from the discrete Gaussian stays below 2⁻¹¹⁰; what is left is that the words come
from AES. Time depends on what is drawn: this is not meant for a machine shared with an attacker.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.crypto.stream import WordStream

LARGEST_SIGMA = 2.0**58
"""Beyond this, 14 σ would not fit 64 bits."""

_CELLS_PER_SIGMA = 16
_TAIL = 14
_CLOSE = 2.0**-40
_MOST = 1 << 14
_LAST_WORD = (1 << 64) - 1
_EXACT = Context(prec=60, Emin=-(10**9), Emax=10**9)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Cells first, first + 1, … of 2^bits integers each; `bounds` are cumulative weights in 2⁻¹²⁸."""

    first: int
    bits: int
    bounds: tuple[int, ...]
    upper: NDArray[np.uint64]


def discrete_gaussian(count: int, *, sigma: float, seed: bytes) -> NDArray[np.int64]:
    """`count` independent whole numbers with probability ∝ exp(−z²/2σ²), the same for the same 32-byte seed."""
    # Training in memory must not need the package behind this.
    from fedveil.crypto.stream import WordStream

    if not 0.0 < sigma <= LARGEST_SIGMA:
        raise ConfigError(f"Discrete noise needs a σ above 0 and up to 2^58 steps, not {sigma}.")
    cells = _cells(float(sigma))
    stream = WordStream(seed)
    drawn = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        # Slightly more than is missing, so that the rejected do not cost another turn.
        missing = count - done
        found = _propose(min(_MOST, missing + missing // 16 + 8), sigma=float(sigma), cells=cells, stream=stream)
        found = found[:missing]
        drawn[done : done + len(found)] = found
        done += len(found)
    return drawn


def _propose(count: int, *, sigma: float, cells: _Cells, stream: WordStream) -> NDArray[np.int64]:
    """Draw `count` proposals and return those accepted, in order."""
    cell = _choose(cells, stream.take(count), stream)
    cell += cells.first
    if cells.bits == 0:
        return cell
    place = (stream.take(count) >> np.uint64(64 - cells.bits)).view(np.int64)
    number, twice, exponent = _weigh(cell, place, bits=cells.bits, sigma=sigma)
    return number[_accept(exponent, stream.take(count), place=place, twice=twice, sigma=sigma, stream=stream)]


def _weigh(
    cell: NDArray[np.int64], place: NDArray[np.int64], *, bits: int, sigma: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """z, |z| + m and −(z² − m²)/2σ² = −place·(|z| + m)/2σ² for a place in a cell, counted away from zero."""
    negative = cell < 0
    nearest = np.where(negative, ~cell, cell)
    nearest <<= bits
    nearest += negative  # cells below zero begin at −1
    number = nearest + place
    twice = nearest + number
    exponent = place / sigma
    exponent *= twice / sigma
    exponent *= -0.5
    np.negative(number, where=negative, out=number)
    return number, twice, exponent


def _choose(cells: _Cells, words: NDArray[np.uint64], stream: WordStream) -> NDArray[np.int64]:
    """Which cell each word falls into; where its 64 bits equal a bound's, 64 more bits decide."""
    found = np.searchsorted(cells.upper, words, side="right")
    undecided = np.flatnonzero(cells.upper[found - 1] == words)
    for place, word in zip(undecided.tolist(), words[undecided].tolist(), strict=True):
        found[place] = bisect_right(cells.bounds, (word << 64) | int(stream.take(1)[0]))
    return found


def _accept(
    exponent: NDArray[np.float64],
    words: NDArray[np.uint64],
    *,
    place: NDArray[np.int64],
    twice: NDArray[np.int64],
    sigma: float,
    stream: WordStream,
    close: float = _CLOSE,
) -> NDArray[np.bool_]:
    """Whether each word/2⁶⁴ lies below exp(exponent), exponent being −place·twice/2σ²; close calls in decimals."""
    chance = np.exp(exponent)
    chance -= words * 2.0**-64
    accepted = chance > 0.0
    np.abs(chance, out=chance)
    undecided = np.flatnonzero(chance < close)
    for at, word in zip(undecided.tolist(), words[undecided].tolist(), strict=True):
        exact = _EXACT.divide(Decimal(-int(place[at]) * int(twice[at])), _twice_square(sigma))
        scaled = _EXACT.multiply(_EXACT.exp(exact), Decimal(1 << 128))
        accepted[at] = (word << 64) | int(stream.take(1)[0]) < scaled
    return accepted


def _twice_square(sigma: float) -> Decimal:
    return _EXACT.multiply(Decimal(2), _EXACT.multiply(Decimal(sigma), Decimal(sigma)))


@lru_cache(maxsize=16)
def _cells(sigma: float) -> _Cells:
    """The cells up to 14 σ on both sides, and where each begins on a scale of 0 to 2¹²⁸."""
    bits = max(0, math.frexp(sigma / _CELLS_PER_SIGMA)[1] - 1)
    side = math.ceil(_TAIL * sigma / 2**bits) + 1
    scale = _twice_square(sigma)
    nearest = [((-cell - 1) << bits) + 1 if cell < 0 else cell << bits for cell in range(-side, side)]
    weights = [_EXACT.exp(_EXACT.divide(Decimal(-(one**2)), scale)) for one in nearest]
    total = Decimal(0)
    for weight in weights:
        total = _EXACT.add(total, weight)
    bounds, below = [], Decimal(0)
    for weight in weights[:-1]:
        below = _EXACT.add(below, weight)
        bounds.append(int(_EXACT.multiply(_EXACT.divide(below, total), Decimal(1 << 128))))
    # A bound that rounds to 2¹²⁸ has no upper half of 64 bits; the exact comparison sees it as it is.
    upper = np.array([min(bound >> 64, _LAST_WORD) for bound in bounds], dtype=np.uint64)
    return _Cells(first=-side, bits=bits, bounds=tuple(bounds), upper=upper)
