"""Real numbers as integers modulo 2⁶⁴, so that masks hide them completely, and noise and masks cancel exactly."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError

_LOG = logging.getLogger(__name__)

Reals = NDArray[np.float32] | NDArray[np.float64]

FEWEST_FRACTION_BITS = 8
"""Below this, rounding would be visible in a trained model."""

SUM_BITS = 62
RANGES = (1.0, 2.0**40)
"""What value_range may be. A server sets it: neither may it cut off every number there is, nor round them all away."""

_SMALLEST_RANGE = 2.0**-64
_CHUNK = 1 << 14


@dataclass(frozen=True)
class FixedPoint:
    """Multiples of 2⁻ᶠ that leave room for `addends` numbers of up to ± `range` each.

    f = 62 − ⌈log₂ range⌉ − ⌈log₂ addends⌉, so that the sum of the encoded integers is at most 2⁶² in
    size: half of what wraps. The other half is there for integer noise.
    """

    range: float
    addends: int

    def __post_init__(self) -> None:
        if not _SMALLEST_RANGE <= self.range < math.inf:
            raise ConfigError(f"value_range must be a positive number, not {self.range}.")
        if self.addends < 1:
            raise ConfigError(f"A sum has at least one addend, not {self.addends}.")
        if self.fraction_bits < FEWEST_FRACTION_BITS:
            raise ConfigError(
                f"Sums of {self.addends} numbers of up to value_range = {self.range:g} leave "
                f"{self.fraction_bits} of 64 bits for fractions; at least {FEWEST_FRACTION_BITS} are needed. "
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
        scratch = np.empty(min(_CHUNK, len(numbers)))
        scale = 2.0**self.fraction_bits
        beyond = 0
        for start in range(0, len(numbers), _CHUNK):
            part = numbers[start : start + _CHUNK]
            if not (part.min() >= -self.range and part.max() <= self.range):  # also catches NaN
                beyond += int(np.count_nonzero(~(np.abs(part) <= self.range)))
                part = np.nan_to_num(part.astype(np.float64), nan=0.0).clip(-self.range, self.range)
            scaled = scratch[: len(part)]
            # In float64, scaling by a power of two is exact, and so is rint beyond 2⁵².
            np.multiply(part, scale, out=scaled, dtype=np.float64)
            np.rint(scaled, out=scaled)
            np.copyto(encoded[start : start + _CHUNK], scaled, casting="unsafe")
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
