"""Discrete Gaussian noise. Statistical tests use fixed seeds; each raises a false alarm with probability 1e-4."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedveil.crypto.keys import WordStream, block_function
from fedveil.errors import ConfigError
from fedveil.uplink.grid import (
    LARGEST_SIGMA,
    _decide,
    _plan,
    _search,
    _sums,
    _table,
    _weights,
    add_discrete_gaussian,
    discrete_gaussian,
    parameter_of,
)

FALSE_ALARM = 1e-4
NORMAL = float(stats.norm.isf(FALSE_ALARM / 2))
LARGE = 2.0**24
COMMON = Fraction(2**22)
SIGMAS = [0.5, 200.0, 256.0, 1024.0, 70_000.0, LARGE, 2.0**40, 2.0**57]
"""At least one of every number of draws: 1, 1, 3, 3, 3, 3, 4 and 6."""


def seed(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def chi_square(drawn: NDArray[np.int64], sigma: float) -> float:
    """The p-value over every integer expected at least ten times, and the two tails."""
    count, reach = len(drawn), math.ceil(15 * sigma)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    expected = count * weights / weights.sum()
    inner = int(np.flatnonzero(expected >= 10)[-1]) - reach
    observed = np.bincount(np.clip(drawn, -inner - 1, inner + 1) + inner + 1, minlength=2 * inner + 3)
    expected = expected[reach - inner : reach + inner + 1]
    tails = count - expected.sum()
    expected = np.concatenate([[tails / 2], expected, [tails / 2]])
    if tails < 20:
        observed, expected = observed[1:-1], expected[1:-1] * observed[1:-1].sum() / expected[1:-1].sum()
    return float(stats.chisquare(observed, expected).pvalue)


# The law, without randomness


def deviation(square: Fraction, multipliers: tuple[int, ...]) -> float:
    """log₂ of how far Σ k·x (each x of this table's weights) is from the integer Gaussian: relative, within 6 s."""
    law = {0: 1 << 256}
    for k in multipliers:
        summed: dict[int, int] = {}
        for size, weight in enumerate(_weights(square)):
            for z in {k * size, -k * size}:
                for start, before in law.items():
                    summed[start + z] = summed.get(start + z, 0) + before * weight
        law = {z: weight >> 256 for z, weight in summed.items()}
    total = square * sum(k * k for k in multipliers)
    wanted = _weights(total)[: math.isqrt(int(36 * total)) + 1]
    ratios = [Fraction(law[z], weight) for z, weight in enumerate(wanted)]
    return math.log2(max(ratios) / min(ratios) - 1)


def test_a_sum_of_table_draws_is_the_wider_gaussian_to_111_bits_a_step() -> None:
    """One step with t = 2 uses the bound up; a second with t² = 4.4 averages the first one's error away."""
    assert -112 < deviation(Fraction(40), (1, 3)) < -111
    assert -125 < deviation(Fraction(40), (1, 3, 9)) < -110


def test_a_larger_multiplier_than_the_plan_would_choose_is_seen() -> None:
    assert deviation(Fraction(40), (1, 4)) > -100


@given(st.floats(min_value=1e-3, max_value=LARGEST_SIGMA) | st.integers(0, 58).map(lambda power: 2.0**power))
def test_every_plan_smooths_and_reaches_the_wanted_deviation(sigma: float) -> None:
    plan = _plan(sigma)
    first, *others = plan.multipliers
    assert first == 1
    assert len(plan.multipliers) <= 6
    spread = plan.square
    for k in others:
        assert 1 / plan.square + k**2 / spread <= Fraction(1, 4)  # 1/t²
        spread += k**2 * plan.square
    assert spread == plan.total
    assert Fraction(sigma) ** 2 <= spread <= (Fraction(sigma) * Fraction(10_005, 10_000)) ** 2
    assert sigma >= 2**21 or spread == Fraction(sigma) ** 2
    # A table's values have 16 bits, and the largest sum 64.
    assert len(_weights(plan.square)) <= 2**15 if sigma < 1 else 15 * math.sqrt(plan.square) < 2**15
    assert 15 * math.sqrt(plan.square) * sum(plan.multipliers) < 2**63


@given(st.floats(min_value=1e-3, max_value=LARGEST_SIGMA))
def test_the_stated_parameter_is_the_largest_float_not_above_the_exact_one(sigma: float) -> None:
    stated, square = parameter_of(sigma), _plan(sigma).total
    assert sigma <= stated <= 1.001 * sigma
    assert Fraction(stated) ** 2 <= square < Fraction(math.nextafter(stated, math.inf)) ** 2


@pytest.mark.parametrize("sigma", [0.01, 0.3, 5.0, 200.0, 2048.0])
def test_levels_and_bounds_multiply_to_the_weights(sigma: float) -> None:
    """The probability of every value, put together exactly from slots and bounds, is its weight's share."""
    square = Fraction(sigma) ** 2
    table, weights = _table(square), _weights(square)
    whole = 2 * sum(weights) - weights[0]
    assert len(weights) > 14 * sigma
    chances = [Fraction(0)] * len(weights)
    reached = Fraction(1)
    for slots, last in zip(table.slots, table.last_owned, strict=True):
        owned = slots[: last + 1]
        assert np.array_equal(owned, -owned[::-1])
        for size, held in enumerate(np.bincount(owned[owned >= 0], minlength=len(weights)).tolist()):
            chances[size] += reached * Fraction(held, 2**16)
        assert not slots[last + 1 :].any()
        reached *= Fraction(2**16 - 1 - last, 2**16)
    for size, (low, high) in enumerate(pairwise((0, *table.bounds, 2**192))):
        chances[size] += reached * Fraction(high - low, 2**192) / (2 if size else 1)
    furthest = max(abs(one - Fraction(weight, whole)) for one, weight in zip(chances, weights, strict=True))
    assert furthest < Fraction(1, 2**190)


@pytest.mark.parametrize("sigma", [0.3, 7.0, 2048.0])
def test_weights_agree_with_floats_where_floats_can_tell(sigma: float) -> None:
    weights = np.array([weight / 2**256 for weight in _weights(Fraction(sigma) ** 2)])
    expected = np.exp(-(np.arange(len(weights)) ** 2) / (2 * sigma**2))
    assert np.allclose(weights, expected, rtol=1e-12, atol=1e-60)
    assert expected[-1] < 2.0**-141


# What is drawn


@pytest.mark.parametrize("sigma", [0.5, 2.0, 10.0, 101.3, 256.0, 300.0, 1024.0, 2000.0])
def test_small_deviations_follow_their_probabilities(sigma: float) -> None:
    assert chi_square(discrete_gaussian(400_000, sigma=sigma, seed=seed(f"chi {sigma}")), sigma) > FALSE_ALARM


def test_the_common_table_follows_its_probabilities() -> None:
    drawn = np.concatenate([part.copy() for part in _sums(_table(COMMON), (1,), 2_000_000, seed("common"))])
    assert chi_square(drawn, 2048.0) > FALSE_ALARM


def test_draws_the_first_bits_leave_open_follow_what_is_left_to_share_out() -> None:
    """All later levels and the search alone: values in proportion to the fraction of a slot they lack."""
    count, square = 400_000, Fraction(100)
    weights = _weights(square)
    whole = 2 * sum(weights) - weights[0]
    lacking = np.array([float(Fraction((weight << 16) % whole, whole)) for weight in weights])
    expected = np.concatenate([lacking[:0:-1], lacking])
    drawn = _decide(_table(square), block_function(bytes(16)), np.arange(count))
    observed = np.bincount(drawn + len(weights) - 1, minlength=len(expected))
    expected *= count / expected.sum()
    often = expected >= 10
    assert expected[often].sum() > 0.999 * count
    scaled = expected[often] * observed[often].sum() / expected[often].sum()
    assert stats.chisquare(observed[often], scaled).pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [1024.0, 70_000.0, 2.0**21, LARGE, 2.0**31, 2.0**40, 2.0**57])
def test_a_large_deviation_is_normal_in_moments_and_shape(sigma: float) -> None:
    count = 400_000
    drawn = discrete_gaussian(count, sigma=sigma, seed=seed(f"large {sigma}")) / parameter_of(sigma)
    assert abs(drawn.mean()) * math.sqrt(count) < NORMAL
    assert abs((drawn**2).mean() - 1) * math.sqrt(count / 2) < NORMAL
    assert abs((drawn**4).mean() - 3) * math.sqrt(count / 96) < NORMAL
    if sigma >= 70_000.0:  # below, whole numbers are too coarse for a continuous test
        assert stats.kstest(drawn, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [70_000.0, LARGE, 2.0**40, 2.0**57])
def test_the_low_bits_of_a_large_deviation_are_uniform_and_do_not_tell_the_sign(sigma: float) -> None:
    drawn = discrete_gaussian(400_000, sigma=sigma, seed=seed(f"bits {sigma}"))
    low = drawn & 255
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > FALSE_ALARM
    table = [np.bincount(low[drawn < 0], minlength=256), np.bincount(low[drawn >= 0], minlength=256)]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


@pytest.mark.parametrize("sigma", [50.0, LARGE, 2.0**40])
def test_neighbouring_draws_are_not_correlated(sigma: float) -> None:
    drawn = discrete_gaussian(400_000, sigma=sigma, seed=seed("correlation")) / sigma
    for lag in (1, 2, 3):
        assert abs(np.mean(drawn[lag:] * drawn[:-lag])) * math.sqrt(len(drawn)) < NORMAL


def test_a_word_that_equals_a_bound_is_decided_by_further_bits() -> None:
    """Of the words equal to a bound's upper 64 bits, as many lie below it as its other bits say."""
    table = _table(Fraction(100))
    lower = [(bound & (2**128 - 1)) / 2**128 for bound in table.bounds]
    place = next(i for i in range(20, 60) if 0.3 < lower[i] < 0.7)
    found = _search(table, np.full(4000, table.upper[place]), block_function(seed("tie")[:16]), np.arange(4000))
    assert set(found.tolist()) == {place, place + 1}
    # 4 standard errors: false alarm 6e-5
    assert abs(np.mean(found == place) - lower[place]) < 4 * math.sqrt(lower[place] * (1 - lower[place]) / 4000)


def test_the_last_word_is_decided_by_further_bits_among_the_outermost_values() -> None:
    table = _table(Fraction(100))
    words = np.array([0, 2**64 - 1], dtype=np.uint64)
    first, last = _search(table, words, block_function(bytes(16)), np.arange(2))
    assert first == 0
    assert 80 < last <= 140


# The same numbers at both ends


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_number_depends_on_its_place_only(sigma: float) -> None:
    """Neither on how many are drawn nor on the size of the chunks."""
    whole = discrete_gaussian(40_000, sigma=sigma, seed=seed("a"))
    for count in (0, 1, 1000, 16_384, 16_385):
        assert np.array_equal(discrete_gaussian(count, sigma=sigma, seed=seed("a")), whole[:count])
    plan = _plan(sigma)
    for chunk in (97, 8192):
        parts = [part.copy() for part in _sums(_table(plan.square), plan.multipliers, 10_000, seed("a"), chunk=chunk)]
        assert np.array_equal(np.concatenate(parts), whole[:10_000])


def test_known_numbers() -> None:
    """Any change of these breaks runs whose two ends have different versions, or different machines."""
    found = {}
    for sigma in SIGMAS:
        drawn = discrete_gaussian(50_000, sigma=sigma, seed=bytes(range(32)))
        found[sigma] = drawn[:3].tolist(), hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()[:16]
    assert found == KNOWN


def test_a_plain_reading_of_the_bits_gives_the_same_numbers() -> None:
    """One number at a time, by the definition: three 16-bit draws of a word, each looked up and, if open, decided."""
    sigma = LARGE
    plan, stream = _plan(sigma), WordStream(seed("plain"))
    table = _table(plan.square)
    blocks = block_function(stream.take(2).tobytes())
    expected, opened = [], 0
    for number, word in enumerate(stream.take(2000).tolist()):
        total = 0
        for draw, k in enumerate(plan.multipliers):
            slot = word >> 16 * draw & 0xFFFF
            if slot <= table.last_owned[0]:
                total += k * int(table.slots[0][slot])
                continue
            opened += 1
            low, high = (int(one) for one in blocks(np.array([4 * number + draw]), 0)[0])
            if low & 0xFFFF <= table.last_owned[1]:
                total += k * int(table.slots[1][low & 0xFFFF])
            elif low >> 16 & 0xFFFF <= table.last_owned[2]:
                total += k * int(table.slots[2][low >> 16 & 0xFFFF])
            else:
                size = sum(bound >> 128 <= high for bound in table.bounds)
                total += k * (-size if low >> 32 & 1 else size)
        expected.append(total)
    assert opened > 400
    assert discrete_gaussian(2000, sigma=sigma, seed=seed("plain")).tolist() == expected


@pytest.mark.parametrize("sigma", SIGMAS)
def test_another_seed_gives_other_numbers(sigma: float) -> None:
    one, other = (discrete_gaussian(1000, sigma=sigma, seed=seed(name)) for name in "ab")
    assert np.count_nonzero(one != other) > (250 if sigma < 1 else 950)
    assert one.dtype == np.int64


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_noise_added_and_subtracted_again_leaves_nothing(kind: type) -> None:
    before = np.random.default_rng(1).integers(0, 2**63, 20_000, dtype=np.uint64).astype(kind) * kind(2)
    total = before.copy()
    add_discrete_gaussian(total, sigma=LARGE, seed=seed("pair"))
    drawn = discrete_gaussian(20_000, sigma=LARGE, seed=seed("pair"))
    assert np.array_equal((total - before).view(np.int64), drawn)
    add_discrete_gaussian(total, sigma=LARGE, seed=seed("pair"), subtract=True)
    assert np.array_equal(total, before)


def test_noise_is_added_to_a_part_of_a_vector_in_place() -> None:
    total = np.zeros(2001, dtype=np.int64)
    add_discrete_gaussian(total[1::2], sigma=LARGE, seed=seed("part"))
    assert not total[::2].any()
    assert np.array_equal(total[1::2], discrete_gaussian(1000, sigma=LARGE, seed=seed("part")))


def test_only_64_bit_integers_take_noise() -> None:
    with pytest.raises(TypeError, match="64-bit"):
        add_discrete_gaussian(np.zeros(3), sigma=1.0, seed=seed("bad"))  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**59])
def test_a_deviation_that_is_none_or_too_large_is_refused(sigma: float) -> None:
    for refuse in (lambda: discrete_gaussian(3, sigma=sigma, seed=seed("bad")), lambda: parameter_of(sigma)):
        with pytest.raises(ConfigError, match="σ above 0"):
            refuse()


@pytest.mark.parametrize("sigma", [1e-6, 1e-200])
def test_hardly_any_deviation_gives_zeros(sigma: float) -> None:
    assert not discrete_gaussian(1000, sigma=sigma, seed=seed("tiny")).any()
    assert parameter_of(sigma) == sigma


KNOWN = {
    0.5: ([0, 0, 0], "d56571a5b5132bb8"),
    200.0: ([146, -10, -220], "fc87dbaa25ee1b58"),
    256.0: ([-517, 475, 287], "065c8f25df42c698"),
    1024.0: ([-1952, 1966, 1216], "a68042e84858f95a"),
    70000.0: ([-118127, 140668, 88500], "5042b9f06f08db79"),
    16777216.0: ([-27902853, 1291878, 31588596], "ff666cde1aaadfb5"),
    1099511627776.0: ([-2139858193757, -1749980428178, 674657662710], "8b328e158c8c0fdb"),
    1.4411518807585587e17: ([-26195951152055235, -116692788957082138, -284720711900425934], "d539c6e129406379"),
}
