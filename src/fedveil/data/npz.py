"""Arrays stored by numpy: one .npz file, or one for each part."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part
from fedveil.data.files import files_of, largest_of
from fedveil.errors import DataError

_X = ("x", "data", "images", "features")
_Y = ("y", "labels", "targets", "target", "label")
_GROUPS = ("groups", "group")
_DAMAGES = (
    *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, TypeError, MemoryError),
    *(tokenize.TokenError, OverflowError),
)
_TEST = ("test", "val", "valid", "validation")


def recognises(path: Path) -> bool:
    """Whether this is an .npz file or a folder that holds some."""
    return any(file.suffix == ".npz" for file in (files_of(path) if path.is_dir() else [path]))


def read(path: Path) -> Arrays:
    """Read one .npz file, or train.npz and test.npz (or val.npz) of a folder."""
    if not path.is_dir():
        return _single(path)
    files = {file.stem: file for file in files_of(path) if file.suffix == ".npz"}
    if "train" not in files:
        if len(files) == 1:
            return _single(next(iter(files.values())))
        raise DataError(
            f"{path}: {len(files)} .npz files ({', '.join(sorted(files))}), but none called train.npz. "
            "Rename them to train.npz and test.npz, or pass the path of one file."
        )
    second = next((name for name in _TEST if name in files), None)
    if second is None:
        return _single(files["train"])
    train, test = _lowered(read_arrays(files["train"])), _lowered(read_arrays(files[second]))
    if _classes(train) and _classes(test) and _classes(train) != _classes(test):
        raise DataError(
            f"{files[second]}: its classes {_classes(test)} differ from the training part's {_classes(train)}."
        )
    return Arrays(_part(train, files["train"]), _part(test, files[second]), _classes(train), None, _vocabulary(train))


def read_arrays(path: Path) -> dict[str, Array]:
    """Every array of an .npz file; pickled objects are refused."""
    try:
        if not path.is_file():
            raise DataError(f"{path}: no file.")
        if not zipfile.is_zipfile(path):
            np.load(path, mmap_mode="r", allow_pickle=False)
            raise DataError(f"{path}: a single array, not an .npz archive. Save it with numpy.savez.")
        with zipfile.ZipFile(path) as archive:
            whole = sum(one.file_size for one in archive.infolist())
            if whole > largest_of(path.stat().st_size):
                raise ValueError(f"it holds {whole:,} bytes, too many for its size")
            return {one.filename.removesuffix(".npy"): _member(archive, one) for one in archive.infolist()}
    except _DAMAGES as error:
        raise DataError(f"{path}: not a readable .npz file ({error}).") from error


def read_array(path: Path) -> Array:
    """The one array of an .npy file; its header is compared with the file's size before anything is allocated."""
    try:
        with path.open("rb") as file:
            _check_header(file, path.stat().st_size)
        found: Array = np.load(path, allow_pickle=False)
        return found
    except _DAMAGES as error:
        raise DataError(f"Cannot read {path} as a .npy array: {error}") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        _check_header(file, info.file_size)
    with archive.open(info) as file:
        found: Array = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _check_header(file: IO[bytes], size: int) -> None:
    """numpy allocates what a header announces before it reads on: refuse one that announces more than is there."""
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = reader(file)
    if kind.hasobject:
        raise ValueError("it holds Python objects, which allow_pickle would run")
    if math.prod(shape) * kind.itemsize > size:
        raise ValueError(f"its header announces {shape} numbers, more than are there")


def _single(path: Path) -> Arrays:
    arrays = _lowered(read_arrays(path))
    test = next((name for name in _TEST if _find(arrays, _X, name)), None)
    if _find(arrays, _X, "train") and test:
        pair = _part(arrays, path, "train"), _part(arrays, path, test)
        return Arrays(*pair, _classes(arrays), None, _vocabulary(arrays))
    part = _part(arrays, path, "train" if _find(arrays, _X, "train") else "")
    return Arrays(part, None, _classes(arrays), None, _vocabulary(arrays))


def _part(arrays: Mapping[str, Array], path: Path, part: str = "") -> Part:
    x, y, groups = (_find(arrays, names, part) for names in (_X, _Y, _GROUPS))
    if x is None or y is None:
        of = f" of the {part} part" if part else ""
        raise DataError(
            f"{path}: no {'samples' if x is None else 'labels'}{of}; "
            f"it holds {', '.join(arrays) or 'nothing'}. "
            "Expected x and y (or data and labels, images and labels, x_train, y_train, x_test, y_test)."
        )
    return Part(f"{path} ({part})" if part else str(path), arrays[x], arrays[y], arrays[groups] if groups else None)


def _find(arrays: Mapping[str, Array], names: tuple[str, ...], part: str) -> str | None:
    spelt = [form for name in names for form in ((f"{name}_{part}", f"{part}_{name}") if part else (name,))]
    return next((form for form in spelt if form in arrays), None)


def _lowered(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.lower(): array for name, array in arrays.items()}


def _classes(arrays: Mapping[str, Array]) -> tuple[str, ...]:
    return tuple(str(name) for name in arrays["classes"].reshape(-1)) if "classes" in arrays else ()


def _vocabulary(arrays: Mapping[str, Array]) -> int | None:
    if "vocabulary" not in arrays:
        return None
    size = arrays["vocabulary"]
    if size.size != 1 or size.dtype.kind not in "iu":
        raise DataError("vocabulary must be one whole number: how many different token ids there are.")
    return int(size.reshape(-1)[0].item())
