"""How an encrypted vector travels: a header, the sizes of its ciphertexts, the ciphertexts.

    magic 5 · checksum 4 · key id 8 · vector length 8 · addends 4 · number of ciphertexts 4 · sizes 4 each · ciphertexts

The checksum (CRC-32 of everything behind it) finds damage, not malice: whoever can write a ciphertext can
encrypt another one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.errors import ProtocolError

_MAGIC = b"FVCV\x01"
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<8sQII")
_BODY = len(_MAGIC) + _CHECKSUM.size


@dataclass(frozen=True)
class Summary:
    """What an encrypted vector says about itself."""

    key_id: bytes
    length: int
    addends: int


def pack(summary: Summary, chunks: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """The bytes of an encrypted vector."""
    header = _HEADER.pack(summary.key_id, summary.length, summary.addends, len(chunks))
    sizes = struct.pack(f"<{len(chunks)}I", *map(len, chunks))
    checksum = zlib.crc32(sizes, zlib.crc32(header))
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    return b"".join((_MAGIC, _CHECKSUM.pack(checksum), header, sizes, *chunks))


def read_summary(content: bytes) -> Summary:
    """The header alone; nothing behind it is looked at."""
    return _header(content)[0]


def unpack(content: bytes, *, key_id: bytes, length: int | None, slots: int) -> tuple[Summary, list[memoryview]]:
    """The header and the ciphertexts of a vector under this key and of this length (None: of any)."""
    summary, count = _header(content)
    if summary.key_id != key_id:
        raise ProtocolError(
            f"an encrypted vector belongs to the key {summary.key_id.hex()}, where {key_id.hex()} is used"
        )
    if length is not None and summary.length != length:
        raise ProtocolError(f"an encrypted vector holds {summary.length} values, where {length} are expected")
    if summary.addends < 1:
        raise ProtocolError("an encrypted vector says that it is a sum of nothing")
    if count != -(-summary.length // slots):
        raise ProtocolError(f"an encrypted vector of {summary.length} values has {count} ciphertexts")
    start = _BODY + _HEADER.size + 4 * count
    sizes = struct.unpack_from(f"<{count}I", content, _BODY + _HEADER.size) if len(content) >= start else ()
    end = start + sum(sizes)
    if len(content) < end:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes of at least {end}")
    if len(content) > end:
        raise ProtocolError(f"an encrypted vector has {len(content) - end} bytes too many")
    whole = memoryview(content)
    if zlib.crc32(whole[_BODY:]) != _CHECKSUM.unpack_from(content, len(_MAGIC))[0]:
        raise ProtocolError("an encrypted vector was damaged on its way: its checksum is wrong")
    parts = []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return summary, parts


def _header(content: bytes) -> tuple[Summary, int]:
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        raise ProtocolError("these bytes are not a CKKS-encrypted vector")
    if len(content) < _BODY + _HEADER.size:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes are less than its header")
    key_id, length, addends, count = _HEADER.unpack_from(content, _BODY)
    return Summary(key_id, length, addends), count
