"""How many parameters are elected."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.uplink.vote import Ratio


@pytest.mark.parametrize(
    ("ratio", "size", "winners"),
    [(0.1, 10, 1), (0.1, 30, 3), (0.07, 100, 7), (0.29, 100, 29), (0.57, 100, 57), (0.01, 11_000_000, 110_000)],
)
def test_a_ratio_that_divides_the_model_elects_no_parameter_too_many(ratio: float, size: int, winners: int) -> None:
    assert Ratio(ratio).winners(0, size) == winners


def test_what_does_not_divide_is_rounded_up() -> None:
    assert Ratio(0.1).winners(0, 11) == 2
    assert Ratio(1e-9).winners(0, 5) == 1


@pytest.mark.parametrize("size", [0, 1, 7, 11_000_000])
def test_nothing_and_everything_stay_so_in_every_round(size: int) -> None:
    assert [Ratio(0).winners(t, size) for t in (0, 3)] == [0, 0]
    assert [Ratio(1).winners(t, size) for t in (0, 3)] == [size, size]


def test_the_ratio_shrinks_by_the_same_factor_every_round() -> None:
    ratio = Ratio(0.1, 0.99)
    assert ratio.at(0) == 0.1
    assert ratio.at(50) == pytest.approx(0.1 * 0.99**50, rel=1e-15)
    assert ratio.at(1) == pytest.approx(0.099, rel=1e-15)
    assert ratio.winners(1, 1000) == 99
    assert Ratio(1, 0.5).winners(10, 1024) == 1


def test_a_ratio_above_zero_elects_somebody_however_late_the_round() -> None:
    assert Ratio(1, 0.5).winners(10_000_000, 100) == 1


@given(start=st.integers(0, 1000), decay=st.integers(1, 100), round=st.integers(0, 12), size=st.integers(0, 20_000_000))
def test_winners_are_the_exact_ceiling_of_the_written_decimals(start: int, decay: int, round: int, size: int) -> None:
    exact = Fraction(start, 1000) * Fraction(decay, 100) ** round * size
    assert Ratio(start / 1000, decay / 100).winners(round, size) == math.ceil(exact)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_a_ratio_outside_zero_to_one_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Ratio(ratio)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01, math.nan])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and up to 1"):
        Ratio(0.1, decay)


def test_a_round_or_model_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        Ratio(0.1).at(-1)
    with pytest.raises(ValueError, match="parameters"):
        Ratio(0.1).winners(0, -1)
