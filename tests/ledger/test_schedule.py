"""Noise that shrinks over rounds: every client stays within the budget, and who takes the dearest rounds meets it."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.accountant import affordable_rounds, check_decay
from fedveil.ledger.gaussian import epsilon_of, mu_of


def shares(decay: float, rounds: int, participations: int) -> list[float]:
    """Which part of the budget each round takes."""
    return [1 / affordable_rounds(t, decay=decay, rounds=rounds, participations=participations) for t in range(rounds)]


@settings(deadline=None, max_examples=60)
@given(decay=st.floats(0.3, 1.0), rounds=st.integers(1, 8), data=st.data())
def test_whichever_rounds_are_a_clients_it_pays_at_most_the_budget_and_for_the_last_ones_all_of_it(
    decay: float, rounds: int, data: st.DataObject
) -> None:
    often = data.draw(st.integers(1, rounds))
    paid = shares(decay, rounds, often)
    totals = [math.fsum(chosen) for chosen in combinations(paid, often)]
    assert max(totals) <= 1 + 1e-15
    assert math.fsum(paid[-often:]) == pytest.approx(1, rel=1e-11)
    assert all(later / earlier == pytest.approx(decay**-2) for earlier, later in pairwise(paid))


def test_without_decay_every_round_is_an_equal_part_to_the_last_bit() -> None:
    assert [affordable_rounds(t, decay=1.0, rounds=9, participations=7) for t in (None, 0, 8)] == [7.0, 7.0, 7.0]


def test_the_amplitudes_of_fifty_rounds_are_those_of_the_geometric_series() -> None:
    """√(Σ ρ^(−2s)·ρ^(2t)/T): 56.7 times and 0.32 times the constant deviation for ρ = 0.9, 5.9 and 0.45 for √0.9."""
    for decay, first, last in ((0.9, 56.7, 0.324), (math.sqrt(0.9), 5.9, 0.45)):
        paid = shares(decay, 50, 50)
        assert math.sqrt(1 / paid[0] / 50) == pytest.approx(first, rel=0.01)
        assert math.sqrt(1 / paid[-1] / 50) == pytest.approx(last, rel=0.01)


def test_epsilon_of_a_schedule_is_that_of_privacy_loss_distributions() -> None:
    """The other library rounds losses up to multiples of 10⁻² a round: it says a little more, never less."""
    dp_accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    mu2 = [mu_of(3.0, 1e-5) ** 2 * share for share in shares(0.7, 3, 3)]
    ours = epsilon_of(math.sqrt(math.fsum(mu2)), 1e-5)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-2)
    for each in mu2:
        accountant.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(each)))
    assert ours == pytest.approx(3.0, rel=1e-9)
    assert ours <= 3.0 <= accountant.get_epsilon(1e-5) <= 3.0 * 1.02


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_what_is_no_factor_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError):
        check_decay(decay, rounds=5)


def test_noise_that_no_number_would_hold_is_refused_with_the_factor_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"0\.987"):
        check_decay(0.9, rounds=1000)
    check_decay(0.987, rounds=1000)
    check_decay(0.01, rounds=1)


@pytest.mark.parametrize("round", [None, -1, 5, 10**9])
def test_a_round_that_noise_is_not_planned_for_is_refused(round: int | None) -> None:
    with pytest.raises(ProtocolError):
        affordable_rounds(round, decay=0.9, rounds=5, participations=5)
