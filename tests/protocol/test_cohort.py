"""Who takes part: reproducible, without repetition, fair."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation import job, trained
from fedveil.errors import ConfigError
from fedveil.protocol import Cohort


@given(st.integers(1, 60), st.data(), st.integers(0, 2**31), st.integers(0, 500))
def test_a_cohort_is_distinct_ascending_and_of_the_asked_size(
    clients: int, data: st.DataObject, seed: int, round_: int
) -> None:
    count = data.draw(st.integers(1, clients))
    drawn = Cohort.of(clients, cohort=count, seed=seed).draw(round_)
    assert len(drawn) == count
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(range(clients))
    assert drawn == Cohort.of(clients, cohort=count, seed=seed).draw(round_)


def test_everybody_takes_part_by_default() -> None:
    assert Cohort.of(4, cohort=None, seed=1).draw(7) == (0, 1, 2, 3)
    assert Cohort.of(4, cohort=1.0, seed=1).draw(7) == (0, 1, 2, 3)


def test_one_is_a_count_and_one_point_zero_a_fraction() -> None:
    assert Cohort.of(10, cohort=1, seed=1).size == 1
    assert Cohort.of(10, cohort=1.0, seed=1).size == 10
    assert Cohort.of(10, cohort=0.3, seed=1).size == 3


def test_another_round_or_seed_draws_others() -> None:
    cohort = Cohort.of(100, cohort=10, seed=1)
    assert cohort.draw(0) != cohort.draw(1)
    assert cohort.draw(0) != Cohort.of(100, cohort=10, seed=2).draw(0)


def test_over_many_rounds_everybody_is_asked_about_as_often() -> None:
    cohort = Cohort.of(20, cohort=5, seed=3)
    counts = Counter(client for round_ in range(2000) for client in cohort.draw(round_))
    assert min(counts.values()) > 420
    assert max(counts.values()) < 580


@pytest.mark.parametrize("cohort", [0, -1, 11, 0.0, -0.5, 0.01, float("nan"), float("inf"), -float("inf"), 12.5, 2.5])
def test_a_cohort_that_does_not_fit_is_refused(cohort: float) -> None:
    with pytest.raises(ConfigError, match="of 10 clients"):
        Cohort.of(10, cohort=cohort, seed=1)


def test_a_seed_of_any_size_draws_cohorts_that_clients_can_be_told_of() -> None:
    one = job(scheme="nadp", clients=4, rounds=1, cohort=3, loss=None, seed=2**63 - 1)
    assert one.cohort.seed < 2**53
    (done,) = trained(one)[1]
    assert len(done.gathered.arrived) == 3
