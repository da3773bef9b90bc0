"""Every law of decomposed noise, and the products that must be Gaussian.

Kolmogorov–Smirnov tests at p > 10⁻³ on fixed seeds: a right sampler would fail each of them for one
seed in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import special, stats

from fedveil.crypto.keys import WordStream
from fedveil.downlink import decomposed
from fedveil.downlink.decomposed import (
    BOUNDED,
    BOUNDED_HALF,
    GAUSSIAN,
    Uniforms,
    bounded,
    client_noise,
    gaussian,
    half,
    secret_uniforms,
    whole,
)
from fedveil.errors import ConfigError
from fedveil.secrets import OsSecrets, SeededSecrets

SAMPLES = 100_000
SIGMA = 1.7
LEAST_P = 1e-3
SEED = bytes(range(32))

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def uniforms() -> Uniforms:
    return secret_uniforms(SeededSecrets(3).stream("samplers"))


@pytest.fixture(scope="module")
def halves(uniforms: Uniforms) -> tuple[Floats, Floats]:
    return half(SAMPLES, uniforms), half(SAMPLES, uniforms)


def fits(numbers: Floats, law: Callable[[Floats], Floats]) -> bool:
    return bool(stats.kstest(numbers, law).pvalue > LEAST_P)


def normal(sigma: float) -> Callable[[Floats], Floats]:
    return stats.norm(0.0, sigma).cdf  # type: ignore[no-any-return]


def series(shape: float, *, samples: int, terms: int, seed: int) -> Floats:
    """The published definition of DN*(1/shape), term by term, without signs; its tail by its mean alone."""
    generator = np.random.default_rng(seed)
    total = np.zeros(samples)
    for number in range(1, terms + 1):
        drawn = generator.gamma(shape, 1.0, samples)
        total -= drawn / (2 * number + 1) - 0.5 * shape * math.log1p(1 / number)
    rest = np.arange(terms + 1, 10**6)
    total -= shape * float((1 / (2 * rest + 1) - 0.5 * np.log1p(1 / rest)).sum())
    return np.exp(total)


def test_a_client_draws_a_uniform_number_which_is_the_published_law(uniforms: Uniforms) -> None:
    drawn = bounded(SAMPLES, sigma=SIGMA, uniforms=uniforms)
    edge = math.sqrt(2.0) * SIGMA
    assert fits(drawn, stats.uniform(-edge, 2 * edge).cdf)
    generator = np.random.default_rng(1)
    published = generator.choice([-1.0, 1.0], SAMPLES) * np.exp(math.log(edge) - generator.gamma(1.0, 1.0, SAMPLES))
    assert stats.ks_2samp(drawn, published).pvalue > LEAST_P


def test_one_secret_factor_is_the_root_of_a_gamma_variable_which_is_the_published_law(uniforms: Uniforms) -> None:
    drawn = whole(SAMPLES, uniforms)
    assert fits(drawn**2, stats.gamma(1.5).cdf)
    assert stats.ks_2samp(drawn, series(1.0, samples=20_000, terms=1000, seed=2)).pvalue > LEAST_P


@pytest.mark.slow
def test_half_a_secret_factor_has_the_published_law(halves: tuple[Floats, Floats]) -> None:
    assert stats.ks_2samp(halves[0], series(0.5, samples=20_000, terms=1000, seed=3)).pvalue > LEAST_P


def test_two_halves_make_a_whole(halves: tuple[Floats, Floats]) -> None:
    assert fits((halves[0] * halves[1]) ** 2, stats.gamma(1.5).cdf)


def test_the_series_has_exactly_half_the_whole_factors_mean_and_variance() -> None:
    # ln √Gamma(3/2) has the mean ψ(3/2)/2 and the variance ψ′(3/2)/4; each half has half of either.
    terms = np.concatenate([decomposed._FIRST, decomposed._SECOND])
    mean = decomposed._CENTRE - 0.5 * terms.sum()
    variance = 0.5 * (terms**2).sum() + decomposed._TAIL_DEVIATION**2
    assert mean == pytest.approx(float(special.digamma(1.5)) / 4, rel=1e-12)
    assert variance == pytest.approx(float(special.polygamma(1, 1.5)) / 8, rel=1e-12)


def test_the_products_are_gaussian(uniforms: Uniforms, halves: tuple[Floats, Floats]) -> None:
    noise = bounded(SAMPLES, sigma=SIGMA, uniforms=uniforms)
    assert fits(whole(SAMPLES, uniforms) * noise, normal(SIGMA))
    assert fits(halves[0] * halves[1] * noise, normal(SIGMA))
    assert fits(gaussian(SAMPLES, sigma=SIGMA, uniforms=uniforms), normal(SIGMA))
    # What the tests above would see: half of the factor, and Gaussian noise under a whole one.
    assert not fits(halves[0] * noise, normal(SIGMA))
    assert not fits(whole(SAMPLES, uniforms) * gaussian(SAMPLES, sigma=SIGMA, uniforms=uniforms), normal(SIGMA))


def test_secret_factors_are_positive_and_not_close_to_zero(halves: tuple[Floats, Floats]) -> None:
    # P(DN* < x) is of the order x³: among 10⁵ the smallest is about 0.02.
    assert min(float(one.min()) for one in halves) > 1e-3


def test_any_source_of_uniform_numbers_serves() -> None:
    seeded = decomposed._from_words(WordStream(SEED).take)
    for source in (secret_uniforms(OsSecrets().stream()), seeded):
        numbers = source(40_000)
        assert len(numbers) == 40_000
        assert 0.0 <= numbers.min() < numbers.max() < 1.0
        assert len(np.unique(numbers)) == 40_000
        assert len(half(3, source)) == len(whole(3, source)) == 3
    assert fits(decomposed._from_words(WordStream(SEED).take)(SAMPLES), stats.uniform.cdf)


@pytest.fixture(scope="module")
def kinds() -> torch.Tensor:
    drawn = torch.randint(0, 3, (3 * SAMPLES // 2,), generator=torch.Generator().manual_seed(4))
    return drawn.to(torch.uint8)


def test_client_noise_has_the_law_of_its_kind(
    kinds: torch.Tensor, uniforms: Uniforms, halves: tuple[Floats, Floats]
) -> None:
    noise = client_noise(kinds, sigma=SIGMA, seed=SEED)
    assert noise.dtype == np.float64
    by_kind = [noise[kinds.numpy() == kind] for kind in (GAUSSIAN, BOUNDED, BOUNDED_HALF)]
    edge = math.sqrt(2.0) * SIGMA
    assert fits(by_kind[0], normal(SIGMA))
    assert fits(by_kind[1], stats.uniform(-edge, 2 * edge).cdf)
    assert np.abs(by_kind[1]).max() < edge
    assert fits(by_kind[1] * whole(len(by_kind[1]), uniforms), normal(SIGMA))
    assert fits(by_kind[2] * halves[0][: len(by_kind[2])], normal(SIGMA))


def test_neighbouring_numbers_of_client_noise_are_uncorrelated() -> None:
    noise = client_noise(torch.ones(SAMPLES), sigma=1.0, seed=SEED)
    # The correlation's deviation is 1/√n = 0.0032: five of them, one seed in a million.
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.016


def test_both_ends_of_a_pair_make_the_same_noise_and_other_seeds_make_other_noise(kinds: torch.Tensor) -> None:
    ours, theirs = (client_noise(kinds[:5000], sigma=SIGMA, seed=SEED) for _ in range(2))
    assert np.array_equal(ours, theirs)
    for place in (0, 15, 16, 31):
        other = bytearray(SEED)
        other[place] ^= 1
        assert (client_noise(kinds[:5000], sigma=SIGMA, seed=bytes(other)) != ours).all()


def test_noise_grows_with_its_deviation_and_vanishes_with_it(kinds: torch.Tensor) -> None:
    once, twice = (client_noise(kinds[:100], sigma=sigma, seed=SEED) for sigma in (1.0, 2.0))
    assert np.allclose(twice, 2.0 * once, rtol=1e-14)
    assert not client_noise(kinds[:100], sigma=0.0, seed=SEED).any()
    assert len(client_noise(kinds[:0], sigma=1.0, seed=SEED)) == 0


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_an_impossible_deviation_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="deviation"):
        client_noise(torch.ones(3), sigma=sigma, seed=SEED)


def test_an_unknown_kind_and_a_short_seed_are_refused() -> None:
    with pytest.raises(ValueError, match="0, 1 and 2"):
        client_noise(torch.tensor([1, 3]), sigma=1.0, seed=SEED)
    with pytest.raises(ValueError, match="32 bytes"):
        client_noise(torch.tensor([1]), sigma=1.0, seed=SEED[:16])
