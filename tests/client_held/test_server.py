"""A server that holds neither a model nor a key: what it refuses, what it passes on, and what it cannot reach."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from client_held.relaying import Hall
from driving import drive
from federation import HeldRun, held_run, job, relay_of, same_bits
from fedveil.client_held.ciphers import Ciphertext, PaddedSum
from fedveil.client_held.client import Keeper, UnreadableError
from fedveil.client_held.messages import Begin, Divide, Divided, Finish, Finished, Lend, Lent, Vote
from fedveil.client_held.server import DividedSum
from fedveil.crypto import ckks
from fedveil.engine import LocalEngine
from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.protocol import directory
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import Nonces, from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role
from fedveil.uplink.unmasking import MaskedUpload, Revealed, lock_shares, unlock_shares

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 16,
    "options": {"depth": 1, "width": 4},
    "clients": 4,
    "rounds": 3,
    "epsilon": 1000.0,
    "value_range": 64.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "ckks": {},
    "pads": {"cipher": "pads"},
    "ballots": {"cipher": "pads", "vote": "histogram"},
    "ballots, ckks": {"vote": "histogram"},
    "nothing hidden": {"share": 0.0},
}


def of(name: str = "ckks", **changes: Any) -> Job:
    return job(scheme="paraaegis", **{**SMALL, "share": 0.2, **WAYS[name], **changes})


# ---- votes


@pytest.fixture
def voting() -> Hall:
    """Votes are the same under either cipher, and keys of this one are made at once."""
    one = Hall(of("pads"))
    one.until(Begin)
    return one


VOTES: dict[str, tuple[Callable[[Vote], Reply], str]] = {
    "too many": (lambda r: replace(r, tags=torch.cat([r.tags, r.tags[:1] ^ 1])), "tags is 130 here"),
    "too few": (lambda r: replace(r, tags=r.tags[1:]), "tags is 130 here"),
    "one twice": (lambda r: replace(r, tags=torch.cat([r.tags[1:], r.tags[-1:]])), "1 of 130 indices more than once"),
    "none": (lambda r: replace(r, tags=r.tags[:0]), "tags is 130 here"),
    "indices": (lambda r: replace(r, tags=torch.arange(130)), "where uint8 of shape"),
    "half tags": (lambda r: replace(r, tags=r.tags[:, :8]), "where uint8 of shape"),
    "another round": (lambda r: replace(r, round=1), "a vote for round 2, attempt 0 arrived in round 1"),
    "another attempt": (lambda r: replace(r, attempt=3), "attempt 3 arrived in round 1, attempt 0"),
    "a stranger": (lambda r: replace(r, client=9), "was not asked"),
    "another message": (lambda r: Reply(r.client), "a Reply arrived where a vote belongs"),
}


@pytest.mark.parametrize(("spoil", "why"), VOTES.values(), ids=VOTES)
def test_a_vote_that_is_none_is_refused_and_counts_for_nobody(
    voting: Hall, spoil: Callable[[Vote], Reply], why: str
) -> None:
    replies = [voting.answer(client) for client in range(4)]
    assert [len(reply.tags) for reply in replies] == [130] * 4
    with pytest.raises(ProtocolError) as caught:
        voting.ask.into.add(spoil(replies[1]))
    assert why in str(caught.value)
    voting.ask.into.add(replies[0])
    with pytest.raises(ProtocolError, match="a second one"):
        voting.ask.into.add(replies[0])
    voting.go_on(replies[1:])
    clean = Hall(of("pads"))
    clean.until(Begin)
    clean.go_on([clean.answer(client) for client in range(4)])
    assert torch.equal(voting.ask.common.winners, clean.ask.common.winners)  # type: ignore[attr-defined]


def test_a_voter_that_was_refused_is_asked_for_no_upload(voting: Hall) -> None:
    replies = [voting.answer(client) for client in range(4)]
    divide = voting.go_on(replies[:3], refused={3: "voted twice"})
    assert isinstance(divide.common, Divide)
    assert divide.to == (0, 1, 2)
    assert divide.common.voters.tolist() == [0, 1, 2]
    assert divide.common.cohort.tolist() == [0, 1, 2, 3]  # a graph among the voters would be of the server's choosing


# ---- uploads


def sums(total: Any) -> bytes:
    """What has been added so far, covers and all."""
    assert isinstance(total, DividedSum)
    rest = total._rest.numpy().tobytes()
    if total._hidden is None:
        return rest
    if isinstance(total._hidden, PaddedSum):
        return rest + total._hidden.masked._sum.tobytes()
    adder = total._hidden._adder  # type: ignore[attr-defined]
    return rest + (to_bytes(total._hidden.total()) if adder.addends else b"")


def with_hidden(change: Callable[[Any], Any]) -> Callable[[Divided], Divided]:
    return lambda reply: replace(reply, hidden=change(reply.hidden))


def zeros(length: int, key: ckks.PublicKey) -> Ciphertext:
    return Ciphertext(from_bytes(ckks.encrypt(torch.zeros(length), key)))


def under_another_key(part: Ciphertext) -> Ciphertext:
    key = ckks.generate(ckks.choose(addends=4, largest=64.0))
    return zeros(ckks.summary(to_bytes(part.data)).length, key.public)


UPLOADS: dict[str, tuple[Callable[[Any], Reply], str]] = {
    "another round": (lambda r: replace(r, round=1), "a divided for round 2, attempt 0 arrived in round 1"),
    "another attempt": (lambda r: replace(r, attempt=3), "attempt 3 arrived in round 1, attempt 0"),
    "a stranger": (lambda r: replace(r, client=9), "was not asked"),
    "a longer rest": (lambda r: replace(r, rest=torch.cat([r.rest, r.rest[:1]])), "has shape"),
    "a shorter rest": (lambda r: replace(r, rest=r.rest[1:]), "has shape"),
    "a matrix": (lambda r: replace(r, rest=r.rest[None]), "has shape"),
    "real numbers": (lambda r: replace(r, rest=r.rest.double()), "is torch.float64"),
    "short numbers": (lambda r: replace(r, rest=r.rest.int()), "is torch.int32"),
    "nothing hidden": (lambda r: replace(r, hidden=None), "lacks its hidden part"),
    "another message": (lambda r: Reply(r.client), "a Reply arrived where a divided belongs"),
}
CKKS: dict[str, tuple[Callable[[Any], Reply], str]] = {
    "cut": (with_hidden(lambda part: Ciphertext(part.data[:-7])), ""),
    "empty": (with_hidden(lambda part: Ciphertext(part.data[:0])), ""),
    "of another key": (with_hidden(under_another_key), "key"),
    "masked words": (
        with_hidden(lambda part: MaskedUpload(1, 1, 0, *[torch.zeros(0, dtype=torch.int64)] * 3, from_bytes(b""))),
        "masked words arrived where a ciphertext belongs",
    ),
}
PADS: dict[str, tuple[Callable[[Any], Reply], str]] = {
    "a longer hidden part": (with_hidden(lambda p: replace(p, payload=p.payload.repeat(2))), "has shape"),
    "a shorter hidden part": (with_hidden(lambda p: replace(p, payload=p.payload[1:])), "has shape"),
    "numbers": (with_hidden(lambda p: replace(p, payload=p.payload.double())), "torch.float64"),
    "the vote's stage": (with_hidden(lambda p: replace(p, round=0)), "a masked upload for round 1"),
    "another attempt's": (with_hidden(lambda p: replace(p, attempt=1)), "attempt 1 arrived"),
    "another client's": (with_hidden(lambda p: replace(p, client=2)), "another client's hidden part"),
    "shares for a stranger": (with_hidden(lambda p: replace(p, holders=p.holders + 7)), "outside the round"),
    "shares of other lengths": (with_hidden(lambda p: replace(p, lengths=p.lengths + 1)), "malformed"),
    "a ciphertext": (with_hidden(lambda p: Ciphertext(from_bytes(b"x" * 90))), "a ciphertext arrived where masked"),
}


EVERYWHERE = [(way, *one) for way in ("ckks", "pads") for one in UPLOADS.items()]
WRONG = [*EVERYWHERE, *(("ckks", *one) for one in CKKS.items()), *(("pads", *one) for one in PADS.items())]


@pytest.fixture(scope="module")
def uploaded() -> dict[str, list[Any]]:
    """Honest uploads of one round; server and clients follow from seeds, so they fit any hall of the same settings."""
    found = {}
    for way in ("ckks", "pads"):
        one = Hall(of(way))
        one.until(Divide)
        found[way] = [one, [one.answer(client) for client in range(4)]]
    return found


def fresh_sum(hall: Hall) -> DividedSum:
    """Where the first round's uploads are added, still empty."""
    relay, context = hall.relay, hall.ask.into._context  # type: ignore[attr-defined]
    size, count = relay._size, relay._uplink.count(0, relay._size)
    assert relay._uplink.cipher is not None
    length = count + relay._length - size
    hidden = relay._uplink.cipher.accumulator(length, context.stage(1), public=relay._group.public)
    return DividedSum(context, rest=size - count, hidden=hidden)


def check_refused(hall: Hall, replies: list[Any], wrong: Reply, why: str) -> None:
    total = fresh_sum(hall)
    total.add(replies[0])
    before = sums(total)
    with pytest.raises(ProtocolError) as caught:
        total.add(wrong)
    assert why in str(caught.value)
    with pytest.raises(ProtocolError, match="a second one"):
        total.add(replies[0])
    assert sums(total) == before
    total.add(replies[1])  # the honest one is still welcome
    assert sums(total) != before


@pytest.mark.parametrize(("way", "name", "spoilt"), WRONG, ids=[f"{way}, {name}" for way, name, _ in WRONG])
def test_an_upload_that_does_not_belong_is_in_neither_sum(
    uploaded: dict[str, list[Any]], way: str, name: str, spoilt: tuple[Callable[[Any], Reply], str]
) -> None:
    hall, replies = uploaded[way]
    spoil, why = spoilt
    check_refused(hall, replies, spoil(replies[1]), why)


@pytest.mark.parametrize("more", [-1, 1, 5000])
def test_a_ciphertext_of_another_length_under_the_right_key_is_in_neither_sum(
    uploaded: dict[str, list[Any]], more: int
) -> None:
    hall, replies = uploaded["ckks"]
    length = ckks.summary(to_bytes(replies[1].hidden.data)).length
    other = zeros(length + more, ckks.PublicKey.from_bytes(hall.relay._group.public))
    check_refused(hall, replies, replace(replies[1], hidden=other), f"holds {length + more} values, where {length} are")


@pytest.mark.parametrize("way", ["ckks", "pads"])
def test_an_upload_cut_anywhere_is_no_message(uploaded: dict[str, list[Any]], way: str) -> None:
    whole = encode(uploaded[way][1][2])
    cuts = sorted({*range(64), *range(len(whole) - 64, len(whole)), *random.Random(0).sample(range(len(whole)), 50)})
    for length in cuts:
        with pytest.raises(ProtocolError):
            decode(whole[:length])
    with pytest.raises(ProtocolError, match="too many"):
        decode(whole + b"\0")


class Spoiling:
    """Clients of which one, in round 2, sends what `spoil` makes of its upload."""

    def __init__(self, role: Any, spoil: Callable[[Any], Any]) -> None:
        self._role, self._spoil = role, spoil

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        for state, reply in self._role.handle_many(states, request, clients, private):
            mine = isinstance(reply, Divided) and reply.round == 1 and state.client == 2
            yield state, self._spoil(reply) if mine else reply


def not_there(request: Any, client: int) -> bool:
    return isinstance(request, Divide) and request.round == 1 and client == 2


@pytest.mark.parametrize("way", ["ckks", "pads", "ballots"])
def test_a_client_refused_for_what_it_sent_is_out_of_the_round_as_if_it_had_vanished(way: str) -> None:
    """And takes part in the next one, with a model that it is lent."""
    away = held_run(of(way, clients=5), absent=not_there)
    spoils = [lambda r: replace(r, rest=r.rest.double()), with_hidden(lambda part: None)]
    for spoil in spoils:
        run = held_run(of(way, clients=5), through=lambda role, spoil=spoil: Spoiling(role, spoil))
        assert [list(done.gathered.refused) for done in run.rounds] == [[], [2], []]
        assert [len(done.gathered.arrived) for done in run.rounds] == [5, 4, 5]
        assert same_bits(run.model, away.model)


# ---- rounds, loans, farewells


def asked(one: Job) -> list[tuple[str, tuple[int, ...]]]:
    """Every question of a run and to whom it went."""
    found: list[tuple[str, tuple[int, ...]]] = []

    class Noting(LocalEngine):
        def gather(self, ask: Ask) -> Gathered:
            found.append((type(ask.common).__name__, ask.to))
            return super().gather(ask)

    held_run(one, engine=Noting)
    return found


def test_only_who_missed_a_model_borrows_it_and_everybody_ends_with_the_last_one() -> None:
    one = of(clients=8, cohort=4, rounds=4)
    found = asked(one)
    rounds = [one.cohort.draw(number) for number in range(4)]
    lends = [to for kind, to in found if kind == "Lend"]
    assert 1 <= len(lends) <= 4
    assert all(len(to) == 1 for to in lends)
    assert [to for kind, to in found if kind == "Begin"] == rounds
    finishes = [to for kind, to in found if kind == "Finish"]
    assert found[-1][0] == "Finish"
    assert len(finishes) == 2  # who can read the last sums, then who is lent what they lead to
    assert sorted(finishes[0] + finishes[1]) == sorted(set().union(*rounds))


@pytest.mark.parametrize("way", WAYS)
def test_everybody_who_took_part_ends_with_one_and_the_same_model(way: str) -> None:
    run = held_run(of(way, clients=7, cohort=4, rounds=4))
    members = set().union(*(done.cohort for done in run.rounds))
    assert len(members) > 4
    for client in members:
        held = run.engine.state_of(client).held
        assert held is not None
        assert held.version == 4
        assert same_bits(held.weights.parameters, run.model)


def test_if_no_lender_answers_who_is_behind_sits_out() -> None:
    def absent(request: Request, client: int) -> bool:
        return isinstance(request, Lend) or (isinstance(request, Begin) and request.round == 0 and client == 3)

    run = held_run(of(), absent=absent)
    assert [done.cohort for done in run.rounds] == [(0, 1, 2, 3)] * 3
    assert [sorted(done.gathered.arrived) for done in run.rounds] == [[0, 1, 2]] * 3
    assert not any(done.failed for done in run.rounds)


def test_if_nobody_has_the_present_model_any_more_the_run_stops() -> None:
    """Two take turns, so that whoever is asked has missed a round, and nobody lends."""
    one = of(clients=6, cohort=2, rounds=6, share=0.0)
    run = held_run(one, absent=lambda request, client: isinstance(request, Lend))
    assert len(run.rounds) < 6
    assert run.stops == ["no client that answers holds the present model any more"]


def misread(one: Job, *, by: set[int], until: int) -> tuple[list[Any], HeldRun]:
    """A run in which, up to this round, `by` say that they cannot read the first sums, and all others are away; gives
    what the server asked from the second round on."""
    asks: list[Any] = []

    class Misreading(LocalEngine):
        def gather(self, ask: Ask) -> Gathered:
            request = ask.common
            if isinstance(request, Begin) and request.round:
                asks.append(request)
            given_up = any(begin.version == 0 for begin in asks)
            round = (asks[-1].round if asks else 0) + isinstance(request, Lend)
            if isinstance(request, (Begin, Lend)) and request.version == 1 and round < until and not given_up:
                said = {client: Refusal(Code.UNREADABLE, "no") for client in ask.to if client in by}
                return Gathered((), said, tuple(client for client in ask.to if client not in by), 0, 0)
            return super().gather(ask)

    return asks, held_run(one, engine=Misreading)


def test_one_client_takes_no_sums_back_while_those_that_they_are_made_of_are_away() -> None:
    """Its cohort has nobody else who could read them, and whoever could lend the model does not answer."""
    one = of(clients=8, cohort=4, rounds=5)
    first, second = (set(one.cohort.draw(round)) for round in (0, 1))
    (liar,) = first & second
    asks, run = misread(one, by={liar}, until=2)
    assert [bool(done.failed) for done in run.rounds[:2]] == [False, True]
    assert [begin.version for begin in asks[:2]] == [1, 1]
    assert not any(done.failed for done in run.rounds[2:])


def test_sums_that_most_of_their_contributors_cannot_read_are_taken_back_before_anybody_is_lent_a_model() -> None:
    one = of(clients=8, cohort=4, rounds=6)
    asks, run = misread(one, by=set(one.cohort.draw(0)), until=6)
    assert [begin.version for begin in asks] == list(range(5))
    assert not any(done.failed for done in run.rounds)


@pytest.mark.parametrize("place", [0, -1], ids=["its code", "a vote"])
def test_a_ballot_that_is_spoilt_takes_no_sums_back_and_puts_nobody_out(place: int) -> None:
    """Nobody can read the sum of ballots; with the sums before, by which all have moved, that has nothing to do."""
    one = Hall(of("ballots", clients=5, rounds=5))
    one.until(Begin, round=1)
    ballots = [one.answer(client) for client in one.ask.to]
    payload = ballots[4].payload.clone()
    payload[place] += 1
    one.go_on([*ballots[:4], replace(ballots[4], payload=payload)])
    while not isinstance(one.ask.common, Divide):
        one.go_on([one.answer(client) for client in one.ask.to])
    for client in one.ask.to:
        with pytest.raises(UnreadableError):
            one.answer(client)
    said = dict.fromkeys(one.ask.to, Refusal(Code.UNREADABLE, "a sum cannot be read"))
    one.ask = one._next(Gathered((), said, (), 0, 0))
    one.until(Begin, round=2)
    assert one.done[1].failed
    assert one.relay.left_out == {}
    assert one.relay.standing[0] == 1
    one.until(Begin, round=3)
    assert not one.done[2].failed
    assert len(one.done[2].gathered.arrived) == 5


def test_loans_and_farewells_of_another_version_are_refused() -> None:
    one = Hall(of(rounds=2))
    one.until(Begin, round=1)
    absent = one.answer(0), one.answer(1), one.answer(2)
    one.go_on(list(absent))
    one.until(Finish)
    assert one.ask.to == (0, 1, 2)
    reply: Finished = one.answer(0)
    with pytest.raises(ProtocolError, match="ends with another version"):
        one.ask.into.add(replace(reply, version=1))
    with pytest.raises(ProtocolError, match="a Reply arrived where a finished belongs"):
        one.ask.into.add(Reply(0))
    one.ask.into.add(reply)


def test_a_loan_of_another_version_or_kind_is_refused() -> None:
    one = Hall(of())
    one.until(Begin)
    one.go_on([one.answer(client) for client in (0, 1, 2)])
    one.until(Lend)
    reply: Lent = one.answer(one.ask.to[0])
    huge = torch.zeros(1 << 22, dtype=torch.uint8)
    for wrong, why in (
        (replace(reply, version=7), "lent a model of another version"),
        (replace(reply, sealed=reply.sealed.long()), "is torch.int64"),
        (replace(reply, sealed=huge), "sealed cannot be 4194304"),
        (Reply(0), "a Reply arrived where a lent belongs"),
    ):
        with pytest.raises(ProtocolError, match=why):
            one.ask.into.add(wrong)
    one.go_on([reply])
    assert isinstance(one.ask.common, Begin)
    assert list(one.ask.each) == [3]


LONELY: dict[str, tuple[dict[str, Any], type[Request], int]] = {
    "after a vote": ({}, Divide, 3),
    "after ballots": ({"vote": "histogram"}, Divide, 3),
    "by lot": ({"strategy": "random"}, Begin, 3),
    "everything hidden": ({"share": 1.0}, Begin, 3),
    "nothing hidden": ({"share": 0.0}, Begin, 2),
}


@pytest.mark.parametrize(("how", "kind", "needed"), LONELY.values(), ids=LONELY)
def test_a_sum_of_so_few_that_it_shows_one_of_them_to_the_others_is_not_passed_on(
    how: dict[str, Any], kind: type[Request], needed: int
) -> None:
    """Every client reads hidden sums, and can take its own part out of them."""

    def absent(request: Any, client: int) -> bool:
        return isinstance(request, kind) and request.round == 1 and client >= there  # type: ignore[attr-defined]

    for there in (needed - 1, needed):
        run = held_run(of(**how), absent=absent)
        assert run.rounds[1].gathered.arrived == tuple(range(there))
        assert bool(run.rounds[1].failed) is (there < needed)
        assert "a sum of so few" in run.rounds[1].failed or "at least t" in run.rounds[1].failed or there == needed
        assert not run.rounds[2].failed


# ---- who is asked no more


def refusals(run: HeldRun) -> dict[int, Code]:
    return {client: one.code for done in run.rounds for client, one in done.gathered.refused.items()}


class Revealing:
    """Clients of which `bad` send what `spoil` makes of every revelation."""

    def __init__(self, role: Any, bad: set[int], spoil: Callable[[Any, Revealed], Revealed]) -> None:
        self._role, self._bad, self._spoil = role, bad, spoil

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        for state, reply in self._role.handle_many(states, request, clients, private):
            mine = isinstance(reply, Revealed) and state.client in self._bad
            yield state, self._spoil(state, reply) if mine else reply


def wrong_keys(state: Any, reply: Revealed) -> Revealed:
    keys = reply.keys.clone()
    keys[:, -1] ^= 1
    return replace(reply, keys=keys)


def unreadable_and_wrong_for_3(state: Any, reply: Revealed) -> Revealed:
    keys = reply.keys.clone()
    keys[reply.peers.tolist().index(3), -1] ^= 1
    return replace(reply, keys=keys, locked=reply.locked ^ 1)


def without_3(state: Any, reply: Revealed) -> Revealed:
    """As if client 3 had dealt nothing that opens."""
    key = state.ring().own(round=reply.round, attempt=reply.attempt, purpose="revelation")
    shares = unlock_shares(to_bytes(reply.locked), client=reply.client, key=key)
    left = {item: share for item, share in shares.items() if item[0] != 3}
    return replace(reply, locked=from_bytes(lock_shares(left, client=reply.client, key=key)))


@pytest.mark.parametrize("way", ["pads", "ballots"])
@pytest.mark.parametrize("spoil", [wrong_keys, unreadable_and_wrong_for_3, without_3])
def test_one_clients_wrong_revelations_cost_nobody_anything(way: str, spoil: Any) -> None:
    honest = held_run(of(way, clients=5))
    run = held_run(of(way, clients=5), through=lambda role: Revealing(role, {1}, spoil))
    assert [done.failed for done in run.rounds] == [""] * 3
    assert not refusals(run)
    assert same_bits(run.model, honest.model)


def test_two_who_say_that_a_third_dealt_nothing_spoil_rounds_and_have_nobody_put_out() -> None:
    run = held_run(of("pads", clients=5), through=lambda role: Revealing(role, {1, 2}, without_3))
    assert ["client 3's own mask cannot be taken off: 2 of 3" in done.failed for done in run.rounds] == [True] * 3
    assert not run.relay.left_out
    assert not run.stops


class Denying:
    """Clients of which `bad` say in the second round that they cannot read the first one's sum."""

    def __init__(self, role: Any, bad: set[int]) -> None:
        self._role, self._bad = role, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        asked = isinstance(request, Begin) and request.latest is not None
        for state, reply in self._role.handle_many(states, request, clients, private):
            denies = asked and state.client in self._bad and isinstance(reply, Reply)
            yield state, UnreadableError("not what clients have sent") if denies else reply


@pytest.mark.parametrize(("liars", "out"), [({1, 2, 3, 4}, set()), ({1, 2, 3, 4, 5, 6}, {0})])
def test_who_has_moved_is_put_out_by_a_quorum_of_those_asked_and_not_by_most_of_those_who_came(
    liars: set[int], out: set[int]
) -> None:
    """Of nine two are away at first: four are most of those whose uploads are in the sum, and a quorum is six."""

    def away(request: Any, client: int) -> bool:
        return isinstance(request, Begin) and request.round == 0 and client in (7, 8)

    run = held_run(of("pads", clients=9), through=lambda role: Denying(role, liars), absent=away)
    assert run.rounds[1].taken_back == (0,)
    assert set(run.relay.left_out) == out


def unopenable(divided: Divided) -> Divided:
    return replace(divided, hidden=replace(divided.hidden, bundles=divided.hidden.bundles ^ 1))  # type: ignore[type-var]


def test_who_deals_shares_that_nobody_can_open_is_put_out_and_the_others_go_on() -> None:
    run = held_run(of("pads", clients=5), through=lambda role: Spoiling(role, unopenable))
    assert [bool(done.failed) for done in run.rounds] == [False, True, False]
    assert refusals(run) == {2: Code.SPOILT}
    assert run.rounds[2].gathered.arrived == (0, 1, 3, 4)


def test_a_run_that_stops_since_too_few_are_left_says_who_was_put_out_and_why() -> None:
    run = held_run(of("pads", clients=3), through=lambda role: Spoiling(role, unopenable))
    (why,) = run.stops
    assert why == "too few clients are left; client 2: has dealt shares of its mask that cannot be opened"


def test_a_run_that_stops_early_leaves_its_clients_with_the_last_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most are not told how the second epoch's rounds are drawn: too few are left, and the model has just moved."""
    monkeypatch.setattr(directory, "WINDOW", 2)
    told: set[int] = set()

    def lost(request: Request, client: int) -> bool:
        if not isinstance(request, Nonces):
            return False
        again = client in told
        told.add(client)
        return again and client < 3

    run = held_run(of("pads", clients=5, rounds=4), absent=lost)
    assert len(run.stops) == 1
    assert [bool(done.failed) for done in run.rounds] == [False, False]
    held = [run.engine.state_of(client).held for client in range(5)]
    assert [None if one is None else one.version for one in held] == [2] * 5


class Apart:
    """Clients that each have a role of their own, as on machines of their own: none shares what another has read."""

    def __init__(self, one: Job, role: Any) -> None:
        self._roles = {data.client: client_role(one) for data in one.pool.clients}
        self._role = role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None, **how: Any) -> Any:
        for state, data in zip(states, clients, strict=True):
            yield from self._roles[state.client].handle_many([state], request, [data], private, **how)


@pytest.mark.parametrize("scheme", ["serial", "paraaegis"])
def test_nobody_is_put_out_for_what_was_lost_on_its_way_and_all_end_with_one_model(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a second epoch's clients are not told how its rounds are drawn; the sums before it are as true as any."""
    monkeypatch.setattr(directory, "WINDOW", 2)
    told: set[int] = set()

    def lost(request: Request, client: int) -> bool:
        again = isinstance(request, Nonces) and client in told
        told.update({client} if isinstance(request, Nonces) else ())
        return again and client < 4

    one = job(scheme=scheme, **{**SMALL, "clients": 7, "rounds": 4, "cipher": "pads"})
    run = held_run(one, absent=lost, through=lambda role: Apart(one, role))
    assert not run.relay.left_out
    assert not any(done.taken_back for done in run.rounds)
    version, _ = run.relay.standing
    held = [run.engine.state_of(client).held for client in range(7)]
    assert [None if one is None else one.version for one in held] == [version] * 7
    assert {run.engine.state_of(client).misread for client in range(7)} == {0}


def lends_falsely(monkeypatch: pytest.MonkeyPatch, liars: set[int]) -> list[int]:
    """These lend the model under another story than its own; gives who lends, in turn."""
    real, lenders = Keeper.lend, list[int]()

    def lend(self: Keeper, state: Any) -> Lent:
        lenders.append(state.client)
        if state.client in liars:
            state = replace(state, held=replace(self.held(state), transcript=bytes(32)))
        return real(self, state)

    monkeypatch.setattr(Keeper, "lend", lend)
    return lenders


def away(*clients: int) -> Callable[[Any, int], bool]:
    return lambda request, client: isinstance(request, Begin) and request.round == 1 and client in clients


@pytest.mark.parametrize("way", ["pads", "ballots"])
@pytest.mark.parametrize(
    ("liars", "clients", "missed", "failing"),
    [({0}, 5, (3,), 1), ({0, 1}, 5, (3,), 2), ({0}, 8, (3, 4), 1)],
    ids=["one liar", "two liars", "two borrowers"],
)
def test_a_lender_who_lies_has_its_borrower_borrow_from_another(
    monkeypatch: pytest.MonkeyPatch, way: str, liars: set[int], clients: int, missed: tuple[int, ...], failing: int
) -> None:
    """The masks of a borrower that was told other sums open nowhere: that is the lender's doing, and nobody else's."""
    lenders = lends_falsely(monkeypatch, liars)
    run = held_run(of(way, clients=clients, rounds=4 + failing), absent=away(*missed))
    assert [bool(done.failed) for done in run.rounds] == [False, False, *[True] * failing, False, False]
    assert len(set(lenders)) == failing + 1
    assert not run.relay.left_out
    assert run.rounds[-1].gathered.arrived == tuple(range(clients))
    for client in range(clients):
        held = run.engine.state_of(client).held
        assert held is not None
        assert same_bits(held.weights.parameters, run.model)


@pytest.mark.parametrize("liars", [{0}, {2}, {0, 2}], ids=str)
def test_lenders_who_lie_to_most_of_a_round_have_none_of_the_others_put_out(
    monkeypatch: pytest.MonkeyPatch, liars: set[int]
) -> None:
    """Of rounds that are drawn, most borrow, and those who do not are the ones who cannot open what is dealt."""
    one = of("pads", clients=10, cohort=5, rounds=8)
    lenders = lends_falsely(monkeypatch, liars)
    run = held_run(one)
    assert liars <= set(lenders)
    assert any(done.failed for done in run.rounds)
    assert not run.relay.left_out
    assert not run.rounds[-1].failed


def test_a_borrower_to_whom_three_lenders_models_were_of_no_use_is_put_out() -> None:
    class Always(Spoiling):
        def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
            for state, reply in self._role.handle_many(states, request, clients, private):
                mine = isinstance(reply, Divided) and reply.round > 1 and state.client == 2
                yield state, unopenable(reply) if mine else reply

    run = held_run(of("pads", clients=5, rounds=7), absent=away(2), through=lambda role: Always(role, unopenable))
    assert [bool(done.failed) for done in run.rounds] == [False, False, True, True, True, False, False]
    assert list(run.relay.left_out) == [2]


class Bluffing:
    """One client spoils a round's sum under its pads, says that it can read it, and lends a model that it is not."""

    def __init__(self, role: Any, *, bad: int = 0, round: int = 0, lends: bool = True) -> None:
        self._role, self._bad, self._round, self._lends = role, bad, round, lends

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        for state, reply in self._role.handle_many(states, request, clients, private):
            said = reply
            if state.client == self._bad and isinstance(reply, Divided) and reply.round == self._round:
                assert isinstance(reply.hidden, MaskedUpload)
                said = replace(reply, hidden=replace(reply.hidden, payload=reply.hidden.payload + (1 << 62)))
            asked = self._lends and state.client == self._bad and isinstance(request, Lend)
            if asked and isinstance(reply, UnreadableError):
                keeper = self._role._keeper
                said = keeper.lend(replace(state, held=replace(keeper.held(state), version=request.version)))
            yield state, said


def test_who_was_lent_a_model_that_spoilt_sums_are_said_to_lead_to_goes_on_with_the_others() -> None:
    def absent(request: Any, client: int) -> bool:
        return isinstance(request, Begin) and request.round == 0 and client == 3

    one, rounds = of("pads", clients=5, rounds=4), list[RoundDone]()
    relay = relay_of(one)
    drive(LocalEngine(Bluffing(client_role(one)), one.pool, absent=absent), relay.run(), on_round=rounds.append)  # type: ignore[arg-type]
    assert [bool(done.failed) for done in rounds] == [False, True, False, False]
    assert list(relay.left_out) == [0]
    assert [done.gathered.arrived for done in rounds[2:]] == [(1, 2, 3, 4)] * 2


def test_whoever_is_lent_a_model_at_the_end_has_the_one_that_the_others_have() -> None:
    """The last sum is spoilt, and who missed it is lent what it leads to: first it is seen whether most can read it."""

    def absent(request: Any, client: int) -> bool:
        return isinstance(request, Begin) and request.round == 2 and client == 4

    one, rounds = of("pads", clients=5, rounds=3), list[RoundDone]()
    relay = relay_of(one)
    engine = LocalEngine(Bluffing(client_role(one), round=2), one.pool, absent=absent)  # type: ignore[arg-type]
    drive(engine, relay.run(), on_round=rounds.append)
    assert not any(done.failed for done in rounds)  # of the last one nobody could know
    ends = [engine.state_of(client).held for client in range(1, 5)]
    assert all(held is not None and held.version == 2 for held in ends)
    assert len({held.weights.parameters.numpy().tobytes() for held in ends if held is not None}) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_spoilt_sum_of_another_cohort_costs_its_round_and_not_the_run(seed: int) -> None:
    """Nobody of the next cohort can move by it, and whoever is asked to lend what it leads to says that it cannot."""
    one, rounds, stops = of("pads", clients=12, cohort=4, rounds=5, seed=seed), list[RoundDone](), list[str]()
    relay = relay_of(one)
    role = Bluffing(client_role(one), bad=one.cohort.draw(0)[0], lends=False)
    drive(LocalEngine(role, one.pool), relay.run(), on_round=rounds.append, on_stop=stops.append)  # type: ignore[arg-type]
    assert stops == []
    assert [bool(done.failed) for done in rounds].count(True) <= 1
    assert relay.left_out == {}
    assert relay.standing[0] >= 3


def test_a_single_lender_of_sums_that_others_could_not_read_is_not_believed() -> None:
    """Of three who are in the first sums two cannot read them, and the third, who spoilt them, lends a model."""
    for seed in range(60):
        one = of("pads", clients=7, cohort=3, rounds=3, seed=seed)
        first, second = (set(one.cohort.draw(number)) for number in (0, 1))
        if not first & second:
            break
    bad, rounds = max(first), list[RoundDone]()
    relay = relay_of(one)
    engine = LocalEngine(Bluffing(client_role(one), bad=bad), one.pool)  # type: ignore[arg-type]
    drive(engine, relay.run(), on_round=rounds.append)
    assert [done.aggregate.version for done in rounds if done.aggregate is not None] == [1, 1, 2]
    assert not any(done.failed for done in rounds)
