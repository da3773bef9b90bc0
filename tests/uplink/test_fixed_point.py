"""Numbers modulo 2⁶⁴."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.uplink.grid import FixedPoint, saturated

RANGES = st.floats(2.0**-40, 2.0**36)


def wrapped_sum(encoded: list[np.ndarray]) -> np.ndarray:
    return np.sum(encoded, axis=0, dtype=np.uint64)


@settings(deadline=None, max_examples=200)
@given(RANGES, st.integers(1, 12), st.data())
def test_a_sum_is_right_to_half_a_step_per_addend(value_range: float, addends: int, data: st.DataObject) -> None:
    fixed = FixedPoint(value_range, addends)
    numbers = st.lists(st.floats(-value_range, value_range), min_size=3, max_size=3)
    rows = data.draw(st.lists(numbers, min_size=addends, max_size=addends))
    total = wrapped_sum([fixed.encode(np.array(row)) for row in rows])
    step = Fraction(2) ** -fixed.fraction_bits
    for place, decoded in enumerate(fixed.decode(total)):
        exact = sum(Fraction(row[place]) for row in rows)
        rounding = abs(exact) * Fraction(1, 2**52)  # decoding gives the nearest float64
        assert abs(Fraction(float(decoded)) - exact) <= addends * step / 2 + rounding


@settings(deadline=None, max_examples=200)
@given(RANGES, st.lists(st.floats(-1, 1), min_size=1, max_size=5))
def test_each_number_becomes_the_nearest_integer(value_range: float, parts: list[float]) -> None:
    fixed = FixedPoint(value_range, 3)
    numbers = [part * value_range for part in parts]
    scaled = [round(Fraction(number) * 2**fixed.fraction_bits) for number in numbers]  # halves go to even, as in rint
    assert fixed.encode(np.array(numbers)).view(np.int64).tolist() == scaled


@settings(deadline=None, max_examples=100)
@given(RANGES, st.integers(1, 10_000), st.sampled_from([-1.0, 1.0]))
def test_the_largest_sum_fills_at_most_half_of_what_wraps(value_range: float, addends: int, sign: float) -> None:
    try:
        fixed = FixedPoint(value_range, addends)
    except ConfigError:
        return
    one = int(fixed.encode(np.array([sign * value_range])).view(np.int64)[0])
    assert 2**60 / 2 < abs(one) * addends <= 2**62  # and no bit is wasted: two roundings up to a power of two
    total = np.array([one * addends], dtype=np.int64).view(np.uint64)
    assert fixed.decode(total)[0] == pytest.approx(sign * value_range * addends, rel=1e-9)


@pytest.mark.parametrize(
    ("value_range", "addends", "bits"),
    [(1.0, 1, 62), (1.0, 2, 61), (1.0, 3, 60), (8.0, 100, 52), (8.1, 100, 51), (0.25, 1, 64), (2.0**36, 2**16, 10)],
)
def test_the_fraction_has_the_bits_that_range_and_addends_leave(value_range: float, addends: int, bits: int) -> None:
    fixed = FixedPoint(value_range, addends)
    assert fixed.fraction_bits == bits
    assert fixed.step == 2.0**-bits


def test_masks_hide_and_cancel() -> None:
    fixed = FixedPoint(4.0, 2)
    mask = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    one, other = np.linspace(-4, 4, 1000), np.linspace(4, -3, 1000)
    masked = fixed.encode(one) + mask
    assert not np.array_equal(masked, fixed.encode(one))
    decoded = fixed.decode(masked + (fixed.encode(other) - mask))
    assert np.abs(decoded - (one + other)).max() <= 2**-50


def test_decoding_is_exact_below_2_to_the_53_steps_and_the_nearest_number_beyond() -> None:
    fixed = FixedPoint(1.0, 1)
    totals = [0, 1, -1, 2**53 - 1, 1 - 2**53, 2**53 + 1, 2**53 + 3, -(2**62) + 257, 2**63 - 1, -(2**63)]
    decoded = fixed.decode(np.array(totals, dtype=np.int64).view(np.uint64))
    assert decoded.tolist() == [math.ldexp(float(total), -62) for total in totals]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_every_type_encode_as_their_float64_numbers(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 40_001, dtype=torch.float64).to(dtype).requires_grad_()
    fixed = FixedPoint(1.0, 1)
    expected = fixed.encode(tensor.detach().double().numpy())
    assert np.array_equal(fixed.encode(tensor), expected)
    assert np.abs(fixed.decode(expected) - tensor.detach().double().numpy()).max() <= fixed.step / 2


@pytest.mark.parametrize("length", [0, 1, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("stride", [1, 2])
def test_vectors_of_every_length_encode_number_by_number(length: int, stride: int) -> None:
    fixed = FixedPoint(1.0, 7)
    numbers = np.random.default_rng(1).uniform(-1, 1, length * stride)[::stride]
    scaled = np.rint(numbers * 2.0**fixed.fraction_bits).astype(np.int64)
    assert np.array_equal(fixed.encode(numbers).view(np.int64), scaled)


def test_encoding_leaves_its_input_alone() -> None:
    numbers = np.array([0.1, -0.7])
    FixedPoint(1.0, 1).encode(numbers)
    assert numbers.tolist() == [0.1, -0.7]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 16_383, 16_384, 20_000])
def test_numbers_that_are_none_count_as_zero_or_as_the_largest(bad: float, place: int) -> None:
    numbers = np.full(20_001, 0.25, dtype=np.float32)
    numbers[place] = bad
    found = FixedPoint(1.0, 1).encode(numbers)
    numbers[place] = 0.0 if math.isnan(bad) else math.copysign(1.0, bad)
    assert np.array_equal(found, FixedPoint(1.0, 1).encode(numbers))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_numbers_beyond_the_range_are_cut_off_there_and_only_their_owner_is_told(
    sign: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fedveil")
    fixed = FixedPoint(3.0, 10)
    edge = fixed.encode(np.array([0.5, 3.0 * sign]))
    assert not caplog.records
    for number in (np.nextafter(3.0, 4.0), 1e300):
        assert np.array_equal(fixed.encode(np.array([0.5, sign * number])), edge)
    assert [one.getMessage()[:22] for one in caplog.records] == ["1 of 2 numbers of an u"] * 2
    cut = saturated(torch.tensor([0.5, 4.0 * sign, math.nan], dtype=torch.float64), 3.0)
    assert cut.tolist() == [0.5, 3.0 * sign, 0.0]


def test_a_range_without_room_for_fractions_is_refused() -> None:
    FixedPoint(2.0**44, 2**10)
    with pytest.raises(ConfigError, match=r"Sums of 1025 .* leave 7 of 64 bits .* Lower value_range, or the number of"):
        FixedPoint(2.0**44, 2**10 + 1)


@pytest.mark.parametrize("value_range", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_a_range_that_is_none_is_refused(value_range: float) -> None:
    with pytest.raises(ConfigError, match="value_range must be"):
        FixedPoint(value_range, 1)


def test_no_addends_and_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one addend"):
        FixedPoint(1.0, 0)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        FixedPoint(1.0, 1).encode(np.zeros((2, 2)))
