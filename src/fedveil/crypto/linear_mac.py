"""A message authentication code that adds up: whoever relays sums cannot change one and fit its code.

The code of whole numbers x₁ … x_d, each below 2⁶³ in size, is Σ a_j·x_j modulo 2¹²⁸, with 128 secret bits a_j for each
place, from a seed that is used once. It is linear over the integers: the codes of several vectors add up to the code of
their sum, as long as that stays below 2⁶³, too. A code travels as two words, which are covered and added as one number
(`crypto/keys.py`, `add_words`): whoever reads a sum of codes sees it modulo 2¹²⁸, which follows from the sum of the
vectors. Were words added each by itself, carries would say something about who has sent what.

What it is worth. Change a vector by integers e ≠ 0 and its code by t: that goes unnoticed where Σ a_j·e_j = t. As
|e_j| < 2⁶⁴, some e_j is not divisible by 2⁶⁴; a_j·e_j then takes 2¹²⁸⁻ᵛ values equally often, where 2ᵛ, v ≤ 63, is the
largest power of two in it. Whoever knows nothing of a, because codes travel covered, is right with a chance of at most
2⁻⁶⁵, beyond what it breaks of AES.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
MAC_WORDS = 2
MODULUS = 1 << 128
_LIMB = 16
_AT_ONCE = 1 << 13
"""Numbers, each of which takes two words of a stream. So many products of 32 bits add up exactly in float64."""


def linear_mac(seed: bytes, *parts: Words) -> int:
    """The code of signed 64-bit numbers, as one vector."""
    from fedveil.crypto.keys import WordStream

    stream = WordStream(seed)
    # Rows: four limbs of x + 2⁶³, and a one. Columns: eight limbs of a.
    products = np.zeros((5, 8), dtype=np.uint64)
    for chunk in _chunks(parts):
        shifted = (chunk ^ np.uint64(1 << 63)).view(np.uint16).reshape(len(chunk), 4)
        keys = stream.take(2 * len(chunk)).view(np.uint16).reshape(len(chunk), 8)
        rows = np.ones((5, len(chunk)))
        rows[:4] = shifted.T
        products += (rows @ keys.astype(np.float64)).astype(np.uint64)
    code = 0
    for place, row in enumerate(products.tolist()):
        of_keys = sum(value << (_LIMB * column) for column, value in enumerate(row))
        code += of_keys << (_LIMB * place) if place < 4 else -(of_keys << 63)
    return code % MODULUS


def _chunks(parts: tuple[Words, ...]) -> Iterator[Words]:
    for part in parts:
        for start in range(0, len(part), _AT_ONCE):
            yield np.ascontiguousarray(part[start : start + _AT_ONCE])


def mac_words(code: int) -> Words:
    """A code as words, the least first."""
    return np.frombuffer(code.to_bytes(8 * MAC_WORDS, "little"), dtype="<u8")
