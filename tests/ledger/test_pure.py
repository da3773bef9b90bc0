"""What rounds of pure differential privacy add up to, against sums over every outcome."""

from __future__ import annotations

import math
from itertools import product

import pytest

from fedveil.errors import ConfigError
from fedveil.ledger.accountant import composed_pure_epsilon


def delta_by_hand(target: float, epsilon: float, rounds: int) -> float:
    """Over all 2ᵀ answers of randomised response."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    total = 0.0
    for answers in product((0, 1), repeat=rounds):
        p = math.prod(truth if answer else 1 - truth for answer in answers)
        q = math.prod(1 - truth if answer else truth for answer in answers)
        total += max(0.0, p - math.exp(target) * q)
    return total


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("delta", [1e-5, 0.01])
def test_the_least_epsilon_is_where_delta_is_met(epsilon: float, rounds: int, delta: float) -> None:
    whole = composed_pure_epsilon(epsilon, rounds=rounds, delta=delta)
    assert whole <= rounds * epsilon
    assert delta_by_hand(whole, epsilon, rounds) <= delta
    if whole > 1e-6:
        assert delta_by_hand(whole * (1 - 1e-6), epsilon, rounds) > delta * (1 - 1e-3)


def test_many_rounds_cost_less_than_their_sum_at_a_small_delta() -> None:
    assert 3.0 < composed_pure_epsilon(0.1, rounds=100, delta=1e-5) < 5.0
    assert composed_pure_epsilon(50.0, rounds=3, delta=1e-5) == pytest.approx(150, abs=12)


@pytest.mark.parametrize("given", [{"epsilon": 0.0}, {"epsilon": math.inf}, {"rounds": 0}, {"delta": 0.0}])
def test_what_makes_no_figure_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        composed_pure_epsilon(**{"epsilon": 1.0, "rounds": 3, "delta": 1e-5, **given})  # type: ignore[arg-type]
