"""Messages as bytes: exact both ways, and nothing but a ProtocolError for anything else."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.errors import ProtocolError
from fedveil.protocol import Train, Upload, dividing, noised  # noqa: F401  (their messages register themselves)
from fedveil.protocol.hiding import Ciphertext
from fedveil.protocol.unmasking import MaskedUpload
from fedveil.protocol.wire import decode, encode, registered, size

NUMBERS = st.integers(0, 2**40)


@st.composite
def tensors(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 99))
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
    return made.to(draw(st.sampled_from(dtypes)))


HEADS = st.builds(
    PublicHead,
    vector=tensors(),
    groups=tensors(dtypes=(torch.int64,)),
    count=st.integers(1, 9),
    per_group=st.booleans(),
)
BROADCASTS = st.builds(
    Broadcast,
    parameters=tensors(),
    epsilon=tensors(),
    statistics=tensors(),
    multipliers=tensors(),
    head=st.none() | HEADS,
)
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    PublicHead: HEADS,
    Broadcast: BROADCASTS,
    Train: st.builds(
        Train, round=NUMBERS, attempt=NUMBERS, broadcast=BROADCASTS, cohort=st.none() | tensors(dtypes=(torch.int64,))
    ),
    Upload: st.builds(
        Upload,
        client=NUMBERS,
        round=NUMBERS,
        attempt=NUMBERS,
        payload=tensors(dtypes=(torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)),
    ),
}
COLUMN = tensors(dtypes=(torch.int64,))
BYTES = tensors(dtypes=(torch.uint8,))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "int": NUMBERS,
    "str": st.text(max_size=9),
    "bool": st.booleans(),
    "Tensor | None": st.none() | COLUMN | BYTES,
}
for kind in registered():
    if kind not in MESSAGES:  # numbers, texts, tensors of numbers or bytes, and, where named here, other messages
        MESSAGES[kind] = st.builds(kind, **{one.name: FIELDS.get(one.type, COLUMN | BYTES) for one in fields(kind)})
    FIELDS[f"{kind.__name__} | None"] = st.none() | MESSAGES[kind]
    FIELDS[kind.__name__] = MESSAGES[kind]
    if kind is Ciphertext:
        FIELDS["Ciphertext | MaskedUpload | None"] = st.none() | MESSAGES[Ciphertext] | MESSAGES[MaskedUpload]
ANY = st.one_of(*MESSAGES.values())
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


def test_every_registered_message_is_tried_here() -> None:
    # An engine may have messages of its own, and is loaded here or not.
    tried, known = (
        {kind for kind in kinds if not kind.__module__.startswith("fedveil.engines.")}
        for kinds in (MESSAGES, registered())
    )
    assert tried == known
    own = {"Broadcast", "PublicHead", "Train", "Upload"}
    assert {kind.__name__ for kind in tried} - own == {
        *("Epoch", "Hello", "Announce", "Directory", "Nonce", "Nonces", "Ready"),
        *("MaskedUpload", "Unmask", "Relayed", "Revealed", "Evidence"),
        *("Repair", "Repaired"),
        *("Found", "Founded", "Join", "Invitation", "Joined"),
        *("Begin", "Vote", "Divide", "Divided", "Ciphertext", "Aggregate"),
        *("Lend", "Lent", "Borrowed", "Finish", "Finished"),
    }
    for kind in registered():
        if kind.__name__ not in own:
            assert {str(one.type) for one in fields(kind)} <= {"Tensor", *FIELDS}


@given(ANY)
@example(UPLOAD)
def test_a_message_survives_the_wire_bit_for_bit(message: Any) -> None:
    assert same(decode(encode(message)), message)


@given(ANY)
def test_the_size_is_the_number_of_bytes(message: Any) -> None:
    assert size(message) == len(encode(message))


def test_a_transposed_or_sliced_tensor_arrives_in_its_own_order() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    for view in (whole.t(), whole[:, ::2], whole[1:]):
        assert torch.equal(decode(encode(Upload(0, 0, 0, view))).payload, view)


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


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_a_deeply_nested_header_is_refused(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"m":', b"}")):
        with pytest.raises(ProtocolError):
            decode(framed(opening * depth + b"1" + closing * depth))
        upload = json.dumps(header_of(UPLOAD)).encode()
        with pytest.raises(ProtocolError):
            decode(framed(upload.replace(b'"round": 1', b'"round": ' + opening * depth + b"1" + closing * depth)))


def test_a_truth_value_other_than_zero_and_one_is_refused() -> None:
    data = encode(Upload(0, 0, 0, torch.tensor([True, False])))
    with pytest.raises(ProtocolError):
        decode(data[:-1] + b"\x02")


@pytest.mark.parametrize(
    "what", [object(), {"a": 1}, torch.nn.Linear(2, 2), torch.zeros(2, dtype=torch.complex64), float("nan")]
)
def test_what_may_not_travel_is_refused(what: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(Upload(0, 0, 0, what))
