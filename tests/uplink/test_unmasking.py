"""Opening sums: dropouts, lying clients, and servers that tell different stories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request
from fedveil.uplink.masked import Masked, Unmasking
from fedveil.uplink.unmasking import (
    Evidence,
    MaskedSum,
    MaskedUpload,
    Relayed,
    Revealed,
    Unmask,
    lock_shares,
    packed,
    unlock_shares,
    unpacked,
)
from uplink.adversary import Adversary, relayed, revealed_kinds
from uplink.masking import Federation, arrivals


def opened(federation: Federation, *, before: set[int] = frozenset(), after: set[int] = frozenset()) -> torch.Tensor:  # type: ignore[assignment]
    """One round in which some clients vanish before, others after their upload."""
    context, vectors = federation.context(), federation.vectors()
    uploads = federation.uploads(vectors, context, only=set(federation.members) - before)
    total, ask = federation.collected(uploads, context)
    if ask is not None:
        for client in ask.to:
            if client not in after:
                total.add(federation.answer(client, ask.common, ask.each.get(client)))
    return total.total()


def expected(federation: Federation, *, before: set[int]) -> torch.Tensor:
    vectors = federation.vectors()
    return torch.stack([vectors[one] for one in federation.members if one not in before]).sum(0)


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_sum_of_the_survivors_is_exact_with_up_to_a_third_missing(
    unmask: Unmasking, share: float, when: str
) -> None:
    federation = Federation(20, Masked(unmask=unmask))
    gone = set(range(3, 3 + round(20 * share)))
    before = gone if when == "before" else set()
    got = opened(federation, before=before, after=gone - before)
    assert torch.equal(got, expected(federation, before=before))


@pytest.mark.parametrize("when", ["before", "after"])
def test_with_half_of_the_clients_missing_the_round_fails(when: str) -> None:
    federation = Federation(20)
    gone = set(range(5, 15))
    with pytest.raises(ProtocolError, match="needed"):
        opened(federation, **{when: gone})


@given(data=st.data(), sparse=st.booleans(), unmask=st.sampled_from(["always", "on-dropout"]))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_whoever_vanishes_whenever_the_sum_is_exact_or_the_round_fails(
    data: st.DataObject, sparse: bool, unmask: Unmasking
) -> None:
    federation = Federation(14, Masked(unmask=unmask, degree=6 if sparse else None), length=8)
    few = st.sets(st.sampled_from(federation.members), max_size=6)
    before, after = data.draw(few), data.draw(few)
    try:
        got = opened(federation, before=before, after=after)
    except ProtocolError:
        # On a complete graph with at most 4 of 14 missing there are always enough shares.
        assert sparse or len(before | after) > 4
        return
    assert torch.equal(got, expected(federation, before=before))


def test_a_neighbourhood_that_falls_short_is_named_with_what_helps() -> None:
    federation = Federation(30, Masked(degree=4))
    near = set(federation.graph(federation.context()).neighbours(7))
    with pytest.raises(ProtocolError, match=r"client \d+'s own mask cannot be taken off.*raise neighbours"):
        opened(federation, after=set(list(near)[:3]))


# ---- what a client reveals, whatever it is asked


class Trusting(Masked):
    """Takes any evidence: what a client reveals must not hang on that check."""

    def _check_evidence(self, state: ClientState, evidence: Evidence) -> None:
        pass


def nothing_signed() -> Evidence:
    return Evidence(torch.empty(0, dtype=torch.int64), torch.empty(0, 64, dtype=torch.uint8))


@cache
def practised(sparse: bool) -> tuple[Federation, dict[tuple[int, int], dict[int, MaskedUpload]]]:
    """Everybody's uploads of two rounds and two attempts, but for client 0's own state, which is fresh."""
    federation = Federation(12, Trusting(degree=4 if sparse else None), length=4)
    vectors = federation.vectors()
    start = federation.states[0]
    uploads = {}
    for attempt in range(2):
        for number in range(2):
            context = federation.context(number, attempt)
            uploads[(number, attempt)] = {
                client: federation.upload(client, vectors[client], context, nothing_signed())
                for client in federation.members
            }
    federation.states[0] = start
    return federation, uploads


MOVES = st.tuples(
    st.sampled_from(["train", "unmask", "unmask"]),
    st.integers(0, 1),
    st.integers(0, 1),
    st.one_of(
        st.sets(st.integers(1, 11), max_size=4).map(lambda gone: sorted(set(range(12)) - gone)),
        st.lists(st.integers(0, 12), max_size=14),
    ),
)


@given(moves=st.lists(MOVES, min_size=2, max_size=12), sparse=st.booleans())
@settings(deadline=None, max_examples=120, derandomize=True)
def test_no_sequence_of_requests_makes_a_client_reveal_both_kinds_about_a_peer(
    moves: list[tuple[str, int, int, list[int]]], sparse: bool
) -> None:
    federation, uploads = practised(sparse)
    start = federation.states[0]
    told: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    answers: dict[tuple[int, int], int] = defaultdict(int)
    try:
        for what, number, attempt, survivors in moves:
            try:
                if what == "train":
                    context = federation.context(number, attempt)
                    federation.upload(0, federation.vectors()[0], context, nothing_signed())
                    continue
                request = Unmask(number, attempt, torch.tensor(survivors, dtype=torch.int64))
                reply = federation.answer(0, request, relayed(uploads[(number, attempt)], 0))
            except ProtocolError:
                continue
            answers[(number, attempt)] += 1
            for peer, kinds in revealed_kinds(federation, reply).items():
                told[(number, attempt, peer)] |= kinds
    finally:
        federation.states[0] = start
    assert all(count == 1 for count in answers.values())
    assert all(len(kinds) == 1 for kinds in told.values())


def test_the_sequences_above_do_make_clients_reveal_either_kind() -> None:
    federation, uploads = practised(False)
    start = federation.states[0]
    federation.upload(0, federation.vectors()[0], federation.context())
    reply = federation.answer(0, federation.unmask(federation.context(), range(10)), relayed(uploads[(0, 0)], 0))
    federation.states[0] = start
    kinds = revealed_kinds(federation, reply)
    assert {peer for peer, one in kinds.items() if one == {"arrived"}} == set(range(1, 10))
    assert {peer for peer, one in kinds.items() if one == {"missing"}} == {10, 11}


def test_a_second_request_to_reveal_is_refused_even_if_it_is_the_same() -> None:
    federation = Federation(6)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    request = federation.unmask(context, federation.members)
    federation.answer(2, request, relayed(uploads, 2))
    for again in (request, federation.unmask(context, range(5))):
        with pytest.raises(ProtocolError, match=r"client 2 was asked to reveal twice.*second list of survivors"):
            federation.answer(2, again, relayed(uploads, 2))


def test_a_directory_that_grows_after_the_upload_does_not_change_what_shares_mean() -> None:
    """Another directory is another graph, on which the same bytes would be shares of other secrets."""
    federation, grown = Federation(12, Masked(degree=4)), Federation(14, Masked(degree=4), seed=1)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    near = federation.graph(context).neighbours(0)
    assert near != federation.uplink.graph(replace(context, beacon=grown.beacon)).neighbours(0)
    federation.states[0].ring().directory, federation.states[0].ring().beacon = grown.directory, grown.beacon
    reply = federation.answer(0, federation.unmask(context, set(range(12)) - {near[1]}), relayed(uploads, 0))
    told = {peer: {"missing" if peer == near[1] else "arrived"} for peer in near}
    assert revealed_kinds(federation, reply) == told


# ---- servers that tell different stories


def attack_one(adversary: Adversary, victim: int) -> None:
    """Call every neighbour of the victim missing, to all but that neighbour: on a sparse graph each list passes."""
    everybody = set(adversary.graph.members)
    near = sorted(adversary.graph.neighbours(victim))
    for client in everybody - set(adversary.allies):
        kept = [client] if client in near else [near[(client + step) % len(near)] for step in range(len(near))]
        for one in kept:
            survivors = everybody - set(near) | {victim, one, client}
            if adversary.graph.connected(survivors):
                adversary.tell(client, survivors)
                break


def test_without_locks_a_server_alone_reads_one_client_on_a_sparse_graph() -> None:
    """What the locks are for; without this the next test would prove nothing."""
    federation = Federation(40, Masked(degree=8))
    context, vectors = federation.context(), federation.vectors()
    adversary = Adversary(federation, context, federation.uploads(vectors, context))
    attack_one(adversary, 17)
    adversary.pick_locks()
    assert frozenset({17}) in adversary.readable()
    codec = federation.uplink.codec(context, federation.terms.work)
    assert np.array_equal(codec.decode(adversary.unmasked(17)), vectors[17].numpy())


def test_a_server_that_calls_all_neighbours_of_one_client_missing_reads_nothing() -> None:
    federation = Federation(40, Masked(degree=8))
    context, vectors = federation.context(), federation.vectors()
    uploads = federation.uploads(vectors, context)
    near = federation.graph(context).neighbours(17)
    for allies in ((), near[:2]):
        adversary = Adversary(federation, context, uploads, allies)
        states = dict(federation.states)
        attack_one(adversary, 17)
        federation.states.update(states)
        assert not adversary.refusals
        adversary.read()
        assert adversary.readable() == []


@pytest.mark.parametrize("allies", [0, 3])
def test_telling_half_that_a_client_vanished_and_half_that_it_arrived_opens_neither(allies: int) -> None:
    """12 clients, n = 11, t = 8: with 3 allies one half and the allies are 7 or 8 of 11."""
    federation = Federation(12, length=3000)
    context, vectors = federation.context(), federation.vectors()
    uploads = federation.uploads(vectors, context)
    friends = tuple(range(1, 1 + allies))
    adversary = Adversary(federation, context, uploads, friends)
    honest = [one for one in range(1, 12) if one not in friends]
    everybody = set(federation.members)
    for place, client in enumerate(honest):
        adversary.tell(client, everybody if place % 2 else everybody - {0})
    adversary.read()
    assert not adversary.refusals
    assert adversary.secret(0, 0) is None or all(adversary.pair_seed(0, one) is None for one in honest)
    assert frozenset({0}) not in adversary.readable()
    # Bits of what is left of client 0's upload: a z-score beyond 5 comes up once in 1.7 million uniform vectors.
    bits = np.unpackbits(adversary.unmasked(0).view(np.uint8))
    assert abs(bits.sum() - len(bits) / 2) < 5 * np.sqrt(len(bits)) / 2


@given(data=st.data(), sparse=st.booleans())
@settings(deadline=None, max_examples=25, derandomize=True)
def test_no_stories_open_a_sum_over_fewer_honest_clients_than_stated(data: st.DataObject, sparse: bool) -> None:
    """At least t − c other honest clients are in every sum, with c < n/3 of each neighbourhood on the server's side."""
    federation = Federation(13, Masked(degree=6 if sparse else None), length=2)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    graph = federation.graph(context)
    most = 1 if sparse else 3
    allies = sorted(data.draw(st.sets(st.sampled_from(federation.members), max_size=most)))
    adversary = Adversary(federation, context, uploads, allies)
    everybody = set(federation.members)
    disliked = data.draw(st.sets(st.sampled_from(federation.members), max_size=6))
    for client in federation.members:
        if client not in allies:
            gone = data.draw(st.one_of(st.sets(st.sampled_from(federation.members), max_size=4), st.just(disliked)))
            adversary.tell(client, everybody - set(sorted(gone - {client})[:4]))
    adversary.read()
    for group in adversary.readable():
        for member in group:
            near = graph.neighbours(member)
            needed = federation.uplink.quorum.of(len(near)) - len(set(near) & set(allies))
            assert len(group) - 1 >= needed


def told_stories(federation: Federation) -> tuple[MaskedSum, dict[int, list[int]]]:
    """A round whose last third was shown a list without client 0."""
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    lists = {client: list(federation.members)[1 if client > 7 else 0 :] for client in ask.to}
    total._signed = False  # this server takes every signature
    for client in ask.to:
        request = federation.unmask(context, lists[client])
        total.add(federation.answer(client, request, ask.each[client]))
    return total, lists


def test_a_server_that_showed_different_lists_is_refused_in_the_next_round() -> None:
    federation = Federation(12)
    total, lists = told_stories(federation)
    vectors, context = federation.vectors(), federation.context(1)
    for client in federation.members:
        signers = [one for one in federation.members if one != client]
        shown = torch.stack([torch.frombuffer(bytearray(total.signatures[one]), dtype=torch.uint8) for one in signers])
        with pytest.raises(ProtocolError, match=r"neighbours of client \d+ signed the survivor list.*round 1"):
            federation.upload(client, vectors[client], context, Evidence(torch.tensor(signers), shown))
    assert len(set(map(tuple, lists.values()))) == 2


def test_missing_forged_or_malformed_evidence_is_refused_and_true_evidence_accepted() -> None:
    federation = Federation(6)
    context, vectors = federation.context(), federation.vectors()
    total, ask = federation.collected(federation.uploads(vectors, context), context)
    assert ask is not None
    for client in ask.to:
        total.add(federation.answer(client, ask.common, ask.each[client]))
    assert torch.equal(total.total(), expected(federation, before=set()))
    true = federation.uplink.parting(total)[3]
    assert isinstance(true, Evidence)
    after = federation.context(1)

    def told(evidence: Request | None) -> None:
        federation.upload(3, vectors[3], after, evidence)

    with pytest.raises(ProtocolError, match="client 3 revealed shares in round 1 and was not shown"):
        told(None)
    with pytest.raises(ProtocolError, match="only 0 of 4 needed"):
        told(replace(true, signatures=true.signatures ^ 1))
    with pytest.raises(ProtocolError, match="must name every client once"):
        told(replace(true, signers=true.signers.flip(0)[:1].repeat(5)))
    with pytest.raises(ProtocolError, match="only 3 of 4 needed"):
        told(replace(true, signers=true.signers[:3], signatures=true.signatures[:3]))
    for spoilt in (
        replace(true, signers=true.signers[:3]),
        replace(true, signers=true.signers.float()),
        replace(true, signers=true.signers[None]),
    ):
        with pytest.raises(ProtocolError, match="signers"):
            told(spoilt)
    told(true)


# ---- survivor lists a client does not accept

LISTS: dict[str, tuple[list[int], str]] = {
    "too few": ([0, 1, 2, 3, 4, 5], "does not reveal for 6 survivors: 7 of 10 are needed"),
    "nobody": ([], "counts it as missing"),
    "a stranger": ([*range(9), 77], "outside the round"),
    "a negative number": ([*range(9), -1], "holds -1"),
    "somebody twice": ([*range(9), 9, 9], "must name every client once"),
    "without itself": ([*range(2), *range(3, 10)], "client 2 was asked to reveal in a round that counts it as miss"),
}


@pytest.mark.parametrize(("survivors", "why"), LISTS.values(), ids=LISTS)
def test_a_list_that_could_expose_somebody_is_refused_and_a_proper_one_still_accepted(
    survivors: list[int], why: str
) -> None:
    federation = Federation(10)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    request = Unmask(0, 0, torch.tensor(survivors, dtype=torch.int64))
    with pytest.raises(ProtocolError, match=why):
        federation.answer(2, request, relayed(uploads, 2))
    federation.answer(2, federation.unmask(context, range(8)), relayed(uploads, 2))


def test_survivors_who_fall_apart_are_refused_by_client_and_server() -> None:
    federation = Federation(30, Masked(degree=2))
    context = federation.context()
    graph = federation.graph(context)
    one, other = graph.neighbours(4)
    cut = (
        next(peer for peer in graph.neighbours(one) if peer != 4),
        next(peer for peer in graph.neighbours(other) if peer != 4),
    )
    survivors = set(federation.members) - set(cut)
    assert len(survivors) >= 21
    assert not graph.connected(survivors)
    uploads = federation.uploads(federation.vectors(), context)
    with pytest.raises(ProtocolError, match="client 4 does not reveal: the survivors fall into groups"):
        federation.answer(4, federation.unmask(context, survivors), relayed(uploads, 4))
    with pytest.raises(ProtocolError, match=r"groups without a mask between them.*raise neighbours"):
        federation.uplink.open(federation.accumulator(context), arrivals(survivors), context)


@pytest.mark.parametrize("survivors", [torch.arange(10.0), torch.arange(10)[None], torch.tensor(3)])
def test_a_malformed_list_is_refused_and_not_a_crash(survivors: torch.Tensor) -> None:
    federation = Federation(10)
    federation.uploads(federation.vectors(), federation.context())
    with pytest.raises(ProtocolError, match="the survivors of an unmask is"):
        federation.answer(2, Unmask(0, 0, survivors), None)


def test_a_round_other_than_the_one_answered_last_is_not_revealed() -> None:
    federation = Federation(5)
    federation.uploads(federation.vectors(), federation.context(1))
    for number, attempt in ((0, 0), (2, 0), (1, 1)):
        with pytest.raises(ProtocolError, match="not the one it answered last"):
            federation.answer(1, federation.unmask(federation.context(number, attempt), range(5)), None)


# ---- clients that lie or break


def with_bundles(upload: MaskedUpload, change: Callable[[int, bytes], bytes]) -> MaskedUpload:
    bundles = unpacked(upload.holders, upload.lengths, upload.bundles)
    holders, lengths, content = packed({holder: change(holder, one) for holder, one in bundles.items()})
    return replace(upload, holders=holders, lengths=lengths, bundles=content)


def stale(federation: Federation) -> MaskedUpload:
    """Client 3's upload of the round before."""
    return federation.upload(3, federation.vectors()[3], federation.context(0))


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda sealed: sealed[:-7],
    "empty": lambda sealed: b"",
    "forged": lambda sealed: bytes(len(sealed)),
    "flipped": lambda sealed: sealed[:40] + bytes([sealed[40] ^ 1]) + sealed[41:],
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_bundles_that_are_spoilt_for_some_holders_do_not_stop_the_round(spoil: Callable[[bytes], bytes]) -> None:
    federation = Federation(10)
    context, vectors = federation.context(), federation.vectors()
    uploads = federation.uploads(vectors, context)
    uploads[3] = with_bundles(uploads[3], lambda holder, one: spoil(one) if holder in (0, 1) else one)
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    for client in ask.to:
        total.add(federation.answer(client, ask.common, ask.each[client]))
    assert torch.equal(total.total(), expected(federation, before=set()))


def test_bundles_of_another_round_do_not_open_and_their_dealer_is_named() -> None:
    federation = Federation(10)
    old = stale(federation)
    context = federation.context(1)
    uploads = federation.uploads(federation.vectors(), context)
    uploads[3] = replace(uploads[3], holders=old.holders, lengths=old.lengths, bundles=old.bundles)
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    for client in ask.to:
        total.add(federation.answer(client, ask.common, ask.each[client]))
    with pytest.raises(ProtocolError, match="client 3's own mask cannot be taken off: 0 of 7"):
        total.total()
    assert not total.opened


def lying(federation: Federation, reply: Revealed, *, about: int) -> Revealed:
    """The same revelation with a wrong share about one client."""
    ring = federation.states[reply.client].ring()
    key = ring.own(round=reply.round, attempt=reply.attempt, purpose="revelation")
    shares = unlock_shares(to_bytes(reply.locked), client=reply.client, key=key)
    wrong = {item: share[:-1] + bytes([share[-1] ^ 1]) if item[1] == about else share for item, share in shares.items()}
    return replace(reply, locked=from_bytes(lock_shares(wrong, client=reply.client, key=key)))


@pytest.mark.parametrize("missing", [False, True])
def test_a_wrong_share_costs_nothing_where_there_are_two_more_than_needed(missing: bool) -> None:
    federation = Federation(10)
    context, vectors = federation.context(), federation.vectors()
    present = [one for one in federation.members if not (missing and one == 4)]
    total, ask = federation.collected(federation.uploads(vectors, context, only=present), context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        total.add(lying(federation, reply, about=4) if client == 2 else reply)
    assert torch.equal(total.total(), expected(federation, before={4} if missing else set()))
    assert not total.spoilers()


@pytest.mark.parametrize("missing", [False, True])
def test_a_wrong_share_is_found_out_and_the_client_it_is_about_named(missing: bool) -> None:
    """7 clients, n = 6, t = 5: whose of six shares is wrong cannot be told."""
    federation = Federation(7)
    context, vectors = federation.context(), federation.vectors()
    present = [one for one in federation.members if not (missing and one == 4)]
    total, ask = federation.collected(federation.uploads(vectors, context, only=present), context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        total.add(lying(federation, reply, about=4) if client == 2 else reply)
    with pytest.raises(ProtocolError, match=r"shares about client 4.*wrong one"):
        total.total()
    assert not total.opened
    assert not total.spoilers()


def test_a_wrong_share_among_no_more_than_needed_is_found_out_by_the_sum_itself() -> None:
    """With t shares every polynomial fits; a mask that stays looks like rubbish (missed once in 2⁴⁰ here)."""
    federation = Federation(10)
    context, vectors = federation.context(), federation.vectors()
    total, ask = federation.collected(federation.uploads(vectors, context), context)
    assert ask is not None
    for client in range(8):  # client 4 has 9 neighbours, of whom 7 answer
        reply = federation.answer(client, ask.common, ask.each[client])
        total.add(lying(federation, reply, about=4) if client == 2 else reply)
    with pytest.raises(ProtocolError, match=r"beyond what clients may send.*wrong shares"):
        total.total()


def test_a_wrong_share_of_a_key_costs_one_revelation_and_not_the_round() -> None:
    federation = Federation(12)
    context, vectors = federation.context(), federation.vectors()
    total, ask = federation.collected(federation.uploads(vectors, context), context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        if client == 2:
            keys = reply.keys.clone()
            keys[reply.peers.tolist().index(5)] ^= 1
            reply = replace(reply, keys=keys)
        total.add(reply)
    assert torch.equal(total.total(), expected(federation, before=set()))


@pytest.mark.parametrize("of", [{0, 2, 3, 4}, {3}], ids=["of everybody's key", "of one key"])
@pytest.mark.parametrize("own", [False, True], ids=["", "and an unreadable revelation"])
@pytest.mark.parametrize("clients", [5, 12])
def test_wrong_shares_of_keys_cost_nothing_and_nobody_is_blamed_for_another(
    of: set[int], own: bool, clients: int
) -> None:
    """Of five clients four hold shares of a key and three are needed: which are right the lock tells."""
    federation = Federation(clients)
    context, vectors = federation.context(), federation.vectors()
    total, ask = federation.collected(federation.uploads(vectors, context), context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        if client == 1:
            wrong = [place for place, peer in enumerate(reply.peers.tolist()) if peer in of]
            keys = reply.keys.clone()
            keys[wrong, -1] ^= 1
            reply = replace(reply, keys=keys, locked=reply.locked ^ own)
        total.add(reply)
    assert torch.equal(total.total(), expected(federation, before=set()))
    assert not total.spoilers()


def told_otherwise(federation: Federation, reply: Revealed, data: st.DataObject) -> Revealed:
    """Anything that a client who means harm can make of its revelation, and the server takes."""
    fates = st.sampled_from(["kept", "kept", "changed", "left out"])
    ring = federation.states[reply.client].ring()
    key = ring.own(round=reply.round, attempt=reply.attempt, purpose="revelation")
    shares = {}
    for item, share in unlock_shares(to_bytes(reply.locked), client=reply.client, key=key).items():
        fate = data.draw(fates)
        if fate != "left out":
            shares[item] = share if fate == "kept" else share[:-1] + bytes([share[-1] ^ 1])
    drawn = [data.draw(fates) for _ in reply.peers]
    keys = reply.keys.clone()
    keys[[place for place, fate in enumerate(drawn) if fate == "changed"], -1] ^= 1
    kept = [place for place, fate in enumerate(drawn) if fate != "left out"]
    locked = from_bytes(lock_shares(shares, client=reply.client, key=key)) ^ data.draw(st.sampled_from([0, 0, 1]))
    return replace(reply, peers=reply.peers[kept], keys=keys[kept], locked=locked)


@given(data=st.data(), clients=st.sampled_from([5, 8]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_two_clients_who_do_and_say_what_they_like_have_nobody_else_blamed(data: st.DataObject, clients: int) -> None:
    federation = Federation(clients, length=4)
    context, vectors = federation.context(), federation.vectors()
    bad = data.draw(st.sets(st.sampled_from(federation.members), min_size=1, max_size=2))
    uploads = federation.uploads(vectors, context)
    for client in bad:
        spoilt = data.draw(st.sets(st.sampled_from(federation.members)))
        uploads[client] = with_bundles(
            uploads[client], lambda holder, one, spoilt=spoilt: SPOILT["flipped"](one) if holder in spoilt else one
        )
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    silent = data.draw(st.sets(st.sampled_from(federation.members), max_size=1))
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        if client not in silent:
            total.add(told_otherwise(federation, reply, data) if client in bad else reply)
    try:
        got = total.total()
    except ProtocolError:
        assert set(total.spoilers()) <= bad
        return
    assert torch.equal(got, expected(federation, before=set()))
    assert not total.spoilers()


@pytest.mark.parametrize("liars", [0, 1])
def test_who_deals_shares_that_a_quorum_cannot_open_is_to_blame_and_one_liar_does_not_help_it(liars: int) -> None:
    federation = Federation(5)
    context, vectors = federation.context(), federation.vectors()
    uploads = federation.uploads(vectors, context)
    uploads[1] = with_bundles(uploads[1], lambda holder, one: SPOILT["flipped"](one))
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        total.add(replace(reply, keys=reply.keys ^ 1) if client < liars else reply)
    with pytest.raises(ProtocolError, match="client 1's own mask cannot be taken off: 0 of 3"):
        total.total()
    assert total.spoilers() == (1,)
    assert not total.spoilers(but={0, 2})


def test_a_revelation_under_a_wrong_key_is_named_when_the_round_fails_for_it() -> None:
    federation = Federation(4)
    context, vectors = federation.context(), federation.vectors()
    total, ask = federation.collected(federation.uploads(vectors, context), context)
    assert ask is not None
    for client in ask.to:
        reply = federation.answer(client, ask.common, ask.each[client])
        total.add(replace(reply, locked=reply.locked[:-1]) if client == 2 else reply)
    with pytest.raises(ProtocolError, match="what client 2 revealed cannot be read"):
        total.total()


# ---- what the server does not take


def replies() -> tuple[Federation, MaskedSum, dict[int, MaskedUpload], dict[int, Revealed]]:
    federation = Federation(5)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    total, ask = federation.collected(uploads, context)
    assert ask is not None
    return federation, total, uploads, {k: federation.answer(k, ask.common, ask.each[k]) for k in ask.to}


REVEALED: dict[str, Callable[[Revealed], Reply]] = {
    "another round": lambda one: replace(one, round=1),
    "another attempt": lambda one: replace(one, attempt=1),
    "a stranger": lambda one: replace(one, client=9),
    "no signature": lambda one: replace(one, signature=one.signature[:0]),
    "too few keys": lambda one: replace(one, keys=one.keys[:-1]),
    "keys of strangers": lambda one: replace(one, peers=one.peers + 7),
    "its own key": lambda one: replace(one, peers=torch.full_like(one.peers, one.client)),
    "a matrix of peers": lambda one: replace(one, peers=one.peers[None]),
    "keys that are numbers": lambda one: replace(one, keys=one.keys.float()),
    "another message": lambda one: Reply(one.client),
}


@pytest.mark.parametrize("spoil", REVEALED.values(), ids=REVEALED)
def test_a_bad_revelation_is_refused_and_the_honest_one_still_welcome(spoil: Callable[[Revealed], Reply]) -> None:
    federation, total, _, revealed = replies()
    with pytest.raises(ProtocolError):
        total.add(spoil(revealed[1]))
    for one in revealed.values():
        total.add(one)
    assert torch.equal(total.total(), expected(federation, before=set()))


def test_a_late_upload_and_a_second_revelation_are_refused() -> None:
    _, total, uploads, revealed = replies()
    with pytest.raises(ProtocolError, match="a MaskedUpload arrived where a revealed belongs"):
        total.add(uploads[1])
    total.add(revealed[1])
    with pytest.raises(ProtocolError, match="a second one"):
        total.add(revealed[1])


UPLOADS: dict[str, Callable[[MaskedUpload], MaskedUpload]] = {
    "another round": lambda one: replace(one, round=1),
    "a stranger": lambda one: replace(one, client=9),
    "a longer vector": lambda one: replace(one, payload=one.payload.repeat(2)),
    "real numbers": lambda one: replace(one, payload=one.payload.double()),
    "strangers as holders": lambda one: replace(one, holders=one.holders + 3),
    "one holder twice": lambda one: replace(one, holders=torch.zeros_like(one.holders)),
    "a matrix of holders": lambda one: replace(one, holders=one.holders[None]),
    "negative lengths": lambda one: replace(one, lengths=-one.lengths),
    "too many bytes": lambda one: replace(one, bundles=one.bundles.repeat(2)),
    "bytes that are numbers": lambda one: replace(one, bundles=one.bundles.float()),
}


@pytest.mark.parametrize("spoil", UPLOADS.values(), ids=UPLOADS)
def test_a_bad_masked_upload_is_refused_and_leaves_the_sum_as_it_was(
    spoil: Callable[[MaskedUpload], MaskedUpload],
) -> None:
    federation = Federation(5)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    total = federation.accumulator(context)
    with pytest.raises(ProtocolError):
        total.add(spoil(uploads[2]))
    for one in uploads.values():
        total.add(one)
    ask = federation.uplink.open(total, arrivals(uploads), context)
    assert ask is not None
    for client in ask.to:
        total.add(federation.answer(client, ask.common, ask.each[client]))
    assert torch.equal(total.total(), expected(federation, before=set()))


def test_malformed_private_bundles_are_refused_by_the_client() -> None:
    federation = Federation(5)
    context = federation.context()
    uploads = federation.uploads(federation.vectors(), context)
    good = relayed(uploads, 1)
    bad, request = Relayed(good.senders, good.lengths + 1, good.bundles), federation.unmask(context, range(5))
    with pytest.raises(ProtocolError, match="malformed"):
        federation.answer(1, request, bad)
