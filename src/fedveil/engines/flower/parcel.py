"""Bytes with a small header: how a message travels from a client's thin process to its worker and back.

"FVP1" · header length (4 bytes) · header (JSON, with the length of every part) · the parts, one after the other
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from fedveil.errors import ProtocolError

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
