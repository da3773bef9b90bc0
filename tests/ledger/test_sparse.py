"""Bounds on the inverse's diagonal for large sparse graphs, against dense inverses."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from fedveil.ledger.correlated import NoiseGraph, diagonal_bounds, worst, worst_candidate


def n_out(size: int, *, out: int = 5, ratio: float = 1000.0, seed: int = 0, even: bool = True) -> NoiseGraph:
    random = np.random.default_rng(seed)
    first = np.repeat(np.arange(size), out)
    second = np.concatenate([random.choice(size - 1, out, replace=False) for _ in range(size)])
    second += second >= first
    keys = np.unique(np.minimum(first, second) * size + np.maximum(first, second))
    spread = np.ones if even else lambda count: random.uniform(0.3, 3, count)
    return NoiseGraph(spread(size), keys // size, keys % size, ratio * spread(len(keys)))


def inverse_diagonal(graph: NoiseGraph) -> np.ndarray:
    return np.diag(np.linalg.inv(graph.covariance.toarray()))


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 1000.0, 1e6])
def test_every_entry_lies_between_its_bounds(ratio: float, even: bool) -> None:
    graph = n_out(300, ratio=ratio, even=even)
    true = inverse_diagonal(graph)
    lower, upper = diagonal_bounds(graph, np.arange(graph.size), slack=1e-3)
    # The dense inverse itself is off by its conditioning: 1e-16 × ratio × 300.
    assert np.all(lower <= true * (1 + 1e-7))
    assert np.all(true <= upper * (1 + 1e-7))
    assert np.all(upper <= lower * (1 + 1.01e-3))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_bounds_hold_however_early_the_work_stops(steps: int) -> None:
    graph = n_out(300, even=False)
    true = inverse_diagonal(graph)
    lower, upper = diagonal_bounds(graph, np.arange(graph.size), steps=steps)
    assert np.all(lower <= true)
    assert np.all(true <= upper)


def test_bounds_keep_their_sides_to_the_last_digit() -> None:
    """Asked for more digits than floats have, and checked with fifty."""
    for seed in range(20):
        graph = n_out(12, out=3, ratio=1e4, seed=seed, even=False)
        lower, upper = diagonal_bounds(graph, np.arange(12), slack=0.0, steps=40)
        with mpmath.workdps(50):
            sigma = mpmath.diag(list(map(mpmath.mpf, graph.residual)))
            for i, j, pair in zip(graph.first.tolist(), graph.second.tolist(), graph.pairs, strict=True):
                for row, column, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
                    sigma[row, column] += sign * mpmath.mpf(pair)
            inverse = sigma**-1
        for i in range(12):
            assert lower[i] < inverse[i, i] < upper[i]
            assert upper[i] - lower[i] <= 1e-8 * inverse[i, i]


def test_bounds_hold_at_the_limit_of_the_arithmetic() -> None:
    """Asked for more digits than floats have, the work ends by itself and the bounds agree to ten."""
    graph = n_out(200, ratio=10.0)
    lower, upper = diagonal_bounds(graph, np.arange(graph.size), slack=1e-14)
    true = inverse_diagonal(graph)
    assert np.all(lower <= true * (1 + 1e-13))
    assert np.all(true <= upper * (1 + 1e-13))
    assert np.all(upper - lower <= 1e-10 * true)


def test_a_badly_connected_graph_is_bounded_too() -> None:
    ring = np.arange(400)
    graph = NoiseGraph(np.ones(400), ring, (ring + 1) % 400, np.full(400, 1000.0))
    lower, upper = diagonal_bounds(graph, np.array([0, 7]))
    true = inverse_diagonal(graph)[[0, 7]]
    assert np.all(lower <= true * (1 + 1e-9))
    assert np.all(true <= upper * (1 + 1e-9))
    assert np.all(upper <= lower * 1.0011)


def test_hopelessly_strong_pair_noise_ends_early_with_bounds_that_hold() -> None:
    """With rounding as large as the residual noise no step count helps; the true value is 1/300 to many digits."""
    lower, upper = diagonal_bounds(n_out(300, ratio=1e12), np.arange(128), steps=10**9)
    assert np.all(lower <= 1 / 300 * (1 + 1e-9))
    assert np.all(upper >= 1 / 300 * (1 - 1e-12))


def test_a_member_without_residual_noise_is_not_bounded() -> None:
    graph = n_out(50)
    bare = NoiseGraph(np.where(np.arange(50) == 3, 0.0, 1.0), graph.first, graph.second, graph.pairs)
    assert np.all(np.isinf(diagonal_bounds(bare, np.array([0, 3]))[1]))


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_the_worst_member_of_two_thousand_is_found_and_nobody_is_worse(even: bool) -> None:
    graph = n_out(2000, even=even, seed=4)
    sensitivity = np.ones(2000) if even else np.random.default_rng(9).uniform(0.5, 2, 2000)
    true = sensitivity**2 * inverse_diagonal(graph)
    candidate = worst_candidate(graph, sensitivity)
    assert candidate.lower <= true.max() * (1 + 1e-9)
    assert true[candidate.position] == pytest.approx(candidate.lower, rel=2e-6)
    found = worst(graph, sensitivity)
    assert true[found.position] == pytest.approx(true.max(), rel=1e-5)
    assert found.lower <= true.max() * (1 + 1e-9) <= found.upper * (1 + 2e-9)
    assert found.upper <= true.max() * (1 + 1e-3)


def test_the_worst_member_is_found_even_when_it_is_no_candidate() -> None:
    graph, sensitivity = n_out(300, seed=5), np.ones(300)
    true = inverse_diagonal(graph)
    assert worst_candidate(graph, sensitivity, count=1).position != int(true.argmax())
    found = worst(graph, sensitivity, count=1, slack=1e-9)
    assert found.position == int(true.argmax())
    assert found.lower == pytest.approx(true.max(), rel=1e-8)
    assert found.upper == pytest.approx(true.max(), rel=1e-8)


def test_insensitive_members_are_left_out() -> None:
    graph, sensitivity = n_out(300), np.zeros(300)
    sensitivity[17] = 2.0
    found = worst(graph, sensitivity)
    assert found.position == 17
    assert found.upper == pytest.approx(4 * inverse_diagonal(graph)[17], rel=1e-5)
