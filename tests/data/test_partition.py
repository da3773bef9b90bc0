from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.data import Dataset, partition
from fedveil.errors import ConfigError

COVERING = ("iid", "dirichlet", "size", "group")


def toy(samples: int, *, classes: int = 3, groups: int | None = None) -> Dataset:
    rows = torch.arange(samples)
    owners = rows % groups if groups else None
    return Dataset("toy", "classification", rows[:, None].float(), rows % classes, classes, groups=owners)


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(COVERING),
    samples=st.integers(1, 120),
    share=st.floats(0, 1),
    alpha=st.floats(1e-300, 1e300),
    ratio=st.floats(1, 1e6),
    seed=st.integers(0, 2**64),
)
def test_every_sample_goes_to_exactly_one_client_and_nobody_is_empty(
    how: str, samples: int, share: float, alpha: float, ratio: float, seed: int
) -> None:
    data = toy(samples, groups=samples)
    clients = 1 + int(share * (samples - 1))
    dealt = partition(data, clients=clients, how=how, seed=seed, alpha=alpha, ratio=ratio)
    assert len(dealt) == clients
    assert all(len(rows) > 0 and rows.dtype is torch.int64 for rows in dealt)
    assert all(rows.tolist() == sorted(rows.tolist()) for rows in dealt)
    assert sorted(torch.cat(dealt).tolist()) == list(range(samples))


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 200), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_iid_sizes_differ_by_at_most_one(samples: int, share: float, seed: int) -> None:
    sizes = [len(rows) for rows in partition(toy(samples), clients=1 + int(share * (samples - 1)), seed=seed)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 50), clients=st.integers(1, 200), seed=st.integers(0, 9))
def test_replacement_serves_more_clients_than_samples(samples: int, clients: int, seed: int) -> None:
    dealt = partition(toy(samples), clients=clients, how="replacement", seed=seed)
    assert len(dealt) == clients
    for rows in dealt:
        assert len(rows) == max(8, samples // clients)
        assert rows.tolist() == sorted(rows.tolist())
        assert 0 <= int(rows.min()) <= int(rows.max()) < samples


@pytest.mark.parametrize("how", [*COVERING, "replacement"])
def test_the_seed_decides(how: str) -> None:
    data = toy(90, groups=30)

    def dealt(seed: int) -> list[list[int]]:
        return [rows.tolist() for rows in partition(data, clients=7, how=how, seed=seed)]

    assert dealt(1) == dealt(1)
    assert dealt(1) != dealt(2)


def test_a_small_alpha_concentrates_classes_and_a_large_one_spreads_them() -> None:
    data = toy(3000, classes=10)

    def top_share(alpha: float) -> float:
        dealt = partition(data, clients=10, how="dirichlet", alpha=alpha)
        return sum(float(torch.bincount(data.y[rows]).max() / len(rows)) for rows in dealt) / len(dealt)

    assert top_share(0.05) > 0.5
    assert top_share(1000.0) < 0.2


def test_size_skew_is_geometric_with_the_asked_ratio() -> None:
    sizes = [len(rows) for rows in partition(toy(7000), clients=4, how="size", ratio=8.0)]
    assert sizes[-1] / sizes[0] == pytest.approx(8.0, rel=0.01)
    assert all(large / small == pytest.approx(2.0, rel=0.01) for small, large in pairwise(sizes))


def test_groups_stay_whole_and_sizes_balanced() -> None:
    data = toy(103, groups=20)
    assert data.groups is not None
    dealt = partition(data, clients=4, how="group")
    owners = [set(data.groups[rows].tolist()) for rows in dealt]
    assert sum(len(owner) for owner in owners) == 20
    sizes = [len(rows) for rows in dealt]
    assert max(sizes) - min(sizes) <= 6


def test_as_many_clients_as_groups_get_one_each_in_order() -> None:
    data = toy(10, groups=3)
    assert data.groups is not None
    dealt = partition(data, clients=3, how="group")
    assert [set(data.groups[rows].tolist()) for rows in dealt] == [{0}, {1}, {2}]


def test_more_clients_than_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 3 clients"):
        partition(toy(10, groups=3), clients=4, how="group")


def test_unknown_groups_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="Name a column with --group"):
        partition(toy(10), clients=2, how="group")


def test_dirichlet_on_regression_is_refused() -> None:
    line = Dataset("line", "regression", torch.zeros(5, 1), torch.zeros(5, 1), 1)
    with pytest.raises(ConfigError, match="regression"):
        partition(line, clients=2, how="dirichlet")


def test_dirichlet_on_several_labels_is_refused_as_what_it_is() -> None:
    films = Dataset("films", "multilabel", torch.zeros(5, 1), torch.zeros(5, 3), 3)
    with pytest.raises(ConfigError, match=r"'films' has several labels for each sample\. Use .* or 'site'"):
        partition(films, clients=2, how="dirichlet")


@pytest.mark.parametrize("how", COVERING)
def test_more_clients_than_samples_is_refused_with_the_remedy(how: str) -> None:
    with pytest.raises(ConfigError, match="replacement"):
        partition(toy(5, groups=5), clients=6, how=how)


@pytest.mark.parametrize("clients", [0, -3])
def test_fewer_than_one_client_is_refused(clients: int) -> None:
    with pytest.raises(ConfigError, match="at least one client"):
        partition(toy(5), clients=clients)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        partition(toy(5), clients=2, how="dirichlet", alpha=alpha)


@pytest.mark.parametrize("ratio", [0.5, float("nan"), float("inf")])
def test_an_impossible_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="ratio"):
        partition(toy(5), clients=2, how="size", ratio=ratio)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed"):
        partition(toy(5), clients=2, seed=-1)


def test_an_unknown_way_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dirichlet'"):
        partition(toy(5), clients=2, how="dirichle")
