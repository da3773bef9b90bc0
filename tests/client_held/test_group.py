"""The group: secrets that all clients share and the server does not, passed on by clients to clients."""

from __future__ import annotations

import copy
import json
import pickle
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from client_held.relaying import Hall
from federation import held_run, job
from fedveil.client_held.group import Found, Founded, Invitation, Join, Joined
from fedveil.client_held.messages import Begin
from fedveil.crypto import ckks
from fedveil.crypto.keys import seal
from fedveil.errors import ProtocolError
from fedveil.protocol.client_state import ClientState, Group, Held, Pending
from fedveil.protocol.directory import Hello, from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request
from fedveil.runs.job import Job
from fedveil.uplink.unmasking import packed, unpacked

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {"loss": "cross-entropy", "lr": 0.1, "batch_size": 16, "options": {"depth": 1, "width": 4}}
KEY = bytes(range(32))


def of(clients: int = 4, **how: Any) -> Job:
    return job(scheme="ckks-fedavg", clients=clients, **{"cipher": "pads", "rounds": 2, **SMALL, **how})


@pytest.fixture
def hall() -> Hall:
    """A run at the question who founds the group."""
    one = Hall(of())
    one.until(Found)
    return one


def members(one: Hall) -> list[int]:
    return one.relay._group.members


# ---- joining


@pytest.mark.parametrize("cipher", ["pads", "ckks"])
def test_all_clients_share_one_key_and_the_server_is_told_which_group_it_is(cipher: str) -> None:
    one = Hall(of(cipher=cipher))
    one.until(Begin)
    groups = [one.states[client].membership() for client in range(4)]
    assert len({group.seed(round=1, attempt=0, purpose="any") for group in groups}) == 1
    assert len({group.fingerprint() for group in groups}) == 1
    assert members(one) == [0, 1, 2, 3]
    assert all(bool(group.opening) is (cipher == "ckks") for group in groups)
    if cipher == "ckks":
        public = ckks.PublicKey.from_bytes(one.relay._group.public)
        assert public.key_id == ckks.SecretKey.from_bytes(groups[3].opening).public.key_id
        assert public.parameters.addends >= 4


def test_seeds_of_a_group_differ_by_round_attempt_purpose_run_and_key() -> None:
    first = Group("a run", bytes(32))
    seeds = [
        first.seed(round=0, attempt=0, purpose="pad of 1"),
        first.seed(round=1, attempt=0, purpose="pad of 1"),
        first.seed(round=0, attempt=1, purpose="pad of 1"),
        first.seed(round=0, attempt=0, purpose="pad of 2"),
        Group("another run", bytes(32)).seed(round=0, attempt=0, purpose="pad of 1"),
        Group("a run", KEY).seed(round=0, attempt=0, purpose="pad of 1"),
    ]
    assert len(set(seeds)) == 6
    assert {len(seed) for seed in seeds} == {32}
    assert first.fingerprint() != Group("a run", bytes(32), b"another opening").fingerprint()


def test_two_runs_and_two_attempts_have_two_groups() -> None:
    prints = set()
    for seed, attempt in ((1, 0), (2, 0), (1, 1)):
        one = Hall(of(seed=seed), attempt=attempt)
        one.until(Begin)
        prints.add(one.states[2].membership().fingerprint())
    assert len(prints) == 3


def test_if_the_first_client_does_not_answer_another_founds_the_group(hall: Hall) -> None:
    assert hall.ask.to == (0,)
    hall.go_on([], refused={0: "busy"})
    assert hall.ask.to == (1,)
    hall.go_on([hall.answer(1)])
    assert isinstance(hall.ask.common, Join)
    assert hall.ask.to == (0, 2, 3)
    hall.go_on([hall.answer(client) for client in (0, 2, 3)])
    assert members(hall) == [1, 0, 2, 3]
    assert isinstance(hall.ask.common, Begin)


def test_who_missed_the_founding_is_let_in_before_a_later_round_by_a_member() -> None:
    begun: list[Begin] = []

    def absent(request: Request, client: int) -> bool:
        if isinstance(request, Begin):
            begun.append(request)
        return client == 3 and isinstance(request, Join) and not begun

    run = held_run(of(rounds=3), absent=absent)
    assert [set(done.gathered.arrived) for done in run.rounds] == [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert len({run.engine.state_of(client).membership().fingerprint() for client in range(4)}) == 1
    held = [run.engine.state_of(client).held for client in range(4)]
    assert all(one is not None and torch.equal(one.weights.parameters, run.model) for one in held)


@pytest.mark.parametrize("how", [{"cipher": "ckks"}, {"scheme": "paraaegis", "vote": "histogram"}])
def test_who_introduces_itself_late_is_let_in_and_lent_the_model(how: dict[str, Any]) -> None:
    """Strangers are asked again every ten rounds; the directory has grown then, and votes and masks go on."""
    asked: list[int] = []

    def absent(request: Request, client: int) -> bool:
        if not isinstance(request, Hello) or client != 3:
            return False
        asked.append(client)
        return len(asked) <= 2

    one = job(clients=4, rounds=12, **{"scheme": "ckks-fedavg", "cipher": "pads", **SMALL, **how})
    run = held_run(one, absent=absent)
    assert [len(done.gathered.arrived) for done in run.rounds] == [3] * 10 + [4] * 2
    assert not any(done.failed or done.gathered.refused for done in run.rounds)
    held = run.engine.state_of(3).held
    assert held is not None
    assert held.version == 12
    assert torch.equal(held.weights.parameters, run.model)


def test_a_run_that_too_few_have_joined_stops_and_says_why(hall: Hall) -> None:
    """Whoever nobody follows has founded nothing, and the next is asked; it ends when nobody is left to ask."""
    founders: list[int] = []
    while not hall.stopped:
        assert isinstance(hall.ask.common, Found)
        founders += hall.ask.to
        hall.go_on([hall.answer(hall.ask.to[0])])
        assert isinstance(hall.ask.common, Join)
        with suppress(StopIteration):
            hall.go_on([], refused=dict.fromkeys(hall.ask.to, "the door is locked"))
        assert members(hall) == []
    assert founders[:2] == [0, 1]
    assert len(set(founders)) == len(founders)
    assert re.fullmatch(r"too few clients have joined the group; client \d: the door is locked", hall.stopped)


# ---- what clients refuse


def test_an_invitation_opens_for_its_receiver_alone_and_only_as_it_was_sealed(hall: Hall) -> None:
    hall.go_on([hall.answer(0)])
    own = hall.ask.each[1]
    assert isinstance(own, Invitation)
    sealed = to_bytes(own.sealed)
    flipped = sealed[:30] + bytes([sealed[30] ^ 1]) + sealed[31:]
    for wrong in (flipped, sealed[:-1], sealed + b"\0", b"", to_bytes(hall.ask.each[2].sealed)):  # type: ignore[attr-defined]
        assert "damaged, or sealed under another key" in hall.refusal(1, private=Invitation(from_bytes(wrong)))
    assert "damaged" in hall.refusal(1, request=Join(2))  # sealed by client 0, said to be by client 2
    assert "was sent no invitation" in hall.refusal(1, private=Join(0))
    assert isinstance(hall.answer(1), Joined)


def invited(one: Hall, content: bytes, *, founder: int = 0, newcomer: int = 1) -> Invitation:
    """An invitation that a founder seals with whatever content."""
    purpose = f"group {founder} > {newcomer}"
    key = one.states[founder].ring().pair(newcomer).seed(round=0, attempt=0, purpose=purpose)
    return Invitation(from_bytes(seal(content, key=key, purpose=purpose)))


def test_a_member_that_has_answered_a_round_is_not_lured_into_a_second_group_of_its_run(hall: Hall) -> None:
    """Before it has, its founder may have dealt everybody another key, and another founder mends that."""
    hall.go_on([hall.answer(0)])
    hall.answer(1)
    run = hall.states[1].ring().run
    own = json.dumps(hall.states[1].membership().stored()).encode()
    for stored in (json.dumps(Group(run, bytes(32)).stored()).encode(), own):
        assert isinstance(hall.answer(1, Join(2), invited(hall, stored, founder=2)), Joined)
    hall.states[1] = replace(hall.states[1], ran=run)
    for other in (Group(run, bytes(32)), Group(run, KEY, b"another opening")):
        invitation = invited(hall, json.dumps(other.stored()).encode(), founder=2)
        assert "plays two groups against each other" in hall.refusal(1, request=Join(2), private=invitation)
    assert isinstance(hall.answer(1), Joined)  # the same invitation again changes nothing


def test_a_group_of_another_run_is_refused(hall: Hall) -> None:
    stored = json.dumps(Group("another run", bytes(32)).stored()).encode()
    assert "the group of another run" in hall.refusal(1, request=Join(0), private=invited(hall, stored))


MALFORMED: dict[str, Any] = {
    "no text": b"\xff\xfe",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"5",
    "nothing": b"{}",
    "a key that is no text": b'{"run": "r", "key": 5, "opening": ""}',
    "a key of other digits": b'{"run": "r", "key": "zz", "opening": ""}',
    "a short key": b'{"run": "r", "key": "00", "opening": ""}',
    "an opening that is no text": b'{"run": "r", "key": "' + b"00" * 32 + b'", "opening": 3}',
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_secrets_that_a_founder_malformed_are_refused(hall: Hall, content: bytes) -> None:
    said = hall.refusal(1, request=Join(0), private=invited(hall, content))
    assert "malformed" in said or "another length" in said


def test_nobody_founds_joins_or_works_before_keys_are_agreed_on() -> None:
    one = Hall(of())
    assert isinstance(one.ask.common, Hello)
    newcomers = torch.arange(4)
    assert "before keys were agreed on" in one.refusal(0, request=Found(newcomers, 4))
    assert "before keys were agreed on" in one.refusal(0, request=Join(1), private=Invitation(from_bytes(b"")))
    one.until(Found)
    begin = Begin(0, 0, newcomers, 0, None)
    with pytest.raises(ProtocolError, match="before it was let into the group"):
        one.answer(0, begin)


def test_a_key_for_more_clients_than_any_ring_holds_is_not_made() -> None:
    one = Hall(of(cipher="ckks"))
    one.until(Found)
    assert one.refusal(0, request=Found(torch.arange(4), 1 << 60))
    assert one.states[0].group is None


# ---- what the server refuses


def test_a_founder_that_invites_others_than_it_was_told_to_is_refused(hall: Hall) -> None:
    reply: Founded = hall.answer(0)
    bundles = unpacked(reply.receivers, reply.lengths, reply.bundles)
    fewer = packed({client: bundle for client, bundle in bundles.items() if client != 2})
    more = packed({**bundles, 9: b"sealed"})
    for receivers, lengths, content in (fewer, more):
        wrong = replace(reply, receivers=receivers, lengths=lengths, bundles=content)
        with pytest.raises(ProtocolError, match="receivers is 3 here"):
            hall.ask.into.add(wrong)
    receivers, lengths, content = packed({9 if client == 2 else client: one for client, one in bundles.items()})
    with pytest.raises(ProtocolError, match="invites others than it was told to"):
        hall.ask.into.add(replace(reply, receivers=receivers, lengths=lengths, bundles=content))
    with pytest.raises(ProtocolError, match="a Reply arrived where a founded belongs"):
        hall.ask.into.add(Reply(0))
    hall.ask.into.add(reply)
    with pytest.raises(ProtocolError, match="a second one"):
        hall.ask.into.add(reply)


def test_who_joined_another_group_is_no_member(hall: Hall) -> None:
    hall.go_on([hall.answer(0)])
    honest = [hall.answer(client) for client in (1, 3)]
    stranger = replace(hall.answer(2), fingerprint=from_bytes(bytes(16)))
    with pytest.raises(ProtocolError, match="has not joined the group it was invited to"):
        hall.ask.into.add(stranger)
    with pytest.raises(ProtocolError, match="a Reply arrived where a joined belongs"):
        hall.ask.into.add(Reply(2))
    hall.go_on(honest, refused={2: "has not joined"})
    assert members(hall) == [0, 1, 3]
    assert 2 not in hall.ask.to


def test_a_member_that_has_lost_its_group_cannot_found_a_second_one_in_its_place() -> None:
    """It starts anew with another key; what it seals for a latecomer is not passed on."""
    one = Hall(of())
    one.until(Found)
    one.go_on([one.answer(0)])
    one.go_on([one.answer(client) for client in (1, 2)])  # client 3 is away
    one.until(Begin)
    one.states[0] = replace(one.states[0], group=None)
    one.role._secrets = type(one.role._secrets)(77)  # type: ignore[call-arg]
    one.go_on([one.answer(client) for client in (1, 2)])
    while not isinstance(one.ask.common, Found):
        one.go_on([one.answer(client) for client in one.ask.to if client != 0])
    one.go_on([one.answer(0)])
    assert not isinstance(one.ask.common, Join)
    assert members(one) == [0, 1, 2]
    assert one.relay._group.refused[0].text == "a member answered for another group than this run's"


# ---- kept secret, and kept


@pytest.fixture(scope="module")
def worked() -> ClientState:
    """A client in the middle of a round: with keys, a group, a model, a vote given and nothing uploaded yet."""
    one = Hall(job(scheme="paraaegis", clients=4, rounds=2, epsilon=100.0, **SMALL))
    one.until(Begin, round=1)
    one.answer(2)
    return one.states[2]


def test_a_state_with_group_model_and_work_comes_back_from_its_seal(worked: ClientState) -> None:
    again = ClientState.unseal(worked.seal(KEY), KEY)
    assert worked.held is not None
    assert again.held is not None
    assert worked.pending is not None
    assert again.pending is not None
    assert again.membership().stored() == worked.membership().stored()
    assert (again.held.version, again.held.loss) == (worked.held.version, worked.held.loss) == (1, worked.held.loss)
    for ours, theirs in ((again.held, worked.held), (again.pending, worked.pending)):
        mine, other = ours.tensors(), theirs.tensors()
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) and mine[name].dtype == other[name].dtype for name in mine)
    assert (again.pending.round, again.pending.attempt, again.pending.winners) == (1, 0, None)
    plain = {"keys": None, "group": None, "held": None, "pending": None}
    assert replace(again, **plain) == replace(worked, **plain)  # type: ignore[arg-type]
    decided = replace(worked, pending=replace(worked.pending, winners=torch.arange(3)))
    restored = ClientState.unseal(decided.seal(KEY), KEY).pending
    assert restored is not None
    assert restored.winners is not None
    assert restored.winners.tolist() == [0, 1, 2]


def test_a_damaged_state_is_refused(worked: ClientState) -> None:
    sealed = worked.seal(KEY)
    for place in range(0, len(sealed), len(sealed) // 50):
        damaged = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises(ProtocolError, match="damaged, or sealed under another key"):
            ClientState.unseal(damaged, KEY)
        with pytest.raises(ProtocolError):
            ClientState.unseal(sealed[:place], KEY)
    with pytest.raises(ProtocolError):
        ClientState.unseal(sealed, bytes(32))


def test_what_was_sealed_but_is_no_state_is_refused() -> None:
    for content in (
        b"",
        b"\0" * 7,
        b"\xff" * 20,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
    ):
        with pytest.raises(ProtocolError, match="stored state is damaged"):
            ClientState.unseal(seal(content, key=KEY, purpose="client state"), KEY)


def test_a_state_is_printed_without_what_it_keeps(worked: ClientState) -> None:
    group, held, pending = worked.membership(), worked.held, worked.pending
    assert held is not None
    assert pending is not None
    text = "".join(f"{one!r} {one!s}" for one in (worked, group, held, pending)) + f"{group:s}"
    assert "<Group: hidden>" in text
    assert "<Keyring: hidden>" in text
    assert "tensor" not in text
    assert group.stored()["key"] not in text
    for number in (*held.weights.parameters.tolist(), *pending.contribution.tolist()):
        assert abs(number) < 1e-3 or f"{number:.4f}" not in text
    assert "version=1" in repr(held)
    assert "round=1" in repr(pending)


def test_a_group_is_neither_pickled_nor_copied(worked: ClientState) -> None:
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Group holds secrets"):
            act(worked.membership())
    assert {type(worked.held), type(worked.pending)} == {Held, Pending}
