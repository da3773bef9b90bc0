"""MP-DP's noise, as far as anything can be said about it."""

from __future__ import annotations

import math

import pytest

from federation import job
from fedveil.ledger.gaussian import epsilon_of, mpdp_sigma
from fedveil.runs.privacy_journal import composed, floors, notes_on


@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive", "mp-cdp"])
def test_the_papers_figure_is_composed_over_rounds(scheme: str) -> None:
    found = composed(job(scheme=scheme, epsilon=1.0).scheme, rounds=100, delta=1e-5)
    assert found is not None
    strength = math.sqrt(1000.0) if scheme == "mpdp" else math.inf
    assert found.sigma == pytest.approx(mpdp_sigma(1.0, 1e-5, strength))
    assert found.one_round == pytest.approx(epsilon_of(1 / found.sigma, 1e-5))
    assert found.all_rounds == pytest.approx(epsilon_of(10 / found.sigma, 1e-5))
    assert found.one_round < 1 < found.all_rounds


def test_other_schemes_have_nothing_assumed() -> None:
    one = job(scheme="nadp", loss=None)
    assert notes_on(one.scheme, one.architecture, clients=5, rounds=9, delta=1e-5, stream=one.secrets.stream("x")) == ()


def test_a_change_where_the_scale_is_smallest_is_seen_more_often_than_one_spread_evenly() -> None:
    one = job(scheme="mpdp")
    few, many = (
        floors(one.scheme, one.architecture, clients=clients, stream=one.secrets.stream("x")) for clients in (2, 50)
    )
    assert few is not None
    assert many is not None
    assert few.sharpest > few.even > 0
    assert few.sharpest > 1e-3
    assert many.sharpest < few.sharpest
    assert few.coordinates < one.architecture.size  # the output bias has Gaussian noise


def test_only_bounded_noise_has_a_floor() -> None:
    one = job(scheme="mpdp-naive")
    assert floors(one.scheme, one.architecture, clients=5, stream=one.secrets.stream("x")) is None
