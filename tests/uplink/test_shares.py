"""Shares of a round's secrets: who holds what, and bundles that only their holder can open."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.crypto.shamir import join
from fedveil.errors import ConfigError, ProtocolError
from fedveil.secrets import SeededSecrets
from fedveil.uplink.graph import Graph, complete, ring
from fedveil.uplink.unmasking import (
    LOCK,
    SHARE_BYTES,
    Label,
    Quorum,
    contents,
    deal,
    holders_of,
    lock_shares,
    open_bundle,
    unlock_shares,
)
from uplink.masking import Federation

LABEL = Label(3, 1, b"graph")


def graph_of(kind: str) -> Graph:
    return complete(range(8)) if kind == "complete" else ring(range(20), degree=4, seed=b"x")


@pytest.mark.parametrize("kind", ["complete", "ring"])
def test_every_secret_about_a_client_lies_with_all_its_neighbours_and_with_nobody_else(kind: str) -> None:
    graph = graph_of(kind)
    held: dict[tuple[int, int], set[int]] = {}
    for sender in graph.members:
        for holder in graph.members:
            items = contents(graph, sender=sender, holder=holder, self_mask=True)
            assert bool(items) == (holder in holders_of(graph, sender))
            for item in items:
                held.setdefault(item, set()).add(holder)
    for client in graph.members:
        near = set(graph.neighbours(client))
        assert held.pop((client, client)) == near
        assert held.pop((client, LOCK)) == near
        for peer in near:
            assert held.pop((peer, client)) == near
    assert not held


@pytest.mark.parametrize("kind", ["complete", "ring"])
def test_what_was_dealt_can_be_put_together_by_any_quorum_of_its_holders(kind: str) -> None:
    graph, quorum = graph_of(kind), Quorum()
    federation = Federation(len(graph.members))
    rings = {client: federation.states[client].ring() for client in graph.members}
    near = graph.neighbours(2)
    secrets = {about: bytes([about % 256]) * 32 for about in (*near, 2, LOCK)}
    bundles = deal(
        graph, rings[2], secrets=secrets, quorum=quorum, stream=SeededSecrets(0).stream("shares"), label=LABEL
    )
    assert sorted(bundles) == holders_of(graph, 2)
    found: dict[int, dict[int, bytes]] = {}
    for holder, sealed in bundles.items():
        opened = open_bundle(graph, rings[holder], sealed, sender=2, self_mask=True, label=LABEL)
        for (dealer, about), share in opened.items():
            assert dealer == 2
            found.setdefault(about, {})[holder] = share
    for about, secret in secrets.items():
        needed = quorum.of(graph.degree(2 if about == LOCK else about))
        some = dict(sorted(found[about].items(), reverse=True)[:needed])
        assert join(some, threshold=needed) == secret
        with pytest.raises(ProtocolError, match="too few"):
            join(dict(list(some.items())[1:]), threshold=needed)


@pytest.mark.parametrize(
    ("label", "holder"),
    [
        (Label(4, 1, b"graph"), 5),
        (Label(3, 2, b"graph"), 5),
        (Label(3, 1, b"another graph"), 5),  # else the holder would take one secret's share for another's
        (LABEL, 6),
    ],
    ids=["round", "attempt", "graph", "holder"],
)
def test_a_bundle_of_another_round_graph_or_holder_is_refused_and_its_sender_named(label: Label, holder: int) -> None:
    graph = complete(range(8))
    federation = Federation(8)
    secrets = {about: bytes(32) for about in (*graph.neighbours(2), 2, LOCK)}
    stream = SeededSecrets(0).stream("shares")
    sealed = deal(graph, federation.states[2].ring(), secrets=secrets, quorum=Quorum(), stream=stream, label=LABEL)[5]
    with pytest.raises(ProtocolError, match="client 2 sent client"):
        open_bundle(graph, federation.states[holder].ring(), sealed, sender=2, self_mask=True, label=label)


@given(st.binary(max_size=200), st.integers(0, 300))
@settings(deadline=None, max_examples=50)
def test_a_revelation_is_read_with_its_key_alone_and_whole(other: bytes, cut: int) -> None:
    shares = {(1, 2): b"a" * SHARE_BYTES, (4, 4): b"b" * SHARE_BYTES}
    locked = lock_shares(shares, client=3, key=b"k" * 32)
    assert unlock_shares(locked, client=3, key=b"k" * 32) == shares
    for spoilt in (other, locked[: min(cut, len(locked) - 1)]):
        with pytest.raises(ProtocolError):
            unlock_shares(spoilt, client=3, key=b"k" * 32)
    with pytest.raises(ProtocolError):
        unlock_shares(locked, client=4, key=b"k" * 32)
    with pytest.raises(ProtocolError):
        unlock_shares(locked, client=3, key=b"l" * 32)


@pytest.mark.parametrize("fraction", [0.5, 0.6, 2 / 3, 0.9, 0.99])
@pytest.mark.parametrize("holders", [2, 3, 5, 9, 19, 31, 99])
def test_two_quorums_never_come_from_holders_who_were_told_different_things(fraction: float, holders: int) -> None:
    """2t > n + c for every c below the share that the ledger states, and t ≤ n."""
    quorum = Quorum(fraction)
    needed = quorum.of(holders)
    colluding = max(c for c in range(holders) if c < quorum.colluding * holders or c == 0)
    assert needed <= holders
    assert 2 * needed > holders + colluding


def test_the_default_quorum_is_more_than_two_thirds() -> None:
    assert [Quorum().of(n) for n in (2, 3, 6, 9, 28, 99)] == [2, 3, 5, 7, 19, 67]
    assert Quorum().colluding == pytest.approx(1 / 3)


@pytest.mark.parametrize("fraction", [0.49, 0.0, 1.0, 1.5, -1.0, float("nan")])
def test_a_threshold_that_protects_nobody_or_asks_for_more_than_everybody_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        Quorum(fraction)
