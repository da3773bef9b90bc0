"""Pictures in the usual layouts: idx files of MNIST and its relatives, CIFAR batches, one folder per class.

CIFAR comes as pickled dictionaries of arrays, from strangers, and is read without Python's unpickler (`pickles`):
numpy's arrays are made from their bytes and checked for size.
"""

from __future__ import annotations

import errno
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.arrays import (
    TEST_NAMES,
    Array,
    Arrays,
    Part,
    files_of,
    held_out_names,
    largest_of,
    read_arrays,
    read_bytes,
)
from fedveil.data.dataset import Options
from fedveil.data.pickles import Built, Machine, RefusedError, cut, text_of
from fedveil.data.tabular import read_table
from fedveil.errors import DataError, missing_extra, spelled, unknown_name

_NAME = re.compile(r"(?P<prefix>.*?)(?P<part>train|t10k|test)-(?P<kind>images|labels)[.-]idx\d-ubyte(?:\.gz|\.xz)?")
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_DIMENSIONS = 8
_WRITERS = "writer_ids.npz"


def is_idx(path: Path) -> bool:
    """Whether this is a folder with idx files, or one of the files."""
    if path.is_dir():
        return any(_NAME.fullmatch(file.name) for file in files_of(path))
    return _NAME.fullmatch(path.name) is not None


def read_idx_folder(folder: Path) -> Arrays:
    """Read the training files and, where they are there, the test files and the writers."""
    files: dict[tuple[str, str], Path] = {}
    prefixes: set[str] = set()
    for file in files_of(folder):
        if match := _NAME.fullmatch(file.name):
            part = "train" if match["part"] == "train" else "test"
            # Sorted by name, an uncompressed file comes before its compressed twin.
            files.setdefault((part, match["kind"]), file)
            prefixes.add(match["prefix"])
    if len(prefixes) > 1:
        raise DataError(
            f"{folder}: holds several idx data sets ({', '.join(sorted(prefixes))}). One folder each, please."
        )
    train = _idx_part(files, "train", folder=folder)
    test = _idx_part(files, "test", folder=folder) if any(part == "test" for part, _ in files) else None
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


def _idx_part(files: dict[tuple[str, str], Path], part: str, *, folder: Path) -> Part:
    for kind in ("images", "labels"):
        if (part, kind) not in files:
            wanted = ("train-" if part == "train" else "t10k-") + kind
            raise DataError(f"{folder}: holds idx files, but no {wanted}-idx?-ubyte[.gz]. Add the missing file.")
    images, labels = files[part, "images"], files[part, "labels"]
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


def read_pickle(path: Path) -> dict[str, object]:
    """The dictionary in ``path``: text keys; arrays of numbers, lists, text and numbers as values."""
    content = read_bytes(path)
    try:
        loaded = Machine(content, _STAND_INS).run()
    except RefusedError as error:
        raise DataError(
            f"{path}: names {error}, which a pickled batch of arrays does not need; nothing was run. "
            "Do not trust this file: fetch it from its official place."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{path}: not a readable pickled batch ({type(error).__name__}: {cut(str(error))}). Fetch it again."
        ) from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: a pickled {type(loaded).__name__} where a dictionary is expected.")
    return {text_of(key): value.array if isinstance(value, _Array) else value for key, value in loaded.items()}


class _Dtype(Built):
    """Stands in for numpy.dtype: plain numbers only."""

    def __init__(self, code: object) -> None:
        self.kind = np.dtype(text_of(code))
        if self.kind.kind not in "biuf":
            raise ValueError(f"arrays of type {self.kind}")

    def built(self, state: object) -> None:
        """Its byte order."""
        if not isinstance(state, tuple):
            raise ValueError("a type without a state")
        if text_of(state[1]) == ">":
            self.kind = self.kind.newbyteorder(">")


class _Array(Built):
    """Stands in for numpy's array reconstruction; the second half of the pickle gives the content."""

    def __init__(self) -> None:
        self.array: Array = np.zeros(0, np.uint8)

    def built(self, state: object) -> None:
        """Its content."""
        if not isinstance(state, tuple):
            raise ValueError("an array without a state")
        _, shape, kind, columns_first, content = state
        self.fill(content, kind, shape, "F" if columns_first else "C")

    def fill(self, content: object, kind: object, shape: object, order: object) -> None:
        """Take the bytes as numbers of a shape."""
        if not isinstance(kind, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
            raise ValueError("an array without type, shape or order")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("an array of no shape")
        # Python 2 wrote the bytes as a string, which the latin1 reading preserves.
        raw = content.encode("latin1") if isinstance(content, str) else content
        if not isinstance(raw, bytes | bytearray):
            raise ValueError("an array whose content is not bytes")
        values = np.frombuffer(bytes(raw), dtype=kind.kind)
        self.array = values.reshape(shape, order="F" if order == "F" else "C")


def _encoded(text: object, encoding: object) -> bytes:
    """Stands in for codecs.encode, which Python 3 uses to write bytes under the old protocols."""
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError(f"bytes encoded as {encoding}")
    return text.encode("latin1")


def _whole(content: object, kind: object, shape: object, order: object, *_: object) -> _Array:
    """Stands in for numpy's reconstruction under pickle protocol 5, which comes in one piece."""
    array = _Array()
    array.fill(content, kind, shape, order)
    return array


def _bare(*_: object) -> object:
    raise ValueError("a bare numpy.ndarray")


_STAND_INS: dict[tuple[str, str], Callable[..., object]] = {
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): lambda code, *_: _Dtype(code),
    ("numpy", "ndarray"): _bare,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy.core.numeric", "_frombuffer"): _whole,
    ("numpy._core.numeric", "_frombuffer"): _whole,
}
_PIXELS = 3 * 32 * 32
_BATCH = re.compile(r"(?P<part>(?P<batch>data_batch_\d+)|test_batch|train|test)(?P<binary>\.bin)?")
_NAMES = {  # where the class names lie beside the batches
    (10, True): "batches.meta.txt",
    (100, True): "fine_label_names.txt",
    (10, False): "batches.meta",
    (100, False): "meta",
}


def is_cifar(path: Path) -> bool:
    """Whether this is a folder with CIFAR batches, or one of the batches."""
    if path.is_dir():
        return any(_is_training(file) for file in files_of(path))
    return _BATCH.fullmatch(path.name) is not None


def read_cifar(folder: Path) -> Arrays:
    """Read all training batches and, where it is there, the test batch; of CIFAR-100 the fine labels."""
    training = sorted((file for file in files_of(folder) if _is_training(file)), key=_number)
    if not training:
        raise DataError(f"{folder}: a CIFAR test batch is there, but no training batch.")
    # The binary and the pickled release may have been unpacked into one folder: one of them is enough.
    binary = any(file.suffix == ".bin" for file in training)
    training = [file for file in training if (file.suffix == ".bin") == binary]
    classes = 10 if any(file.name.startswith("data_batch") for file in training) else 100
    if classes == 10:
        training = [file for file in training if file.name.startswith("data_batch")]
    batches = [_batch(file, classes, binary=binary) for file in training]
    train = Part(str(folder), np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches]))
    held = folder / (("test_batch" if classes == 10 else "test") + (".bin" if binary else ""))
    test = Part(str(held), *_batch(held, classes, binary=binary)) if held.is_file() else None
    return Arrays(train, test, _class_names(folder, classes, binary=binary), classes)


def _is_training(file: Path) -> bool:
    match = _BATCH.fullmatch(file.name)
    return match is not None and (match["batch"] is not None or match["part"] == "train")


def _number(file: Path) -> int:
    return int("".join(filter(str.isdigit, file.name)) or 0)


def _batch(file: Path, classes: int, *, binary: bool) -> tuple[Array, Array]:
    x, y = _binary(file, classes) if binary else _pickled(file, classes)
    if int(y.max(initial=0)) >= classes or int(y.min(initial=0)) < 0:
        raise DataError(f"{file}: class {int(y.max())} in a CIFAR-{classes} batch; the file is damaged.")
    return x.reshape(-1, 3, 32, 32), y


def _binary(file: Path, classes: int) -> tuple[Array, Array]:
    # CIFAR-100 puts the coarse label before the fine one.
    label_bytes = 1 if classes == 10 else 2
    content, record = read_bytes(file), label_bytes + _PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{file}: {len(content)} bytes are not a whole number of CIFAR-{classes} records "
            f"of {record} bytes. Fetch the file again."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:], rows[:, label_bytes - 1]


def _pickled(file: Path, classes: int) -> tuple[Array, Array]:
    content = read_pickle(file)
    wanted = "labels" if classes == 10 else "fine_labels"
    x, y = content.get("data"), content.get(wanted)
    if not isinstance(x, np.ndarray) or not isinstance(y, list | np.ndarray):
        raise DataError(f"{file}: a CIFAR batch needs 'data' and {wanted!r}; it holds {', '.join(content)}.")
    # Not left to numpy: of one long text and many short ones it makes as many long ones.
    if isinstance(y, list) and not all(type(label) is int and 0 <= label < classes for label in y):
        raise DataError(f"{file}: the labels are not whole numbers below {classes}; the file is damaged.")
    labels = np.asarray(y, np.int64) if isinstance(y, list) else y
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PIXELS or labels.shape != (len(x),):
        raise DataError(
            f"{file}: data of shape {x.shape} ({x.dtype}) and {labels.size} labels; "
            f"expected N × {_PIXELS} bytes and N labels."
        )
    if labels.dtype.kind not in "iu":
        raise DataError(f"{file}: the labels are not whole numbers.")
    return x, labels


def _class_names(folder: Path, classes: int, *, binary: bool) -> tuple[str, ...]:
    file = folder / _NAMES[classes, binary]
    if not file.is_file():
        return ()
    if binary:
        names: object = read_bytes(file).decode("utf-8", "replace").split()
    else:
        names = read_pickle(file).get("label_names" if classes == 10 else "fine_label_names")
    if not isinstance(names, list) or len(names) != classes:
        raise DataError(f"{file}: expected the names of {classes} classes. Fetch it again, or remove it.")
    if not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"{file}: the names of classes are no texts. Fetch it again, or remove it.")
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


_METADATA, _FILE_NAME = "metadata.csv", "file_name"
_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# Pillow goes by content, not by name, and hands PostScript to another program.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_BILINEAR = 2  # Pillow's number for it; averages over all pixels where a picture shrinks
_MOST_IN_MEMORY = 1 << 30


def is_pictures(path: Path) -> bool:
    """Whether this folder holds class folders with pictures, directly or under train."""
    return path.is_dir() and (bool(class_folders(path)) or bool(class_folders(path / "train")))


def read_pictures(path: Path, options: Options) -> Arrays:
    """Read PATH/{train,test,val}/CLASS/*.png or PATH/CLASS/*.png; other usual picture formats too.

    Whose pictures they are stands in PATH/metadata.csv, which has a column file_name and those that options name. Where
    options have a picture_size, every picture is resized to so many pixels a side.
    """
    size, resized = options.picture_size, options.picture_size is not None
    decode, owners = decoder(None if size is None else (size, size)), _Owners(path, options)

    def part_of(folder: Path, classes: dict[str, list[Path]]) -> Part:
        return owners.given_to(_picture_part(folder, classes, decode, resized=resized), classes)

    if not class_folders(path / "train"):
        classes = class_folders(path)
        return Arrays(part_of(path, classes), None, tuple(classes), resized=resized)
    second, third = held_out_names({name for name in TEST_NAMES if class_folders(path / name)})
    classes = class_folders(path / "train")
    parts = [part_of(path / "train", classes)]
    for held in (path / name for name in (second, third) if name is not None):
        if set(class_folders(held)) != set(classes):
            odd = sorted(set(class_folders(held)) ^ set(classes))
            raise DataError(
                f"{held}: its class folders differ from those of {path / 'train'}: {', '.join(odd)} on one side only."
            )
        parts.append(part_of(held, class_folders(held)))
    train, test, validation = (*parts, None, None)[:3]
    assert train is not None
    return Arrays(train, test, tuple(classes), resized=resized, validation=validation)


class _Owners:
    """What PATH/metadata.csv says of pictures, where options ask for it."""

    def __init__(self, path: Path, options: Options) -> None:
        self._path = path
        self._file = path / _METADATA
        asked = {"groups": options.group, "sites": options.site}
        self._columns: dict[str, dict[str, str]] = {}
        self._by_name: dict[str, Path] = {}
        if not any(asked.values()):
            return
        if not self._file.is_file():
            raise DataError(
                f"{path}: whose are its pictures? Put a table {_METADATA} there, with a column {_FILE_NAME} (like "
                f"CLASS/1.png) and the column {options.group or options.site}."
            )
        table = read_table(self._file)
        named = {"names": _FILE_NAME} | {what: column for what, column in asked.items() if column is not None}
        for column in named.values():
            if column not in table.columns:
                raise unknown_name("column", column, table.columns, hint=f"These are the columns of {self._file}.")
        listed = {what: [value.strip() for value in table.columns[column]] for what, column in named.items()}
        names = listed.pop("names")
        seen: set[str] = set()
        for row, name in enumerate(names):
            if name in seen:
                raise DataError(
                    f"{table.place(row)}: {name[:80]!r} stands in column {_FILE_NAME!r} a second time, and a picture "
                    "has one owner. Leave one line for each picture; where pictures in two folders have one name, "
                    "write CLASS/NAME."
                )
            seen.add(name)
        self._columns = {what: dict(zip(names, owners, strict=True)) for what, owners in listed.items()}

    def given_to(self, part: Part, classes: dict[str, list[Path]]) -> Part:
        """The part with the owners of its pictures, which are in the order of their classes."""
        files = [file for listed in classes.values() for file in listed]
        return replace(part, groups=self._owners(files, "groups"), sites=self._owners(files, "sites"))

    def _owners(self, files: list[Path], what: str) -> Array | None:
        known = self._columns.get(what)
        return None if known is None else np.array([self._of(file, known) for file in files], object)

    def _of(self, file: Path, known: dict[str, str]) -> str:
        owner = known.get(file.relative_to(self._path).as_posix())
        if not owner and file.name in known:
            owner, first = known[file.name], self._by_name.setdefault(file.name, file)
            if first != file:
                raise DataError(
                    f"{self._file}: {file.name!r} may be {first} or {file}. Write CLASS/NAME in column {_FILE_NAME!r}."
                )
        if not owner:
            raise DataError(f"{file}: {self._file} does not say whose it is. Add a line for it.")
        return owner


def class_folders(path: Path) -> dict[str, list[Path]]:
    """The pictures of every folder in `path` that holds some, by its name."""
    if not path.is_dir():
        return {}
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    pictures = {folder.name: [file for file in files_of(folder) if is_picture(file)] for folder in folders}
    return {name: files for name, files in pictures.items() if files}


def is_picture(file: Path) -> bool:
    """Whether the name is that of a picture."""
    return file.suffix.lower() in _ENDINGS


def decoder(size: tuple[int, int] | None = None) -> Callable[[Path], Array]:
    """What reads a picture's bytes, of shape (height, width) or (height, width, 3), resized to a (width, height)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "Reading a folder of pictures") from error

    def decode(path: Path) -> Array:
        try:
            with Image.open(path, formats=_FORMATS) as picture:
                pixels = picture.width * picture.height * len(picture.getbands())
                if pixels > largest_of(path.stat().st_size):
                    raise ValueError(f"{picture.width}×{picture.height} pixels, too many for its size")
                return as_array(picture, size)
        except Exception as error:  # each format has its own ways to fail on a damaged picture
            raise DataError(f"{path}: not a readable picture ({error}).") from error

    return decode


def as_array(picture: Any, size: tuple[int, int] | None) -> Array:
    """A Pillow picture as bytes: grey ones in one channel, all others in three; resized to a (width, height)."""
    plain = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
    return np.asarray(plain if size in (None, plain.size) else plain.resize(size, _BILINEAR))


def _picture_part(
    path: Path, classes: dict[str, list[Path]], decode: Callable[[Path], Array], *, resized: bool
) -> Part:
    """All pictures as bytes, in one array that is made once the first picture tells its size."""
    named = [(code, file) for code, files in enumerate(classes.values()) for file in files]
    most = math.inf if resized else largest_of(sum(file.stat().st_size for _, file in named))
    pixels: Array = np.empty(0, np.uint8)
    for place, (_, file) in enumerate(named):
        picture = decode(file)
        coloured = picture.ndim == 3
        if place == 0:
            pixels = _room(path, (len(named), *picture.shape), most)
        if picture.shape[:2] != pixels.shape[1:3]:
            ours, theirs = (f"{width}×{height}" for height, width in (pixels.shape[1:3], picture.shape[:2]))
            raise DataError(
                f"{file}: {theirs} pixels, but {named[0][1]} has {ours}. "
                f"Have them resized as they are read ({spelled('picture_size', 64)}), or bring them to one size first."
            )
        if coloured and pixels.ndim == 3:  # the first one in colour
            grey, pixels = pixels, _room(path, (*pixels.shape, 3), most)
            pixels[:place] = grey[:place, ..., None]
        pixels[place] = picture if coloured == (pixels.ndim == 4) else picture[..., None]
    return Part(str(path), pixels, np.array([code for code, _ in named], np.int64))


def _room(path: Path, shape: tuple[int, ...], most: float) -> Array:
    """An array of bytes; a large one lies in a file that is gone with the process, so that memory need not hold it."""
    size = math.prod(shape)
    if size > most:
        raise DataError(f"{path}: its pictures are too large for the size of their files. Do not trust them.")
    if size <= _MOST_IN_MEMORY:
        return np.empty(shape, np.uint8)
    try:
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if size > free:
            raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free")
        return np.memmap(tempfile.TemporaryFile(), np.uint8, "w+", shape=shape)
    except OSError as error:
        raise DataError(
            f"{path}: its pictures take {size >> 20} MiB in {tempfile.gettempdir()}, where they cannot be kept "
            f"({error.strerror}). Let the environment variable TMPDIR name a folder with more room, or make the "
            "pictures smaller."
        ) from error
