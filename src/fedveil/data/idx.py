"""The idx files of MNIST and its relatives."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part, read_arrays
from fedveil.data.files import files_of, read_bytes
from fedveil.errors import DataError

_NAME = re.compile(r"(?P<prefix>.*?)(?P<part>train|t10k|test)-(?P<kind>images|labels)[.-]idx\d-ubyte(?:\.gz|\.xz)?")
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 8
_WRITERS = "writer_ids.npz"


def recognises(path: Path) -> bool:
    """Whether this is a folder with idx files, or one of the files."""
    if path.is_dir():
        return any(_NAME.fullmatch(file.name) for file in files_of(path))
    return _NAME.fullmatch(path.name) is not None


def read(folder: Path) -> Arrays:
    """Read the training files and, where they are there, the test files and the writers."""
    found: dict[tuple[str, str], Path] = {}
    prefixes: set[str] = set()
    for file in files_of(folder):
        if match := _NAME.fullmatch(file.name):
            part = "train" if match["part"] == "train" else "test"
            # Sorted by name, an uncompressed file comes before its compressed twin.
            found.setdefault((part, match["kind"]), file)
            prefixes.add(match["prefix"])
    if len(prefixes) > 1:
        raise DataError(
            f"{folder}: holds several idx data sets ({', '.join(sorted(prefixes))}). One folder each, please."
        )
    train = _part(found, "train", folder=folder)
    test = _part(found, "test", folder=folder) if any(part == "test" for part, _ in found) else None
    return Arrays(train, test)


def read_idx(path: Path) -> Array:
    """One idx file: 00 00 type dimensions, the sizes, then the values, all big-endian."""
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise DataError(f"{path}: not an idx file (it starts with {content[:4].hex(' ') or 'nothing'}).")
    dimensions, kind = content[3], np.dtype(_TYPES[content[2]])
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise DataError(f"{path}: the idx header is cut short. Fetch the file again.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape) * kind.itemsize
    if len(content) - start != expected:
        raise DataError(
            f"{path}: {len(content) - start} bytes of data where its header {shape} announces {expected}. "
            "Fetch the file again."
        )
    if dimensions > _MOST_DIMENSIONS or expected == 0:
        raise DataError(f"{path}: its header announces {dimensions} dimensions and {expected} bytes, which is no data.")
    return np.frombuffer(content, dtype=kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def _part(found: dict[tuple[str, str], Path], part: str, *, folder: Path) -> Part:
    for kind in ("images", "labels"):
        if (part, kind) not in found:
            wanted = ("train-" if part == "train" else "t10k-") + kind
            raise DataError(f"{folder}: holds idx files, but no {wanted}-idx?-ubyte[.gz]. Add the missing file.")
    images, labels = found[part, "images"], found[part, "labels"]
    x, y = read_idx(images), read_idx(labels)
    if x.ndim < 2 or y.ndim != 1:
        raise DataError(f"{images}, {labels}: shapes {x.shape} and {y.shape} are not images and their labels.")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images but {labels} {len(y)} labels; they do not belong together.")
    return Part(str(images), x, y, _writers(folder, part))


def _writers(folder: Path, part: str) -> Array | None:
    path, key = folder / _WRITERS, f"{part}_writer"
    if not path.is_file():
        return None
    arrays = read_arrays(path)
    if key not in arrays:
        raise DataError(f"{path}: no array {key!r}; it holds {', '.join(arrays) or 'nothing'}.")
    return arrays[key]
