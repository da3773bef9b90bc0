"""Frames on a stream socket: one byte that says what it is, eight bytes of length, the body."""

from __future__ import annotations

import io
import socket
import struct
import time
from enum import IntEnum

from fedveil.errors import ProtocolError

LIMIT = 8 << 30
"""Bytes a body may have unless another limit is given."""

_HEAD = struct.Struct(">BQ")
_PIECE = 1 << 20


class Kind(IntEnum):
    """What a frame is."""

    PARCEL = 1
    REPLY = 2
    FAILED = 3
    PING = 4
    PONG = 5
    STOP = 6


class BrokenOffError(ProtocolError):
    """The other side went away before a whole frame had passed."""


def send(
    sock: socket.socket, kind: Kind, body: bytes = b"", *, deadline: float | None = None, limit: int = LIMIT
) -> None:
    """Send one frame; TimeoutError if the other side has not taken it by `deadline` (of time.monotonic)."""
    if len(body) > limit:
        raise ProtocolError(f"A frame of {len(body)} bytes is over the limit of {limit} bytes.")
    try:
        # An empty body is not sent on its own: whoever has the head may have answered and gone by then.
        for part in (_HEAD.pack(kind, len(body)), *([body] if body else [])):
            sock.settimeout(None if deadline is None else _left(deadline))
            sock.sendall(part)
    except ConnectionError as reason:
        raise BrokenOffError("The other side closed the connection while a frame was sent to it.") from reason


def receive(sock: socket.socket, *, deadline: float, limit: int = LIMIT) -> tuple[Kind, bytes]:
    """The next frame; TimeoutError if it is not there in full by `deadline` (of time.monotonic)."""
    code, size = _HEAD.unpack(_exactly(sock, _HEAD.size, deadline))
    try:
        kind = Kind(code)
    except ValueError:
        raise ProtocolError(f"A frame of the unknown kind {code} came.") from None
    if size > limit:
        raise ProtocolError(f"A frame of {size} bytes came, over the limit of {limit} bytes.")
    return kind, _exactly(sock, size, deadline)


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    # Memory grows with what really comes, not with the length somebody claims; getvalue() then hands out the
    # buffer itself, so that a large body is never in memory twice.
    gathered = io.BytesIO()
    piece = memoryview(bytearray(min(size, _PIECE)))
    missing = size
    while missing:
        sock.settimeout(_left(deadline))
        try:
            count = sock.recv_into(piece[: min(missing, _PIECE)])
        except ConnectionError as reason:
            raise BrokenOffError("The other side closed the connection in the middle of a frame.") from reason
        if not count:
            raise BrokenOffError(f"The connection ended {missing} bytes before the end of a frame.")
        gathered.write(piece[:count])
        missing -= count
    return gathered.getvalue()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("The other side took too long.")
    return left
