"""Charges of correlated noise: against plain linear algebra, the checked numbers, and what must never happen."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.ledger import correlated
from fedveil.ledger.correlated import NoiseLayout, _complete_bound, central, charges, worst_collusion

few = settings(deadline=None, max_examples=60)


def layout_of(weights: np.ndarray, residual: np.ndarray, sensitivity: np.ndarray | None = None) -> NoiseLayout:
    """From a symmetric matrix of pair variances; the clients are numbered 10, 13, 16, …"""
    first, second = np.nonzero(np.triu(weights))
    members = tuple(range(10, 10 + 3 * len(residual), 3))
    sensitivity = np.ones(len(residual)) if sensitivity is None else sensitivity
    return NoiseLayout(members, sensitivity, residual, first, second, weights[first, second])


def complete(size: int, *, pair: float, residual: float = 1.0) -> NoiseLayout:
    return layout_of(pair * (1 - np.eye(size)), np.full(size, residual))


def random_out(random: np.random.Generator, size: int, out: int) -> np.ndarray:
    """Everyone picks `out` others; an edge exists if either picked the other."""
    edges = np.zeros((size, size))
    for i in range(size):
        picked = random.choice(size - 1, out, replace=False)
        for j in picked + (picked >= i):
            edges[i, j] = edges[j, i] = 1
    return edges


def theta(edges: np.ndarray, ratio: float, colluding: tuple[int, ...] = ()) -> float:
    """The worst charge in units of the central limit."""
    size = len(edges)
    noise_layout = layout_of(edges * ratio / size, np.full(size, 1 / size))
    return float(charges(noise_layout, colluding=[noise_layout.members[i] for i in colluding]).max())


@st.composite
def layouts(draw: st.DrawFn) -> NoiseLayout:
    size = draw(st.integers(1, 8))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = 10.0 ** random.uniform(-3, 3, (size, size))
    weights = np.triu(scale * (random.random((size, size)) < random.random()), 1)
    return layout_of(weights + weights.T, 10.0 ** random.uniform(-2, 2, size), random.uniform(0.1, 3, size))


def by_hand(
    noise_layout: NoiseLayout, arrived: set[int], revealed: set[tuple[int, int]], colluding: set[int]
) -> dict[int, float]:
    """Build Σ over the honest, delete absent rows and columns, invert."""
    honest = [i for i, member in enumerate(noise_layout.members) if member not in colluding]
    sigma = np.diag(noise_layout.residual)
    for first, second, pair in zip(noise_layout.first, noise_layout.second, noise_layout.pairs, strict=True):
        ends = noise_layout.members[first], noise_layout.members[second]
        if colluding & set(ends) or ends in revealed or ends[::-1] in revealed:
            continue
        sigma[first, first] += pair
        sigma[second, second] += pair
        sigma[first, second] -= pair
        sigma[second, first] -= pair
    seen = [i for i in honest if noise_layout.members[i] in arrived]
    inverse = np.linalg.inv(sigma[np.ix_(seen, seen)])
    return {noise_layout.members[i]: noise_layout.sensitivity[i] ** 2 * inverse[at, at] for at, i in enumerate(seen)}


def test_the_checked_numbers() -> None:
    random = np.random.default_rng(0)
    assert theta(1 - np.eye(5), 1) == pytest.approx(5 / 3, abs=1e-9)
    hundred = random_out(random, 100, 5)
    random_out(random, 100, 63)
    thousand = random_out(random, 1000, 5)
    assert theta(hundred, 1000) == pytest.approx(1.0216, abs=5e-5)
    assert theta(thousand, 1000) == pytest.approx(1.2274, abs=5e-5)
    another = random_out(random, 100, 5)
    colluding = tuple(random.permutation(100)[70:].tolist())
    assert theta(another, 1000, colluding) == pytest.approx(1.55, abs=5e-3)


@given(noise_layout=layouts(), data=st.data())
@few
def test_charges_are_the_inverse_with_colluders_reveals_and_deletions(
    noise_layout: NoiseLayout, data: st.DataObject
) -> None:
    members = st.sets(st.sampled_from(noise_layout.members))
    arrived, colluding = data.draw(members), data.draw(members)
    revealed = data.draw(
        st.sets(st.tuples(st.sampled_from(noise_layout.members), st.sampled_from(noise_layout.members)))
    )
    ours = charges(noise_layout, arrived=arrived, revealed=revealed, colluding=colluding)
    expected = by_hand(noise_layout, arrived, revealed, colluding)
    for member, value in zip(noise_layout.members, ours, strict=True):
        assert value == pytest.approx(expected.get(member, 0.0), rel=1e-6)


@given(noise_layout=layouts(), data=st.data())
@few
def test_a_missing_upload_never_raises_a_charge(noise_layout: NoiseLayout, data: st.DataObject) -> None:
    arrived = data.draw(st.sets(st.sampled_from(noise_layout.members)))
    assert np.all(charges(noise_layout, arrived=arrived) <= charges(noise_layout) * (1 + 1e-6))


@given(noise_layout=layouts(), data=st.data())
@few
def test_a_revealed_seed_never_lowers_a_charge(noise_layout: NoiseLayout, data: st.DataObject) -> None:
    every = list(combinations(noise_layout.members, 2)) or [(noise_layout.members[0], noise_layout.members[0])]
    revealed = data.draw(st.sets(st.sampled_from(every)))
    assert np.all(charges(noise_layout, revealed=revealed) >= charges(noise_layout) * (1 - 1e-6))


@given(noise_layout=layouts())
@few
def test_charges_lie_between_the_sum_alone_and_no_pair_noise(noise_layout: NoiseLayout) -> None:
    ours = charges(noise_layout)
    assert np.all(ours >= central(noise_layout) * (1 - 1e-6))
    assert np.all(ours <= noise_layout.sensitivity**2 / noise_layout.residual * (1 + 1e-6))


@pytest.mark.parametrize("strength", [1.0, 1e6, 1e12, 1e18])
def test_strong_pair_noise_costs_no_accuracy(strength: float) -> None:
    """Sixty digits say what the inverse is; ours is not below, and above by a billionth at most."""
    random = np.random.default_rng(3)
    weights = strength * np.triu(random.uniform(0.5, 2, (12, 12)), 1)
    weights *= random.random((12, 12)) < 0.7
    weights, residual = weights + weights.T, random.uniform(0.5, 2, 12)
    with mpmath.workdps(60):
        sigma = mpmath.matrix((-weights).tolist())
        for i in range(12):
            sigma[i, i] = mpmath.mpf(residual[i]) + mpmath.fsum(map(mpmath.mpf, weights[i]))
        inverse = sigma**-1
    for i, value in enumerate(charges(layout_of(weights, residual))):
        assert inverse[i, i] <= value <= inverse[i, i] * (1 + 1e-9)


@pytest.mark.parametrize("strength", [1e-30, 1e-9])
def test_vanishing_pair_noise_leaves_the_residual_noise(strength: float) -> None:
    assert charges(complete(6, pair=strength, residual=2.0)) == pytest.approx(np.full(6, 0.5), rel=1e-6)


def test_badly_balanced_pairs_still_give_a_bound() -> None:
    """Two groups joined by a thread of pair noise: far too badly conditioned to trust an inverse blindly."""
    weights = np.zeros((6, 6))
    weights[0, 1] = weights[1, 2] = weights[3, 4] = weights[4, 5] = 1e11
    weights[2, 3] = 1e-9
    # A bare inverse would need a margin of a few per cent.
    noise_layout = layout_of(weights + weights.T, np.ones(6))
    assert charges(noise_layout) == pytest.approx(np.full(6, 1 / 3), rel=2e-3)
    assert np.all(charges(noise_layout) >= 1 / 3 * (1 - 1e-8))  # less the thread's own part


def test_what_nothing_covers_is_charged_without_limit() -> None:
    weights = np.zeros((5, 5))
    weights[0, 1] = weights[1, 0] = weights[2, 3] = weights[3, 2] = 7.0
    noise_layout = layout_of(weights, np.array([0.0, 0.0, 0.0, 2.0, 0.0]))
    # 0 and 1 share noise that cancels; 2 is covered through 3; 4 stands bare.
    assert charges(noise_layout).tolist() == pytest.approx([math.inf, math.inf, 1 / 2 + 1 / 7, 1 / 2, math.inf])
    # Without the upload of 1 nothing cancels the pair noise on 0.
    assert charges(noise_layout, arrived=[10, 16, 19])[0] == pytest.approx(1 / 7)


def test_one_who_releases_nothing_sensitive_is_never_charged() -> None:
    noise_layout = layout_of(np.zeros((2, 2)), np.zeros(2), np.array([0.0, 1.0]))
    assert charges(noise_layout).tolist() == [0.0, math.inf]
    assert central(noise_layout).tolist() == [0.0, math.inf]


def test_a_repaired_client_whose_upload_is_late_stands_on_its_residual_noise() -> None:
    noise_layout = complete(4, pair=100.0, residual=0.5)
    late = noise_layout.members[2]
    repaired = [(late, other) for other in noise_layout.members if other != late]
    charged = charges(noise_layout, revealed=repaired)
    assert charged[2] == pytest.approx(2.0)
    assert np.all(charged[[0, 1, 3]] < 0.7)


def test_large_and_small_graphs_are_charged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = random_out(np.random.default_rng(1), 200, 4)
    noise_layout = layout_of(edges * 50, np.random.default_rng(2).uniform(0.5, 2, 200))
    dense = charges(noise_layout)
    monkeypatch.setattr(correlated, "DENSE_UP_TO", 10)
    monkeypatch.setattr(correlated, "DENSE_UP_TO_IF_FULL", 10)
    large = charges(noise_layout)
    assert np.all(large >= dense * (1 - 1e-9))
    assert np.all(large <= dense * (1 + 2e-3))


def test_the_sum_alone_is_covered_by_all_residual_noise() -> None:
    noise_layout = layout_of(
        np.ones((4, 4)) - np.eye(4), np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 1.0, 2.0, 2.0])
    )
    assert central(noise_layout) == pytest.approx([0.1, 0.1, 0.4, 0.4])
    assert central(noise_layout, arrived=[10, 16, 19], known=[19]) == pytest.approx([1 / 4, 0, 1, 0])


def test_masked_uploads_are_charged_as_their_sum() -> None:
    nobody = np.empty(0, dtype=np.int64)
    noise_layout = NoiseLayout(
        (1, 2, 3), np.ones(3), np.array([1.0, 2.0, 3.0]), nobody, nobody, np.empty(0), summed=True
    )
    assert charges(noise_layout) == pytest.approx(np.full(3, 1 / 6))
    assert charges(noise_layout, colluding=[3]) == pytest.approx([1 / 3, 1 / 3, 0])
    assert worst_collusion(noise_layout, 1).mu2 == pytest.approx([1 / 3, 1 / 3, 1 / 4])


@pytest.mark.parametrize("strength", [1.0, 1000.0])
@pytest.mark.parametrize("size", [9, 60])
def test_every_single_colluder_is_tried_at_once_on_a_sparse_graph(size: int, strength: float) -> None:
    """A ring with chords; member 0 hangs on one pair alone: its neighbour leaves it nothing but its own noise."""
    ring = np.arange(1, size - 1)
    first, second = np.concatenate([[0], ring, [1, 2]]), np.concatenate([[1], ring + 1, [size - 1, size - 2]])
    residual = np.linspace(1, 2, size) / size
    pairs = np.full(len(first), strength / size)
    noise_layout = NoiseLayout(tuple(range(size)), np.linspace(1, 3, size), residual, first, second, pairs)
    found = worst_collusion(noise_layout, 1)
    one_by_one = np.maximum.reduce([charges(noise_layout, colluding=(one,)) for one in range(size)])
    assert found.certified
    assert found.mu2 == pytest.approx(one_by_one, rel=1e-9)
    assert (found.mu2 >= one_by_one * (1 - 1e-13)).all()
    assert found.mu2[0] == pytest.approx(1 / residual[0])
    larger = replace(noise_layout, residual=residual * 7.3, pairs=pairs * 7.3)
    assert 7.3 * worst_collusion(larger, 1).mu2 == pytest.approx(found.mu2, rel=2e-12)


@given(data=st.data(), size=st.integers(2, 7), strength=st.sampled_from([0.1, 10.0, 1e5]))
@few
def test_the_bound_for_complete_graphs_holds_for_every_set_of_colluders(
    data: st.DataObject, size: int, strength: float
) -> None:
    colluders = data.draw(st.integers(0, size - 1))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weights = np.triu(strength * random.uniform(1, 3, (size, size)), 1)
    noise_layout = layout_of(weights + weights.T, random.uniform(0.2, 3, size))
    bound = _complete_bound(noise_layout.residual, float(noise_layout.pairs.min()), size - colluders)
    true = np.max(
        [charges(noise_layout, colluding=some) for some in combinations(noise_layout.members, colluders)], axis=0
    )
    assert np.all(bound >= true * (1 - 1e-9))
    if strength == 1e5:
        assert bound == pytest.approx(true, rel=1e-4)
    assert worst_collusion(noise_layout, colluders).mu2 == pytest.approx(true)


def test_the_bound_for_complete_graphs_is_exact_for_equal_pairs() -> None:
    random = np.random.default_rng(5)
    noise_layout = layout_of(2.0 * (1 - np.eye(6)), random.uniform(0.2, 3, 6))
    true = np.max([charges(noise_layout, colluding=some) for some in combinations(noise_layout.members, 2)], axis=0)
    assert _complete_bound(noise_layout.residual, 2.0, 4) == pytest.approx(true, rel=1e-9)
    sums = [
        min(sum(noise_layout.residual[[i, *rest]]) for rest in combinations(set(range(6)) - {i}, 3)) for i in range(6)
    ]
    assert _complete_bound(noise_layout.residual, math.inf, 4) == pytest.approx(1 / np.array(sums))


def test_many_colluders_on_a_complete_graph_are_bounded_for_every_set() -> None:
    result = worst_collusion(complete(100, pair=100.0), 30)
    assert result.certified
    assert "every set" in result.how
    assert result.mu2 == pytest.approx(np.full(100, 1 / 70 + 1 / 7000 - 1 / 70 / 7000), rel=1e-3)
    assert np.all(result.mu2 >= charges(complete(100, pair=100.0), colluding=range(10, 100, 3)).max() * (1 - 1e-9))


def test_colluders_on_a_sparse_graph_are_an_estimate_and_say_so() -> None:
    edges = random_out(np.random.default_rng(0), 60, 5)
    noise_layout = layout_of(1000 * edges, np.ones(60))
    result = worst_collusion(noise_layout, 18, draws=4)
    assert not result.certified
    assert "4 random draws" in result.how
    assert np.all(result.mu2 > charges(noise_layout))
    assert worst_collusion(noise_layout, 18, draws=4).mu2.tolist() == result.mu2.tolist()
    assert np.all(worst_collusion(noise_layout, 18, draws=8).mu2 >= result.mu2)


def test_nobody_honest_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 colluders among 5 members"):
        worst_collusion(complete(5, pair=1.0), 5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"members": (1, 2, 2)}, "twice"),
        ({"sensitivity": np.ones(2)}, "one of each per member"),
        ({"residual": np.array([1.0, -1.0, 1.0])}, "residual variance"),
        ({"residual": np.array([1.0, math.nan, 1.0])}, "residual variance"),
        ({"pairs": np.array([math.inf])}, "pair variance"),
        ({"sensitivity": np.array([1.0, math.nan, 1.0])}, "sensitivity"),
        ({"second": np.array([0])}, "paired with itself"),
        ({"second": np.array([3])}, "outside the 3 members"),
        ({"pairs": np.ones(2)}, "do not match"),
    ],
)
def test_a_covering_that_makes_no_sense_is_refused(changes: dict[str, object], text: str) -> None:
    sound: dict[str, object] = {
        "members": (1, 2, 3),
        "sensitivity": np.ones(3),
        "residual": np.ones(3),
        "first": np.array([0]),
        "second": np.array([1]),
        "pairs": np.ones(1),
    }
    NoiseLayout(**sound)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        NoiseLayout(**{**sound, **changes})  # type: ignore[arg-type]


def test_strangers_are_refused_except_among_colluders() -> None:
    noise_layout = complete(3, pair=1.0)
    with pytest.raises(ConfigError, match="not members"):
        charges(noise_layout, arrived=[10, 99])
    with pytest.raises(ConfigError, match="not members"):
        charges(noise_layout, revealed=[(10, 99)])
    assert charges(noise_layout, colluding=[99]).tolist() == charges(noise_layout).tolist()
