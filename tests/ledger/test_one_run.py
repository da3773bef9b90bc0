"""Bounds from guesses at canaries: against closed forms, and the worst mechanism that a linear program finds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.stats import binom, norm

from fedveil.errors import ConfigError
from fedveil.ledger.caveats import SECRET_BATCH
from fedveil.ledger.gaussian import (
    Guesses,
    delta_of,
    epsilon_at_least,
    epsilon_of,
    excludes,
    gaussian_excludes,
    mu_at_least,
    mu_of,
    plan_guesses,
    tail_bound,
)
from fedveil.ledger.statement import Line


def worst_tail(coins: int, right: int, curve: list[tuple[float, float]]) -> float:
    """The largest P[W ≥ right] of all mechanisms that tell `coins` guesses and keep each (ε, δ) of the curve.

    Variables are P[guesses | coins], and for each pair of neighbours, ε and outcome the excess of one over e^ε times
    the other, whose sum is held to δ.
    """
    sides = list(itertools.product((0, 1), repeat=coins))
    count = len(sides)
    pairs = [(s, s ^ (1 << bit)) for s in range(count) for bit in range(coins)]
    tables = count * count
    excess = tables + len(pairs) * len(curve) * count
    rows, columns, values, limits = [], [], [], []
    row = 0
    for number, ((here, there), (epsilon, delta)) in enumerate(itertools.product(pairs, curve)):
        first = tables + number * count
        for outcome in range(count):
            rows += [row] * 3
            columns += [here * count + outcome, there * count + outcome, first + outcome]
            values += [1.0, -math.exp(epsilon), -1.0]
            limits.append(0.0)
            row += 1
        rows += [row] * count
        columns += range(first, first + count)
        values += [1.0] * count
        limits.append(delta)
        row += 1
    upper = coo_array((values, (rows, columns)), shape=(row, excess))
    whole = coo_array((np.ones(tables), (np.repeat(np.arange(count), count), np.arange(tables))), shape=(count, excess))
    gain = np.zeros(excess)
    for here, there in itertools.product(range(count), repeat=2):
        if coins - bin(here ^ there).count("1") >= right:
            gain[here * count + there] = -1.0 / count
    solved = linprog(gain, A_ub=upper.tocsr(), b_ub=limits, A_eq=whole.tocsr(), b_eq=np.ones(count))
    assert solved.success
    return -solved.fun


@pytest.mark.parametrize("right", [1, 7, 40])
def test_guesses_that_are_all_right_have_the_chance_that_coins_have(right: int) -> None:
    game = Guesses(50, right, right)
    assert tail_bound(game, epsilon=0.0, delta=0.0) == pytest.approx(2.0**-right)
    assert tail_bound(game, epsilon=1.5, delta=0.0) == pytest.approx((math.e**1.5 / (1 + math.e**1.5)) ** right)
    least = epsilon_at_least(game, delta=0.0)
    chance = 0.05 ** (1 / right)
    assert least == pytest.approx(max(0.0, math.log(chance / (1 - chance))), abs=2e-4)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.7, 0.0), (0.7, 0.02), (0.0, 0.1), (2.0, 0.01)])
@pytest.mark.parametrize("right", [2, 3])
def test_no_mechanism_beats_the_bound_and_without_delta_one_meets_it(epsilon: float, delta: float, right: int) -> None:
    worst = worst_tail(3, right, [(epsilon, delta)])
    bound = tail_bound(Guesses(3, 3, right), epsilon=epsilon, delta=delta)
    assert worst <= bound + 1e-9
    if not delta:
        assert worst == pytest.approx(bound)
    else:
        assert worst > tail_bound(Guesses(3, 3, right), epsilon=epsilon, delta=0.0)


@pytest.mark.parametrize("mu", [0.3, 1.0])
@pytest.mark.parametrize("right", [2, 3])
def test_no_gaussian_mechanism_beats_its_bound(mu: float, right: int) -> None:
    game = Guesses(3, 3, right)
    # Fewer conditions than a Gaussian curve has: what keeps them may do a little more than it could.
    curve = [(epsilon, delta_of(mu, epsilon)) for epsilon in np.linspace(0.0, 4 * mu, 16)]
    worst = worst_tail(3, right, curve)
    assert worst >= binom.sf(right - 1, 3, norm.cdf(mu / 2)) - 1e-9  # coins that lie apart are such a mechanism
    assert not gaussian_excludes(game, mu=mu, tau=worst * 0.995)
    if right == 3:  # and where all guesses are right, the bound is met
        assert gaussian_excludes(game, mu=mu, tau=worst * 1.005)


def test_one_canary_is_bounded_exactly() -> None:
    for mu in (0.2, 1.0, 3.0):
        chance = float(norm.cdf(mu / 2))
        assert gaussian_excludes(Guesses(1, 1, 1), mu=mu, tau=chance + 1e-6)
        assert not gaussian_excludes(Guesses(1, 1, 1), mu=mu, tau=chance - 1e-6)


def test_bounds_grow_with_right_guesses_and_shrink_with_confidence_and_delta() -> None:
    few, many = Guesses(1000, 200, 150), Guesses(1000, 200, 170)
    assert 0 < mu_at_least(few) < mu_at_least(many)
    assert mu_at_least(many, confidence=0.99) < mu_at_least(many)
    assert epsilon_at_least(many, delta=1e-3) < epsilon_at_least(many, delta=0.0)
    assert mu_at_least(Guesses(100, 100, 50)) == epsilon_at_least(Guesses(100, 100, 50), delta=0.0) == 0.0


def test_an_honest_mechanism_is_below_its_claim_as_often_as_is_said() -> None:
    """200 games at the 95 % level: more than 20 above the claim have a chance below 10⁻³, if each had one of 5 %."""
    mu, canaries = mu_of(3.0, 1e-5), 2000
    guesses = plan_guesses(canaries, mu=mu, delta=1e-5, gaussian=True).guesses
    rng = np.random.default_rng(5)
    coins = rng.choice((-1.0, 1.0), size=(200, canaries))
    scores = rng.standard_normal(coins.shape) + coins * mu / 2
    chosen = np.argsort(-np.abs(scores), axis=1)[:, :guesses]
    right = (np.take_along_axis(scores * coins, chosen, axis=1) > 0).sum(axis=1)
    above = sum(gaussian_excludes(Guesses(canaries, guesses, int(each)), mu=mu, tau=0.05) for each in right)
    assert above <= 20
    shown = epsilon_of(mu_at_least(Guesses(canaries, guesses, int(np.median(right)))), 1e-5)
    assert shown == pytest.approx(plan_guesses(canaries, mu=mu, delta=1e-5, gaussian=True).expected, rel=0.1)


@pytest.mark.parametrize(("canaries", "epsilon"), [(600, 3.0), (600, 8.0), (1000, 8.0), (20_000, 1.0)])
def test_so_many_guesses_are_planned_that_a_third_of_the_noise_contradicts_its_claim(
    canaries: int, epsilon: float
) -> None:
    """With the scores of noise that is a third of what is claimed, N(±3·μ/2, 1); fixed seed."""
    mu = mu_of(epsilon, 1e-5)
    plan = plan_guesses(canaries, mu=mu, delta=1e-5, gaussian=True)
    assert 0 < plan.expected < epsilon
    rng = np.random.default_rng(3)
    right = rng.standard_normal(canaries) + 3 * mu / 2
    farthest = np.argsort(-np.abs(right))[: plan.guesses]
    game = Guesses(canaries, plan.guesses, int((right[farthest] > 0).sum()))
    assert excludes(game, epsilon=epsilon, delta=1e-5, gaussian=True)


def test_outcomes_that_cannot_be_are_refused() -> None:
    for outcome in ((10, 11, 3), (10, 5, 6), (0, 0, 0), (10, 5, -1)):
        with pytest.raises(ConfigError, match="no outcome"):
            Guesses(*outcome)


def test_a_line_says_what_its_noise_is_under_add_remove() -> None:
    line = Line("server", "differential privacy", "", epsilon=3.0, delta=1e-5, mu=mu_of(3.0, 1e-5))
    assert line.add_remove.startswith("replace-one ε = 3; ")
    assert line.add_remove.endswith("ε = 1.382")
    assert Line("server", "none", "").add_remove == ""
    assert replace(line, assumptions=(SECRET_BATCH,)).add_remove == ""
