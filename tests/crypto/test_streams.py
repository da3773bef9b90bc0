from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.crypto.keys import WordStream, add_mask, block_function

SEED = bytes(range(32))
# NIST SP 800-38A, F.5.1 (CTR-AES128): key, first counter block, plain text, cipher text
KEY, COUNTER = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c"), bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
CIPHERED = bytes.fromhex(
    "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
)


def test_the_stream_is_the_known_answer_of_nist() -> None:
    words = WordStream(KEY + COUNTER).take(8)
    assert bytes(a ^ b for a, b in zip(words.tobytes(), PLAIN, strict=True)) == CIPHERED


def test_blocks_are_the_known_answer_of_nist() -> None:
    """NIST SP 800-38A, F.1.1 (ECB-AES128): the same key, and the first 16 bytes of the same plain text."""
    place, purpose = np.frombuffer(PLAIN[:8], dtype="<i8"), int.from_bytes(PLAIN[8:16], "little")
    assert block_function(KEY)(place, purpose).tobytes() == bytes.fromhex("3ad77bb40d7a3660a89ecaf32466ef97")


def test_blocks_depend_on_place_and_purpose_only() -> None:
    blocks, places = block_function(KEY), np.arange(100)
    whole = blocks(places, 0)
    assert np.array_equal(blocks(places[::-7], 0), whole[::-7])
    assert not np.isin(blocks(places, 1), whole).any()
    assert blocks(places[:0], 0).shape == (0, 2)


def test_reading_in_pieces_reads_the_same_words() -> None:
    whole = WordStream(SEED).take(1000).copy()
    stream = WordStream(SEED)
    assert np.array_equal(np.concatenate([stream.take(n).copy() for n in (1, 7, 92, 900)]), whole)


@pytest.mark.parametrize("length", [0, 1, 16_384, 16_385, 100_001])
def test_a_mask_and_its_opposite_cancel_exactly(length: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**64, length, dtype=np.uint64)
    masked = values.copy()
    add_mask(masked, SEED)
    assert length == 0 or not np.array_equal(masked, values)
    add_mask(masked, SEED, subtract=True)
    assert np.array_equal(masked, values)


def test_a_long_mask_is_one_stream_without_repeats() -> None:
    total = np.zeros(40_000, dtype=np.uint64)
    add_mask(total, SEED)
    expected = Cipher(algorithms.AES128(SEED[:16]), modes.CTR(SEED[16:])).encryptor().update(bytes(8 * 40_000))
    assert total.tobytes() == expected
    assert len(np.unique(total)) == len(total)


def test_a_short_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        WordStream(bytes(16))
