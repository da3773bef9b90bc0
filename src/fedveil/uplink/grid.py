"""The grid under a claim: contribution, noise and masks are whole numbers of one step, in one vector modulo 2⁶⁴.

Noise in floating point has gaps that depend on what it is added to, and those tell one record from another. So what
is under a claim is first rounded to multiples of a step, and noise is an integer Gaussian on that grid. The step
follows from public facts: everybody computes the same. What is proven of it, in steps:

- Rounding moves each number by half a step, so that two neighbours' vectors of d numbers are at most S + √d apart.
  The step is so small that this is at most S·(1 + ROUNDING), which is what the plan counts on.
- An integer Gaussian of variance σ² on a whole number is, within a factor e^(±2⁻¹¹⁰) at every point, a real Gaussian
  of variance σ² − 4 rounded at random without a further look at the data. Integers are therefore drawn with
  σ² = V + 4 for a planned variance V, and all that is known of real Gaussians of variance V holds.
- The same is true of pair noise, which in uploads is a whole multiple of what a pair has drawn, as long as every σ
  has at least FINEST steps and nobody shares noise with more than MOST_PAIRS others.

docs/decisions/0013 has the proof.
"""

from __future__ import annotations

import logging
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
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout

# --- real numbers as integers modulo 2⁶⁴, so that masks hide them completely, and noise and masks cancel exactly

_LOG = logging.getLogger(__name__)

Reals = NDArray[np.float32] | NDArray[np.float64]

FEWEST_FRACTION_BITS = 8
"""Below this, rounding would be visible in a trained model."""

SUM_BITS = 62
RANGES = (1.0, 2.0**40)
"""What value_range may be. A server sets it: neither may it cut off every number there is, nor round them all away."""

_SMALLEST_RANGE = 2.0**-64
_WORDS_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class FixedPoint:
    """Multiples of 2⁻ᶠ that leave room for `addends` numbers of up to ± `range` each.

    f = 62 − ⌈log₂ range⌉ − ⌈log₂ addends⌉, and not below `least`, so that the sum of the encoded integers is at most
    2⁶² in size: half of what wraps. The other half is there for integer noise.
    """

    range: float
    addends: int
    least: int = FEWEST_FRACTION_BITS

    def __post_init__(self) -> None:
        if not _SMALLEST_RANGE <= self.range < math.inf:
            raise ConfigError(f"value_range must be a positive number, not {self.range}.")
        if self.addends < 1:
            raise ConfigError(f"A sum has at least one addend, not {self.addends}.")
        if self.fraction_bits < self.least:
            raise ConfigError(
                f"Sums of {self.addends} numbers of up to value_range = {self.range:g} leave "
                f"{self.fraction_bits} of 64 bits for fractions; at least {self.least} are needed. "
                "Lower value_range, or the number of clients a round."
            )

    @property
    def fraction_bits(self) -> int:
        """f, the number of bits after the point; more than 52 for small ranges."""
        mantissa, exponent = math.frexp(self.range)
        whole_bits = exponent - 1 if mantissa == 0.5 else exponent
        return SUM_BITS - whole_bits - (self.addends - 1).bit_length()

    @property
    def step(self) -> float:
        """The distance 2⁻ᶠ of neighbouring numbers; encoding errs by half of it at most."""
        return 2.0**-self.fraction_bits

    def encode(self, vector: Tensor | Reals) -> NDArray[np.uint64]:
        """The nearest multiples of the step, negative ones as 2⁶⁴ − |·|.

        What is beyond ± range is cut off there, and what is no number counts as 0: a client that refused instead
        would tell how large its numbers are.
        """
        numbers = _as_array(vector)
        if numbers.ndim != 1:
            raise ValueError(f"a flat vector is encoded, not one of shape {numbers.shape}")
        encoded = np.empty(len(numbers), dtype=np.int64)
        scratch = np.empty(min(_WORDS_AT_ONCE, len(numbers)))
        scale = 2.0**self.fraction_bits
        beyond = 0
        for start in range(0, len(numbers), _WORDS_AT_ONCE):
            part = numbers[start : start + _WORDS_AT_ONCE]
            if not (part.min() >= -self.range and part.max() <= self.range):  # also catches NaN
                beyond += int(np.count_nonzero(~(np.abs(part) <= self.range)))
                part = np.nan_to_num(part.astype(np.float64), nan=0.0).clip(-self.range, self.range)
            scaled = scratch[: len(part)]
            # In float64, scaling by a power of two is exact, and so is rint beyond 2⁵².
            np.multiply(part, scale, out=scaled, dtype=np.float64)
            np.rint(scaled, out=scaled)
            np.copyto(encoded[start : start + _WORDS_AT_ONCE], scaled, casting="unsafe")
        _note(beyond, len(numbers), self.range)
        return encoded.view(np.uint64)

    def decode(self, total: NDArray[np.uint64]) -> NDArray[np.float64]:
        """A sum of encoded numbers; exact below 2⁵³ steps, beyond that the nearest float64."""
        numbers = total.view(np.int64).astype(np.float64)
        numbers *= self.step
        return numbers

    def plausible(self, total: NDArray[np.uint64], *, addends: int) -> bool:
        """Whether `total` can be the sum of `addends` encoded numbers; one that is still masked mostly cannot."""
        signed = total.view(np.int64)
        limit = addends * math.ceil(self.range / self.step)
        return not len(signed) or (-limit <= int(signed.min()) and int(signed.max()) <= limit)


def saturated(values: Tensor, limit: float) -> Tensor:
    """A vector cut off at ± `limit`; what is no number counts as 0."""
    kept = torch.nan_to_num(values, nan=0.0).clamp(-limit, limit)
    _note(int((kept != values).sum()), len(values), limit)
    return kept


def _note(beyond: int, count: int, limit: float) -> None:
    """Tell whoever runs the client, and nobody else."""
    if beyond:
        _LOG.info("%d of %d numbers of an upload were no numbers or beyond ± %g: cut off", beyond, count, limit)


def check_value_range(value: float) -> None:
    """Refuse a range outside what a server may set."""
    low, high = RANGES
    if not low <= value <= high:
        what = "Lower" if value > high else "Raise"
        raise ConfigError(f"value_range must lie between {low:g} and 2^40, not {value:g}. {what} value_range.")


def _as_array(vector: Tensor | Reals) -> Reals:
    if not isinstance(vector, Tensor):
        return vector
    plain = vector.detach().cpu()
    # numpy knows no bfloat16; float64 holds every other floating type exactly.
    return np.asarray(plain if plain.dtype.itemsize >= 4 else plain.double())


# --- discrete Gaussian noise: whole numbers z with probability ∝ exp(−z²/2s²), under every claim
#
# Noise in floating point has gaps that depend on what it is added to, and those leak; whole numbers
# have none.
#
# The promise, per number and for ideal random words: an integer Gaussian of parameter s = `parameter_of(σ)`
# (from σ to 1.001·σ; exactly σ below 2²¹), within 2⁻¹⁰⁰ in max-log on all integers, but for an event of
# probability below 2⁻¹²⁰ (tails cut off, weights rounded). So n numbers add at most 2n·2⁻¹⁰⁰ to an ε and
# n·2⁻¹²⁰·(1 + e^ε) to a δ. What is left is that the words come from AES.
#
# How a number is drawn. X = x₀ + k₁x₁ + k₂x₂ + …, every x drawn from one table of a small parameter σ₀
# (Peikert 2010; Micciancio and Walter 2017). Let x be an integer Gaussian of parameter s, y one of σ₀, and k
# a whole number. Completing the square, P(x + ky = z) is exp(−z²/2s'²) with s'² = s² + k²σ₀², times
# Σ_y exp(−(y − cz)²/2t²) with 1/t² = 1/σ₀² + k²/s² and a real c. By Poisson's formula that sum is
# √(2π)·t·(1 ± δ) whatever cz is, with δ < 2.01·exp(−2π²t²). Hence x + ky is within log((1 + δ)/(1 − δ)) of
# the integer Gaussian of parameter s', in max-log. Multipliers are chosen so that t ≥ 2, which makes it
# 2⁻¹¹¹ a step; convolving with another law does not increase it, there are at most five steps, and
# 5·2⁻¹¹¹ < 2⁻¹⁰⁸.
#
# - σ < 2⁸: one draw from a table of σ₀ = σ.
# - σ < 2²¹: multipliers 1, b, b² and a table of σ₀² = σ²/(1 + b² + b⁴). With b the largest whole number for
#   which σ₀² ≥ 4(1 + b²), both steps have 1/t² ≤ (1 + b²)/σ₀² ≤ 1/4.
# - from 2²¹ on: one table for all, σ₀ = 2¹¹. Every multiplier but the last is the largest with t ≥ 2, so s grows by
#   2¹⁰ a step; the last is rounded up to reach σ. With L the sum of the squares before it, L ≥ 1023², that
#   raises s by a factor of at most 1 + 1/(2√L) + 1/L < 1.0005.
#
# How a table is drawn from. Weights up to 14 σ₀ (less than 2⁻¹³⁵ lies beyond) are whole numbers on a scale of
# 2²⁵⁶, so everything after is exact and alike on every machine. A value owns ⌊2¹⁶·p⌋ of 2¹⁶ slots, and 16
# bits of the stream choose one. What no value owns (9 % of the slots at σ₀ = 2¹¹) is shared out again in the
# same way, twice, with 16 further bits each time; what is left then is decided by 64 bits against cumulative
# weights, and where these equal a bound's, by 192. Draw j of number i takes its bits from places that only i
# and j determine: a shorter vector is the beginning of a longer one, and the size of chunks changes nothing.
#
# Time depends on what is drawn: this is not meant for a machine shared with an attacker.

if TYPE_CHECKING:
    from fedveil.crypto.keys import Blocks

LARGEST_SIGMA = 2.0**58
"""Beyond this, 14 σ would not fit 64 bits."""

_ONE_DRAW = 2**8
_OWN_TABLE = 2**21
_COMMON = 2**11
_GAUSSIAN_TAIL = 14
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
    for _ in range(math.isqrt(math.ceil(_GAUSSIAN_TAIL**2 * square)) + 2):
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
    from fedveil.crypto.keys import WordStream, block_function

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


ROUNDING = 2.0**-20
"""By how much rounding to the grid may lengthen the largest change of a contribution, relatively."""

FINEST = 1024.0
"""The least standard deviation of noise, in steps."""

SHORT_BITS = 28
"""The length of words that are found as logarithms of points: what is in them is on a coarser grid."""

_LEAST_SHORT = -40
MOST_SHORT = 512
_SHORT_FINEST = 64.0
"""Of how many clients sums in such words are at most, and their noise's least deviation: without pairs, n integer
Gaussians add up like real ones where (n + 1)/σ² < 0.13 (decision 13, 3)."""

MOST_PAIRS = 1 << 16

_SMOOTHING = 4.0
_TAIL = 14.0
_KEPT_BITS = 16


def rounding_of(word_bits: int) -> float:
    """By how much rounding may lengthen a change where sums are words of so many bits."""
    return {64: ROUNDING, SHORT_BITS: 2.0**-5}.get(word_bits, 2.0**-10)


def finest_of(word_bits: int) -> float:
    """The least standard deviation of noise in such words, in steps."""
    return _SHORT_FINEST if word_bits == SHORT_BITS else FINEST


def grid_of(noise_layout: NoiseLayout, *, length: int, largest: float, word_bits: int = 64) -> FixedPoint:
    """The grid of a round's uploads of `length` numbers, none beyond ± `largest`; refuses what words do not hold."""
    rounding = rounding_of(word_bits)
    size = len(noise_layout.members)
    variances = np.concatenate([noise_layout.residual, noise_layout.pairs])
    noise, reach = variances[variances > 0], noise_layout.sensitivity[noise_layout.sensitivity > 0]
    # Where one record may be left out altogether, a client's reach is half of what it is where one is replaced.
    fine = rounding * float(reach.min(initial=math.inf)) / 2 / (1 + rounding) / math.sqrt(length)
    # In short words a step is small beside the noise, whatever it is by itself.
    least = _LEAST_SHORT if word_bits == SHORT_BITS else FEWEST_FRACTION_BITS
    fine = min(fine, math.sqrt(float(noise.min(initial=math.inf))) / finest_of(word_bits), 2.0**-least)
    bits = 1 - math.frexp(fine)[1]
    room = 2.0 ** (word_bits - 2 - bits - (size - 1).bit_length())
    spread = _TAIL * math.sqrt(float(variances.sum()))
    if not (largest <= room and spread <= room * size):
        raise ConfigError(
            f"Numbers of up to {largest:g} and noise of {spread / _TAIL:.2g}, in steps of 2^-{bits} as a claim about "
            f"{float(reach.min()):.2g} needs them, do not fit {word_bits} bits for {size} clients. Raise clip, or "
            "lower the number of clients a round."
        )
    return FixedPoint(room * 2.0 ** (64 - word_bits), size, least)


def check_pairs(noise_layout: NoiseLayout) -> None:
    """Refuse rounds in which somebody shares noise with more clients than the proof is for."""
    ends = np.concatenate([noise_layout.first, noise_layout.second])
    if len(ends) and int(np.bincount(ends).max()) > MOST_PAIRS:
        raise ConfigError(f"A client would share noise with more than {MOST_PAIRS} others. Set neighbours.")


def add_noise(words: NDArray[np.uint64], *, variance: float, step: float, seed: bytes, subtract: bool = False) -> None:
    """Words ± whole numbers that count as Gaussian noise of at least `variance`, modulo 2⁶⁴, in place."""
    sigma = math.sqrt(variance / step**2 + _SMOOTHING)
    # Both ends of a pair must draw the same numbers, though linear algebra differs in its last bits between machines.
    unit = 2.0 ** (math.frexp(sigma)[1] - _KEPT_BITS)
    add_discrete_gaussian(words, sigma=math.ceil(sigma / unit) * unit, seed=seed, subtract=subtract)
