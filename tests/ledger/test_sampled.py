"""Amplification by secret sampling: the checked numbers and the limits where they can be known."""

from __future__ import annotations

import math
import sys

import pytest

from fedveil.errors import ConfigError, MissingExtraError
from fedveil.ledger.gaussian import epsilon_of, sampled_epsilon, sampled_noise


def test_the_checked_numbers() -> None:
    found = sampled_epsilon(noise_multiplier=2, sampling_rate=0.1, rounds=10, delta=1e-5)
    assert found == pytest.approx(1.25, abs=5e-3)


def test_without_sampling_it_is_the_gaussian_mechanism_that_a_replaced_record_moves_twice_as_far() -> None:
    plain = epsilon_of(2 * math.sqrt(5) / 8, 1e-5)
    ours = sampled_epsilon(noise_multiplier=8, sampling_rate=1.0, rounds=5, delta=1e-5)
    assert plain * (1 - 1e-9) <= ours <= plain * 1.001


def test_sampling_amplifies_and_rounds_add_up() -> None:
    def epsilon(rate: float, rounds: int) -> float:
        return sampled_epsilon(noise_multiplier=2, sampling_rate=rate, rounds=rounds, delta=1e-5)

    assert epsilon(0.05, 4) < epsilon(0.2, 4) < epsilon(1.0, 4)
    assert epsilon(0.2, 4) < epsilon(0.2, 8)


def test_the_noise_for_a_target_is_the_smallest_to_a_thousandth_even_where_coarse_losses_mislead() -> None:
    setting = {"sampling_rate": 0.2, "rounds": 2000, "delta": 1e-6}
    step = 16 * math.sqrt(2)  # a point of the search: coarse losses say that it is too little for what it reaches
    fine = sampled_epsilon(noise_multiplier=step, **setting)
    coarse = sampled_epsilon(noise_multiplier=step, **setting, interval=1e-3)
    assert fine < coarse
    noise = sampled_noise(epsilon=(fine + coarse) / 2, **setting)
    assert noise == step
    assert sampled_epsilon(noise_multiplier=noise / 1.001, **setting) > (fine + coarse) / 2


def test_no_noise_is_no_privacy() -> None:
    assert sampled_epsilon(noise_multiplier=0, sampling_rate=0.1, rounds=1, delta=1e-5) == math.inf


def test_a_missing_package_names_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedveil\[accounting\]'"):
        sampled_epsilon(noise_multiplier=1, sampling_rate=0.1, rounds=1, delta=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": -1},
        {"noise_multiplier": math.nan},
        {"sampling_rate": 0},
        {"sampling_rate": 1.1},
        {"rounds": 0},
        {"delta": 0},
        {"delta": 1},
    ],
    ids=str,
)
def test_senseless_settings_are_refused(change: dict[str, float]) -> None:
    sound = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "rounds": 1, "delta": 1e-5}
    with pytest.raises(ConfigError, match=next(iter(change))):
        sampled_epsilon(**{**sound, **change})  # type: ignore[arg-type]
