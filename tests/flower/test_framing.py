"""Frames: what goes in comes out; what is too large, cut short, unknown or stalled is refused."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from fedveil.errors import ProtocolError
from fedveil.flower.framing import LIMIT, BrokenOffError, Kind, receive, send


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
    send(pair[0], kind, body, deadline=soon())
    assert receive(pair[1], deadline=soon()) == (kind, body)


def test_frames_follow_one_another(pair: tuple[socket.socket, socket.socket]) -> None:
    send(pair[0], Kind.PARCEL, b"first")
    send(pair[0], Kind.PING)
    assert [receive(pair[1], deadline=soon()) for _ in range(2)] == [(Kind.PARCEL, b"first"), (Kind.PING, b"")]


def test_the_layout_is_a_byte_of_kind_eight_of_length_and_the_body(pair: tuple[socket.socket, socket.socket]) -> None:
    send(pair[0], Kind.REPLY, b"abc")
    assert pair[1].recv(100) == b"\x02" + b"\0\0\0\0\0\0\0\x03" + b"abc"


def test_an_empty_frame_is_sent_in_one_piece() -> None:
    """Whoever has its head has all of it, and may answer and close: nothing must be sent after that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, Kind.PING)
        assert theirs.recv(100) == bytes([Kind.PING]) + bytes(8)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)


def test_a_frame_larger_than_the_sockets_buffer_arrives(pair: tuple[socket.socket, socket.socket]) -> None:
    body = bytes(range(251)) * 20_000
    sender = threading.Thread(target=send, args=(pair[0], Kind.PARCEL, body), kwargs={"deadline": soon()})
    sender.start()
    assert receive(pair[1], deadline=soon()) == (Kind.PARCEL, body)
    sender.join()


@pytest.mark.parametrize("code", [0, 7, 71, 255])
def test_an_unknown_kind_is_refused(pair: tuple[socket.socket, socket.socket], code: int) -> None:
    pair[0].sendall(struct.pack(">BQ", code, 0))
    with pytest.raises(ProtocolError, match=f"unknown kind {code}"):
        receive(pair[1], deadline=soon())


@pytest.mark.parametrize(("size", "limit"), [(LIMIT + 1, LIMIT), (2**64 - 1, LIMIT), (11, 10)])
def test_an_oversize_frame_is_refused_before_its_body(
    pair: tuple[socket.socket, socket.socket], size: int, limit: int
) -> None:
    pair[0].sendall(struct.pack(">BQ", Kind.PARCEL, size))
    with pytest.raises(ProtocolError, match=f"{size} bytes came, over the limit of {limit}"):
        receive(pair[1], deadline=soon(), limit=limit)


def test_a_frame_of_just_the_limit_passes_and_a_larger_one_is_not_even_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    send(pair[0], Kind.PARCEL, b"0123456789", limit=10)
    assert receive(pair[1], deadline=soon(), limit=10) == (Kind.PARCEL, b"0123456789")
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        send(pair[0], Kind.PARCEL, b"0123456789a", limit=10)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@pytest.mark.parametrize("sent", [0, 1, 8, 9, 12], ids=lambda sent: f"after-{sent}-bytes")
def test_a_frame_cut_short_is_refused(pair: tuple[socket.socket, socket.socket], sent: int) -> None:
    pair[0].sendall((struct.pack(">BQ", Kind.PARCEL, 5) + b"hello")[:sent])
    pair[0].close()
    with pytest.raises(BrokenOffError, match="before the end of a frame"):
        receive(pair[1], deadline=soon())


def test_sending_to_one_who_has_gone_is_an_error_of_its_own(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(BrokenOffError, match="while a frame was sent"):
        send(pair[0], Kind.PING, deadline=soon())


@pytest.mark.parametrize("sent", [b"", b"\x01", struct.pack(">BQ", 1, 5) + b"hel"], ids=["nothing", "head", "body"])
def test_a_peer_that_stalls_is_given_up_at_the_deadline(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    pair[0].sendall(sent)
    with pytest.raises(TimeoutError):
        receive(pair[1], deadline=soon(0.2))


def test_a_peer_that_sends_drop_by_drop_is_given_up_too(pair: tuple[socket.socket, socket.socket]) -> None:
    """Every byte comes in time; the frame does not."""
    over = threading.Event()

    def drip() -> None:
        pair[0].sendall(struct.pack(">BQ", Kind.PARCEL, 10_000))
        while not over.wait(0.02):
            pair[0].sendall(b".")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            receive(pair[1], deadline=soon(0.3))
    finally:
        over.set()
        dripping.join()


def test_a_peer_that_takes_nothing_is_given_up_at_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        send(pair[0], Kind.PARCEL, bytes(1 << 24), deadline=soon(0.2))
