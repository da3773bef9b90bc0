"""PNG files of small pictures, without a picture library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2}


def write_png(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Write an array (height, width, 1 or 3) as an 8-bit PNG."""
    height, width, channels = pixels.shape
    if channels not in _COLOURS:
        raise ValueError(f"a picture has 1 or 3 channels, not {channels}")
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_SIGNATURE + b"".join(_chunk(kind, content) for kind, content in parts))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
