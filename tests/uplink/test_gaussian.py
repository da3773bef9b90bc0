"""Gaussian noise on vectors: the right law, the same numbers from the same seed, fresh ones otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from fedveil.secrets import OsSecrets, SeededSecrets
from fedveil.uplink.gaussian import add_fresh, add_seeded

SEED = bytes(range(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_noise_is_normal_with_the_given_deviation(dtype: torch.dtype, scale: float) -> None:
    """False-alarm rate 1e-4 over the Kolmogorov–Smirnov test and 1e-4 over the χ² test of the variance."""
    vector = torch.full((200_001,), 5.0 * scale, dtype=dtype)
    add_seeded(vector, scale=scale, seed=SEED)
    noise = (vector.double() / scale - 5.0).numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    spread = float((noise**2).sum())
    low, high = stats.chi2(len(noise)).ppf([5e-5, 1 - 5e-5])
    assert low < spread < high


def test_the_same_seed_with_the_opposite_sign_cancels_to_rounding() -> None:
    one, other = torch.zeros(10_001, dtype=torch.float64), torch.zeros(10_001, dtype=torch.float64)
    add_seeded(one, scale=1234.5, seed=SEED)
    add_seeded(other, scale=-1234.5, seed=SEED)
    assert torch.equal(one, -other)
    assert float(one.abs().max()) > 1234.5


def test_noise_is_added_in_place_to_a_part_of_a_vector() -> None:
    vector = torch.arange(6, dtype=torch.float64)
    add_seeded(vector[:-1], scale=1.0, seed=SEED)
    assert float(vector[-1]) == 5.0
    assert not bool((vector[:-1] == torch.arange(5)).any())


def test_no_scale_adds_nothing() -> None:
    vector = torch.ones(9, dtype=torch.float64)
    add_seeded(vector, scale=0.0, seed=SEED)
    assert torch.equal(vector, torch.ones(9, dtype=torch.float64))


def test_fresh_noise_never_repeats() -> None:
    drawn = []
    for _ in range(3):
        vector = torch.zeros(64, dtype=torch.float64)
        add_fresh(vector, scale=1.0, stream=OsSecrets().stream("residual", 0, 0, 0))
        drawn.append(vector)
    stream = SeededSecrets(1).stream("residual", 0, 0, 0)
    for _ in range(2):
        vector = torch.zeros(64, dtype=torch.float64)
        add_fresh(vector, scale=1.0, stream=stream)
        drawn.append(vector)
    # Pairs of independent 64-vectors coincide in no coordinate.
    for place, one in enumerate(drawn):
        for other in drawn[place + 1 :]:
            assert not bool((one == other).any())


def test_simulated_noise_is_reproducible() -> None:
    found = []
    for _ in range(2):
        vector = torch.zeros(64)
        add_fresh(vector, scale=2.0, stream=SeededSecrets(7).stream("residual", 3, 1, 0))
        found.append(vector)
    assert torch.equal(*found)
    assert 1.0 < float(found[0].std()) < 3.0  # 64 draws of deviation 2: false alarm below 1e-6
    assert math.isfinite(float(found[0].sum()))
