"""Keyed streams: words for masks and noise that both ends of a pair can make again.

AES-128 in counter mode over zeros, written straight into the array it is for. The 32-byte seed
gives the key (first half) and the first counter block (second half).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedveil.crypto.keys import SEED_BYTES

Words = NDArray[np.uint64]
Blocks = Callable[[NDArray[np.int64], int], Words]

_BLOCK = 16
_CHUNK = 1 << 14
_ZEROS = memoryview(bytes(8 * _CHUNK))


class WordStream:
    """The 64-bit words of one seed, in order; reading goes on where the last read ended."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a stream's seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._cipher = Cipher(algorithms.AES128(seed[:16]), modes.CTR(seed[16:])).encryptor()
        # update_into wants room for one more block than it writes.
        self._room = np.empty(8 * _CHUNK + _BLOCK, dtype=np.uint8)

    def take(self, count: int) -> Words:
        """The next `count` (at most 2¹⁴) words; valid until the next call."""
        written = self._cipher.update_into(_ZEROS[: 8 * count], self._room.data)
        return self._room[:written].view(np.uint64)


def block_function(key: bytes) -> Blocks:
    """Random access to words: two for each (place, purpose), the AES-128 of that pair under a 16-byte key."""
    cipher = Cipher(algorithms.AES128(key), modes.ECB()).encryptor()

    def blocks(places: NDArray[np.int64], purpose: int) -> Words:
        pairs = np.empty((len(places), 2), dtype="<u8")
        pairs[:, 0], pairs[:, 1] = places, purpose
        room = np.empty(pairs.nbytes + _BLOCK, dtype=np.uint8)
        written = cipher.update_into(pairs.view(np.uint8).reshape(-1).data, room.data)
        return room[:written].view("<u8").reshape(-1, 2)

    return blocks


def add_mask(total: Words, seed: bytes, *, subtract: bool = False) -> None:
    """total ± the seed's words, modulo 2⁶⁴, in place."""
    stream = WordStream(seed)
    operation = np.subtract if subtract else np.add
    for start in range(0, len(total), _CHUNK):
        part = total[start : start + _CHUNK]
        operation(part, stream.take(len(part)), out=part)
