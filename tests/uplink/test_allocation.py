"""How noise is shared among clients and pairs."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.uplink.noise_plan import collusion_strength, pair_shares
from papers.nadp import COLLUDING, TABLE3

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=200)


def beta(size: int, sizes: list[int]) -> Fraction:
    return Fraction(size**2, min(sizes) ** 2) - Fraction(size, sum(sizes))


def thetas_as_written(sizes: list[int]) -> list[Fraction]:
    """The paper's formulas, term by term, in exact arithmetic (k ≥ 2)."""
    k = len(sizes)
    betas = [beta(size, sizes) for size in sorted(sizes)]
    betas[-2] = betas[-1]
    thetas: list[Fraction] = []
    for n in range(1, k):
        thetas.append((betas[n - 1] - sum(thetas)) / (k - n))
    return thetas


@settings(deadline=None, max_examples=100)
@given(SIZES)
def test_every_row_sums_to_what_the_client_needs_and_no_share_is_negative(sizes: list[int]) -> None:
    found = pair_shares(sizes)
    k = len(sizes)
    assert found.shape == (k, k)
    assert np.all(found >= 0)
    assert np.array_equal(found, found.T)
    assert not found.diagonal().any()
    if k > 1:
        needed = [float(beta(size, sizes)) for size in sizes]
        largest = np.argsort(sizes, kind="stable")
        needed[largest[-2]] = needed[largest[-1]]
        assert found.sum(axis=1) == pytest.approx(needed, rel=1e-11)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=40))
def test_every_pair_gets_the_papers_share_to_full_precision(sizes: list[int]) -> None:
    thetas = thetas_as_written(sizes)
    found = pair_shares(sizes)
    rank = {place: n for n, place in enumerate(np.argsort(sizes, kind="stable").tolist())}
    for i in range(len(sizes)):
        for j in range(i):
            share = float(thetas[min(rank[i], rank[j])])
            assert found[i, j] == pytest.approx(share, rel=1e-12, abs=0.0)
            assert found[j, i] == found[i, j]
        assert found[i, i] == 0.0


def test_one_client_has_no_pair_and_two_share_the_larger_need() -> None:
    assert pair_shares([7]).tolist() == [[0.0]]
    assert pair_shares([30, 10]).tolist() == [[0.0, 8.25], [8.25, 0.0]]  # 3² − 30/40


def test_equal_clients_share_equally() -> None:
    off_diagonal = pair_shares([5] * 6)[~np.eye(6, dtype=bool)]
    assert off_diagonal == pytest.approx(np.full(30, 1 / 6))  # (1 − 1/6)/5


@pytest.mark.parametrize("sizes", [[], [3, 0, 2], [-1]])
def test_a_client_without_records_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        pair_shares(sizes)


@pytest.mark.parametrize(("key", "row"), TABLE3.items())
def test_the_papers_table_of_strengths_is_met_to_four_decimals(
    key: tuple[float, float], row: tuple[float, ...]
) -> None:
    ratio, clients = key
    found = [collusion_strength(clients=clients, colluding=one, ratio_squared=ratio) for one in COLLUDING]
    assert [round(one, 4) for one in found] == list(row)


def test_the_published_table_is_whole() -> None:
    assert sum(len(row) for row in TABLE3.values()) == 60


def test_many_clients_come_near_the_limit() -> None:
    limit = collusion_strength(clients=math.inf, colluding=0.3, ratio_squared=1.7)
    assert collusion_strength(clients=1e9, colluding=0.3, ratio_squared=1.7) == pytest.approx(limit, rel=1e-8)


@pytest.mark.parametrize(
    ("clients", "colluding", "ratio"),
    [
        (10, 1.0, 1),
        (10, -0.1, 1),
        (10, math.nan, 1),
        (2, 0.5, 1),
        (10, 0.9, 1),
        (math.nan, 0.1, 1),
        (10, 0.1, 0.5),
        (10, 0.1, math.inf),
        (10, 0.1, math.nan),
    ],
)
def test_impossible_shares_and_ratios_are_refused(clients: float, colluding: float, ratio: float) -> None:
    with pytest.raises(ConfigError):
        collusion_strength(clients=clients, colluding=colluding, ratio_squared=ratio)
