"""PNG files that any picture library reads as they were meant."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedveil.audit.pictures import write_png


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (64, 3)])
def test_every_pixel_comes_back(tmp_path: Path, channels: int, size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(3).integers(0, 256, (*size, channels), dtype=np.uint8)
    write_png(tmp_path / "new" / "a.png", pixels)
    with image.open(tmp_path / "new" / "a.png") as opened:
        opened.verify()
    with image.open(tmp_path / "new" / "a.png") as opened:
        assert opened.mode == {1: "L", 3: "RGB"}[channels]
        assert opened.size == (size[1], size[0])
        assert np.array_equal(np.asarray(opened).reshape(pixels.shape), pixels)


def test_without_a_picture_library_the_file_is_as_the_standard_says(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    write_png(tmp_path / "a.png", pixels)
    raw = (tmp_path / "a.png").read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(raw):
        (length,) = struct.unpack(">I", raw[place : place + 4])
        kind, content = raw[place + 4 : place + 8], raw[place + 8 : place + 8 + length]
        assert struct.unpack(">I", raw[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + content)
        chunks[kind], place = content, place + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (4, 2, 8, 2, 0, 0, 0)
    assert zlib.decompress(chunks[b"IDAT"]) == b"\0" + pixels[0].tobytes() + b"\0" + pixels[1].tobytes()


def test_two_channels_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 or 3 channels"):
        write_png(tmp_path / "a.png", np.zeros((2, 2, 2), np.uint8))
