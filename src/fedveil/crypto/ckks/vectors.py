"""How an encrypted vector travels: a header, the sizes of its ciphertexts, the ciphertexts.

    magic 5 · checksum 4 · key id 8 · vector length 8 · addends 4 · number of ciphertexts 4 · sizes 4 each · ciphertexts

The checksum (CRC-32 of everything behind it) finds damage, not malice: whoever can write a ciphertext can
encrypt another one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedveil.crypto import ciphertexts
from fedveil.crypto.ciphertexts import Values, Vector
from fedveil.crypto.ckks.keys import PublicKey, SecretKey
from fedveil.crypto.ckks.ring import ROUNDED
from fedveil.errors import NumericError, ProtocolError

_MAGIC = b"FVCV\x01"
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<8sQII")
_BODY = len(_MAGIC) + _CHECKSUM.size


@dataclass(frozen=True)
class Summary:
    """What an encrypted vector says about itself."""

    key_id: bytes
    length: int
    addends: int


def pack(summary: Summary, chunks: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """The bytes of an encrypted vector."""
    header = _HEADER.pack(summary.key_id, summary.length, summary.addends, len(chunks))
    sizes = struct.pack(f"<{len(chunks)}I", *map(len, chunks))
    checksum = zlib.crc32(sizes, zlib.crc32(header))
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    return b"".join((_MAGIC, _CHECKSUM.pack(checksum), header, sizes, *chunks))


def unpack(content: bytes, *, key_id: bytes, length: int | None, slots: int) -> tuple[Summary, list[memoryview]]:
    """The header and the ciphertexts of a vector under this key and of this length (None: of any)."""
    summary, count = _header(content)
    if summary.key_id != key_id:
        raise ProtocolError(
            f"an encrypted vector belongs to the key {summary.key_id.hex()}, where {key_id.hex()} is used"
        )
    if length is not None and summary.length != length:
        raise ProtocolError(f"an encrypted vector holds {summary.length} values, where {length} are expected")
    if summary.addends < 1:
        raise ProtocolError("an encrypted vector says that it is a sum of nothing")
    if count != -(-summary.length // slots):
        raise ProtocolError(f"an encrypted vector of {summary.length} values has {count} ciphertexts")
    start = _BODY + _HEADER.size + 4 * count
    sizes = struct.unpack_from(f"<{count}I", content, _BODY + _HEADER.size) if len(content) >= start else ()
    end = start + sum(sizes)
    if len(content) < end:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes of at least {end}")
    if len(content) > end:
        raise ProtocolError(f"an encrypted vector has {len(content) - end} bytes too many")
    whole = memoryview(content)
    if zlib.crc32(whole[_BODY:]) != _CHECKSUM.unpack_from(content, len(_MAGIC))[0]:
        raise ProtocolError("an encrypted vector was damaged on its way: its checksum is wrong")
    parts = []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return summary, parts


def _header(content: bytes) -> tuple[Summary, int]:
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        raise ProtocolError("these bytes are not a CKKS-encrypted vector")
    if len(content) < _BODY + _HEADER.size:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes are less than its header")
    key_id, length, addends, count = _HEADER.unpack_from(content, _BODY)
    return Summary(key_id, length, addends), count


Reals = NDArray[np.float32] | NDArray[np.float64]


def encrypt(values: Tensor | Reals, key: PublicKey) -> bytes:
    """The encrypted vector; values that are not finite, or beyond the key's `largest`, are refused."""
    numbers = _checked(values, key.parameters.largest)
    if key.parameters.grain is not None:
        numbers = _rounded(numbers, key.parameters.grain)
    parts = ciphertexts.encrypt_all(numbers, slots=key.parameters.slots, material=key.material)
    return pack(Summary(key.key_id, len(numbers), 1), parts)


def summary(content: bytes) -> Summary:
    """Key, length and number of addends an encrypted vector claims; only `Adder` and `decrypt` check them."""
    return _header(content)[0]


class Adder:
    """Adds encrypted vectors of one length under one key; needs no secret.

    Stays in this process: a sum costs a few percent of an encryption, about what sending the ciphertext to
    a worker would cost.
    """

    def __init__(self, key: PublicKey, *, length: int) -> None:
        self._key = key
        self._length = length
        self._sum: list[Vector] = []
        self._addends = 0

    @property
    def addends(self) -> int:
        """How many vectors the sum consists of."""
        return self._addends

    def add(self, content: bytes) -> None:
        """Add one encrypted vector; a refused one (ProtocolError) leaves the sum as it was."""
        key = self._key
        header, parts = unpack(content, key_id=key.key_id, length=self._length, slots=key.parameters.slots)
        if self._addends + header.addends > key.parameters.addends:
            raise ProtocolError(
                f"{self._addends} + {header.addends} encrypted vectors are more than the {key.parameters.addends} "
                "this key's sums have room for"
            )
        sizes = _sizes(self._length, key.parameters.slots)
        try:
            loaded = [
                ciphertexts.load(key.material.context, bytes(part), size=size, level=key.level)
                for part, size in zip(parts, sizes, strict=True)
            ]
            if self._addends:
                _add(self._sum, loaded)
            else:
                self._sum = loaded
        except ciphertexts.Refused as reason:
            raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
        self._addends += header.addends

    def total(self) -> bytes:
        """The encrypted sum so far."""
        if not self._addends:
            raise ProtocolError("there is no sum: no encrypted vector has been added")
        whole = Summary(self._key.key_id, self._length, self._addends)
        return pack(whole, [vector.serialize() for vector in self._sum])


def decrypt(content: bytes, key: SecretKey, *, length: int | None = None) -> Values:
    """The values, rounded to multiples of `ROUNDED` (which says why), of a vector of this length (None: of any)."""
    parameters = key.parameters
    header, parts = unpack(content, key_id=key.key_id, length=length, slots=parameters.slots)
    if header.addends > parameters.addends:
        raise ProtocolError(
            f"an encrypted sum of {header.addends} vectors: this key's sums have room for {parameters.addends}"
        )
    sizes = _sizes(header.length, parameters.slots)
    try:
        pieces = ciphertexts.decrypt_all(parts, sizes, level=key.public.level, material=key.material)
    except ciphertexts.Refused as reason:
        raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
    values = np.concatenate(pieces) if pieces else np.empty(0)
    limit = header.addends * parameters.largest + parameters.error
    if len(values) and not (values.min() >= -limit and values.max() <= limit):
        raise ProtocolError(
            f"a decrypted sum of {header.addends} vectors has values beyond {limit:g}: one of them did not keep to "
            f"the agreed ± {parameters.largest:g}, or was damaged"
        )
    if parameters.grain is not None:
        values = _rounded(values, parameters.grain)
    return _rounded(values, ROUNDED) + 0.0  # no negative zeros


def _add(total: list[Vector], more: list[Vector]) -> None:
    """In place; if one addition fails, it and those before it are taken back (SEAL refuses only after adding)."""
    for done, (here, other) in enumerate(zip(total, more, strict=True)):
        try:
            here.add_(other)
        except Exception as reason:  # TenSEAL's errors are of many kinds
            for changed, added in zip(total[: done + 1], more, strict=False):
                changed.sub_(added)
            raise ciphertexts.Refused(str(reason)) from reason


def _rounded(values: Values, step: float) -> Values:
    """The nearest multiples of a power of two; multiplying by one is exact."""
    rounded = values * (1.0 / step)
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded


def _sizes(length: int, slots: int) -> list[int]:
    return [min(slots, length - start) for start in range(0, length, slots)]


def _checked(values: Tensor | Reals, largest: float) -> Values:
    plain = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    numbers = np.ascontiguousarray(plain, dtype=np.float64)
    if numbers.ndim != 1:
        raise ValueError(f"a flat vector is encrypted, not one of shape {numbers.shape}")
    if len(numbers) and not (numbers.min() >= -largest and numbers.max() <= largest):  # also catches NaN
        place = int(np.argmin(np.abs(numbers) <= largest))
        number = float(numbers[place])
        if not math.isfinite(number):
            raise NumericError(f"Number {place} of a vector to encrypt is {number}: training has diverged.")
        raise NumericError(
            f"Number {place} of a vector to encrypt is {number:g}, beyond the largest of ± {largest:g} its key is "
            "made for. Allow larger values, or lower the learning rate if training has diverged."
        )
    return numbers
