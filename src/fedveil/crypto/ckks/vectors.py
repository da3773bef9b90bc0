"""Encrypting vectors, adding ciphertexts as they arrive, reading the sum."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedveil.crypto.ckks import chunks
from fedveil.crypto.ckks.chunks import Values, Vector
from fedveil.crypto.ckks.frame import Summary, pack, read_summary, unpack
from fedveil.crypto.ckks.keys import PublicKey, SecretKey
from fedveil.crypto.ckks.parameters import ROUNDED
from fedveil.crypto.ckks.processes import spread
from fedveil.crypto.ckks.tasks import decrypting, encrypting
from fedveil.errors import NumericError, ProtocolError

Reals = NDArray[np.float32] | NDArray[np.float64]


def encrypt(values: Tensor | Reals, key: PublicKey) -> bytes:
    """The encrypted vector; values that are not finite, or beyond the key's `largest`, are refused."""
    numbers = _checked(values, key.parameters.largest)
    if key.parameters.grain is not None:
        numbers = _rounded(numbers, key.parameters.grain)
    return pack(Summary(key.key_id, len(numbers), 1), spread(encrypting(numbers, key)))


def summary(content: bytes) -> Summary:
    """Key, length and number of addends an encrypted vector claims; only `Adder` and `decrypt` check them."""
    return read_summary(content)


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
        found, parts = unpack(content, key_id=key.key_id, length=self._length, slots=key.parameters.slots)
        if self._addends + found.addends > key.parameters.addends:
            raise ProtocolError(
                f"{self._addends} + {found.addends} encrypted vectors are more than the {key.parameters.addends} "
                "this key's sums have room for"
            )
        sizes = _sizes(self._length, key.parameters.slots)
        try:
            loaded = [
                chunks.load(key.material.context, bytes(part), size=size, level=key.level)
                for part, size in zip(parts, sizes, strict=True)
            ]
            if self._addends:
                _add(self._sum, loaded)
            else:
                self._sum = loaded
        except chunks.Refused as reason:
            raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
        self._addends += found.addends

    def total(self) -> bytes:
        """The encrypted sum so far."""
        if not self._addends:
            raise ProtocolError("there is no sum: no encrypted vector has been added")
        whole = Summary(self._key.key_id, self._length, self._addends)
        return pack(whole, [vector.serialize() for vector in self._sum])


def decrypt(content: bytes, key: SecretKey, *, length: int | None = None) -> Values:
    """The values, rounded to multiples of `ROUNDED` (which says why), of a vector of this length (None: of any)."""
    parameters = key.parameters
    found, parts = unpack(content, key_id=key.key_id, length=length, slots=parameters.slots)
    if found.addends > parameters.addends:
        raise ProtocolError(
            f"an encrypted sum of {found.addends} vectors: this key's sums have room for {parameters.addends}"
        )
    sizes = _sizes(found.length, parameters.slots)
    try:
        pieces = spread(decrypting(parts, sizes, key))
    except chunks.Refused as reason:
        raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
    values = np.concatenate(pieces) if pieces else np.empty(0)
    limit = found.addends * parameters.largest + parameters.error
    if len(values) and not (values.min() >= -limit and values.max() <= limit):
        raise ProtocolError(
            f"a decrypted sum of {found.addends} vectors has values beyond {limit:g}: one of them did not keep to "
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
            raise chunks.Refused(str(reason)) from reason


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
