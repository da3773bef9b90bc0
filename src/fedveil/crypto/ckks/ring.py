"""The ring, the moduli and the scale: how large a sum may be, how exact it is, how safe it is.

A ciphertext of TenSEAL's CKKS that was only ever added to others carries, per coefficient, the
rounding of its two halves when the special (last) modulus is divided away, the second times the
ternary secret, and the rounding of the encoding: a variance of (2 + 2N/3)/12. A slot reads N
coefficients through cosines, so one ciphertext's slots are off by

    σ₁ = √(N/2 · (2 + 2N/3)/12) / scale,      a sum of n by σ = √n · σ₁ on average.

(Measured on N = 4096 and 8192, scales 2³⁰ to 2⁶⁰: within 2 % of it.) The secret is the same in all
ciphertexts, so slots where its transform is large are always worse: by √E with probability e⁻ᴱ. With
8 standard deviations for the rest, no slot of a key is off by more than

    8 · √(ln(N/2) + 20) · σ

but with probability 2·10⁻⁹. float64 arithmetic adds 2⁻⁴⁸ of the largest sum (measured: a quarter of that).

Where that is little enough, the noise is taken away altogether: values are rounded to multiples of a
`grain` of more than twice the noise before they are encrypted, so that the sum is such a multiple too and
the nearest one to what was decrypted is the sum. Decrypting then gives what the values alone determine,
and n addends are off by n · grain/2 at most. Rounding to multiples of 2⁻²⁰ comes last, and adds half of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedveil.errors import ConfigError

PRECISION = 1e-6
"""The largest absolute error a decrypted sum may have."""

ROUNDED = 2.0**-20
"""Decrypted values are rounded to multiples of this.

A CKKS decryption is the sum plus the ciphertext's noise, and the noise is a linear function of the
secret key: whoever holds a ciphertext and is handed its exact decryption can solve for the key (Li
and Micciancio, EUROCRYPT 2021). Rounded to steps far wider than the noise, almost every decryption
is what the sum alone would have given; with a `grain`, every one.
"""

MODULUS_BITS = {4096: 109, 8192: 218, 16384: 438}
"""Degree of the ring → most bits of all moduli together at 128-bit security (HomomorphicEncryption.org)."""

_LARGE = (16384, (60, 60, 60))
_SHAPES = ((4096, (54, 55)), (4096, (60, 49)), (8192, (60, 60, 60)))
_MODULUS_RANGE = range(20, 61)
_MOST_SCALE_BITS = 60
_FLOAT_ERROR = 2.0**-48


@dataclass(frozen=True)
class Parameters:
    """A ring that is safe, and a scale that leaves room and precision for a sum of `addends` values of ± `largest`.

    `moduli` are bit lengths, the special one last. The sum must stay within half of the other moduli's
    product q, with a factor of two to spare: addends · largest · 2^scale_bits ≤ q/4.
    """

    degree: int
    moduli: tuple[int, ...]
    scale_bits: int
    addends: int
    largest: float

    def __post_init__(self) -> None:
        if self.addends < 1:
            raise ConfigError(f"A sum has at least one addend, not {self.addends}.")
        if not 0.0 < self.largest < math.inf:
            raise ConfigError(f"The largest value to encrypt must be a positive number, not {self.largest}.")
        self._check_security()
        self._check_room()
        if not self.error <= PRECISION:
            raise ConfigError(
                f"{self._named()} gives sums of {self.addends} values of up to {self.largest:g} with an error of up "
                f"to {self.error:.2g}, where {PRECISION:g} is needed. Raise scale_bits, or lower the number of "
                "addends or the largest value."
            )

    @property
    def slots(self) -> int:
        """How many values one ciphertext holds."""
        return self.degree // 2

    @property
    def scale(self) -> float:
        """What values are multiplied by before they are rounded to integers."""
        return 2.0**self.scale_bits

    @property
    def deviation(self) -> float:
        """σ: the standard deviation of the noise in a sum of `addends` ciphertexts."""
        coefficient = math.sqrt((2.0 + 2.0 * self.degree / 3.0) / 12.0)
        return math.sqrt(self.addends * self.degree / 2.0) * coefficient / self.scale

    @property
    def noise(self) -> float:
        """What the noise of such a sum exceeds in no slot, but with probability 2·10⁻⁹ per key."""
        return 8.0 * math.sqrt(math.log(self.slots) + 20.0) * self.deviation

    @property
    def grain(self) -> float | None:
        """What values are rounded to multiples of before encryption, a power of two; None where that costs too much."""
        grain = 2.0 ** math.ceil(math.log2(2.0 * self._inexact))
        affordable = grain <= ROUNDED and self.addends * grain / 2.0 + ROUNDED / 2.0 <= PRECISION
        return grain if affordable else None

    @property
    def error(self) -> float:
        """The largest error of a decrypted and rounded sum."""
        return (self._inexact if self.grain is None else self.addends * self.grain / 2.0) + ROUNDED / 2.0

    @property
    def _inexact(self) -> float:
        return self.noise + self.addends * self.largest * _FLOAT_ERROR

    def _named(self) -> str:
        return f"CKKS with degree {self.degree}, moduli {list(self.moduli)} and scale 2^{self.scale_bits}"

    def _check_security(self) -> None:
        _check_degree(self.degree)
        if len(self.moduli) < 2 or not all(bits in _MODULUS_RANGE for bits in self.moduli):
            raise ConfigError(
                f"CKKS needs two or more moduli of {_MODULUS_RANGE[0]} to {_MODULUS_RANGE[-1]} bits, "
                f"the special one last, not {list(self.moduli)}."
            )
        most = MODULUS_BITS[self.degree]
        if sum(self.moduli) > most:
            raise ConfigError(
                f"{self._named()} is below 128-bit security: its moduli have {sum(self.moduli)} bits together, "
                f"and at most {most} are safe. Lower the moduli, or take a larger degree."
            )

    def _check_room(self) -> None:
        if not 1 <= self.scale_bits <= min(sum(self.moduli[:-1]) - 2, _MOST_SCALE_BITS):
            raise ConfigError(
                f"{self._named()} does not work: scale_bits must leave two bits of the moduli before the last one "
                f"and be at most {_MOST_SCALE_BITS}."
            )
        if self.addends * self.largest * self.scale > 2.0 ** (sum(self.moduli[:-1]) - 2):
            raise ConfigError(
                f"{self._named()} has no room for sums of {self.addends} values of up to {self.largest:g}. "
                "Lower scale_bits, the number of addends or the largest value."
            )


def choose(*, addends: int, largest: float, degree: int | None = None, scale_bits: int | None = None) -> Parameters:
    """The smallest safe ring with room and precision for the sum, and the largest scale it has room for.

    A larger scale costs nothing. Of several moduli for one ring, the smallest that allow a grain are taken,
    or the smallest if none do. With a `degree` or `scale_bits` given, one that does not do is refused.
    """
    if degree is not None:
        _check_degree(degree)
    shapes = _SHAPES if degree is None else [shape for shape in (*_SHAPES, _LARGE) if shape[0] == degree]
    candidates: list[Parameters] = []
    for ring, moduli in shapes:
        bits = _scale_bits(moduli, addends * largest) if scale_bits is None else scale_bits
        try:
            candidates.append(Parameters(ring, moduli, bits, addends, largest))
        except ConfigError:
            given = degree is not None or scale_bits is not None
            if (
                addends < 1
                or not 0.0 < largest < math.inf
                or (given and (ring, moduli) == shapes[-1] and not candidates)
            ):
                raise
    if not candidates:
        raise ConfigError(
            f"No CKKS parameters keep an absolute precision of {PRECISION:g} for sums of {addends} values of up to "
            f"{largest:g}. Lower the largest value, or the number of addends."
        )
    smallest = [parameters for parameters in candidates if parameters.degree == candidates[0].degree]
    return next((parameters for parameters in smallest if parameters.grain is not None), smallest[0])


def _check_degree(degree: int) -> None:
    if degree not in MODULUS_BITS:
        raise ConfigError(
            f"The degree of a CKKS ring must be one of {', '.join(map(str, MODULUS_BITS))}, not {degree}: "
            "smaller ones are not both safe and precise enough."
        )


def _scale_bits(moduli: tuple[int, ...], size: float) -> int:
    bits = sum(moduli[:-1]) - 2
    whole = math.ceil(math.log2(size)) if 0.0 < size < math.inf else 0
    return min(bits - max(whole, 0), _MOST_SCALE_BITS)
