"""Messages as bytes: exact both ways, and nothing but a ProtocolError for anything else."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedveil.schemes  # noqa: F401 (their parts register every message)
from fedveil.client_held import messages as dividing
from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Released
from fedveil.protocol.codec import decode, encode, message, registered, size
from fedveil.protocol.directory import Epoch
from fedveil.protocol.messages import Reply, Upload
from fedveil.shapes import Declared, Number, Shape, declared, reals
from fedveil.uplink import noised

KINDS = [kind for kind in registered() if not kind.__module__.startswith("fedveil.flower.")]
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=9)


def drawn(draw: st.DrawFn, kind: type, sizes: dict[str, int]) -> Any:
    """A message as its fields are declared; `sizes` are those that have been drawn for its names so far."""

    def size(name: int | str) -> int:
        return name if isinstance(name, int) else sizes.setdefault(name, draw(st.integers(1, 4)))

    def tensor(rule: Shape) -> Tensor:
        dtype = draw(st.sampled_from(rule.dtypes))
        shape = [size(one) for one in rule.sizes]
        made = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).double() * 10
        if rule.least is not None or dtype is torch.uint8:
            made = made.abs()
        if rule.below:
            least = shape[0] if rule.ascending else 1  # so many different places need so much room
            sizes[rule.below] = max(size(rule.below), least)
            made = made % sizes[rule.below]
        return torch.arange(shape[0]) if rule.ascending else made.to(dtype)

    def field(one: Declared) -> Any:
        chosen = draw(st.sampled_from(one.types))
        if chosen is Tensor:
            assert isinstance(one.rule, Shape)
            return tensor(one.rule)
        if isinstance(one.rule, Number):
            return size(one.rule.name)
        plain = {int: st.integers(0, 2**40), str: TEXT, bool: st.booleans(), type(None): st.none()}
        return draw(plain[chosen]) if chosen in plain else drawn(draw, chosen, sizes)

    return kind(**{name: field(one) for name, one in declared(kind).items()})


@st.composite
def messages(draw: st.DrawFn) -> Any:
    return drawn(draw, draw(st.sampled_from(KINDS)), {})


ANY = messages()
UPLOAD = Upload(3, 1, 0, torch.tensor([1.0, float("nan"), -0.0, 5e-324], dtype=torch.float64))


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.numpy().tobytes() == theirs.numpy().tobytes()
        )
    if dataclasses.is_dataclass(ours):
        fields = [one.name for one in dataclasses.fields(ours)]
        return type(ours) is type(theirs) and all(same(getattr(ours, n), getattr(theirs, n)) for n in fields)
    return type(ours) is type(theirs) and ours == theirs


def framed(header: object, tail: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"FVW1" + struct.pack("<I", len(raw)) + raw + tail


def header_of(message: object) -> Any:
    data = encode(message)
    (length,) = struct.unpack("<I", data[4:8])
    return json.loads(data[8 : 8 + length])


def test_every_message_is_tried_here_and_none_has_a_tensor_without_a_shape() -> None:
    assert {kind.__name__ for kind in KINDS} == {
        *("Broadcast", "ClipBroadcast", "SketchBroadcast", "PublicHead", "Train", "Upload", "SelectedUpload"),
        *("Epoch", "Hello", "Announce", "Directory", "Nonce", "Nonces", "Ready"),
        *("MaskedUpload", "Unmask", "Relayed", "Revealed", "Evidence"),
        *("Repair", "Repaired", "LweUpload"),
        *("Deal", "Dealt", "TakeShare", "SealedShare", "Taken", "EncryptedUpload", "Decrypt", "Decrypted"),
        *("SetupRound", "RoundKeys", "RoundKey", "FunctionalUpload", "KeyFor", "FunctionKeys"),
        *("Found", "Founded", "Join", "Invitation", "Joined"),
        *("Begin", "Vote", "Divide", "Divided", "Ciphertext", "Aggregate"),
        *("Lend", "Lent", "Borrowed", "Finish", "Finished"),
    }
    rules = [one for kind in registered() for one in declared(kind).values() if Tensor in one.types]
    assert all(isinstance(one.rule, Shape) for one in rules)


def test_a_message_with_a_tensor_of_undeclared_shape_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"Loose\.payload may not travel: declare it"):

        @message
        @dataclass(frozen=True, eq=False)
        class Loose(Reply):
            payload: Tensor

    assert "Loose" not in {kind.__name__ for kind in registered()}


def test_a_declared_message_inside_does_not_speak_for_what_else_a_field_may_hold() -> None:
    with pytest.raises(TypeError, match=r"Sneaky\.inside may not travel"):

        @message
        @dataclass(frozen=True, eq=False)
        class Sneaky(Reply):
            inside: Annotated[Epoch | Tensor, reals("n")]

    assert "Sneaky" not in {one.__name__ for one in registered()}


def test_nobody_takes_the_name_of_a_message_that_there_is() -> None:
    def another() -> type:
        @dataclass(frozen=True, eq=False)
        class Upload(Reply):
            diary: Annotated[int, Released("all of it")]

        return Upload

    with pytest.raises(TypeError, match=r"Upload is a message of fedveil\.protocol\.messages already"):
        message(another())
    assert Upload in registered()


def test_a_message_with_a_field_of_which_nobody_says_what_leaves_with_it_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match=r"Silent\.height may not travel: declare what leaves with it"):

        @message
        @dataclass(frozen=True, eq=False)
        class Silent(Reply):
            payload: Annotated[Tensor, reals("contribution"), Released("a gradient")]
            height: float

    assert "Silent" not in {kind.__name__ for kind in registered()}


@given(ANY)
@example(UPLOAD)
def test_a_message_survives_the_wire_bit_for_bit(message: Any) -> None:
    assert same(decode(encode(message)), message)


@given(ANY)
def test_the_size_is_the_number_of_bytes(message: Any) -> None:
    assert size(message) == len(encode(message))


def test_a_transposed_or_sliced_tensor_arrives_in_its_own_order() -> None:
    whole = torch.arange(512).reshape(16, 32).to(torch.uint8)
    for view in (whole.t(), whole[:, ::2], whole[1:, :16]):
        assert torch.equal(decode(encode(dividing.Vote(0, 0, 0, view))).tags, view)


def test_what_arrives_is_writable_and_no_view_of_the_bytes() -> None:
    data = encode(UPLOAD)
    decode(data).payload.zero_()
    assert same(decode(data), UPLOAD)


@given(ANY)
@settings(max_examples=20)
def test_a_message_cut_anywhere_is_refused(message: Any) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length])


@given(ANY, st.binary(min_size=1, max_size=9))
def test_trailing_bytes_are_refused(message: Any, extra: bytes) -> None:
    with pytest.raises(ProtocolError, match="too many"):
        decode(encode(message) + extra)


@given(st.binary(max_size=64))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, b"FVW1" + noise, framed(noise)):
        with pytest.raises(ProtocolError):
            decode(data)


@given(ANY, st.data())
def test_damage_is_refused_or_leaves_a_message_of_the_same_kind_of_fields(message: Any, data: st.DataObject) -> None:
    """A flipped byte in a number cannot be noticed here, but nothing else than ProtocolError may be raised."""
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = decode(bytes(raw))
    except ProtocolError:
        return
    assert type(arrived) in registered()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["m", "f", "t", "s", "client", "payload"]) | st.text(max_size=3), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_a_made_up_header_is_refused(header: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(framed(header))


@given(st.sampled_from(["client", "round", "attempt", "payload"]), JSON)
def test_a_field_with_something_else_in_it_is_refused(name: str, value: Any) -> None:
    header = header_of(Upload(3, 1, 0, torch.zeros(2)))
    header["f"][name] = value
    if name != "payload" and type(value) is int:
        return
    with pytest.raises(ProtocolError):
        decode(framed(header, bytes(8)))


FORGED: dict[str, Any] = {
    "an unknown type": {"m": "Pickle", "f": {}},
    "a type that does not travel": {"m": "ServerState", "f": {}},
    "a type that is no name": {"m": ["Upload"], "f": {}},
    "a missing field": {"m": "Upload", "f": {"client": 1, "round": 1, "attempt": 1}},
    "a field too many": {"m": "Upload", "f": {"client": 1, "round": 1, "attempt": 1, "payload": None, "x": 1}},
    "fields as a list": {"m": "Upload", "f": [1, 2, 3]},
    "no message at all": [1, 2],
    "a number": 5,
    "an unknown kind of number": {"t": "f2", "s": [1]},
    "a kind of number that is no name": {"t": {"f": 4}, "s": [1]},
    "a negative size": {"t": "f4", "s": [-1]},
    "a size that is no number": {"t": "f4", "s": ["1"]},
    "a size that is true": {"t": "f4", "s": [True]},
    "a size beyond all memory": {"t": "f4", "s": [2**40, 2**40]},
    "an empty tensor beyond all memory": {"t": "f4", "s": [0, 2**62, 2**62]},
    "an empty tensor with more rows than the message has bytes": {"t": "f4", "s": [10**12, 0]},
    "very many dimensions": {"t": "f4", "s": [1] * 500},
    "sizes that are no list": {"t": "f4", "s": 4},
}


@pytest.mark.parametrize("header", FORGED.values(), ids=FORGED)
def test_a_forged_header_is_refused(header: Any) -> None:
    upload = header_of(Upload(3, 1, 0, torch.zeros(2)))
    upload["f"]["payload"] = header
    for forged in (header, upload):
        with pytest.raises(ProtocolError):
            decode(framed(forged, bytes(8)))


def test_not_a_number_is_refused_in_a_header() -> None:
    for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        raw = json.dumps(header_of(UPLOAD)).encode().replace(b'"round": 1', b'"round": ' + word)
        with pytest.raises(ProtocolError):
            decode(framed(raw, bytes(32)))


def test_a_header_beyond_the_limit_is_refused_unread() -> None:
    raw = json.dumps(header_of(UPLOAD)).encode()
    assert decode(framed(raw.ljust(1 << 14), encode(UPLOAD)[-32:])).client == 3
    with pytest.raises(ProtocolError, match="16385 bytes, and 16384 are the most"):
        decode(framed(raw.ljust((1 << 14) + 1), encode(UPLOAD)[-32:]))


@pytest.mark.parametrize("text", ["x" * 257, "naïve", "\ud800", "two\nlines"])
def test_a_text_that_is_long_or_not_plain_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="the run of a hello"):
        decode(framed({"m": "Hello", "f": {"run": text, "epoch": header_of(Epoch(0, 0, 1, 1, 1, 0))}}))


@pytest.mark.parametrize("number", [-1, 2**53, 2**64, 10**300])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ProtocolError, match="the founder of a join is out of range"):
        decode(framed({"m": "Join", "f": {"founder": number}}))


def test_a_client_list_with_a_client_twice_or_out_of_order_is_refused() -> None:
    for wrong in ([1, 1], [2, 1], [-1, 0]):
        with pytest.raises(ProtocolError, match="the missing of a repair"):
            decode(encode(noised.Repair(0, 0, torch.tensor(wrong))))


def test_sizes_of_one_name_must_agree() -> None:
    reply = noised.Repaired(0, 0, 0, torch.tensor([1, 2]), torch.zeros(3, 32, dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="missing is 2 elsewhere in the message"):
        decode(encode(reply))


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_a_deeply_nested_header_is_refused(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"m":', b"}")):
        with pytest.raises(ProtocolError):
            decode(framed(opening * depth + b"1" + closing * depth))
        upload = json.dumps(header_of(UPLOAD)).encode()
        with pytest.raises(ProtocolError):
            decode(framed(upload.replace(b'"round": 1', b'"round": ' + opening * depth + b"1" + closing * depth)))


@pytest.mark.parametrize(
    "what", [object(), {"a": 1}, torch.nn.Linear(2, 2), torch.zeros(2, dtype=torch.complex64), float("nan")]
)
def test_what_may_not_travel_is_refused(what: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(Upload(0, 0, 0, what))
