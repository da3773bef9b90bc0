"""What hides the winners: who can read a single upload, who a sum, and what gives a wrong list away.

Tests of uniformity are those of masked uploads: fixed seeds, and less than one false alarm in a million seeds each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_held.relaying import Covered, Recording, watch_uploads
from federation import HeldRun, held_run, job
from fedveil.client_held.ciphers import Ciphertext, Ckks, PaddedSum, Pads
from fedveil.client_held.messages import Divide, Divided
from fedveil.crypto import ckks
from fedveil.crypto.keys import add_mask
from fedveil.crypto.linear_mac import MAC_WORDS
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol.client_state import ClientState, Group
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.parts import RoundContext
from fedveil.secrets import SeededSecrets
from fedveil.uplink.masked import Masked
from fedveil.uplink.unmasking import MaskedUpload, Quorum
from uplink.masking import RUN, Federation, arrivals, mask_purpose, words
from uplink.test_masked import assert_uniform, byte_p_value

pytest.importorskip("tenseal")

LONG = 20_000
SMALL: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "batch_size": 16,
    "clients": 4,
    "rounds": 2,
    "how": "size",
    "epsilon": 1000.0,
}


# ---- one upload, in the hands of a server with one client on its side


def recorded(monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[HeldRun, list[Covered], dict[Any, Divided]]:
    """A run, what its clients covered, and what the server saw of it."""
    seen, kept = watch_uploads(monkeypatch), []

    def through(role: Any) -> Recording:
        kept.append(Recording(role))
        return kept[0]

    run = held_run(job(scheme="paraaegis", **{**SMALL, **how}), through=through)
    uploads = {(one.round, one.client): one for one in kept[0].replied if isinstance(one, Divided)}
    return run, seen, uploads


def hidden_values(run: HeldRun, one: Covered) -> Tensor:
    """What a client's hidden part says: its winners and what is reported beside them, over all samples."""
    size = run.job.architecture.size
    values = torch.cat([one.contribution[:size][one.winners], one.contribution[size:]])
    return values / sum(len(data) for data in run.job.pool.clients)


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_under_ckks_a_server_with_any_client_on_its_side_reads_everybodys_values(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    run, seen, uploads = recorded(monkeypatch, share=share)
    assert len(seen) == 2 * 4
    for one in seen:
        upload = uploads[one.round, one.client].hidden
        assert isinstance(upload, Ciphertext)
        traitor = run.engine.state_of((one.client + 1) % 4)
        key = ckks.SecretKey.from_bytes(traitor.membership().opening)
        read = torch.from_numpy(ckks.decrypt(to_bytes(upload.data), key))
        true = hidden_values(run, one)
        assert float((read - true).abs().max()) < ckks.PRECISION
        assert float(true.abs().max()) > 100 * ckks.PRECISION


def test_a_server_alone_has_no_key_that_opens_a_ciphertext(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, uploads = recorded(monkeypatch, share=1.0, rounds=1)
    upload = uploads[0, 1].hidden
    assert isinstance(upload, Ciphertext)
    public = run.relay._group.public
    assert ckks.PublicKey.from_bytes(public).key_id == ckks.summary(to_bytes(upload.data)).key_id
    with pytest.raises(ProtocolError):
        ckks.SecretKey.from_bytes(public)
    own = ckks.generate(ckks.choose(addends=4, largest=256.0))
    with pytest.raises(ProtocolError):
        ckks.decrypt(to_bytes(upload.data), own)


class Padded(Federation):
    """Clients of one group, hiding bare vectors under masks and pads."""

    def __init__(self, clients: int, *, length: int = LONG, seed: int = 0, unmask: Any = "always", **how: Any) -> None:
        self.pads = Pads(Masked(256.0, unmask, **how))
        super().__init__(clients, self.pads.masks, length=length, seed=seed)
        self.group = Group(RUN, SeededSecrets(seed).stream("group").bytes(32))
        self.states = {client: _member(state, self.group) for client, state in self.states.items()}

    def hidden(self, client: int, vector: Tensor, context: RoundContext) -> MaskedUpload:
        state = self.states[client].answering(context.round, context.attempt)
        self.states[client], part = self.pads.hide(state, vector, context, secrets=self.secrets)
        return cast(MaskedUpload, part)

    def all_hidden(self, vectors: dict[int, Tensor], context: RoundContext) -> dict[int, MaskedUpload]:
        return {client: self.hidden(client, vectors[client], context) for client in self.members}

    def opened(self, uploads: dict[int, MaskedUpload], context: RoundContext) -> tuple[PaddedSum, Tensor]:
        """The sum over those who arrived, their masks taken off."""
        total = self.pads.accumulator(self.terms.layout.length, context, public=b"")
        for upload in uploads.values():
            total.add(upload)
        ask = total.open(arrivals(uploads))
        if ask is not None:
            for client in ask.to:
                total.masked.add(self.answer(client, ask.common, ask.each[client]))
        return total, total.total()

    def off(self, opened: NDArray[np.uint64], client: int, context: RoundContext, allies: Iterable[int]) -> None:
        """Take off an upload what the server and its allies know of it: own mask, pad, masks shared with allies."""
        own = self.secrets.stream("self mask", client, context.round, context.attempt).bytes(32)
        if self.pads.masks.unmask == "always":
            add_mask(opened, own, subtract=True, wide=MAC_WORDS)
        self.without_pad(opened, client, context)
        for ally in allies:
            pair = self.states[ally].ring().pair(client)
            seed = pair.seed(round=context.round, attempt=context.attempt, purpose=mask_purpose(context))
            add_mask(opened, seed, subtract=client < ally, wide=MAC_WORDS)

    def without_pad(self, opened: NDArray[np.uint64], client: int, context: RoundContext) -> None:
        if client in self.pads.padding(context):
            pad = self.group.seed(round=context.round, attempt=context.attempt, purpose=f"pad of {client}")
            add_mask(opened, pad, subtract=True, wide=MAC_WORDS)


def _member(state: ClientState, group: Group) -> ClientState:
    return replace(state, group=group)


def ramps(federation: Padded) -> dict[int, Tensor]:
    """Multiples of 1/8, so that sums are exact in fixed point."""
    ramp = torch.arange(federation.terms.layout.length, dtype=torch.float64) % 800 / 8.0 - 50.0
    return {client: ramp + client / 8.0 for client in federation.members}


def word_sum(total: Tensor) -> NDArray[np.uint64]:
    return total.numpy().view(np.uint64)


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
def test_under_pads_a_server_with_one_client_on_its_side_sees_a_uniform_vector(unmask: str) -> None:
    federation = Padded(5, unmask=unmask)
    context, vectors = federation.context(), ramps(federation)
    uploads = federation.all_hidden(vectors, context)
    for client in (0, 1, 4):  # the first two pad
        opened = words(uploads[client]).copy()
        federation.off(opened, client, context, [3 if client != 3 else 2])
        assert_uniform(opened)


def test_with_everybody_else_on_its_side_the_server_reads_an_upload_after_all() -> None:
    """The same steps, so that the test above fails where they open something."""
    federation = Padded(5)
    context, vectors = federation.context(), ramps(federation)
    uploads = federation.all_hidden(vectors, context)
    for client in (0, 4):
        opened = words(uploads[client]).copy()
        federation.off(opened, client, context, [one for one in federation.members if one != client])
        assert byte_p_value(opened) < 1e-12
        read = federation.pads.codec(context).decode(opened[MAC_WORDS:])
        assert np.array_equal(read, vectors[client].numpy())


# ---- the sum, in the hands of the server


@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
@pytest.mark.parametrize("missing", [(), (0,), (1, 5), (0, 1)])
def test_a_sum_without_its_masks_is_uniform_and_clients_read_it(missing: tuple[int, ...], unmask: str) -> None:
    """Of eight, the first three pad; any two may be missing."""
    federation = Padded(8, unmask=unmask)
    context, vectors = federation.context(), ramps(federation)
    assert federation.pads.padding(context) == (0, 1, 2)
    uploads = {one: part for one, part in federation.all_hidden(vectors, context).items() if one not in missing}
    _, total = federation.opened(uploads, context)
    assert_uniform(word_sum(total))
    read = federation.pads.read(federation.group, total, sorted(uploads), context)
    assert torch.equal(read, sum(vectors[one] for one in uploads))  # type: ignore[arg-type]


def test_if_nobody_padded_the_server_would_read_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pads, "padding", lambda self, context: ())
    federation = Padded(7)
    context, vectors = federation.context(), ramps(federation)
    _, total = federation.opened(federation.all_hidden(vectors, context), context)
    assert byte_p_value(word_sum(total)) < 1e-12
    read = federation.pads.codec(context).decode(word_sum(total)[MAC_WORDS:])
    assert np.array_equal(read, sum(vectors.values()).numpy())  # type: ignore[union-attr]


def passed_on(**how: Any) -> tuple[NDArray[np.uint64], HeldRun]:
    """All words that a run's server passed on to clients: sums of hidden parts and of ballots."""
    kept: list[Recording] = []

    def through(role: Any) -> Recording:
        kept.append(Recording(role))
        return kept[0]

    wide = {"options": {"depth": 2, "width": 32}, "clients": 5, "rounds": 3, "cipher": "pads", "vote": "histogram"}
    run = held_run(job(scheme="paraaegis", **{**SMALL, **wide, **how}), through=through)
    counts = [one.counts for one in kept[0].received if isinstance(one, Divide)]
    sums = [done.aggregate.hidden for done in run.rounds if done.aggregate is not None]
    return word_sum(torch.cat([*counts, *sums])), run  # type: ignore[list-item]


@pytest.mark.parametrize("how", [{"share": 0.5}, {"share": 1.0}, {"share": 0.5, "unmask": "on-dropout"}])
def test_in_a_run_too_whatever_the_server_passes_on_is_uniform(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    uniform, run = passed_on(**how)
    assert len(uniform) > 3 * run.job.architecture.size
    assert_uniform(uniform)
    monkeypatch.setattr(Pads, "padding", lambda self, context: ())
    readable, again = passed_on(**how)
    assert byte_p_value(readable) < 1e-12
    assert torch.equal(again.model, run.model)


@pytest.mark.parametrize("threshold", [0.5, 2 / 3, 0.9])
@pytest.mark.parametrize("clients", [3, 4, 5, 10, 31])
def test_among_any_quorum_somebody_pads_whatever_order_the_cohort_is_told_in(clients: int, threshold: float) -> None:
    pads = Pads(Masked(quorum=Quorum(threshold)))
    members = tuple(range(10, 10 + clients))
    padding = pads.padding(RoundContext(0, 0, members))
    assert clients - len(padding) < pads.masks.quorum.of(clients)
    assert padding == pads.padding(RoundContext(0, 0, members[::-1]))


def test_pads_of_other_rounds_attempts_clients_and_groups_share_nothing() -> None:
    """Two sums of equal numbers differ by a uniform vector, so nothing of a pad is used twice."""
    federation, stranger = Padded(3, length=LONG), Padded(3, length=LONG, seed=1)
    vectors = dict.fromkeys(range(3), torch.zeros(LONG, dtype=torch.float64))
    sums = [
        word_sum(one.opened(one.all_hidden(vectors, context), context)[1])
        for one, context in (
            (federation, federation.context(0)),
            (federation, federation.context(1)),
            (federation, federation.context(1, 1)),
            (stranger, stranger.context(0)),
        )
    ]
    for number, first in enumerate(sums):
        for second in sums[number + 1 :]:
            assert_uniform(first - second)


def test_of_uploads_with_one_sum_members_read_the_same_words_whoever_sent_what() -> None:
    """Also of the code: carries of its own would tell one assignment from another."""
    federation = Padded(5, length=50)
    vectors = ramps(federation)
    turned = {client: vectors[(client + 1) % 5] for client in vectors}
    context = federation.context()
    read = []
    for sent in (vectors, turned):
        one = Padded(5, length=50)
        _, total = one.opened(one.all_hidden(sent, context), context)
        read.append(one.pads.unpadded(one.group, total, range(5), context))
    assert np.array_equal(*read)
    values = federation.pads.codec(context).encode(sum(vectors.values()))  # type: ignore[arg-type]
    assert np.array_equal(read[0][MAC_WORDS:], values)


# ---- lists that are wrong


def test_a_wrong_list_of_contributors_is_noticed() -> None:
    federation = Padded(7, length=300)
    context = federation.context()
    uploads = federation.all_hidden(ramps(federation), context)
    del uploads[1]
    _, total = federation.opened(uploads, context)
    # One pad too many, one too few, none; and the right pads, but not the right clients.
    for wrong in ([0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [3, 4, 5, 6], [0, 2, 3, 4, 5]):
        with pytest.raises(ProtocolError, match="the sum of round 1 is not what clients have sent"):
            federation.pads.read(federation.group, total, wrong, context)
    another = Group(RUN, bytes(32))
    with pytest.raises(ProtocolError, match="a client has spoilt it or has another group key"):
        federation.pads.read(another, total, sorted(uploads), context)
    other_round = federation.context(2)
    with pytest.raises(ProtocolError, match="the sum of round 2 is not what clients have sent"):
        federation.pads.read(federation.group, total, sorted(uploads), other_round)
    for malformed in (total.double(), total[None], total.to(torch.uint8), total[:1]):
        with pytest.raises(ProtocolError, match="a padded sum is malformed"):
            federation.pads.read(federation.group, malformed, sorted(uploads), context)


KEY = ckks.generate(ckks.choose(addends=3, largest=8.0))
OTHER = ckks.generate(ckks.choose(addends=3, largest=8.0))
CONTEXT = RoundContext(1, 0, (0, 1, 2))


def encrypted(values: list[float], key: Any = KEY) -> Ciphertext:
    return Ciphertext(from_bytes(ckks.encrypt(torch.tensor(values, dtype=torch.float64), key.public)))


def test_ciphertexts_add_up_and_a_list_of_another_length_is_noticed() -> None:
    group = Group(RUN, bytes(32), KEY.secret_bytes())
    cipher = Ckks(8.0)
    total = cipher.accumulator(2, CONTEXT, public=KEY.public_bytes())
    with pytest.raises(ProtocolError, match="no encrypted vector has been added"):
        total.total()
    for values in ([1.0, 2.0], [0.5, -4.0]):
        total.add(encrypted(values))
    assert torch.equal(cipher.read(group, total.total(), [0, 2], CONTEXT), torch.tensor([1.5, -2.0]).double())
    for wrong in ([0], [0, 1, 2]):
        with pytest.raises(ProtocolError, match=f"is of 2 ciphertexts, and {len(wrong)} contributors are named"):
            cipher.read(group, total.total(), wrong, CONTEXT)
    for malformed in (total.total().double(), total.total()[None]):
        with pytest.raises(ProtocolError, match="a sum of ciphertexts is malformed"):
            cipher.read(group, malformed, [0, 2], CONTEXT)
    with pytest.raises(ProtocolError):
        cipher.read(Group(RUN, bytes(32), OTHER.secret_bytes()), total.total(), [0, 2], CONTEXT)
    with pytest.raises(ProtocolError):
        cipher.read(group, total.total()[:-1], [0, 2], CONTEXT)


def cut(part: Ciphertext, length: int) -> Ciphertext:
    return Ciphertext(part.data[:length])


def doubled() -> Ciphertext:
    adder = ckks.Adder(KEY.public, length=2)
    for _ in range(2):
        adder.add(to_bytes(encrypted([1.0, 1.0]).data))
    return Ciphertext(from_bytes(adder.total()))


UNFIT: dict[str, Any] = {
    "cut in half": lambda: cut(encrypted([1.0, 1.0]), 40_000),
    "one byte short": lambda: cut(encrypted([1.0, 1.0]), -1),
    "empty": lambda: cut(encrypted([1.0, 1.0]), 0),
    "of another key": lambda: encrypted([1.0, 1.0], OTHER),
    "of another length": lambda: encrypted([1.0, 1.0, 1.0]),
    "a sum of two": doubled,
    "words": lambda: Ciphertext(torch.zeros(8, dtype=torch.int64)),
    "masked words": lambda: Padded(3, length=2).hidden(0, torch.zeros(2).double(), CONTEXT),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_ciphertext_that_does_not_fit_is_refused_and_the_sum_stays(name: str) -> None:
    """A sum sent as one client's would make its list of contributors wrong for everybody."""
    total = Ckks(8.0).accumulator(2, CONTEXT, public=KEY.public_bytes())
    total.add(encrypted([1.0, 2.0]))
    before = to_bytes(total.total())
    with pytest.raises(ProtocolError):
        total.add(UNFIT[name]())
    assert to_bytes(total.total()) == before
    total.add(encrypted([1.0, 2.0]))


def test_a_ciphertext_where_masked_words_belong_is_refused() -> None:
    federation = Padded(3, length=4)
    total = federation.pads.accumulator(4, federation.context(), public=b"")
    with pytest.raises(ProtocolError, match="a ciphertext arrived where masked words belong"):
        total.add(encrypted([1.0]))


# ---- limits


def test_numbers_beyond_the_range_are_cut_off() -> None:
    federation = Padded(3, length=4)
    group = Group(RUN, bytes(32), KEY.secret_bytes())
    state = _member(federation.states[0], group)
    federation.hidden(0, torch.full((4,), 1e30, dtype=torch.float64), federation.context())
    for number, kept in ((8.5, 8.0), (-1e30, -8.0), (float("nan"), 0.0), (float("inf"), 8.0)):
        values = torch.full((4,), number, dtype=torch.float64)
        _, part = Ckks(8.0).hide(state, values, CONTEXT, secrets=federation.secrets)
        assert isinstance(part, Ciphertext)
        found = Ckks(8.0).read(group, part.data, [0], CONTEXT)
        assert torch.allclose(found, torch.full((4,), kept).double(), atol=1e-4)


def test_rounds_that_no_cipher_can_hide_or_hold_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="Masking needs at least three clients"):
        job(scheme="paraaegis", **{**SMALL, "clients": 2, "cipher": "pads"})
    with pytest.raises(ConfigError, match="needs at least two"):
        job(scheme="ckks-fedavg", loss="cross-entropy", clients=1)
    with pytest.raises(ConfigError):
        job(scheme="ckks-fedavg", loss="cross-entropy", clients=5, value_range=1e30)
    with pytest.raises(ConfigError, match="Lower value_range"):
        job(scheme="ckks-fedavg", loss="cross-entropy", clients=5, value_range=2.0**60, cipher="pads")
