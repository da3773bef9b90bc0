"""Discrete Gaussian noise. Statistical tests use fixed seeds; each raises a false alarm with probability 1e-4."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from fedveil.crypto.stream import WordStream
from fedveil.errors import ConfigError
from fedveil.uplink.discrete import _accept, _cells, _choose, _weigh, discrete_gaussian

FALSE_ALARM = 1e-4
LARGE = 2.0**24


def seed(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def weight(z: float, sigma: float) -> float:
    return math.exp(-(z**2) / (2 * sigma**2))


@pytest.mark.parametrize("sigma", [0.5, 2.0, 10.0, 31.7, 40.0, 101.3])
def test_small_deviations_follow_their_probabilities(sigma: float) -> None:
    """Chi-square over every integer expected at least ten times, and the two tails; from 32 on with rejection."""
    count = 400_000
    drawn = discrete_gaussian(count, sigma=sigma, seed=seed(f"chi {sigma}"))
    reach = math.ceil(15 * sigma)
    norm = sum(weight(z, sigma) for z in range(-reach, reach + 1))
    inner = max(z for z in range(reach) if count * weight(z, sigma) / norm >= 10)
    expected = np.array([count * weight(z, sigma) / norm for z in range(-inner, inner + 1)])
    observed = np.bincount(np.clip(drawn, -inner - 1, inner + 1) + inner + 1, minlength=2 * inner + 3)
    tails = count - expected.sum()
    expected = np.concatenate([[tails / 2], expected, [tails / 2]])
    if tails < 10:
        observed, expected = observed[1:-1], expected[1:-1] * observed[1:-1].sum() / expected[1:-1].sum()
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [0.3, 7.0, 31.99, 32.0, 45.7, 300.0])
def test_cells_places_and_acceptance_multiply_to_the_wanted_weights(sigma: float) -> None:
    """The whole construction without randomness: P(cell)/B·P(accept) is proportional to the weight of each z."""
    cells = _cells(sigma)
    size = 2**cells.bits
    assert size == 1 or 16 <= sigma / size < 32
    bounds = (0, *cells.bounds, 2**128)
    cell = cells.first + np.repeat(np.arange(len(bounds) - 1), size)
    place = np.tile(np.arange(size), len(bounds) - 1)
    number, _, exponent = _weigh(cell, place, bits=cells.bits, sigma=sigma)
    assert len(set(number.tolist())) == len(number)
    proposed = np.repeat([float(Fraction(high - low, 2**128)) for low, high in pairwise(bounds)], size)
    near = np.abs(number) < 6 * sigma
    assert exponent[near].max() <= 0.0
    ratios = (proposed * np.exp(exponent + number**2 / (2 * sigma**2)))[near]
    assert len(ratios) == 2 * math.ceil(6 * sigma) - 1
    assert ratios.max() / ratios.min() - 1 < 1e-11


def test_cells_reach_beyond_every_number_of_visible_probability() -> None:
    for sigma in (0.01, 1.0, 40.0, LARGE, 2.0**58):
        cells = _cells(sigma)
        assert -cells.first << cells.bits > 14 * sigma
        assert (len(cells.bounds) + 1 + cells.first) << cells.bits > 14 * sigma


def test_a_large_deviation_is_normal_in_mean_variance_and_shape() -> None:
    count = 400_000
    drawn = discrete_gaussian(count, sigma=LARGE, seed=seed("large")) / LARGE
    normal = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(drawn.mean()) * math.sqrt(count) < normal
    assert abs(drawn.var() - 1) * math.sqrt(count / 2) < normal
    assert stats.kstest(drawn, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [LARGE, 2.0**57])
def test_the_low_bits_of_a_large_deviation_are_uniform_and_do_not_tell_the_sign(sigma: float) -> None:
    drawn = discrete_gaussian(400_000, sigma=sigma, seed=seed(f"bits {sigma}"))
    low = drawn & 255
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > FALSE_ALARM
    table = [np.bincount(low[drawn < 0], minlength=256), np.bincount(low[drawn >= 0], minlength=256)]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_neighbouring_draws_are_not_correlated() -> None:
    drawn = discrete_gaussian(400_000, sigma=50.0, seed=seed("correlation")) / 50.0
    for lag in (1, 2, 3):
        assert abs(np.mean(drawn[lag:] * drawn[:-lag])) * math.sqrt(len(drawn)) < stats.norm.isf(FALSE_ALARM / 2)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    for sigma in (3.0, LARGE):
        one = discrete_gaussian(50_000, sigma=sigma, seed=seed("a"))
        assert np.array_equal(one, discrete_gaussian(50_000, sigma=sigma, seed=seed("a")))
        assert np.count_nonzero(one != discrete_gaussian(50_000, sigma=sigma, seed=seed("b"))) > 40_000
        assert one.dtype == np.int64


def test_a_word_that_equals_a_bound_is_decided_by_further_bits() -> None:
    """Of the words equal to a bound's upper half, as many lie below it as its lower half says."""
    cells = _cells(10.0)
    # Near the middle, where bounds differ in their upper halves.
    place = next(i for i in range(120, 160) if 0.3 < (cells.bounds[i] & (2**64 - 1)) / 2**64 < 0.7)
    share = (cells.bounds[place] & (2**64 - 1)) / 2**64
    words = np.full(4000, cells.upper[place])
    found = _choose(cells, words, WordStream(seed("tie")))
    assert set(found.tolist()) == {place, place + 1}
    # 4 standard errors: false alarm 6e-5
    assert abs(np.mean(found == place) - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_the_first_and_the_last_word_fall_into_the_outermost_cells_only_by_further_bits() -> None:
    cells = _cells(2.0)
    found = _choose(cells, np.array([0, 2**64 - 1], dtype=np.uint64), WordStream(seed("ends")))
    low, high = (int(one) + cells.first for one in found)
    assert low == -high
    assert 8 * 2 < high < 14 * 2  # a probability of 2⁻⁶⁴ lies at 9.1 σ


def test_close_calls_are_decided_as_the_real_number_says() -> None:
    """With every call taken for close, decimals must agree with floats wherever those are clear."""
    sigma = 1000.0
    generator = np.random.default_rng(5)
    place = generator.integers(0, 32, 2000)
    twice = place + 2 * 32 * generator.integers(0, 400, 2000)
    words = generator.integers(0, 2**64, 2000, dtype=np.uint64)
    exponent = -(place * twice) / (2 * sigma**2)
    accepted = [
        _accept(exponent, words, place=place, twice=twice, sigma=sigma, stream=WordStream(seed("x")), close=close)
        for close in (0.0, 2.0)
    ]
    assert 0 < np.count_nonzero(accepted[0]) < 2000
    assert np.array_equal(*accepted)


def test_a_call_too_close_for_floats_is_decided_by_decimals() -> None:
    sigma, place, twice = 1000.0, 31, 12_000
    chance = (-Decimal(place * twice) / Decimal(2 * 1000**2)).exp() * 2**64
    near = int(chance)
    for shift, expected in ((-3, True), (-2, True), (2, False), (3, False)):
        found = _accept(
            np.array([-place * twice / (2 * sigma**2)]),
            np.array([near + shift], dtype=np.uint64),
            place=np.array([place]),
            twice=np.array([twice]),
            sigma=sigma,
            stream=WordStream(seed("y")),
        )
        assert found.tolist() == [expected]


@pytest.mark.parametrize("count", [0, 1, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("sigma", [1e-6, 5.0, 2.0**58])
def test_as_many_numbers_come_as_were_asked_for(count: int, sigma: float) -> None:
    drawn = discrete_gaussian(count, sigma=sigma, seed=seed("count"))
    assert len(drawn) == count
    assert np.abs(drawn / sigma).max(initial=0.0) < 7


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**59])
def test_a_deviation_that_is_none_or_too_large_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="σ above 0"):
        discrete_gaussian(3, sigma=sigma, seed=seed("bad"))
