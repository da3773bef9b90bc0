"""The Gaussian accountant: exact where that can be computed, and never on the wrong side."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedveil.errors import ConfigError
from fedveil.ledger.gaussian import delta_of, epsilon_of, mpdp_sigma, mu_of, paper_sigma, sigma_of

EPSILONS = st.floats(1e-3, 200)
DELTAS = st.floats(-300, -0.01).map(lambda power: 10.0**power)
STRENGTHS = st.floats(-4, 2.5).map(lambda power: 10.0**power)
few = settings(deadline=None, max_examples=60)


def exact(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        # ncdf loses nothing in its lower tail, which is the only one that matters here.
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize(("epsilon", "analytic", "papers"), [(0.5, 7.032, 9.597), (1, 3.731, 4.799), (3, 1.391, 1.600)])
def test_the_checked_noise_sizes(epsilon: float, analytic: float, papers: float) -> None:
    assert sigma_of(epsilon, 1e-5) == pytest.approx(analytic, abs=6e-4)
    assert paper_sigma(epsilon, 1e-5) == pytest.approx(papers, abs=6e-4)


@given(mu=STRENGTHS, epsilon=st.floats(-6, 4).map(lambda power: 10.0**power))
@few
def test_delta_agrees_with_eighty_digits_and_is_never_below(mu: float, epsilon: float) -> None:
    ours, true = delta_of(mu, epsilon), exact(mu, epsilon)
    if true < 1e-290:
        assert 0 < ours < 1e-280
    else:
        assert true <= ours
        assert ours <= min(true * (1 + mpmath.mpf("1e-9")), 1)


@pytest.mark.parametrize(
    ("mu", "epsilon"), [(1e-8, 1e-7), (1e-5, 1e-5), (0.0999, 1.5), (0.1001, 1.5), (60, 1000), (90, 1)]
)
def test_delta_survives_where_the_textbook_formula_cancels(mu: float, epsilon: float) -> None:
    true = exact(mu, epsilon)
    assert min(true, 1 - 1e-15) <= delta_of(mu, epsilon) <= true * (1 + mpmath.mpf("1e-9"))


@given(mu=st.floats(0.1, 5), epsilon=st.floats(0.01, 5))
@few
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(mu: float, epsilon: float) -> None:
    """Integrate max(0, N(μ, 1) − e^ε·N(0, 1)) by brute force; it is positive right of ε/μ + μ/2."""
    start = epsilon / mu + mu / 2
    area, _ = quad(lambda t: norm.pdf(t - mu) - math.exp(epsilon) * norm.pdf(t), start, start + 45, epsabs=1e-13)
    assert delta_of(mu, epsilon) == pytest.approx(area, abs=1e-9)


def test_two_releases_compose_by_adding_squares() -> None:
    """The hockey-stick divergence of two independent releases, summed over a plane, is that of √(μ₁² + μ₂²)."""
    axis = np.linspace(-12, 16, 1401)
    step = axis[1] - axis[0]
    for one, two, epsilon in ((0.6, 0.8, 0.5), (1.0, 2.0, 1.0)):
        with_it = np.outer(norm.pdf(axis - one), norm.pdf(axis - two))
        without = np.outer(norm.pdf(axis), norm.pdf(axis))
        area = np.maximum(with_it - math.exp(epsilon) * without, 0).sum() * step**2
        assert delta_of(math.hypot(one, two), epsilon) == pytest.approx(area, rel=1e-4)


@given(epsilon=EPSILONS, delta=DELTAS)
@few
def test_the_chosen_noise_meets_its_target_and_wastes_nothing(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert delta_of(mu, epsilon) <= delta
    assert delta_of(mu * (1 + 1e-9), epsilon) > delta
    assert 1 / sigma_of(epsilon, delta) <= mu


@given(mu=STRENGTHS, delta=DELTAS)
@few
def test_the_claimed_epsilon_holds_and_is_the_smallest(mu: float, delta: float) -> None:
    epsilon = epsilon_of(mu, delta)
    assert delta_of(mu, epsilon) <= delta
    if epsilon:
        assert delta_of(mu, epsilon * (1 - 1e-9)) > delta


@given(epsilon=EPSILONS, delta=DELTAS)
@few
def test_strength_and_epsilon_are_inverse_to_each_other(epsilon: float, delta: float) -> None:
    assert epsilon_of(mu_of(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-8)


@given(mu=STRENGTHS, epsilon=EPSILONS, delta=DELTAS)
@few
def test_more_noise_is_more_privacy(mu: float, epsilon: float, delta: float) -> None:
    assert delta_of(mu, epsilon) <= delta_of(1.01 * mu, epsilon)
    assert delta_of(mu, 1.01 * epsilon) <= delta_of(mu, epsilon)
    assert epsilon_of(mu, delta) <= epsilon_of(1.01 * mu, delta)


def test_no_release_and_no_noise_are_the_two_ends() -> None:
    assert delta_of(0.0, 1.0) == 0
    assert epsilon_of(0.0, 1e-5) == 0
    assert delta_of(math.inf, 1.0) == 1
    assert epsilon_of(math.inf, 1e-5) == math.inf
    assert epsilon_of(1e-7, 1e-5) == 0  # total variation is already below δ


@pytest.mark.parametrize("mu", [1e-300, 1e-20, 1e20, 1e200])
def test_extreme_strengths_give_numbers(mu: float) -> None:
    assert 0 <= delta_of(mu, 1.0) <= 1
    assert epsilon_of(mu, 1e-5) >= 0


def test_the_papers_formula_composes_over_rounds() -> None:
    assert paper_sigma(2.0, 1e-5, rounds=16) == pytest.approx(4 * paper_sigma(2.0, 1e-5))
    assert paper_sigma(0.5, 1e-5) == pytest.approx(math.sqrt(2 * math.log(1e5)) / 0.5)


@pytest.mark.parametrize(("epsilon", "expected"), [(3.0, 1.683), (10.0, 0.564)])
def test_mpdps_noise_solves_its_equation_and_is_never_below_the_exact_minimum(epsilon: float, expected: float) -> None:
    delta, strength = 1e-5, 2.0
    assert mpdp_sigma(epsilon, delta) == pytest.approx(expected, abs=5e-4)
    assert mpdp_sigma(epsilon, delta) > sigma_of(epsilon, delta)
    theta = (1 + 1 / strength**2) / mpdp_sigma(epsilon, delta, strength) ** 2
    tail = 2 * math.log(2 / (delta * math.sqrt(2 * math.pi)))
    assert (epsilon - theta / 2) ** 2 == pytest.approx(tail * theta)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("function", [mu_of, sigma_of, paper_sigma, mpdp_sigma])
def test_a_target_without_a_positive_epsilon_is_refused(function: object, epsilon: float) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        function(epsilon, 1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
@pytest.mark.parametrize("function", [mu_of, sigma_of, paper_sigma, mpdp_sigma, epsilon_of])
def test_a_delta_outside_its_range_is_refused(function: object, delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        function(1.0, delta)  # type: ignore[operator]


def test_other_senseless_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="mu is -1"):
        delta_of(-1.0, 1.0)
    with pytest.raises(ConfigError, match="epsilon is -1"):
        delta_of(1.0, -1.0)
    with pytest.raises(ConfigError, match="rounds is 0"):
        paper_sigma(1.0, 1e-5, rounds=0)
