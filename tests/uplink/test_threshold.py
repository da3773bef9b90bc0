"""Rounds under threshold Paillier: the model of masks with the same integers, dropouts, and the refusal of lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from federation import job, next_ask, same_bits, server_of, trained
from fedveil import schemes
from fedveil.crypto.paillier import fresh_primes
from fedveil.engine import LocalEngine
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Train
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.options import MaskOptions
from fedveil.secrets import SecretStream
from fedveil.uplink.noise_plan import NoisePlan, Target
from fedveil.uplink.threshold import Deal, Decrypt, Decrypted, EncryptedUpload, Taken, TakeShare, ThresholdPaillier

SMALL: dict[str, Any] = {"rounds": 2, "options": {"depth": 2, "width": 2}}
NAMES = ("tp-smc", "pile")


def small(name: str, **settings: Any) -> Job:
    """Five clients, of whom one may side with the server: two decrypt, and a sum is of at least four."""
    loss = "square" if name == "pile" else "cross-entropy"
    return job(scheme=name, **{**SMALL, "loss": loss, **settings})


@pytest.mark.parametrize(("name", "local"), [("tp-smc", {}), ("tp-smc", {"local_steps": 2}), ("pile", {})], ids=str)
def test_the_model_is_that_of_masks_with_the_same_integers(name: str, local: dict[str, Any]) -> None:
    """To the last bit: what encrypts adds nothing and rounds nothing."""
    encrypted = small(name, **local)
    uplink = encrypted.scheme.uplink
    assert isinstance(uplink, ThresholdPaillier)
    masks = MaskOptions().masks(uplink.value_range, noise=uplink.noise)
    masked = replace(encrypted, scheme=replace(encrypted.scheme, uplink=masks))
    (ours, rounds), (theirs, _) = trained(encrypted), trained(masked)
    assert [done.failed for done in rounds] == ["", ""]
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)


def away(kind: type[Any], *clients: int) -> Callable[[Any, int], bool]:
    """These do not answer one kind of request."""
    return lambda request, client: type(request) is kind and client in clients


@pytest.mark.parametrize("settings", [{}, {"clients": 10}, {"clients": 10, "collusion": 0.2}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_under_masks_by_option_the_same_numbers_and_the_same_noise_are_summed(
    name: str, settings: dict[str, Any]
) -> None:
    """What a comparison trains in a cipher's place: to the last bit the same model, with as many absences allowed."""
    keyed, masked = small(name, **settings), small(name, cover="masks", **settings)
    assert not isinstance(masked.scheme.uplink, ThresholdPaillier)
    (ours, _), (theirs, rounds) = trained(keyed), trained(masked)
    assert [done.failed for done in rounds] == ["", ""]
    assert same_bits(ours.weights.parameters, theirs.weights.parameters)
    clients = keyed.config.clients
    assert masked.scheme.uplink.absences(clients) == keyed.scheme.uplink.absences(clients)
    line, other = (PrivacyJournal(one).ledger().line("server") for one in (keyed, masked))
    assert (line.verdict, line.epsilon) == (other.verdict, other.epsilon)


def test_masks_in_a_keys_place_are_refused_where_they_would_sum_otherwise() -> None:
    for settings in ({"clients": 64}, {"key_bits": 512}):
        with pytest.raises(ConfigError):
            small("tp-smc", cover="masks", **settings)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_clients_upload_the_sum_is_of_the_others(name: str) -> None:
    _, rounds = trained(small(name), absent=away(Train, 1))
    assert [done.failed for done in rounds] == ["", ""]
    assert [done.gathered.arrived for done in rounds] == [(0, 2, 3, 4)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_without_a_clients_partial_decryption_another_is_asked_and_the_sum_is_the_same(name: str) -> None:
    (whole, _), (state, rounds) = trained(small(name)), trained(small(name), absent=away(Decrypt, 0, 1))
    assert [done.failed for done in rounds] == ["", ""]
    assert [len(done.gathered.arrived) for done in rounds] == [5, 5]
    assert same_bits(state.weights.parameters, whole.weights.parameters)


def test_two_missing_are_too_many_for_a_sum_and_too_few_decrypt_nothing() -> None:
    for absent, why in (
        (away(Train, 1, 2), "3 of 4 needed uploads"),
        (away(Decrypt, 0, 1, 2, 4), "1 of 2 needed partial decryptions"),
    ):
        _, rounds = trained(small("tp-smc", rounds=1), absent=absent)
        assert why in rounds[0].failed


def changed(kind: type[Any], field: str, how: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    """Client 1's message of a kind with one field changed on its way."""

    def reorder(replies: list[Any]) -> list[Any]:
        return [
            replace(said, **{field: how(getattr(said, field))}) if type(said) is kind and said.client == 1 else said
            for said in replies
        ]

    return reorder


SPOILT = {
    "too short": lambda payload: payload[:-1],
    "zeros": torch.zeros_like,
    "beyond the modulus": lambda payload: torch.full_like(payload, 255),
    "of another width": lambda payload: payload[:, :-1],
}


@pytest.mark.parametrize("how", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize(("kind", "field"), [(EncryptedUpload, "payload"), (Decrypted, "partial")], ids=["up", "down"])
def test_what_is_no_ciphertext_is_refused_and_the_round_goes_on(kind: type[Any], field: str, how: Any) -> None:
    _, rounds = trained(small("tp-smc"), reorder=changed(kind, field, how))
    assert [done.failed for done in rounds] == ["", ""]
    refused = [done.gathered.refused for done in rounds if done.gathered.refused]
    assert refused
    assert all(list(one) == [1] and one[1].came and one[1].code is Code.PROTOCOL for one in refused)


@pytest.mark.parametrize(("kind", "field"), [(EncryptedUpload, "payload"), (Decrypted, "partial")], ids=["up", "down"])
def test_forged_ciphertexts_and_partial_decryptions_spoil_the_round_and_not_the_model(
    kind: type[Any], field: str
) -> None:
    """Any other unit modulo N² is a ciphertext of something, mostly beyond what clients may send."""
    one = small("tp-smc", rounds=1)
    before = server_of(one).state.weights.parameters.clone()
    forged = changed(kind, field, lambda payload: torch.cat([torch.zeros_like(payload[:, :1]), payload[:, 1:]], 1))
    state, (done,) = trained(one, reorder=forged)
    assert done.code is Code.IMPLAUSIBLE
    assert torch.equal(state.weights.parameters, before)


def test_who_has_taken_a_share_of_another_key_takes_no_part() -> None:
    _, rounds = trained(small("tp-smc"), reorder=changed(Taken, "digest", torch.zeros_like))
    assert [done.gathered.arrived for done in rounds] == [(0, 2, 3, 4)] * 2


@pytest.fixture(scope="module")
def answered() -> tuple[Job, ClientState, Decrypt]:
    """Client 0, which has uploaded in a round and is about to be asked to decrypt, and the request."""
    one = small("tp-smc", rounds=1)
    engine, steps = LocalEngine(client_role(one), one.pool), server_of(one).run()
    ask = next_ask(steps)
    while not isinstance(ask.common, Decrypt):
        ask = next_ask(steps, engine.gather(ask))
    return one, engine.state_of(0), ask.common


def asked(answered: tuple[Job, ClientState, Decrypt], **changes: Any) -> tuple[ClientState, Any]:
    one, state, request = answered
    return client_role(one).handle(state, replace(request, **changes), one.pool.clients[0])


def test_a_client_decrypts_once_for_a_round_whatever_the_product(answered: tuple[Job, ClientState, Decrypt]) -> None:
    one, _, request = answered
    state, reply = asked(answered)
    assert isinstance(reply, Decrypted)
    assert state.revealed == (0, 0)
    other = replace(request, product=request.product.flip(0))
    for again in (request, other):
        with pytest.raises(ProtocolError, match="twice") as refused:
            client_role(one).handle(state, again, one.pool.clients[0])
        assert refused.value.code is Code.PROTOCOL
    # What it has promised it remembers, wherever its state is kept meanwhile.
    key = bytes(32)
    with pytest.raises(ProtocolError, match="twice"):
        client_role(one).handle(ClientState.unseal(state.seal(key), key), other, one.pool.clients[0])


REFUSED: dict[str, tuple[Callable[[Decrypt], dict[str, Any]], str]] = {
    "another round": (lambda ask: {"round": 1}, "not the one it answered last"),
    "another attempt": (lambda ask: {"attempt": 1}, "not the one it answered last"),
    "a sum without itself": (lambda ask: {"contributors": torch.tensor([1, 2, 3, 4])}, "without itself"),
    "a sum of strangers": (lambda ask: {"contributors": torch.tensor([0, 1, 2, 7])}, "of strangers"),
    "a sum of too few": (lambda ask: {"contributors": torch.tensor([0, 1, 2])}, "4 of 5 are needed"),
    "more than a sum": (lambda ask: {"product": torch.cat([ask.product, ask.product[:1]])}, "something else"),
    "less than a sum": (lambda ask: {"product": ask.product[:-1]}, "something else"),
    "another width": (lambda ask: {"product": ask.product[:, 1:]}, "something else"),
    "no ciphertexts": (lambda ask: {"product": torch.zeros_like(ask.product)}, "no unit"),
}


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED)
def test_a_client_decrypts_nothing_but_a_sum_of_its_round(
    answered: tuple[Job, ClientState, Decrypt], changes: Any, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why) as refused:
        asked(answered, **changes(answered[2]))
    assert refused.value.code is Code.PROTOCOL


def test_a_client_changes_over_to_no_other_key_and_deals_none_but_its_own(
    answered: tuple[Job, ClientState, Decrypt],
) -> None:
    """Client 0 has dealt; who has taken a share of its key deals no other."""
    one, state, _ = answered
    assert state.share is not None
    role, public = client_role(one), state.share.public.to_bytes()
    other = TakeShare(1, torch.tensor([*public[:-1], public[-1] ^ 2], dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="handed one of another"):
        role.handle(state, other, one.pool.clients[0])
    again, dealt = role.handle(state, Deal(torch.tensor([1, 2, 3, 4])), one.pool.clients[0])
    assert again.share is not None
    assert bytes(dealt.public.tolist()) == public  # type: ignore[attr-defined]
    taker = replace(state, share=type(state.share)(state.share.run, state.share.public, 1))
    with pytest.raises(ProtocolError, match="not dealt"):
        role.handle(taker, Deal(torch.tensor([1])), one.pool.clients[0])
    stranger = replace(state, share=None)
    with pytest.raises(ProtocolError, match="was sent none"):
        role.handle(stranger, TakeShare(1, torch.tensor(list(public), dtype=torch.uint8)), one.pool.clients[0])
    with pytest.raises(ProtocolError, match="odd number of 256 bits"):
        role.handle(stranger, TakeShare(1, torch.zeros(32, dtype=torch.uint8)), one.pool.clients[0])


def test_a_server_that_relays_a_share_with_a_modulus_of_its_own_is_refused() -> None:
    """It knows the factors of its own, and would read single uploads: shares are sealed for the dealer's modulus."""
    one = small("tp-smc", rounds=1)
    engine, steps = LocalEngine(client_role(one), one.pool), server_of(one).run()
    ask = next_ask(steps)
    while not isinstance(ask.common, TakeShare):
        ask = next_ask(steps, engine.gather(ask))
    client = ask.to[0]
    primes = fresh_primes(256, SecretStream(bytes(32)))
    own = torch.tensor(list(math.prod(primes).to_bytes(32, "big")), dtype=torch.uint8)
    told = (engine.state_of(client), one.pool.clients[client], ask.each[client])
    with pytest.raises(ProtocolError, match="sealed under another key"):
        client_role(one).handle(told[0], replace(ask.common, public=own), *told[1:])
    assert isinstance(client_role(one).handle(told[0], ask.common, *told[1:])[1], Taken)


def test_who_comes_later_is_dealt_a_share_of_the_same_key() -> None:
    """Every tenth round latecomers are let in: client 4 answers from the eleventh on."""
    count = 0

    def absent(ask: Any, client: int) -> bool:
        nonlocal count
        count += type(ask).__name__ == "Train" and client == 0
        return client == 4 and count < 10

    _, rounds = trained(small("tp-smc", rounds=12, epsilon=100.0), absent=absent)
    here = [len(done.gathered.arrived) for done in rounds if not done.failed]
    assert here[-1] == 5


@pytest.mark.parametrize(
    ("clients", "collusion", "quorum", "least"),
    [(5, 0.0, 1, 5), (5, 0.1, 2, 4), (5, 0.6, 4, 5), (10, 0.5, 6, 7), (10, 0.8, 9, 10), (100, 0.1, 11, 90)],
)
def test_quorum_and_smallest_sum_follow_from_who_may_collude(
    clients: int, collusion: float, quorum: int, least: int
) -> None:
    """t̄ = n − t + 1 shares decrypt, sums are of max(t, n − t + 2), and the noise of t − 1 others is counted on."""
    uplink = ThresholdPaillier(256, collusion, clients, clients)
    uplink.fits(clients)
    assert (uplink.quorum, uplink.fewest(clients)) == (quorum, least)
    assert uplink.absences(clients) == clients - least


@pytest.mark.parametrize(
    ("uplink", "clients"),
    [
        (ThresholdPaillier(256, 0.1, 2, 2), 2),
        (ThresholdPaillier(256, 0.9, 5, 5), 5),
        (ThresholdPaillier(256, 0.1, 100, 5), 5),
        (ThresholdPaillier(256, 0.1, 2000, 2000), 2000),
    ],
    ids=["two clients", "one honest", "a quorum larger than a round", "too many holders"],
)
def test_rounds_that_would_hide_nothing_do_not_begin(uplink: ThresholdPaillier, clients: int) -> None:
    with pytest.raises(ConfigError):
        uplink.fits(clients)


@pytest.mark.parametrize("accounting", ["exact", "paper"])
@pytest.mark.parametrize("collusion", [0.0, 0.5, 0.8], ids=["t = n", "t = n/2", "t = 2"])
def test_noise_is_sized_for_the_honest_clients_of_the_smallest_sum(collusion: float, accounting: Any) -> None:
    """Ten clients. Exactly: whoever is honest in the smallest sum covers it; by the paper: S²σ²/(t − 1) each."""
    plan = NoisePlan(Target(3.0, 1e-5, 4, 4), "sum", accounting, collusion=collusion, asked=10, decrypted=True)
    layout = plan.noise_layout(range(10), [30] * 10, [2.0] * 10, seed=b"", round=0)
    honest = 10 - round(collusion * 10)
    if accounting == "paper":
        sigma = (2 * torch.log(torch.tensor(1.25e5, dtype=torch.float64))).sqrt().item() / 3.0
        assert layout.residual == pytest.approx([(2.0 * sigma) ** 2 / (honest - 1)] * 10)
        return
    left = {10: 9, 5: 2, 2: 2}[honest]  # the smallest sum less who colludes, of whom there is always counted one
    mu2 = plan.target.mu**2 / 4
    assert layout.residual == pytest.approx([2.0**2 / mu2 / left] * 10, rel=1e-4)


def test_noise_that_slots_would_cut_off_within_its_tail_is_refused() -> None:
    """The first round's is so wide that words hold the sum's, but slots would cut a client's at ten deviations."""
    wide = small("tp-smc", clients=40, rounds=3, epsilon=8e-6, noise_decay=0.005)
    with pytest.raises(ConfigError, match="do not fit slots"):
        trained(wide)


def test_ledgers_say_what_is_proven_and_by_whom_it_is_opened() -> None:
    ledgers = {name: PrivacyJournal(small(name)).ledger() for name in NAMES}
    assert {line.verdict for line in ledgers["tp-smc"].lines} == {"differential privacy"}
    verdicts = {line.adversary: line.verdict for line in ledgers["pile"].lines}
    assert verdicts["server"] == verdicts["server and colluding clients"] == "aggregate only"
    assert verdicts["clients"] == "none"
    for ledger in ledgers.values():
        assert any("dealer" in text for text in ledger.line("server").assumptions)
        assert any("cannot check the product" in text for text in ledger.line("server").assumptions)
        assert any("256 bits can be found out" in text for text in ledger.unprotected)
        uploads = [one for one in ledger.releases if one.field.startswith("upload.g")]
        assert uploads
        assert all(one.protection in ("masked", "noised") for one in uploads)
    assert ledgers["tp-smc"].paper is not None
    assert "without proofs" in schemes.find("pile").summary


def test_keys_that_can_be_found_out_are_for_simulations() -> None:
    assert small("pile", key_bits=512).scheme.uplink.key_bits == 512  # type: ignore[attr-defined]
    for settings in ({"key_bits": 1024, "secrets": "os"}, {"key_bits": 1000}, {"collusion": 1.0}):
        with pytest.raises(ConfigError):
            small("pile", **settings)
    assert small("pile", secrets="os").scheme.uplink.key_bits == 2048  # type: ignore[attr-defined]


def test_groups_of_clients_do_not_hold_one_key_together() -> None:
    for name in NAMES:
        with pytest.raises(ConfigError, match="does not go with"):
            small(name, clients=20, robust_groups=4)


def test_a_round_counts_the_bytes_of_both_phases() -> None:
    one = small("tp-smc", rounds=1)
    uplink = one.scheme.uplink
    assert isinstance(uplink, ThresholdPaillier)
    _, rounds = trained(one)
    length = one.scheme.layout(one.architecture).length
    least = length * uplink.key_bits // 4 // 10  # a slot has more bits than 25, so that ten at most are in a ciphertext
    assert rounds[0].gathered.bytes_up > 5 * least
