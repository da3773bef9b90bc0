"""Frames on a stream socket: one byte that says what it is, eight bytes of length, the body."""

from __future__ import annotations

import io
import json
import socket
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from flwr.app import Array

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


_MAGIC = b"FVP1"
_LONGEST_HEADER = 1 << 20


def pack(header: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """One piece of bytes from plain facts and named parts."""
    lengths = {name: len(part) for name, part in parts.items()}
    text = json.dumps({"header": dict(header), "parts": lengths}, separators=(",", ":")).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(text)), text, *parts.values()])


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Facts and parts back; anything malformed or truncated is refused."""
    if data[:4] != _MAGIC or len(data) < 8:
        raise ProtocolError("not a parcel (wrong magic bytes)")
    (length,) = struct.unpack("<I", data[4:8])
    if length > _LONGEST_HEADER:
        raise ProtocolError(f"a parcel's header has {length} bytes, and {_LONGEST_HEADER} are the most")
    try:
        content = json.loads(data[8 : 8 + length])
        header, lengths = dict(content["header"]), dict(content["parts"])
        position, parts = 8 + length, {}
        for name, count in lengths.items():
            if type(count) is not int or count < 0 or position + count > len(data):
                raise ProtocolError("a parcel is truncated, or its lengths are wrong")
            parts[name] = bytes(data[position : position + count])
            position += count
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise ProtocolError("a parcel's header is truncated or damaged") from reason
    if position != len(data):
        raise ProtocolError(f"a parcel carries {len(data) - position} bytes too many")
    return header, parts


HEADER = "fedveil"
PARTS = "fedveil.parts"
_KIND = "fedveil"


def in_array(content: bytes) -> Array:
    """Bytes as something that Flower carries."""
    return Array(dtype="uint8", shape=(len(content),), stype=_KIND, data=content)


def out_of_array(array: Array) -> bytes:
    """The bytes back; an array of another making is refused."""
    if array.stype != _KIND:
        raise ValueError("an array of another kind")
    return array.data
