"""Exact sums: the same bits in every order, close to math.fsum, unmoved by what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil import tensors
from fedveil.errors import ProtocolError
from fedveil.tensors import ExactSum

PROFILE = settings(deadline=None, derandomize=True, max_examples=200)
LIMIT = 2.0**36
numbers = st.one_of(
    st.floats(-(2.0**35), 2.0**35, allow_nan=False),
    st.floats(-1.0, 1.0, allow_nan=False),
    st.floats(-1e-15, 1e-15, allow_nan=False),
    st.integers(-5, 5).map(float),
)
columns = st.lists(numbers, min_size=1, max_size=30)


def total(values: list[float]) -> float:
    accumulator = ExactSum(1)
    for value in values:
        accumulator.add(torch.tensor([value], dtype=torch.float64))
    return float(accumulator.total())


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int64).tolist()  # type: ignore[no-any-return]


@PROFILE
@given(columns.flatmap(lambda values: st.tuples(st.just(values), st.permutations(values))))
def test_every_order_gives_the_same_bits(pair: tuple[list[float], list[float]]) -> None:
    first, second = (torch.tensor([total(values)], dtype=torch.float64) for values in pair)
    assert bits(first) == bits(second)


@PROFILE
@given(columns)
def test_the_sum_is_close_to_the_exactly_rounded_one(values: list[float]) -> None:
    exact = math.fsum(values)
    # One rounding of the result, one of the fractions' sum, and 2⁻⁷³ per addend for what was cut off.
    allowed = math.ulp(exact) + len(values) * (2.0**-53 + 2.0**-73)
    assert abs(total(values) - exact) <= allowed


def test_digits_survive_cancellation() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        values = torch.rand(5, generator=generator, dtype=torch.float64).mul(2).sub(1).tolist()
        values.append(1e-14 - math.fsum(values))
        exact = math.fsum(values)
        assert abs(total(values) - exact) <= 2 * math.ulp(exact) + len(values) * 2.0**-73


@PROFILE
@given(st.lists(st.integers(-(2**35), 2**35), min_size=1, max_size=40))
def test_sums_of_whole_numbers_are_exact(values: list[int]) -> None:
    assert total([float(value) for value in values]) == float(sum(values))


@PROFILE
@given(st.integers(0, 2**16), st.integers(1, 12), st.sampled_from([torch.float32, torch.float64]))
def test_vectors_add_up_number_by_number_in_any_order(seed: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(7, generator=generator, dtype=dtype) * 10.0 ** float(k % 5) for k in range(count)]
    sums = []
    for order in (range(count), reversed(range(count)), torch.randperm(count, generator=generator).tolist()):
        accumulator = ExactSum(7)
        for place in order:
            accumulator.add(vectors[place])
        sums.append(accumulator.total())
    assert bits(sums[0]) == bits(sums[1]) == bits(sums[2])
    expected = [math.fsum(float(vector[k]) for vector in vectors) for k in range(7)]
    assert torch.allclose(sums[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=count * 2.0**-52)


def test_long_vectors_cross_the_blocks() -> None:
    length = 300_001
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(2))
    accumulator = ExactSum(length)
    accumulator.add(one)
    accumulator.add(two)
    assert float((accumulator.total() - (one + two)).abs().max()) < 1e-15


def test_opposite_vectors_cancel_to_nothing() -> None:
    vector = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 1e6
    accumulator = ExactSum(100)
    for sign in (1, -1, -1, 1):
        accumulator.add(sign * vector)
    assert not accumulator.total().any()


REFUSED = {
    "NaN": torch.tensor([1.0, math.nan, 0.0]),
    "infinity": torch.tensor([1.0, math.inf, 0.0]),
    "minus infinity": torch.tensor([1.0, -math.inf, 0.0]),
    "out of range": torch.tensor([1.0, LIMIT, 0.0], dtype=torch.float64),
    "out of range below": torch.tensor([1.0, -LIMIT, 0.0], dtype=torch.float64),
    "too short": torch.ones(2),
    "too long": torch.ones(4),
    "a matrix": torch.ones(3, 1),
    "a number": torch.tensor(1.0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    accumulator = ExactSum(3)
    accumulator.add(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    before = accumulator.total()
    with pytest.raises(ProtocolError):
        accumulator.add(REFUSED[case])
    assert bits(accumulator.total()) == bits(before)
    accumulator.add(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    assert torch.allclose(accumulator.total(), 2 * before, rtol=1e-15)


def test_the_largest_number_allowed_is_taken() -> None:
    largest = math.nextafter(LIMIT, 0.0)
    assert total([largest, -largest, largest]) == largest


def test_the_number_of_addends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_MOST_ADDENDS", 3)
    accumulator = ExactSum(1)
    for _ in range(3):
        accumulator.add(torch.ones(1))
    with pytest.raises(ProtocolError, match="more than 3 uploads"):
        accumulator.add(torch.ones(1))
    assert float(accumulator.total()) == 3.0


def test_empty_vectors_and_empty_sums() -> None:
    accumulator = ExactSum(0)
    accumulator.add(torch.empty(0))
    assert accumulator.total().shape == (0,)
    assert ExactSum(4).total().tolist() == [0.0] * 4
    assert ExactSum(4).length == 4
