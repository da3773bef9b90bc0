"""Discrete Gaussian noise: whole numbers z with probability ∝ exp(−z²/2s²), under every claim.

Noise in floating point has gaps that depend on what it is added to, and those leak; whole numbers
have none.

The promise, per number and for ideal random words: an integer Gaussian of parameter s = `parameter_of(σ)`
(from σ to 1.001·σ; exactly σ below 2²¹), within 2⁻¹⁰⁰ in max-log on all integers, but for an event of
probability below 2⁻¹²⁰ (tails cut off, weights rounded). So n numbers add at most 2n·2⁻¹⁰⁰ to an ε and
n·2⁻¹²⁰·(1 + e^ε) to a δ. What is left is that the words come from AES.

How a number is drawn. X = x₀ + k₁x₁ + k₂x₂ + …, every x drawn from one table of a small parameter σ₀
(Peikert 2010; Micciancio and Walter 2017). Let x be an integer Gaussian of parameter s, y one of σ₀, and k
a whole number. Completing the square, P(x + ky = z) is exp(−z²/2s'²) with s'² = s² + k²σ₀², times
Σ_y exp(−(y − cz)²/2t²) with 1/t² = 1/σ₀² + k²/s² and a real c. By Poisson's formula that sum is
√(2π)·t·(1 ± δ) whatever cz is, with δ < 2.01·exp(−2π²t²). Hence x + ky is within log((1 + δ)/(1 − δ)) of
the integer Gaussian of parameter s', in max-log. Multipliers are chosen so that t ≥ 2, which makes it
2⁻¹¹¹ a step; convolving with another law does not increase it, there are at most five steps, and
5·2⁻¹¹¹ < 2⁻¹⁰⁸.

- σ < 2⁸: one draw from a table of σ₀ = σ.
- σ < 2²¹: multipliers 1, b, b² and a table of σ₀² = σ²/(1 + b² + b⁴). With b the largest whole number for
  which σ₀² ≥ 4(1 + b²), both steps have 1/t² ≤ (1 + b²)/σ₀² ≤ 1/4.
- from 2²¹ on: one table for all, σ₀ = 2¹¹. Every multiplier but the last is the largest with t ≥ 2, so s grows by
  2¹⁰ a step; the last is rounded up to reach σ. With L the sum of the squares before it, L ≥ 1023², that
  raises s by a factor of at most 1 + 1/(2√L) + 1/L < 1.0005.

How a table is drawn from. Weights up to 14 σ₀ (less than 2⁻¹³⁵ lies beyond) are whole numbers on a scale of
2²⁵⁶, so everything after is exact and alike on every machine. A value owns ⌊2¹⁶·p⌋ of 2¹⁶ slots, and 16
bits of the stream choose one. What no value owns (9 % of the slots at σ₀ = 2¹¹) is shared out again in the
same way, twice, with 16 further bits each time; what is left then is decided by 64 bits against cumulative
weights, and where these equal a bound's, by 192. Draw j of number i takes its bits from places that only i
and j determine: a shorter vector is the beginning of a longer one, and the size of chunks changes nothing.

Time depends on what is drawn: this is not meant for a machine shared with an attacker.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.crypto.streams import Blocks

LARGEST_SIGMA = 2.0**58
"""Beyond this, 14 σ would not fit 64 bits."""

_ONE_DRAW = 2**8
_OWN_TABLE = 2**21
_COMMON = 2**11
_TAIL = 14
_SLOTS = 1 << 16
_LEVELS = 3
_SCALE = 256
_CHUNK = 1 << 14
_LAST_WORD = (1 << 64) - 1
_EXACT = Context(prec=90, Emin=-(10**9), Emax=10**9)


@dataclass(frozen=True, eq=False)
class _Table:
    """Each level's slots hold the values that own them, then zeros; `bounds` (of |z|) are in 2⁻¹⁹²."""

    slots: tuple[NDArray[np.int16], ...]
    last_owned: tuple[int, ...]
    bounds: tuple[int, ...]
    upper: NDArray[np.uint64]


@dataclass(frozen=True)
class _Plan:
    """A sum of draws from a table of parameter √`square`, one for each multiplier."""

    square: Fraction
    multipliers: tuple[int, ...]

    @property
    def total(self) -> Fraction:
        return self.square * sum(k * k for k in self.multipliers)


def discrete_gaussian(count: int, *, sigma: float, seed: bytes) -> NDArray[np.int64]:
    """`count` independent whole numbers with probability ∝ exp(−z²/2s²), s = `parameter_of(sigma)`.

    The same 32-byte seed gives the same numbers, and fewer of them for a smaller count.
    """
    drawn = np.zeros(count, dtype=np.int64)
    add_discrete_gaussian(drawn, sigma=sigma, seed=seed)
    return drawn


def add_discrete_gaussian(
    total: NDArray[np.int64] | NDArray[np.uint64], *, sigma: float, seed: bytes, subtract: bool = False
) -> None:
    """total ± the numbers of `discrete_gaussian`, modulo 2⁶⁴, in place."""
    plan = _plan(_checked(sigma))
    if total.dtype not in (np.int64, np.uint64):
        raise TypeError(f"discrete noise is added to 64-bit integers, not to {total.dtype}")
    signed = total.view(np.int64)
    operation = np.subtract if subtract else np.add
    start = 0
    for drawn in _sums(_table(plan.square), plan.multipliers, len(total), seed):
        part = signed[start : start + len(drawn)]
        operation(part, drawn, out=part)
        start += len(drawn)


def parameter_of(sigma: float) -> float:
    """The parameter s of what `discrete_gaussian` draws: the largest float that is not above √(σ₀²·Σk²)."""
    square = _plan(_checked(sigma)).total
    parameter = max(float(sigma), math.sqrt(square) * (1 - 2.0**-50))
    while Fraction(above := math.nextafter(parameter, math.inf)) ** 2 <= square:
        parameter = above
    return parameter


def _checked(sigma: float) -> float:
    if not 0.0 < sigma <= LARGEST_SIGMA:
        raise ConfigError(f"Discrete noise needs a σ above 0 and up to 2^58 steps, not {sigma}.")
    return float(sigma)


@lru_cache(maxsize=4096)
def _plan(sigma: float) -> _Plan:
    square = Fraction(sigma) ** 2
    if sigma < _ONE_DRAW:
        return _Plan(square, (1,))
    if sigma < _OWN_TABLE:
        b = int((sigma / 2) ** (1 / 3)) + 1  # more than enough, since 4b⁶ < σ²
        while 4 * (1 + b**2) * (1 + b**2 + b**4) > square:
            b -= 1
        return _Plan(square / (1 + b**2 + b**4), (1, b, b**2))
    wanted = math.ceil(square / _COMMON**2)
    multipliers, squares = [1], 1
    while squares < wanted:
        # t ≥ 2 for k² ≤ s²·(1/4 − 1/σ₀²)
        largest = math.isqrt(squares * (_COMMON**2 // 4 - 1))
        missing = math.isqrt(wanted - squares - 1) + 1
        multipliers.append(min(largest, missing))
        squares += multipliers[-1] ** 2
    return _Plan(Fraction(_COMMON**2), tuple(multipliers))


@lru_cache(maxsize=32)
def _table(square: Fraction) -> _Table:
    left = _weights(square)
    whole = 2 * sum(left) - left[0]
    slots, last_owned = [], []
    for _ in range(_LEVELS):
        # Where nothing is left to share out, nobody ever looks at what follows.
        pairs = [divmod(weight << 16, max(whole, 1)) for weight in left]
        owned, left = [quotient for quotient, _ in pairs], [remainder for _, remainder in pairs]
        slots.append(_slots(owned))
        last_owned.append(2 * sum(owned) - owned[0] - 1)
        whole *= _SLOTS - 1 - last_owned[-1]
    cumulated = list(accumulate([left[0], *(2 * weight for weight in left[1:])]))
    bounds = tuple((mass << 192) // max(whole, 1) for mass in cumulated[:-1])
    # A bound that rounds to 2¹⁹² has no upper part of 64 bits; the exact comparison sees it as it is.
    upper = np.array([min(bound >> 128, _LAST_WORD) for bound in bounds], dtype=np.uint64)
    return _Table(tuple(slots), tuple(last_owned), bounds, upper)


def _weights(square: Fraction) -> list[int]:
    """2²⁵⁶·exp(−z²/2σ₀²) for z = 0, 1, … up to 14 σ₀, each off by less than 2³²."""
    exponent = _EXACT.divide(Decimal(-square.denominator), Decimal(2 * square.numerator))
    step = int(_EXACT.multiply(_EXACT.exp(exponent), Decimal(1 << _SCALE)))
    turn, weight = step * step >> _SCALE, 1 << _SCALE
    weights = []
    for _ in range(math.isqrt(math.ceil(_TAIL**2 * square)) + 2):
        weights.append(weight)
        weight = weight * step >> _SCALE
        step = step * turn >> _SCALE
    return weights


def _slots(owned: list[int]) -> NDArray[np.int16]:
    """The value of each slot, zero where none owns it; `owned` counts the slots of |z|, for either sign."""
    values = np.arange(1 - len(owned), len(owned), dtype=np.int16)
    taken = np.repeat(values, [*owned[:0:-1], *owned])
    return np.pad(taken, (0, _SLOTS - len(taken)))


def _sums(
    table: _Table, multipliers: tuple[int, ...], count: int, seed: bytes, *, chunk: int = _CHUNK
) -> Iterator[NDArray[np.int64]]:
    """Chunks of Σ k_j·x_j; each is valid until the next is asked for. A number has 16 bits of the stream a draw."""
    # Training in memory must not need the package behind this.
    from fedveil.crypto.streams import WordStream, block_function

    stream = WordStream(seed)
    blocks = block_function(stream.take(2).tobytes())  # keyed by the stream's first 128 bits
    draws = len(multipliers)
    words = -(-draws // 4)
    lanes = 4 * words
    chunk = max(1, min(chunk // words, count))
    factors = np.array(multipliers, dtype=np.int64)
    index, term, total = (np.empty(chunk, dtype=np.int64) for _ in range(3))
    value = np.empty(chunk, dtype=np.int16)
    used = np.arange(lanes) < draws
    for start in range(0, count, chunk):
        if start + chunk > count:
            index, term, total = (room[: count - start] for room in (index, term, total))
            value = value[: count - start]
        bits = stream.take(len(total) * words).view("<u2").reshape(-1, lanes)
        for lane, factor in enumerate(multipliers):
            np.copyto(index, bits[:, lane])
            # Every index is in range; "clip" only keeps take from making a copy of its own.
            np.take(table.slots[0], index, out=value, mode="clip")
            np.copyto(term if lane else total, value)
            if lane:
                np.multiply(term, factor, out=term)
                np.add(total, term, out=total)
        number, lane_of = _where(bits > np.uint16(table.last_owned[0]), used)
        if len(number):
            decided = _decide(table, blocks, (number + start) * lanes + lane_of)
            decided *= factors.take(lane_of)
            np.add.at(total, number, decided)
        yield total


def _where(undecided: NDArray[np.bool_], used: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of what is true in a used column; by rows first, since most have nothing."""
    lanes = len(used)
    whole = np.dtype(f"u{lanes}")
    packed = undecided.view(whole)[:, 0]
    packed &= used.view(whole)
    rows = np.flatnonzero(packed != 0)
    within = np.flatnonzero(packed.take(rows).view(np.bool_))
    return rows.take(within // lanes), within & (lanes - 1)


def _decide(table: _Table, blocks: Blocks, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of draws whose first 16 bits fell to no value."""
    bits = blocks(places, 0)
    draws = np.empty(len(places), dtype=np.int64)
    low, left = bits[:, 0], np.arange(len(places))
    for level in range(1, _LEVELS):
        slot = (low & np.uint64(_SLOTS - 1)).view(np.int64)
        draws[left] = table.slots[level].take(slot)
        again = np.flatnonzero(slot > table.last_owned[level])
        left, low = left.take(again), low.take(again) >> np.uint64(16)
    size = _search(table, bits[left, 1], blocks, places.take(left))
    draws[left] = np.where(low & np.uint64(1), -size, size)
    return draws


def _search(table: _Table, words: NDArray[np.uint64], blocks: Blocks, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which |z| each word falls to; where its 64 bits equal a bound's, 128 more decide."""
    sizes = np.searchsorted(table.upper, words, side="right").astype(np.int64)
    for at in np.flatnonzero(table.upper[sizes - 1] == words).tolist():
        high, low = (int(word) for word in blocks(places[at : at + 1], 1)[0])
        sizes[at] = bisect_right(table.bounds, int(words[at]) << 128 | high << 64 | low)
    return sizes
