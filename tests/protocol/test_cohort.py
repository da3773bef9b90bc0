"""Who takes part: reproducible, without repetition, fair."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from federation import job, trained
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.directory import RARELY, WINDOW, Cohort, Epoch
from fedveil.runs.job import Job


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


@given(st.integers(2, 40), st.data(), st.integers(1, 200), st.integers(0, 2**32))
def test_nobody_is_asked_more_often_than_planned_whatever_the_beacons_are(
    clients: int, data: st.DataObject, rounds: int, beacons: int
) -> None:
    cohort = Cohort(clients, data.draw(st.integers(1, clients)), 0, shuffled=True)
    counts: Counter[int] = Counter()
    for number in range(rounds):
        drawn = cohort.draw(number, (beacons + number // WINDOW).to_bytes(8, "big"))
        assert len(drawn) == len(set(drawn)) == cohort.size
        assert list(drawn) == sorted(drawn)
        counts.update(drawn)
    assert max(counts.values()) <= cohort.most_participations(rounds)


def test_planned_participations_are_reached_by_whoever_always_has_the_busiest_seat() -> None:
    cohort = Cohort(100, 10, 0, shuffled=True)
    assert cohort.most_participations(100) == 7 + 4
    for stretch, most in ((range(64), 7), (range(64, 100), 4)):
        counts = Counter(client for number in stretch for client in cohort.draw(number, b"beacon"))
        assert max(counts.values()) == most


def test_every_beacon_seats_clients_anew_and_evenly() -> None:
    """Fixed beacons: a count off by 5 standard errors for one of 20 clients happens to one choice in 80,000."""
    cohort = Cohort(20, 5, 3, shuffled=True)
    counts = Counter(client for number in range(4000) for client in cohort.draw(2, number.to_bytes(8, "big")))
    assert all(abs(count - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for count in counts.values())
    assert len(counts) == 20
    assert cohort.draw(2, b"beacon") == replace(cohort, seed=4).draw(2, b"beacon")


def sampled(**changes: Any) -> Job:
    return job(scheme="veil-secagg", clients=8, rounds=6, cohort=4, **changes)


def test_cohorts_are_shuffled_where_clients_share_keys_and_secrets_are_the_operating_systems() -> None:
    assert sampled(secrets="os").cohort.shuffled
    assert not sampled().cohort.shuffled  # a simulation: comparable with other schemes of the same seed
    assert not job(scheme="fedavg", clients=8, cohort=4, secrets="os").cohort.shuffled
    assert not job(scheme="veil-secagg", clients=8, secrets="os").cohort.shuffled  # everybody is asked


def test_a_real_run_of_shuffled_cohorts_trains_and_asks_nobody_more_often_than_planned() -> None:
    one = sampled(secrets="os")
    _, boundaries = trained(one)
    asked = Counter(client for done in boundaries for client in done.gathered.arrived)
    assert [len(done.gathered.arrived) for done in boundaries] == [4] * 6
    assert max(asked.values()) <= one.cohort.most_participations(6) == 3


@pytest.mark.parametrize("cohort", [0, -1, 11, 0.0, -0.5, 0.01, float("nan"), float("inf"), -float("inf"), 12.5, 2.5])
def test_a_cohort_that_does_not_fit_is_refused(cohort: float) -> None:
    with pytest.raises(ConfigError, match="of 10 clients"):
        Cohort.of(10, cohort=cohort, seed=1)


def test_a_seed_of_any_size_draws_cohorts_that_clients_can_be_told_of() -> None:
    one = job(scheme="nadp", clients=4, rounds=1, cohort=3, loss=None, seed=2**63 - 1)
    assert one.cohort.seed < 2**53
    (done,) = trained(one)[1]
    assert len(done.gathered.arrived) == 3


def chances(clients: int, rate: float, *, rounds: int = 50, **changes: Any) -> Cohort:
    return replace(Cohort.of(clients, cohort=None, seed=3, sampling_rate=rate, rounds=rounds), **changes)


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.integers(0, 500), st.booleans())
def test_a_sampled_cohort_is_distinct_ascending_and_within_its_bounds(
    clients: int, rate: float, round_: int, shuffled: bool
) -> None:
    cohort = chances(clients, rate, shuffled=shuffled)
    drawn = cohort.draw(round_, b"beacon")
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(range(clients))
    assert not drawn or cohort.least <= len(drawn) <= cohort.size
    assert drawn == replace(cohort).draw(round_, b"beacon")


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_client_is_drawn_by_itself_with_the_probability_that_was_asked_for(shuffled: bool) -> None:
    """Fixed seed and beacon. Over 4000 rounds of 12 clients: of each client's rate, of each pair's and of the cohort's
    mean and variance, none is off by 5 standard errors; one choice of seeds in 20,000 would fail (80 normal tails)."""
    clients, rate, rounds = 12, 0.3, 4000
    cohort = Cohort(clients, clients, 3, shuffled, rate, 1)
    drawn = np.zeros((rounds, clients))
    for number in range(rounds):
        drawn[number, list(cohort.draw(number, b"beacon"))] = 1
    assert np.all(np.abs(drawn.mean(0) - rate) < 5 * math.sqrt(rate * (1 - rate) / rounds))
    together = (drawn.T @ drawn / rounds)[np.triu_indices(clients, 1)]
    assert np.all(np.abs(together - rate**2) < 5 * math.sqrt(rate**2 * (1 - rate**2) / rounds))
    sizes, variance = drawn.sum(1), clients * rate * (1 - rate)
    assert abs(sizes.mean() - clients * rate) < 5 * math.sqrt(variance / rounds)
    # A binomial's fourth central moment gives the variance of its sample variance.
    fourth = variance * (1 + 3 * (clients - 2) * rate * (1 - rate))
    assert abs(sizes.var() - variance) < 5 * math.sqrt((fourth - variance**2) / rounds)


def test_another_beacon_round_or_seed_samples_others() -> None:
    cohort = chances(100, 0.5, shuffled=True)
    assert cohort.draw(0, b"one") != cohort.draw(1, b"one")
    assert cohort.draw(0, b"one") != cohort.draw(0, b"two")
    assert cohort.draw(0, b"one") == replace(cohort, seed=4).draw(0, b"one")
    assert chances(100, 0.5).draw(0) != chances(100, 0.5, seed=4).draw(0)


def test_of_more_than_the_largest_number_those_with_the_lowest_draws_are_asked() -> None:
    cohort = Cohort(40, 40, 3, False, 0.5, 1)
    whole = cohort.draw(0)
    fewer = replace(cohort, size=len(whole) - 5).draw(0)
    assert len(fewer) == len(whole) - 5
    assert set(fewer) < set(whole)
    assert replace(cohort, least=len(whole) + 1).draw(0) == ()
    # A lower rate draws some of the same: each client has one draw, whatever the rate.
    assert set(replace(cohort, rate=0.3).draw(0)) < set(whole)


@given(st.integers(1, 300), st.floats(0.02, 0.98), st.integers(1, 400))
def test_planned_participations_and_sizes_are_exceeded_rarely_and_are_the_least_that_are(
    clients: int, rate: float, rounds: int
) -> None:
    cohort = chances(clients, rate, rounds=rounds)
    most = cohort.most_participations(rounds)
    assert clients * binom.sf(most, rounds, rate) <= RARELY * (1 + 1e-6)
    assert most == 1 or clients * binom.sf(most - 1, rounds, rate) > RARELY * (1 - 1e-6)
    assert rounds * binom.sf(cohort.size, clients, rate) <= RARELY * (1 + 1e-6)
    assert cohort.least == 1 or rounds * binom.cdf(cohort.least - 1, clients, rate) <= RARELY * (1 + 1e-6)


def test_a_rate_of_one_asks_everybody() -> None:
    assert Cohort.of(4, cohort=None, seed=1, sampling_rate=1.0, rounds=9) == Cohort.of(4, cohort=None, seed=1)


def test_an_epoch_of_other_bounds_than_follow_from_its_rate_is_refused() -> None:
    cohort = chances(100, 0.4)
    told = Epoch(0, 0, 50, 100, cohort.size, 3, True, 0.4, cohort.least)
    told.check()
    told.check_shuffled()
    replace(told, least=cohort.least + 1).check()  # more rounds are skipped, and no smaller one is asked for
    for changes in ({"size": cohort.size - 1}, {"least": cohort.least - 1}, {"rate": 0.5}):
        with pytest.raises(ProtocolError, match="follow from its sampling rate"):
            replace(told, **changes).check()
    for rate in (1.0, -0.1, math.nan):
        with pytest.raises(ProtocolError, match="numbers that cannot be"):
            replace(told, rate=rate).check()
    assert told.packed() != replace(told, rate=0.5).packed()
    with pytest.raises(ProtocolError, match="by a seed that the server has picked"):
        replace(told, shuffled=False).check_shuffled()
    few = chances(8, 0.4)
    alone = Epoch(0, 0, 50, 8, few.size, 3, True, 0.4, 1)
    alone.check()
    with pytest.raises(ProtocolError, match="hides none of them"):
        alone.check_shuffled()
