"""Neighbourhoods that every client derives by itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.directory import graph_seed
from fedveil.uplink.graph import Graph, complete, default_degree, n_out, ring, threshold

SEED = bytes(range(32))
MEMBERS = st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True)


def seed(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


def edges(graph: Graph) -> set[tuple[int, int]]:
    return {(graph.members[a], graph.members[b]) for a, b in zip(graph.first, graph.second, strict=True)}


def reaches_all(graph: Graph, among: Collection[int]) -> bool:
    """Connectivity the slow way: walk from anyone through survivors only."""
    left, todo = set(among), list(among)[:1]
    while todo:
        one = todo.pop()
        if one in left:
            left.discard(one)
            todo.extend(n for n in graph.neighbours(one) if n in left)
    return bool(among) and not left


def assert_well_formed(graph: Graph) -> None:
    assert list(graph.members) == sorted(graph.members)
    assert graph.first.dtype == graph.second.dtype == np.int64
    assert np.all(graph.first < graph.second)
    assert np.all(np.diff(graph.first * len(graph.members) + graph.second) > 0)
    pairs = edges(graph)
    for client in graph.members:
        joined = {a + b - client for a, b in pairs if client in (a, b)}
        assert graph.neighbours(client) == tuple(sorted(joined))
        assert graph.degree(client) == len(joined)


@settings(deadline=None, max_examples=60)
@given(MEMBERS, st.integers(1, 8), st.integers(0, 99))
def test_a_ring_gives_everyone_the_same_degree_whatever_the_order_of_listing(
    members: list[int], half: int, number: int
) -> None:
    graph = ring(members, degree=2 * half, seed=seed(number))
    assert_well_formed(graph)
    assert {graph.degree(client) for client in members} == {min(2 * half, len(members) - 1)}
    assert edges(ring(members[::-1], degree=2 * half, seed=seed(number))) == edges(graph)


@settings(deadline=None, max_examples=60)
@given(MEMBERS, st.integers(1, 4), st.integers(0, 99), st.data())
def test_a_ring_stays_connected_when_fewer_than_its_degree_leave(
    members: list[int], half: int, number: int, data: st.DataObject
) -> None:
    graph = ring(members, degree=2 * half, seed=seed(number))
    gone = data.draw(st.sets(st.sampled_from(members), max_size=min(2 * half - 1, len(members) - 1)))
    assert graph.connected(set(members) - gone)


@settings(deadline=None, max_examples=60)
@given(MEMBERS, st.data())
def test_each_member_of_an_n_out_graph_has_at_least_its_own_picks(members: list[int], data: st.DataObject) -> None:
    picks = data.draw(st.integers(1, len(members) - 1))
    graph = n_out(members, neighbours=picks, seed=SEED)
    assert_well_formed(graph)
    assert all(graph.degree(client) >= picks for client in members)
    assert len(graph.first) <= picks * len(members)
    assert edges(n_out(members[::-1], neighbours=picks, seed=SEED)) == edges(graph)


def test_picking_everyone_or_a_degree_that_reaches_everyone_is_the_complete_graph() -> None:
    members = [4, 8, 15, 16, 23, 42]
    everyone = set(combinations(members, 2))
    for graph in (
        complete(members),
        ring(members, degree=5, seed=SEED),
        ring(members, degree=6, seed=SEED),
        n_out(members, neighbours=5, seed=SEED),
    ):
        assert edges(graph) == everyone
        assert_well_formed(graph)


PAIRS_OF_SEVEN = list(combinations(range(7), 2))


@pytest.mark.parametrize(
    ("make", "chance"),
    [
        (lambda s: ring(range(7), degree=2, seed=s), 2 / 6),
        (lambda s: ring(range(7), degree=4, seed=s), 4 / 6),
        (lambda s: n_out(range(7), neighbours=1, seed=s), 1 - (5 / 6) ** 2),
        (lambda s: n_out(range(7), neighbours=4, seed=s), 1 - (2 / 6) ** 2),
    ],
)
def test_every_pair_is_joined_equally_often(make: Callable[[bytes], Graph], chance: float) -> None:
    """2,000 fixed seeds, 21 pairs at 4.5 standard errors: false alarms below 2e-4."""
    draws = 2000
    counts = dict.fromkeys(PAIRS_OF_SEVEN, 0)
    for number in range(draws):
        for pair in edges(make(seed(number))):
            counts[pair] += 1
    error = math.sqrt(draws * chance * (1 - chance))
    assert max(abs(count - draws * chance) for count in counts.values()) < 4.5 * error


def test_all_twelve_rings_of_five_occur_equally_often() -> None:
    """3,600 fixed seeds, 12 rings at 4.5 standard errors: false alarms below 1e-4."""
    draws = 3600
    counts: dict[frozenset[tuple[int, int]], int] = {}
    for number in range(draws):
        one = frozenset(edges(ring(range(5), degree=2, seed=seed(number))))
        counts[one] = counts.get(one, 0) + 1
    assert len(counts) == 12
    assert max(abs(count - draws / 12) for count in counts.values()) < 4.5 * math.sqrt(draws / 12 * 11 / 12)


@settings(deadline=None, max_examples=80)
@given(st.integers(2, 25), st.integers(0, 999), st.data())
def test_connectivity_is_that_of_the_survivors_alone(count: int, number: int, data: st.DataObject) -> None:
    graph = n_out(range(count), neighbours=1, seed=seed(number))
    among = data.draw(st.sets(st.integers(0, count - 1)))
    assert graph.connected(among) == reaches_all(graph, among)
    assert graph.connected() == reaches_all(graph, graph.members)


def test_a_ring_cut_in_two_places_is_not_connected() -> None:
    graph = ring(range(50), degree=2, seed=SEED)
    assert graph.connected()
    one = 0
    beyond = next(c for c in range(50) if c != one and one not in graph.neighbours(c))
    assert graph.connected(set(range(50)) - {one})
    assert not graph.connected(set(range(50)) - {one, beyond})
    assert graph.connected([one])
    assert not graph.connected([])


def test_ten_thousand_clients_get_their_neighbourhoods() -> None:
    graph = ring(range(10_000), degree=default_degree(10_000), seed=SEED)
    assert len(graph.first) == 10_000 * 54 // 2
    assert graph.connected(range(0, 10_000, 2))
    sparse = n_out(range(10_000), neighbours=5, seed=SEED)
    # Each of the 50,000 picks is returned with probability 5/9999: about 12.5 edges are picked twice.
    assert 50_000 - 40 < len(sparse.first) < 50_000


def test_rows_beyond_the_first_block_pick_anew() -> None:
    graph = n_out(range(3000), neighbours=1, seed=SEED)
    degrees = np.array([graph.degree(client) for client in range(3000)])
    # Blocks that repeated each other's words would pick the same third of all clients three times.
    assert np.count_nonzero(degrees == 1) == pytest.approx(3000 / math.e, rel=0.1)


def test_edges_cannot_be_changed_afterwards() -> None:
    for graph in (complete(range(5)), ring(range(9), degree=4, seed=SEED), n_out(range(9), neighbours=2, seed=SEED)):
        with pytest.raises(ValueError, match="read-only"):
            graph.first[0] = 3


@pytest.mark.parametrize(("clients", "degree"), [(2, 1), (32, 31), (33, 22), (64, 24), (100, 28), (10_000, 54)])
def test_the_default_degree_is_everyone_up_to_32_and_logarithmic_beyond(clients: int, degree: int) -> None:
    assert default_degree(clients) == degree


@pytest.mark.parametrize(("holders", "needed"), [(1, 1), (2, 2), (3, 3), (4, 3), (9, 7), (30, 21), (54, 37)])
def test_the_threshold_is_more_than_two_thirds(holders: int, needed: int) -> None:
    assert threshold(holders) == needed
    assert 3 * needed > 2 * holders


def test_a_wanted_threshold_is_kept_if_it_can_be_met() -> None:
    assert threshold(10, wanted=10) == 10
    for wanted in (11, 0):
        with pytest.raises(ConfigError, match=rf"{wanted} does not fit 10"):
            threshold(10, wanted=wanted)
    with pytest.raises(ConfigError, match="1 does not fit 0"):
        threshold(0)


def test_the_seed_depends_on_every_fact_and_on_no_order() -> None:
    def of(beacon: bytes = b"a", round: int = 1, members: tuple[int, ...] = (1, 2, 3)) -> bytes:
        return graph_seed(beacon=beacon, round=round, members=members)

    others = [of(beacon=b"b"), of(round=2), of(members=(1, 2)), of(members=(1, 2, 4))]
    others.append(of(beacon=b"a" + (1).to_bytes(8, "little"), members=(2, 3)))  # the same bytes, cut elsewhere
    assert len({of(), *others}) == 6
    assert of(members=(3, 1, 2)) == of()
    assert len(of()) == 32


def test_too_few_clients_and_impossible_degrees_are_refused() -> None:
    for make in (complete, lambda m: ring(m, degree=2, seed=SEED), lambda m: n_out(m, neighbours=1, seed=SEED)):
        for members in ([], [3]):
            with pytest.raises(ConfigError, match="at least two clients"):
                make(members)
        with pytest.raises(ProtocolError, match="twice"):
            make([3, 4, 3])
    with pytest.raises(ConfigError, match="at least two clients"):
        default_degree(1)
    for neighbours in (0, 10, -1):
        with pytest.raises(ConfigError, match=f"between 1 and 9 neighbours, not {neighbours}"):
            n_out(range(10), neighbours=neighbours, seed=SEED)
    for degree in (0, 3, -2):
        with pytest.raises(ConfigError, match=f"even number of neighbours, at least 2, not {degree}"):
            ring(range(10), degree=degree, seed=SEED)


def test_a_stranger_has_no_neighbourhood() -> None:
    graph = complete([1, 2, 3])
    for ask in (graph.neighbours, graph.degree, lambda c: graph.connected([1, c])):
        with pytest.raises(ProtocolError, match="client 9 is not among the 3"):
            ask(9)
