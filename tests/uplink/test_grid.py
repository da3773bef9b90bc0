"""The grid under a claim: what rounding costs, and that integer noise is as private as the ledger's real one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedveil.errors import ConfigError
from fedveil.ledger.correlated import NoiseLayout, charges
from fedveil.ledger.gaussian import delta_of
from fedveil.uplink.grid import FINEST, ROUNDING, add_noise, check_pairs, grid_of

NOBODY = np.empty(0, dtype=np.int64)
SEED = bytes(range(32))


def noise_layout(
    residual: Sequence[float], reach: Sequence[float], pairs: Sequence[tuple[int, int, float]] = ()
) -> NoiseLayout:
    ends = np.array([(i, j) for i, j, _ in pairs], dtype=np.int64).reshape(-1, 2)
    shared = np.array([pair for _, _, pair in pairs], dtype=np.float64)
    own = np.asarray(residual, dtype=np.float64)
    return NoiseLayout(tuple(range(len(own))), np.asarray(reach, dtype=np.float64), own, ends[:, 0], ends[:, 1], shared)


def integer_gaussian(sigma: float, *, side: int) -> NDArray[np.float64]:
    """Its probabilities on −side … side."""
    weights = np.exp(-(np.arange(-side, side + 1.0) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


def hockey_stick(one: NDArray[np.float64], other: NDArray[np.float64], epsilon: float) -> float:
    """Σ max(0, p − e^ε·q): the δ that belongs to ε, exactly."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum())


@pytest.mark.parametrize("variance", [2.0, 12.0, 60.0, 1000.0])
@pytest.mark.parametrize("moved", [1, 3, 10])
@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
def test_integer_noise_is_no_less_private_than_real_noise_of_the_planned_variance(
    variance: float, moved: int, epsilon: float
) -> None:
    """By exact sums: integers are drawn with four square steps more than what is charged."""
    side = math.ceil(20 * math.sqrt(variance + 4)) + moved
    one = integer_gaussian(math.sqrt(variance + 4.0), side=side)
    other = np.roll(one, moved)  # what wraps around is below 1e-80
    allowed = delta_of(moved / math.sqrt(variance), epsilon)
    found = hockey_stick(one, other, epsilon)
    assert found <= allowed * (1 + 1e-12) + 1e-15
    # The test would notice noise of a tenth less than is charged, wherever there is anything to see.
    less = integer_gaussian(0.9 * math.sqrt(variance), side=side)
    assert hockey_stick(less, np.roll(less, moved), epsilon) > allowed or allowed < 1e-12


@pytest.mark.parametrize(("own", "shared"), [(12.0, 60.0), (12.0, 12.0), (32.0, 250.0)])
@pytest.mark.parametrize("moved", [1, 4, 9])
def test_two_clients_with_integer_pair_noise_are_as_private_as_the_accountant_says(
    own: float, shared: float, moved: int
) -> None:
    """P(u₁, u₂) = Σ_p w(p)·w(u₁ − p)·w(u₂ + p) by exact sums, against the charge for real Gaussians."""
    side = math.ceil(9 * math.sqrt(own + shared + 8)) + moved
    far = 2 * side
    noise = integer_gaussian(math.sqrt(own + 4.0), side=far)
    pair = integer_gaussian(math.sqrt(shared + 4.0), side=side)
    places = np.arange(-side, side + 1)
    # noise[z − p] for every place z and every p, and noise[z + p]
    first = noise[(places[:, None] - places[None, :]) + far]
    second = noise[(places[:, None] + places[None, :]) + far]
    joint = (first * pair) @ second.T
    other = np.roll(joint, moved, axis=0)
    mu2, least = (
        charges(noise_layout([own + more] * 2, [float(moved)] * 2, [(0, 1, shared + more)]))[0] for more in (0.0, 4.0)
    )
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        allowed = delta_of(math.sqrt(mu2), epsilon)
        found = hockey_stick(joint, other, epsilon)
        assert found <= allowed * (1 + 1e-9) + 1e-13
        # And the sums are right: real Gaussians of the integers' own variance come to nearly the same.
        assert found == pytest.approx(delta_of(math.sqrt(least), epsilon), rel=0.1, abs=1e-9)


@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 400),
    reach=st.floats(1e-3, 1e3),
    noise=st.floats(1e-2, 1e3),
    clients=st.integers(1, 50),
)
def test_rounding_lengthens_no_change_beyond_what_the_plan_counts_on(
    seed: int, length: int, reach: float, noise: float, clients: int
) -> None:
    random = np.random.default_rng(seed)
    covered = noise_layout([(noise * reach) ** 2] * clients, [reach * (1 + ROUNDING)] * clients)
    codec = grid_of(covered, length=length, largest=10 * reach)
    change = random.standard_normal(length)
    change *= reach / np.linalg.norm(change)
    one = random.standard_normal(length) * reach
    moved = (codec.encode(one + change) - codec.encode(one)).view(np.int64).astype(np.float64) * codec.step
    assert np.linalg.norm(moved) <= float(covered.sensitivity[0])
    # Where one record is left out instead of replaced, the reach is half, and rounding is still covered.
    moved = (codec.encode(one + change / 2) - codec.encode(one)).view(np.int64).astype(np.float64) * codec.step
    assert np.linalg.norm(moved) <= float(covered.sensitivity[0]) / 2
    assert math.sqrt(float(covered.residual.min())) >= FINEST * codec.step


def test_noise_on_the_grid_has_the_planned_variance_and_the_same_numbers_at_both_ends() -> None:
    """50,000 numbers: the variance strays by more than five deviations (√(2/n)) with probability below 1e-6."""
    step, count = 2.0**-20, 50_000
    for variance in (1e-4, 3.0):
        words = np.zeros(count, dtype=np.uint64)
        add_noise(words, variance=variance, step=step, seed=SEED)
        found = float(np.var(words.view(np.int64) * step))
        assert abs(found / variance - 1) < 5 * math.sqrt(2 / count) + 0.002
        # What is computed elsewhere may differ in the last bits.
        add_noise(words, variance=variance * (1 - 1e-13), step=step, seed=SEED, subtract=True)
        assert not words.any()


@pytest.mark.parametrize(
    ("residual", "largest"), [([1.0, 1.0], 1e30), ([1e30, 1.0], 1.0), ([1.0, 1e-30], 1.0)], ids=["sum", "noise", "fine"]
)
def test_what_does_not_fit_64_bits_is_refused(residual: list[float], largest: float) -> None:
    with pytest.raises(ConfigError, match="do not fit 64 bits for 2 clients"):
        grid_of(noise_layout(residual, [1.0, 1.0]), length=100, largest=largest)


def test_more_pairs_than_the_proof_is_for_are_refused() -> None:
    many = (1 << 16) + 2
    star = NoiseLayout(
        tuple(range(many)),
        np.ones(many),
        np.ones(many),
        np.zeros(many - 1, dtype=np.int64),
        np.arange(1, many),
        np.ones(many - 1),
    )
    with pytest.raises(ConfigError, match="neighbours"):
        check_pairs(star)
