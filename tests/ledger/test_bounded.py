"""The δ floor of bounded noise, against its closed forms and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import irwinhall

from fedveil.errors import ConfigError
from fedveil.ledger import gaussian
from fedveil.ledger.gaussian import delta_floor, delta_floor_even

WIDTH = 2 * math.sqrt(2)  # of the uniform noise of scale 1


@given(shift=st.floats(0, 6), scale=st.floats(0.1, 10))
@settings(deadline=None, max_examples=50)
def test_one_client_is_uniform_noise(shift: float, scale: float) -> None:
    expected = min(1, shift / (WIDTH * scale))
    assert delta_floor(scale=scale, clients=1, shift=shift) == pytest.approx(expected, rel=1e-8)
    assert delta_floor(scale=scale, clients=1, shift=-shift) <= expected


@pytest.mark.parametrize("clients", [2, 3, 5, 12])
def test_a_sum_follows_irwin_and_hall(clients: int) -> None:
    for width in np.linspace(0.05, clients, 23):
        ours = delta_floor(scale=0.7, clients=clients, shift=width * WIDTH * 0.7)
        assert ours == pytest.approx(irwinhall.cdf(width, clients), rel=1e-6)


def test_a_floor_is_never_above_the_truth() -> None:
    """Two clients: t²/2, then 1 − (2 − t)²/2."""
    for width in np.linspace(0.01, 2, 57):
        true = width**2 / 2 if width <= 1 else 1 - (2 - width) ** 2 / 2
        assert delta_floor(scale=1, clients=2, shift=width * WIDTH) <= true * (1 + 1e-12)


def test_many_clients_keep_their_digits() -> None:
    """Half the support escapes with probability one half, where a hundred alternating terms reach 1e40."""
    assert delta_floor(scale=1, clients=100, shift=50 * WIDTH) == pytest.approx(0.5, rel=1e-6)
    assert delta_floor(scale=1, clients=100, shift=100 * WIDTH) == 1
    assert delta_floor(scale=1, clients=10000, shift=0.5 * WIDTH) == 0  # below any float
    normal = 0.5 * math.erfc(2 / math.sqrt(2))
    assert delta_floor(scale=1, clients=300, shift=(150 - 2 * 5) * WIDTH) == pytest.approx(normal, rel=0.01)


@pytest.mark.parametrize(("clients", "width"), [(1, 0.3), (3, 0.9), (3, 1.6), (5, 2.2)])
def test_simulated_noise_leaves_the_support_that_often(clients: int, width: float) -> None:
    """400,000 draws, five standard errors: a false alarm in 1.7 million runs (and the seed is fixed)."""
    random, draws, scale = np.random.default_rng(11), 400_000, 1.3
    edge = math.sqrt(2) * scale
    noise = random.uniform(-edge, edge, (draws, clients)).sum(axis=1)
    seen = float(np.mean(noise + width * WIDTH * scale > clients * edge))
    floor = delta_floor(scale=scale, clients=clients, shift=width * WIDTH * scale)
    assert abs(seen - floor) < 5 * math.sqrt(floor * (1 - floor) / draws)


def test_simulated_noise_leaves_the_support_in_any_of_many_coordinates() -> None:
    """200,000 draws, five standard errors: a false alarm in 1.7 million runs (and the seed is fixed)."""
    random, draws, scale, clients = np.random.default_rng(12), 200_000, 0.8, 2
    factors = random.uniform(0.3, 3, 6)
    shifts = 2.0 / (math.sqrt(6) * factors)
    edge = math.sqrt(2) * scale
    noise = random.uniform(-edge, edge, (draws, clients, 6)).sum(axis=1)
    seen = float(np.mean(np.any(noise + shifts > clients * edge, axis=1)))
    floor = delta_floor_even(scale=scale, clients=clients, sensitivity=2.0, factors=factors)
    assert 0.05 < floor < 0.95
    assert abs(seen - floor) < 5 * math.sqrt(floor * (1 - floor) / draws)


def test_one_coordinate_is_the_same_either_way() -> None:
    even = delta_floor_even(scale=1.5, clients=3, sensitivity=2.0, factors=np.array([-0.4]))
    assert even == pytest.approx(delta_floor(scale=1.5, clients=3, shift=2.0 / 0.4))


def test_many_wide_shifts_are_rounded_down_to_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = np.random.default_rng(0).uniform(0.5, 30, 900)
    coarse = gaussian._escapes(widths, 40)
    monkeypatch.setattr(gaussian, "GRID", 10_000)
    fine = gaussian._escapes(widths, 40)
    assert fine == pytest.approx(np.array([delta_floor(scale=1, clients=40, shift=w * WIDTH) for w in widths]))
    assert np.all(coarse <= fine)
    assert np.any(coarse < fine)
    assert np.all(coarse[widths > 2] >= 0.5 * fine[widths > 2] ** 2)


def test_no_change_is_not_seen() -> None:
    assert delta_floor(scale=1, clients=4, shift=0.0) == 0
    assert delta_floor_even(scale=1, clients=4, sensitivity=0.0, factors=np.ones(3)) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [({"scale": 0.0}, "scale"), ({"clients": 0}, "clients"), ({"shift": math.nan}, "change")],
    ids=str,
)
def test_senseless_settings_are_refused(change: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        delta_floor(**{"scale": 1.0, "clients": 1, "shift": 1.0, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("factors", [np.array([1.0, 0.0]), np.array([math.nan]), np.empty(0)], ids=str)
def test_scales_that_are_zero_or_missing_are_refused(factors: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="factors"):
        delta_floor_even(scale=1, clients=1, sensitivity=1, factors=factors)
