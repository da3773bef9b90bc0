"""Rounds under functional encryption: the model of masks with the same integers, dropouts, the authority's refusals."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from driving import drive
from federation import job, next_ask, same_bits, server_of, trained
from fedveil.crypto.functional import SCALAR_BYTES, AuthoritySecrets, EncryptionKey
from fedveil.crypto.keys import Identity, Roster
from fedveil.engine import LocalEngine
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode
from fedveil.protocol.messages import Train
from fedveil.protocol.phases import Ask
from fedveil.runs.job import Guard, Job
from fedveil.runs.loop import authority_role, client_role
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.options import MaskOptions
from fedveil.secrets import SeededSecrets, StoredSecret
from fedveil.uplink import functional
from fedveil.uplink.functional import (
    FunctionalEncryption,
    FunctionalUpload,
    FunctionKeys,
    KeyAuthority,
    KeyFor,
    RoundKey,
    RoundKeys,
    SetupRound,
)
from reach import CLIENT_SIDE, CLIENTS_OWN, SERVERS_OWN, Secrets, leaks
from roles.fuzzing import LONGEST, Mutator, within

SMALL: dict[str, Any] = {"rounds": 2, "options": {"depth": 2, "width": 2}, "loss": "cross-entropy"}


def small(**settings: Any) -> Job:
    """Five clients, of whom one may side with the server: a sum is of at least four. The authority is number 5."""
    return job(scheme="hybridalpha", **{**SMALL, **settings})


def engine_of(one: Job, authority: Any = None, **given: Any) -> LocalEngine:
    return LocalEngine(client_role(one), one.pool, authority=authority or authority_role(one), **given)


@pytest.mark.parametrize("local", [{}, {"local_steps": 2}, {"accounting": "paper"}], ids=str)
def test_the_model_is_that_of_masks_with_the_same_integers(local: dict[str, Any]) -> None:
    """To the last bit: what encrypts adds nothing and rounds nothing."""
    encrypted = small(**local)
    masks = MaskOptions().masks(noise=encrypted.scheme.uplink.plan)
    masked = replace(encrypted, scheme=replace(encrypted.scheme, uplink=masks))
    (ours, rounds), (theirs, _) = trained(encrypted), trained(masked)
    assert [done.failed for done in rounds] == ["", ""]
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)


def test_under_masks_by_option_the_same_numbers_and_the_same_noise_are_summed() -> None:
    """What a comparison trains in the cipher's place, with as many absences allowed and the same ε."""
    keyed, masked = small(), small(cover="masks")
    (ours, _), (theirs, rounds) = trained(keyed), trained(masked)
    assert [done.failed for done in rounds] == ["", ""]
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)
    assert masked.scheme.uplink.absences(5) == keyed.scheme.uplink.absences(5)
    line, other = (PrivacyJournal(one).ledger().line("server") for one in (keyed, masked))
    assert (line.verdict, line.epsilon) == (other.verdict, other.epsilon)


def away(kind: type[Any], *clients: int) -> Callable[[Any, int], bool]:
    """These do not answer one kind of request."""
    return lambda request, client: type(request) is kind and client in clients


def test_without_a_clients_upload_the_sum_is_of_the_others_and_no_client_is_asked_again() -> None:
    asked: list[Any] = []

    class Watching(LocalEngine):
        def gather(self, ask: Ask) -> Any:
            asked.append(ask)
            return super().gather(ask)

    one, rounds = small(rounds=1), list[Any]()
    engine = Watching(client_role(one), one.pool, authority=authority_role(one), absent=away(Train, 1))
    drive(engine, server_of(one).run(), on_round=rounds.append)
    assert (rounds[0].failed, rounds[0].gathered.arrived) == ("", (0, 2, 3, 4))
    train = next(at for at, ask in enumerate(asked) if isinstance(ask.common, Train))
    assert [(type(ask.common), ask.to) for ask in asked[train - 1 :]] == [
        (SetupRound, (5,)),
        (Train, (0, 1, 2, 3, 4)),
        (KeyFor, (5,)),
    ]
    assert asked[-1].common.weights.tolist() == [1, 0, 1, 1, 1]


def test_two_missing_are_too_many_for_a_sum() -> None:
    _, (done,) = trained(small(rounds=1), absent=away(Train, 1, 2))
    assert "3 of 4 needed uploads" in done.failed


@pytest.mark.parametrize(("kind", "why"), [(SetupRound, "drawn no keys"), (KeyFor, "given no key")])
def test_without_the_authority_a_round_fails_and_costs_no_more(kind: type[Any], why: str) -> None:
    one, gone = small(), 0

    def absent(request: Any, client: int) -> bool:
        nonlocal gone
        gone += type(request) is kind
        return type(request) is kind and gone == 1

    _, rounds = trained(one, absent=absent)
    assert why in rounds[0].failed
    assert "did not answer" in rounds[0].failed
    assert not rounds[1].failed
    assert (rounds[0].gathered.bytes_up == 0) is (kind is SetupRound)  # nobody was asked


def changed(
    kind: type[Any], field: str, how: Callable[[Any], Any], client: int = 1
) -> Callable[[list[Any]], list[Any]]:
    """A client's message of a kind with one field changed on its way."""

    def reorder(replies: list[Any]) -> list[Any]:
        return [
            replace(said, **{field: how(getattr(said, field))})
            if type(said) is kind and said.client == client
            else said
            for said in replies
        ]

    return reorder


def off_the_curve(payload: torch.Tensor) -> torch.Tensor:
    spoilt = payload.clone()
    spoilt[2, 1:33] = 255
    return spoilt


SPOILT = {
    "a number too few": lambda payload: payload[:-1],
    "a number too many": lambda payload: torch.cat([payload, payload[:1]]),
    "zeros": torch.zeros_like,
    "a point off the curve": off_the_curve,
    "of another width": lambda payload: payload[:, :-1],
}


@pytest.mark.parametrize("how", SPOILT.values(), ids=SPOILT)
def test_what_is_no_ciphertext_is_refused_and_the_round_goes_on_without_it(how: Any) -> None:
    _, (done,) = trained(small(rounds=1), reorder=changed(FunctionalUpload, "payload", how))
    assert not done.failed
    assert done.gathered.arrived == (0, 2, 3, 4)
    assert list(done.gathered.refused) == [1]
    assert (done.gathered.refused[1].code, done.gathered.refused[1].came) == (Code.PROTOCOL, True)


FORGED = {
    "an upload": changed(FunctionalUpload, "payload", lambda payload: payload.flip(0)),
    "the halves of a key": changed(FunctionKeys, "halves", lambda halves: halves.flip(0), client=5),
    "the pads of a key": changed(FunctionKeys, "pads", lambda pads: pads.flip(0), client=5),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_sums_beyond_what_clients_may_send_cost_the_round_and_not_the_model(forged: Any) -> None:
    one = small(rounds=1)
    before = server_of(one).state.weights.parameters.clone()
    state, (done,) = trained(one, reorder=forged)
    assert done.code is Code.IMPLAUSIBLE
    assert torch.equal(state.weights.parameters, before)


def test_a_key_of_another_length_is_refused_and_none_is_there() -> None:
    _, (done,) = trained(small(rounds=1), reorder=changed(FunctionKeys, "pads", lambda pads: pads[:-1], client=5))
    assert "given no key" in done.failed
    assert done.code is Code.PROTOCOL


# --- what the authority refuses -----------------------------------------------------------------------------------


@cache
def asked() -> tuple[Job, ClientState, SetupRound, KeyFor]:
    """The authority before its first round's keys, and what the server then asks of it."""
    one = small()
    engine, steps = engine_of(one), server_of(one).run()
    ask = next_ask(steps)
    while not isinstance(ask.common, SetupRound):
        ask = next_ask(steps, engine.gather(ask))
    before, setup = engine.state_of(5), ask.common
    while not isinstance(ask.common, KeyFor):
        ask = next_ask(steps, engine.gather(ask))
    return one, before, setup, ask.common


def set_up(**changes: Any) -> tuple[KeyAuthority, ClientState, Any]:
    one, before, setup, _ = asked()
    role = authority_role(one)
    assert isinstance(role, KeyAuthority)
    return role, *role.handle(before, replace(setup, **changes))


def test_the_authority_gives_one_key_a_round_wherever_its_state_was_meanwhile() -> None:
    role, state, _ = set_up()
    request = asked()[3]
    state, reply = role.handle(state, request)
    assert isinstance(reply, FunctionKeys)
    kept = ClientState.unseal(state.seal(bytes(32)), bytes(32))
    for now in (state, kept):
        _, again = role.handle(now, request)
        assert isinstance(again, FunctionKeys)
        assert torch.equal(again.pads, reply.pads)
        for other in (
            replace(request, weights=torch.tensor([0, 1, 1, 1, 1])),
            replace(request, weights=request.weights * 2),
        ):
            with pytest.raises(ProtocolError, match="another key") as refused:
                role.handle(now, other)
            assert refused.value.code is Code.WITHHELD


WITHHELD: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"weights": torch.tensor([1, 1, 1, 0, 0])}, "4 of 5 are needed"),
    "one alone": ({"weights": torch.tensor([0, 0, 1, 0, 0])}, "4 of 5 are needed"),
    "nobody": ({"weights": torch.zeros(5, dtype=torch.int64)}, "4 of 5 are needed"),
    "unequal weights": ({"weights": torch.tensor([1, 1, 1, 1, 2])}, "differ"),
    "other clients": ({"weights": torch.tensor([1, 1, 1, 1])}, "4 weights"),
    "another round": ({"round": 1}, "not the one"),
    "another attempt": ({"attempt": 1}, "not the one"),
    "no numbers": ({"numbers": 0}, "cannot be"),
    "too many numbers": ({"numbers": 1 << 40}, "cannot be"),
}


@pytest.mark.parametrize(("changes", "why"), WITHHELD.values(), ids=WITHHELD)
def test_the_authority_withholds_keys_that_would_show_single_uploads(changes: dict[str, Any], why: str) -> None:
    role, state, _ = set_up()
    with pytest.raises(ProtocolError, match=why) as refused:
        role.handle(state, replace(asked()[3], **changes))
    assert refused.value.code is Code.WITHHELD


def test_a_refusal_of_the_authoritys_has_its_code_where_the_round_fails() -> None:
    """A server that asks for one client's key alone: the round is lost, and says why."""
    one = small(rounds=1)
    steps, engine, rounds = server_of(one).run(), engine_of(one), list[Any]()
    answer = None
    for _ in range(20):
        step = steps.send(answer)
        answer = None
        if isinstance(step, Ask):
            if isinstance(step.common, KeyFor):
                step = replace(step, common=replace(step.common, weights=torch.tensor([0, 0, 1, 0, 0])))
            answer = engine.gather(step)
        elif hasattr(step, "failed"):
            rounds.append(step)
            break
    assert rounds[0].code is Code.WITHHELD


def test_rounds_only_go_forward_and_every_one_has_keys_of_its_own() -> None:
    role, state, first = set_up()
    setup = asked()[2]
    for again in (setup, replace(setup, cohort=torch.tensor([0, 1, 2, 3])), replace(setup, attempt=1)):
        with pytest.raises(ProtocolError, match=r"^the key authority was asked for keys of round 1, .* left behind"):
            role.handle(state, again)
    later, second = role.handle(state, replace(setup, round=1))
    assert isinstance(second, RoundKeys)
    assert isinstance(first, RoundKeys)
    with pytest.raises(ProtocolError, match="not the one"):  # what the round before would have needed is gone
        role.handle(later, asked()[3])


SET_UP: dict[str, tuple[Callable[[SetupRound], dict[str, Any]], str]] = {
    "strangers": (lambda said: {"cohort": torch.tensor([0, 1, 2, 9])}, "not of the epoch"),
    "two clients": (lambda said: {"cohort": torch.tensor([0, 1])}, "two others"),
    "a number twice": (lambda said: {"cohort": torch.tensor([0, 1, 1, 2])}, "every client once"),
    "a swapped key": (
        lambda said: {"directory": replace(said.directory, keys=said.directory.keys.flip(0))},
        "not signed by the key",
    ),
}


@pytest.mark.parametrize(("changes", "why"), SET_UP.values(), ids=SET_UP)
def test_the_authority_draws_no_keys_for_strangers_or_too_few(changes: Any, why: str) -> None:
    with pytest.raises((ProtocolError, ConfigError), match=why):
        set_up(**changes(asked()[2]))


@pytest.mark.parametrize("round", [2, 500, 10**9])
def test_the_authority_draws_no_keys_for_a_round_outside_the_epoch(round: int) -> None:
    """Of a run of two rounds."""
    assert isinstance(set_up(round=1)[2], RoundKeys)
    with pytest.raises(ProtocolError, match="not of the epoch") as refused:
        set_up(round=round)
    assert refused.value.code is Code.WITHHELD


def test_the_largest_key_that_the_authority_gives_fits_into_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured of one a sixteenth as large, whose bytes are all that grows; and one number more is withheld."""
    assert functional.MOST_NUMBERS * SCALAR_BYTES == 32 << 20
    most = functional.MOST_NUMBERS >> 4
    monkeypatch.setattr(functional, "MOST_NUMBERS", most)
    role, state, _ = set_up()
    request = replace(asked()[3], numbers=most)
    tracemalloc.start()
    try:
        _, reply = role.handle(state, request)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(reply, FunctionKeys)
    assert reply.pads.numel() == most * SCALAR_BYTES
    fixed = peak - reply.pads.numel()
    assert fixed < 4 << 20
    with pytest.raises(ProtocolError, match="cannot be") as refused:
        role.handle(state, replace(request, numbers=most + 1))
    assert refused.value.code is Code.WITHHELD


def test_networks_of_more_numbers_than_a_key_is_given_for_do_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    one = small()
    monkeypatch.setattr(functional, "MOST_NUMBERS", one.scheme.layout(one.architecture).length - 2)
    with pytest.raises(ConfigError, match="--cover masks"):
        trained(one)
    trained(small(cover="masks"))


def test_the_authority_takes_no_directory_that_contradicts_an_earlier_one() -> None:
    role, state, _ = set_up()
    setup = asked()[2]
    other = replace(setup.directory, samples=setup.directory.samples + 1)
    with pytest.raises(ProtocolError, match="contradicts"):
        role.handle(state, replace(setup, round=1, directory=other))


def test_what_is_not_for_the_authority_is_refused() -> None:
    role, state, _ = set_up()
    with pytest.raises(ProtocolError, match="not for it"):
        role.handle(state, asked()[2].directory)
    with pytest.raises(ProtocolError):  # before any run
        role.handle(ClientState(5), asked()[3])


# --- what a client refuses ----------------------------------------------------------------------------------------


@cache
def handed() -> tuple[Job, dict[int, ClientState], Ask]:
    """Clients that are about to be asked to train, and what they are then sent."""
    one = small()
    engine, steps = engine_of(one), server_of(one).run()
    ask = next_ask(steps)
    while not isinstance(ask.common, Train):
        ask = next_ask(steps, engine.gather(ask))
    return one, {client: engine.state_of(client) for client in range(5)}, ask


def told(private: Any, *, client: int = 0, state: ClientState | None = None, **changes: Any) -> tuple[ClientState, Any]:
    one, states, ask = handed()
    request = replace(ask.common, **changes)
    return client_role(one).handle(state or states[client], request, one.pool.clients[client], private)


def test_a_client_encrypts_with_the_authoritys_key_of_the_round_and_forgets_it() -> None:
    state, upload = told(handed()[2].each[0])
    assert isinstance(upload, FunctionalUpload)
    assert isinstance(state.share, EncryptionKey)
    with pytest.raises(ProtocolError, match="has been used"):
        state.share.encrypt([1], SeededSecrets(1).stream("again"))


def another_authority(one: Job) -> Any:
    """An authority of the server's own making, and its key for client 0."""
    role = KeyAuthority(one.scheme.uplink, secrets=SeededSecrets(99), roster=None, identities=None)  # type: ignore[arg-type]
    _, said = role.handle(ClientState(5), asked()[2])
    assert isinstance(said, RoundKeys)
    return RoundKey(said.identity, said.key, said.signature, said.sealed[0])


LIES: dict[str, tuple[Callable[[Ask], Any], str]] = {
    "no key": (lambda ask: None, "without the key authority's key"),
    "another client's key": (lambda ask: ask.each[1], "another key"),
    "a changed seal": (lambda ask: replace(ask.each[0], sealed=ask.each[0].sealed ^ 1), "another key"),
    "a swapped public key": (lambda ask: replace(ask.each[0], key=ask.each[0].key ^ 1), "not signed"),
    "a swapped identity": (lambda ask: replace(ask.each[0], identity=ask.each[0].identity ^ 1), "not signed"),
}


@pytest.mark.parametrize(("lie", "why"), LIES.values(), ids=LIES)
def test_a_client_takes_no_key_but_its_own_from_the_authority(lie: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=why) as refused:
        told(lie(handed()[2]))
    assert refused.value.code is Code.PROTOCOL


def test_a_client_takes_no_key_that_the_authority_has_drawn_for_others_or_another_round() -> None:
    """A server that tells the authority of another cohort, or keeps a round's keys for the next one."""
    said = [set_up(cohort=torch.tensor([0, 1, 2, 3]))[2], set_up(round=1)[2], set_up(attempt=1)[2]]
    right = set_up()[2]
    for keys in said:
        assert torch.equal(keys.key, right.key)
        with pytest.raises(ProtocolError, match="another key"):
            told(RoundKey(keys.identity, keys.key, keys.signature, keys.sealed[0]))
    assert isinstance(told(RoundKey(right.identity, right.key, right.signature, right.sealed[0]))[1], FunctionalUpload)


def test_a_client_keeps_to_the_authority_that_it_has_met_first() -> None:
    one, states, ask = handed()
    own = another_authority(one)
    state, _ = told(own)  # without a roster nobody can tell whose it is
    assert isinstance(state.share, EncryptionKey)
    met = replace(states[0], share=EncryptionKey(state.share.run, state.share.authority))
    for now in (met, ClientState.unseal(met.seal(bytes(32)), bytes(32))):
        with pytest.raises(ProtocolError, match="another key authority"):
            told(ask.each[0], state=now)


def test_a_roster_pins_the_authority() -> None:
    identities = {number: bytes([number + 1]) * 32 for number in range(6)}
    public = {number: Identity(StoredSecret(key)).public for number, key in identities.items()}
    one = small(rounds=1)
    for pinned, refused in (
        (public, 0),
        ({**public, 5: bytes(32)}, 5),
        ({k: v for k, v in public.items() if k < 5}, 5),
    ):
        guard = Guard(roster=Roster(pinned), identities=identities)
        known = replace(one, guard=guard)
        role = KeyAuthority(one.scheme.uplink, secrets=SeededSecrets(3), roster=None, identities=identities)  # type: ignore[arg-type]
        rounds = list[Any]()
        engine = engine_of(known, role)
        drive(engine, server_of(known).run(), on_round=rounds.append)
        assert len(rounds[0].gathered.refused) == refused
        if refused:
            assert all("roster" in why.text for why in rounds[0].gathered.refused.values())


def test_the_authority_holds_clients_to_its_roster() -> None:
    one, before, setup, _ = asked()
    pinned = Roster({number: bytes([number + 1]) * 32 for number in range(6)})
    role = KeyAuthority(one.scheme.uplink, secrets=SeededSecrets(3), roster=pinned, identities=None)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="client 0"):
        role.handle(before, setup)


@pytest.mark.parametrize("times", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_changed_messages_end_no_authority(times: int) -> None:
    """Whatever it is sent, it answers or refuses; nothing is left that it cannot deal with."""
    role, state, _ = set_up()
    _, before, setup, key = asked()
    refused = 0
    for now, request in ((before, setup), (state, key)):
        mutator = Mutator(3)
        for _ in range(times):
            try:
                found = decode(mutator.changed(request))
            except ProtocolError:
                continue
            own = ClientState.unseal(now.seal(bytes(32)), bytes(32))
            with within(LONGEST):
                ((_, reply),) = role.handle_many([own], found)
            assert "cannot deal with" not in str(reply)
            refused += isinstance(reply, FedVeilError)
    assert refused > 10


# --- who can reach what -------------------------------------------------------------------------------------------


def test_nothing_of_the_authority_can_be_reached_from_server_or_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its keys nor what it draws; of a round's key, what the server is given is for the sum alone."""
    one, secrets, made = small(), Secrets(), list[AuthoritySecrets]()
    begin = AuthoritySecrets.__init__

    def note(self: AuthoritySecrets, seed: bytes) -> None:
        begin(self, seed)
        made.append(self)
        secrets.add_bytes("a round's seed", seed)
        secrets.add_bytes("a", self._scalar("a").to_bytes(32, "big"))
        for client in range(5):
            secrets.add_bytes(f"the pads of client {client}", self._pad_seed(client))

    monkeypatch.setattr(AuthoritySecrets, "__init__", note)
    role, authority, server, sent = client_role(one), authority_role(one), server_of(one), list[Any]()
    assert isinstance(authority, KeyAuthority)
    engine = LocalEngine(role, one.pool, authority=authority, listen=lambda heard: sent.append(heard.message))
    drive(engine, server.run(), on_round=lambda done: None)
    ring = engine.state_of(5).keys
    assert ring is not None
    for part in ring._stored:
        secrets.add_bytes("a key of the authority", part)
    assert len(made) == 4
    own = {"forbidden": (KeyAuthority, AuthoritySecrets)}
    assert leaks([server, sent], secrets, owned=SERVERS_OWN, allowed=[server._secrets], forbidden=CLIENT_SIDE) == []
    clients = [role, *(engine.state_of(client) for client in range(5))]
    assert leaks(clients, secrets, owned=CLIENTS_OWN, **own) == []
    for planted in (authority, made[0], made[0]._seed, ring._stored[1], engine.state_of(5)):
        assert leaks([planted], secrets, owned=(), **own)
    assert "hidden" in repr(authority)


def test_uploads_are_never_sent_to_the_authority() -> None:
    heard = list[Any]()

    class Listening(KeyAuthority):
        def handle(self, state: ClientState, request: Any) -> Any:
            heard.append(type(request))
            return super().handle(state, request)

    one = small(rounds=1)
    role = Listening(one.scheme.uplink, secrets=SeededSecrets(5), roster=None, identities=None)  # type: ignore[arg-type]
    drive(engine_of(one, role), server_of(one).run(), on_round=lambda done: None)
    assert heard == [SetupRound, KeyFor]


# --- settings, ledger ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "collusion", "least"), [(5, 0.0, 5), (5, 0.1, 4), (10, 0.5, 7), (10, 0.8, 10)])
def test_the_smallest_sum_follows_from_who_may_collude(clients: int, collusion: float, least: int) -> None:
    uplink = small(clients=clients, collusion=collusion).scheme.uplink
    assert isinstance(uplink, FunctionalEncryption)
    uplink.fits(clients)
    assert (uplink.fewest(clients), uplink.absences(clients)) == (least, clients - least)


@pytest.mark.parametrize("settings", [{"clients": 2}, {"collusion": 0.9}, {"collusion": 1.0}], ids=str)
def test_rounds_that_would_hide_nothing_do_not_begin(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        trained(small(**settings))


def test_rounds_of_more_clients_than_the_grid_is_proven_for_do_not_begin() -> None:
    uplink = small().scheme.uplink
    with pytest.raises(ConfigError, match="512"):
        uplink.fits(513)


def test_numbers_that_short_words_do_not_hold_are_refused_before_any_round() -> None:
    with pytest.raises(ConfigError, match="do not fit 28 bits"):
        trained(small(epsilon=1e-4))


def test_the_ledger_says_what_is_proven_and_by_whose_leave_sums_are_opened() -> None:
    ledger = PrivacyJournal(small()).ledger()
    assert {line.verdict for line in ledger.lines} == {"differential privacy"}
    said = ledger.line("server").assumptions
    assert any("together they open every one" in text for text in said)
    assert any("DDH" in text and "one round" in text for text in said)
    assert "the authority gives a key for" in ledger.line("server").why
    assert any("28" in text or "2^27" in text for text in ledger.notes)
    assert any("every client sees it" in text for text in ledger.unprotected)
    by_field = {one.field: one for one in ledger.releases}
    assert by_field["setupround.cohort"].to == by_field["setupround.directory.keys"].to == ("authority",)
    assert by_field["functionkeys.pads"].sender == "authority"
    assert by_field["upload.gradients"].protection == "noised"
    assert not [one for one in ledger.releases if "authority" in one.to and one.about == "data"]


def test_groups_of_clients_have_no_authority() -> None:
    with pytest.raises(ConfigError, match="does not go with"):
        small(clients=20, robust_groups=4)


def test_bytes_of_a_round_are_those_of_clients() -> None:
    one = small(rounds=1)
    _, (done,) = trained(one)
    numbers = one.scheme.layout(one.architecture).length - 1
    assert 5 * 99 * numbers < done.gathered.bytes_up < 5 * (99 * numbers + 400)
