"""Frames: what goes in comes out; what is too large, cut short, unknown or stalled is refused."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from enum import IntEnum

import pytest

from fedveil.errors import ProtocolError
from fedveil.framing import LIMIT, BrokenOffError, pack, receive, send, unpack


class Kind(IntEnum):
    """What frames are, here."""

    PARCEL = 1
    REPLY = 2
    PING = 4


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 16], ids=["empty", "one", "4096"])
def test_a_frame_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket], kind: Kind, body: bytes) -> None:
    send(pair[0], kind, body, b"more", deadline=soon())
    assert receive(pair[1], Kind, deadline=soon()) == (kind, [body, b"more"])


def test_frames_follow_one_another(pair: tuple[socket.socket, socket.socket]) -> None:
    send(pair[0], Kind.PARCEL, b"first")
    send(pair[0], Kind.PING)
    assert [receive(pair[1], Kind, deadline=soon()) for _ in range(2)] == [(Kind.PARCEL, [b"first"]), (Kind.PING, [])]


def test_frames_pass_through_pipes_too() -> None:
    reading, writing = (os.fdopen(one, mode, 0) for one, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    body = bytes(range(251)) * 20_000
    with reading, writing:
        sender = threading.Thread(target=send, args=(writing, Kind.PARCEL, body, b""))
        sender.start()
        assert receive(reading, Kind, deadline=soon()) == (Kind.PARCEL, [body, b""])
        sender.join()


def test_an_empty_frame_is_sent_in_one_piece() -> None:
    """Whoever has its head has all of it, and may answer and close: nothing must be sent after that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, Kind.PING)
        assert theirs.recv(100) == bytes([Kind.PING]) + bytes(4)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)


def test_a_frame_larger_than_the_sockets_buffer_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    body = bytes(range(251)) * 20_000
    sender = threading.Thread(target=send, args=(pair[0], Kind.PARCEL, body), kwargs={"deadline": soon()})
    sender.start()
    assert receive(pair[1], Kind, deadline=soon()) == (Kind.PARCEL, [body])
    sender.join()


@pytest.mark.parametrize("code", [0, 3, 71, 255])
def test_an_unknown_kind_is_refused(pair: tuple[socket.socket, socket.socket], code: int) -> None:
    pair[0].sendall(struct.pack(">BI", code, 0))
    with pytest.raises(ProtocolError, match=f"unknown kind {code}"):
        receive(pair[1], Kind, deadline=soon())


@pytest.mark.parametrize(("size", "limit"), [(LIMIT + 1, LIMIT), (2**64 - 1, LIMIT), (11, 10)])
def test_an_oversize_frame_is_refused_before_its_body(
    pair: tuple[socket.socket, socket.socket], size: int, limit: int
) -> None:
    pair[0].sendall(struct.pack(">BIQ", Kind.PARCEL, 1, size))
    with pytest.raises(ProtocolError, match=f"{size} bytes came, over the limit of {limit}"):
        receive(pair[1], Kind, deadline=soon(), limit=limit)


def test_the_number_of_parts_has_a_limit_too(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(struct.pack(">BI", Kind.PARCEL, 2**32 - 1))
    with pytest.raises(ProtocolError, match="4294967295 parts came"):
        receive(pair[1], Kind, deadline=soon())


def test_a_frame_of_just_the_limit_passes_and_a_larger_one_is_not_even_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    send(pair[0], Kind.PARCEL, b"0123456789", limit=10)
    assert receive(pair[1], Kind, deadline=soon(), limit=10) == (Kind.PARCEL, [b"0123456789"])
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        send(pair[0], Kind.PARCEL, b"0123456789a", limit=10)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@pytest.mark.parametrize("sent", [0, 1, 5, 8, 13, 16], ids=lambda sent: f"after-{sent}-bytes")
def test_a_frame_cut_short_is_refused(pair: tuple[socket.socket, socket.socket], sent: int) -> None:
    pair[0].sendall((struct.pack(">BIQ", Kind.PARCEL, 1, 5) + b"hello")[:sent])
    pair[0].close()
    with pytest.raises(BrokenOffError, match="before the end of a frame"):
        receive(pair[1], Kind, deadline=soon())


def test_sending_to_one_who_has_gone_is_an_error_of_its_own(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(BrokenOffError, match="while a frame was sent"):
        send(pair[0], Kind.PING, deadline=soon())


@pytest.mark.parametrize("sent", [b"", b"\x01", struct.pack(">BIQ", 1, 1, 5) + b"hel"], ids=["nothing", "head", "body"])
def test_a_peer_that_stalls_is_given_up_at_the_deadline(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    pair[0].sendall(sent)
    with pytest.raises(TimeoutError):
        receive(pair[1], Kind, deadline=soon(0.2))


def test_a_peer_that_sends_drop_by_drop_is_given_up_too(pair: tuple[socket.socket, socket.socket]) -> None:
    """Every byte comes in time; the frame does not."""
    over = threading.Event()

    def drip() -> None:
        pair[0].sendall(struct.pack(">BIQ", Kind.PARCEL, 1, 10_000))
        while not over.wait(0.02):
            pair[0].sendall(b".")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            receive(pair[1], Kind, deadline=soon(0.3))
    finally:
        over.set()
        dripping.join()


def test_a_peer_that_takes_nothing_is_given_up_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        send(pair[0], Kind.PARCEL, bytes(1 << 24), deadline=soon(0.2))


PARCEL = pack({"setup": "a", "number": 3}, {"common": b"abc", "private": b""})


def test_a_parcel_comes_back_as_it_was_packed_and_is_the_bytes_it_always_was() -> None:
    assert unpack(PARCEL) == ({"setup": "a", "number": 3}, {"common": b"abc", "private": b""})
    header = b'{"header":{"setup":"a","number":3},"parts":{"common":3,"private":0}}'
    assert b"FVP1" + struct.pack("<I", len(header)) + header + b"abc" == PARCEL


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"FVP1",
        b"FVW1" + PARCEL[4:],
        PARCEL[:-1],
        PARCEL + b"\0",
        PARCEL[:20],
        PARCEL.replace(b'"common":3', b'"common":9'),
        PARCEL.replace(b'"private":0', b'"private":-1'),
        PARCEL[:4] + struct.pack("<I", (1 << 20) + 1) + PARCEL[8:],
        PARCEL[:4] + struct.pack("<I", 2) + b"[]",
    ],
    ids=repr,
)
def test_a_damaged_parcel_is_refused(damaged: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(damaged)
