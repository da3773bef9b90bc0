"""What is done with one ciphertext of up to N/2 values; also runs in worker processes, without the rest of FedVeil.

TenSEAL could cut long vectors up by itself, no faster, and prints a warning to standard output for each.
It trusts the sizes a serialised vector claims, so everything received is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class Refused(Exception):  # noqa: N818 - it never leaves this package
    """TenSEAL, or a check, did not accept a serialised ciphertext or context."""


class Ciphertext(Protocol):
    """SEAL's part of a vector."""

    scale: float

    def parms_id(self) -> Sequence[int]:
        """The hash of the ring and of the moduli that are left."""
        ...

    def size(self) -> int:
        """The number of its polynomials."""
        ...

    def is_transparent(self) -> bool:
        """Whether it can be read without a key."""
        ...


class Vector(Protocol):
    """TenSEAL's encrypted vector, as far as it is used here."""

    def serialize(self) -> bytes:
        """Its bytes."""
        ...

    def size(self) -> int:
        """How many values it says it holds."""
        ...

    def ciphertext(self) -> Sequence[Ciphertext]:
        """The ciphertexts it consists of."""
        ...

    def decrypt(self) -> list[float]:
        """Its values, if its context has the secret key."""
        ...

    def add_(self, other: Vector) -> object:
        """Add another one, in place."""
        ...

    def sub_(self, other: Vector) -> object:
        """Subtract another one, in place."""
        ...


class Context(Protocol):
    """TenSEAL's context, as far as it is used here."""

    @property
    def data(self) -> object:
        """What lies under it."""
        ...


@dataclass(frozen=True)
class Level:
    """What a ciphertext must look like to be added to others under the same parameters."""

    parms: tuple[int, ...]
    scale: float


def restored(serialized: bytes) -> Context:
    """A context from its bytes, without threads of its own."""
    import tenseal

    try:
        context: Context = tenseal.context_from(serialized, 1)
    except Exception as reason:  # TenSEAL's errors are of many kinds
        raise Refused(str(reason)) from reason
    return context


def encrypt(context: Context, values: Values) -> Vector:
    """One ciphertext of at most N/2 values."""
    from tenseal import _ts_cpp

    # Past TenSEAL's wrapper, which copies the values into a tensor and out of it again.
    vector: Vector = _ts_cpp.CKKSVector(context.data, values.tolist())
    return vector


def level(vector: Vector) -> Level:
    """What ciphertexts made under this one's context look like."""
    (ciphertext,) = vector.ciphertext()
    return Level(tuple(ciphertext.parms_id()), ciphertext.scale)


def load(context: Context, chunk: bytes, *, size: int, level: Level) -> Vector:
    """A ciphertext of exactly `size` values, checked."""
    from tenseal import _ts_cpp

    if not _holds_one(chunk, size=size, scale=level.scale):
        raise Refused(f"it is not one ciphertext of {size} values")
    try:
        vector: Vector = _ts_cpp.CKKSVector(context.data, chunk)
        found = vector.ciphertext()
    except Exception as reason:
        raise Refused(str(reason)) from reason
    if len(found) != 1 or vector.size() != size:
        raise Refused(f"it holds {vector.size()} values in {len(found)} ciphertexts, not {size} in one")
    if found[0].size() != 2 or tuple(found[0].parms_id()) != level.parms or found[0].scale != level.scale:
        raise Refused("it was made with other parameters")
    if found[0].is_transparent():
        raise Refused("it is not encrypted: anybody could read it")
    return vector


def _holds_one(chunk: bytes, *, size: int, scale: float) -> bool:
    """Whether these are the bytes TenSEAL writes for one ciphertext: sizes = 1, ciphertexts = 2, scale = 3.

    TenSEAL reads as many values as the sizes say, past the end of what it has decrypted.
    """
    sizes = _varint(size)
    start = b"\x0a" + _varint(len(sizes)) + sizes + b"\x12"
    end = b"\x19" + struct.pack("<d", scale)
    room = len(chunk) - len(start) - len(end)
    # The ciphertext fills what its own length, of one to five bytes, leaves.
    lengths = (_varint(room - used) for used in range(1, 6) if room > used)
    return chunk.endswith(end) and any(
        chunk.startswith(start + length) for used, length in enumerate(lengths, 1) if len(length) == used
    )


def _varint(number: int) -> bytes:
    """Protocol buffers' integers: seven bits a byte, the lowest first."""
    content = bytearray()
    while number > 0x7F:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    content.append(number)
    return bytes(content)


def decrypt(context: Context, chunk: bytes, *, size: int, level: Level) -> Values:
    """The `size` values of a ciphertext, with their noise."""
    vector = load(context, chunk, size=size, level=level)
    try:
        values = np.array(vector.decrypt(), dtype=np.float64)
    except Exception as reason:
        raise Refused(str(reason)) from reason
    if len(values) != size:
        raise Refused(f"it holds {len(values)} values, not {size}")
    return values
