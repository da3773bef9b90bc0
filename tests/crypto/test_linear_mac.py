"""Codes that add up: their algebra, and what it takes to fit one to a changed sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedveil.crypto.keys import WordStream, add_mask, add_words
from fedveil.crypto.linear_mac import MAC_WORDS, MODULUS, linear_mac, mac_words

SEED, OTHER = bytes(range(32)), bytes(range(1, 33))
WORDS = st.lists(st.integers(-(2**59), 2**59), max_size=40)


def words(numbers: list[int]) -> NDArray[np.uint64]:
    return np.array(numbers, dtype=np.int64).view(np.uint64)


def by_definition(seed: bytes, numbers: list[int]) -> int:
    stream = WordStream(seed)
    keys = [stream.take(2).tolist() for _ in numbers]
    return sum(number * (low + (high << 64)) for number, (low, high) in zip(numbers, keys, strict=True)) % MODULUS


@given(WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_the_code_is_the_sum_of_products(first: list[int], second: list[int]) -> None:
    expected = by_definition(SEED, first + second)
    assert linear_mac(SEED, words(first), words(second)) == linear_mac(SEED, words(first + second)) == expected


@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1, -1])
def test_long_vectors_of_extreme_numbers_overflow_nowhere(extreme: int) -> None:
    numbers = [extreme] * 20_001
    assert linear_mac(SEED, words(numbers)) == by_definition(SEED, numbers)


def summed(codes: list[int]) -> NDArray[np.uint64]:
    total = np.zeros(MAC_WORDS, dtype=np.uint64)
    for code in codes:
        add_words(total, mac_words(code), wide=MAC_WORDS)
    return total


@given(st.lists(st.lists(st.integers(-(2**59), 2**59), min_size=5, max_size=5), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_codes_of_vectors_add_up_to_the_code_of_their_sum_and_say_nothing_else(vectors: list[list[int]]) -> None:
    total = [sum(column) for column in zip(*vectors, strict=True)]
    codes = summed([linear_mac(SEED, words(one)) for one in vectors])
    assert np.array_equal(codes, mac_words(linear_mac(SEED, words(total))))


def test_words_that_are_one_number_carry_and_others_do_not() -> None:
    total = np.full(4, 2**64 - 1, dtype=np.uint64)
    add_words(total, np.ones(4, dtype=np.uint64), wide=2)
    assert total.tolist() == [0, 1, 0, 0]
    add_words(total, np.array([1, 1, 1, 1], dtype=np.uint64), subtract=True, wide=2)
    assert total.tolist() == [2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1]
    assert summed([MODULUS - 1] * 10_000).tolist() == mac_words(10_000 * (MODULUS - 1) % MODULUS).tolist()


@pytest.mark.parametrize("length", [2, 3, 40_000])
def test_a_mask_on_a_wide_number_comes_off_again(length: int) -> None:
    covered = np.arange(length, dtype=np.uint64)
    add_mask(covered, SEED, wide=MAC_WORDS)
    add_mask(covered, OTHER, wide=MAC_WORDS, subtract=True)
    assert not np.array_equal(covered, np.arange(length, dtype=np.uint64))
    add_mask(covered, SEED, wide=MAC_WORDS, subtract=True)
    add_mask(covered, OTHER, wide=MAC_WORDS)
    assert np.array_equal(covered, np.arange(length, dtype=np.uint64))


def test_other_seeds_and_orders_give_other_codes() -> None:
    assert linear_mac(SEED, words([1, 2])) != linear_mac(OTHER, words([1, 2]))
    assert linear_mac(SEED, words([1, 2])) != linear_mac(SEED, words([2, 1]))


@pytest.mark.parametrize("power", [0, 1, 31, 32, 62, 63])
def test_what_fits_a_change_is_spread_over_so_many_values(power: int) -> None:
    """A change by 2ᵛ moves the code by a·2ᵛ: its lowest v bits stay, all others are the secret's.

    4,000 seeds each; of 65 bits, each within 5 standard errors of a half (one false alarm in 27,000 runs of all).
    """
    moved = [
        linear_mac(number.to_bytes(32, "big"), words([-(2**63) if power == 63 else 2**power])) for number in range(4000)
    ]
    assert all(code % 2**power == 0 for code in moved)
    tops = np.array([[code >> bit & 1 for bit in range(63, 128)] for code in moved])
    assert np.all(np.abs(tops.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(4000))
    assert len(set(moved)) == 4000
