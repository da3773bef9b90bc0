"""Bytes between processes and on disk: how the parts of one thing are told from each other.

On a stream (a pipe or a socket between two processes of one machine) goes one frame after the other:

    kind 1 · number of parts 4 · length of each part 8 · parts            (big endian; what a kind means, its users say)

What is carried further or kept, messages, parcels and stored state, describes itself (`Format`):

    magic · length of the header · header (JSON) · parts, one after the other

A length is held to a limit before anything is allocated for it, and memory grows with what really comes.
"""

from __future__ import annotations

import io
import json
import os
import select
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from fedveil.errors import ProtocolError

Part = bytes | bytearray | memoryview

LIMIT = 8 << 30
"""Bytes that all parts of a frame may have together unless another limit is given."""

_HEAD = struct.Struct(">BI")
_MOST_PARTS = 1 << 16
_PIECE = 1 << 20


class Stream(Protocol):
    """One end of a pipe, or a socket."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


Kind = TypeVar("Kind", bound=IntEnum)


class BrokenOffError(ProtocolError):
    """The other side went away before a whole frame had passed."""


def send(stream: Stream, kind: IntEnum, *parts: Part, deadline: float | None = None, limit: int = LIMIT) -> None:
    """Send one frame.

    Raises:
        BrokenOffError: The other side has gone.
        TimeoutError: It has not taken the frame by `deadline` (of time.monotonic).
    """
    size = sum(map(len, parts))
    if size > limit:
        raise ProtocolError(f"A frame of {size} bytes is over the limit of {limit} bytes.")
    head = _HEAD.pack(kind, len(parts)) + struct.pack(f">{len(parts)}Q", *map(len, parts))
    descriptor = stream.fileno()
    os.set_blocking(descriptor, False)  # or a write would wait for room beyond the deadline
    try:
        for part in (head, *parts):
            rest = memoryview(part)
            while len(rest):
                _await(descriptor, select.POLLOUT, deadline)
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except BlockingIOError:
                    continue
    except ConnectionError as reason:
        raise BrokenOffError("The other side closed the connection while a frame was sent to it.") from reason


def receive(
    stream: Stream, kinds: type[Kind], *, deadline: float | None = None, limit: int = LIMIT
) -> tuple[Kind, list[bytes]]:
    """The next frame: its kind, one of `kinds`, and its parts.

    Raises:
        BrokenOffError: The other side has gone.
        ProtocolError: What came is no frame of these kinds, or is over the limit.
        TimeoutError: It is not there in full by `deadline` (of time.monotonic).
    """
    descriptor = stream.fileno()
    code, count = _HEAD.unpack(_exactly(descriptor, _HEAD.size, deadline))
    try:
        kind = kinds(code)
    except ValueError:
        raise ProtocolError(f"A frame of the unknown kind {code} came.") from None
    if count > _MOST_PARTS:
        raise ProtocolError(f"A frame of {count} parts came, and {_MOST_PARTS} are the most.")
    sizes = struct.unpack(f">{count}Q", _exactly(descriptor, 8 * count, deadline))
    if sum(sizes) > limit:
        raise ProtocolError(f"A frame of {sum(sizes)} bytes came, over the limit of {limit} bytes.")
    return kind, [_exactly(descriptor, size, deadline) for size in sizes]


def _exactly(descriptor: int, size: int, deadline: float | None) -> bytes:
    # getvalue() hands out the buffer itself, so that a large part is never in memory twice.
    gathered = io.BytesIO()
    piece = memoryview(bytearray(min(size, _PIECE)))
    missing = size
    while missing:
        _await(descriptor, select.POLLIN, deadline)
        try:
            count = os.readv(descriptor, [piece[: min(missing, _PIECE)]])
        except BlockingIOError:
            continue
        except ConnectionError as reason:
            raise BrokenOffError("The other side closed the connection in the middle of a frame.") from reason
        if not count:
            raise BrokenOffError(f"The connection ended {missing} bytes before the end of a frame.")
        gathered.write(piece[:count])
        missing -= count
    return gathered.getvalue()


def _await(descriptor: int, event: int, deadline: float | None) -> None:
    left = None if deadline is None else 1000.0 * (deadline - time.monotonic())
    waiting = select.poll()
    waiting.register(descriptor, event)
    if (left is not None and left <= 0) or not waiting.poll(left):
        raise TimeoutError("The other side took too long.")


@dataclass(frozen=True)
class Format:
    """A kind of bytes that describe themselves; what stands in the header is up to whoever packs it."""

    what: str
    magic: bytes
    length: str = "<I"
    longest: int = sys.maxsize
    """Bytes that a header may have."""
    separators: tuple[str, str] = (",", ":")

    def pack(self, header: object, parts: Iterable[Part]) -> bytes:
        """One piece of bytes."""
        text = self.header(header)
        return b"".join([self.magic, struct.pack(self.length, len(text)), text, *parts])

    def size(self, header: object) -> int:
        """How many bytes stand before the parts."""
        return len(self.magic) + struct.calcsize(self.length) + len(self.header(header))

    def header(self, header: object) -> bytes:
        """The header as it is written."""
        return json.dumps(header, separators=self.separators).encode()

    def unpack(self, data: bytes) -> tuple[Any, int]:
        """The header, and where the parts begin; what is of another format or damaged is refused."""
        start = len(self.magic) + struct.calcsize(self.length)
        if data[: len(self.magic)] != self.magic or len(data) < start:
            raise ProtocolError(f"not a FedVeil {self.what} (wrong magic bytes)")
        (length,) = struct.unpack_from(self.length, data, len(self.magic))
        if length > self.longest:
            raise ProtocolError(f"a {self.what}'s header has {length} bytes, and {self.longest} are the most")
        try:
            return json.loads(data[start : start + length]), start + length
        except (ValueError, RecursionError) as reason:
            raise ProtocolError(f"a {self.what}'s header is truncated or damaged") from reason


_PARCEL = Format("parcel", b"FVP1", longest=1 << 20)


def pack(header: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """A parcel: plain facts and named parts."""
    lengths = {name: len(part) for name, part in parts.items()}
    return _PARCEL.pack({"header": dict(header), "parts": lengths}, parts.values())


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A parcel's facts and parts; anything malformed or truncated is refused."""
    content, position = _PARCEL.unpack(data)
    parts = {}
    try:
        header, lengths = dict(content["header"]), dict(content["parts"])
    except (ValueError, KeyError, TypeError) as reason:
        raise ProtocolError("a parcel's header is truncated or damaged") from reason
    for name, count in lengths.items():
        if type(count) is not int or count < 0 or position + count > len(data):
            raise ProtocolError("a parcel is truncated, or its lengths are wrong")
        parts[name] = bytes(data[position : position + count])
        position += count
    if position != len(data):
        raise ProtocolError(f"a parcel carries {len(data) - position} bytes too many")
    return header, parts
