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

import math

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout
from fedveil.uplink.discrete_gaussian import add_discrete_gaussian
from fedveil.uplink.fixed_point import FEWEST_FRACTION_BITS, FixedPoint

ROUNDING = 2.0**-20
"""By how much rounding to the grid may lengthen the largest change of a contribution, relatively."""

FINEST = 1024.0
"""The least standard deviation of noise, in steps."""

MOST_PAIRS = 1 << 16

_SMOOTHING = 4.0
_TAIL = 14.0
_KEPT_BITS = 16


def rounding_of(word_bits: int) -> float:
    """By how much rounding may lengthen a change where sums are words of so many bits: of fewer, by a thousandth."""
    return ROUNDING if word_bits == 64 else 2.0**-10


def grid_of(noise_layout: NoiseLayout, *, length: int, largest: float, word_bits: int = 64) -> FixedPoint:
    """The grid of a round's uploads of `length` numbers, none beyond ± `largest`; refuses what words do not hold."""
    rounding = rounding_of(word_bits)
    size = len(noise_layout.members)
    variances = np.concatenate([noise_layout.residual, noise_layout.pairs])
    noise, reach = variances[variances > 0], noise_layout.sensitivity[noise_layout.sensitivity > 0]
    # Where one record may be left out altogether, a client's reach is half of what it is where one is replaced.
    fine = rounding * float(reach.min(initial=math.inf)) / 2 / (1 + rounding) / math.sqrt(length)
    fine = min(fine, math.sqrt(float(noise.min(initial=math.inf))) / FINEST, 2.0**-FEWEST_FRACTION_BITS)
    bits = 1 - math.frexp(fine)[1]
    room = 2.0 ** (word_bits - 2 - bits - (size - 1).bit_length())
    spread = _TAIL * math.sqrt(float(variances.sum()))
    if not (largest <= room and spread <= room * size):
        raise ConfigError(
            f"Numbers of up to {largest:g} and noise of {spread / _TAIL:.2g}, in steps of 2^-{bits} as a claim about "
            f"{float(reach.min()):.2g} needs them, do not fit {word_bits} bits for {size} clients. Raise clip, or "
            "lower the number of clients a round."
        )
    return FixedPoint(room * 2.0 ** (64 - word_bits), size)


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
