"""From arrays as a file holds them to a Split: one shape, one scale, one meaning of a label.

Files may be compressed, damaged or missing.
"""

from __future__ import annotations

import gzip
import lzma
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset, Options, Split, Task, check_finite
from fedveil.data.partition import Purpose, generator
from fedveil.errors import DataError

_COMPRESSED = frozenset({".gz", ".xz"})
_SMALL, _MOST_TIMES = 1 << 26, 100


def read_bytes(path: Path) -> bytes:
    """The content of ``path``, decompressed where its name ends in .gz or .xz."""
    try:
        if not path.is_file():
            raise DataError(f"{path}: no file.")
        if path.suffix not in _COMPRESSED:
            return path.read_bytes()
        most = largest_of(path.stat().st_size)
        with gzip.open(path) if path.suffix == ".gz" else lzma.open(path) as stream:
            content = stream.read(most + 1)
        if len(content) > most:
            raise DataError(
                f"{path}: more than {most:,} bytes when decompressed, too many for its size. Do not trust it."
            )
        return content
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise DataError(f"{path}: the compressed file is damaged or cut short ({error}). Fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error


def largest_of(compressed: int) -> int:
    """How many bytes so many compressed ones may hold: data sets take a tenth, a bomb takes a thousandth."""
    return max(_SMALL, _MOST_TIMES * compressed)


def plain_name(path: Path) -> str:
    """The file's name without the ending of its compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name


def by_plain_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Files by name without compression; an uncompressed file wins over its compressed twin."""
    ordered = sorted(paths, key=lambda path: (path.suffix not in _COMPRESSED, path.name))
    return {plain_name(path): path for path in ordered}


def files_of(folder: Path) -> list[Path]:
    """The visible plain files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


Array = npt.NDArray[np.generic]

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False)
class Part:
    """One part as it was read; ``origin`` names its file in errors."""

    origin: str
    x: Array
    y: Array
    groups: Array | None = None


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a reader of array files returns; without ``test`` the training part will be split."""

    train: Part
    test: Part | None = None
    classes: tuple[str, ...] = ()
    outputs: int | None = None
    vocabulary: int | None = None


def split_rows(count: int, options: Options, *, where: str) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the test rows, each in the order of the file."""
    if count < 2:
        raise DataError(f"{where}: {count} sample(s) cannot be split into a training and a test part.")
    held = min(max(round(count * options.test_fraction), 1), count - 1)
    order = generator(options.seed, purpose=Purpose.SPLIT).permutation(count)
    return torch.from_numpy(np.sort(order[held:])), torch.from_numpy(np.sort(order[:held]))


def assemble(arrays: Arrays, options: Options, *, name: str) -> Split:
    """Turn the arrays of one source into a Split."""
    parts = [arrays.train] if arrays.test is None else [arrays.train, arrays.test]
    for part in parts:
        _check_counts(part)
    task, outputs, labels, targets = _targets(parts, arrays, options.task)
    image = arrays.train.x.dtype == np.uint8 and arrays.vocabulary is None
    if arrays.vocabulary is None and any((part.x.dtype == np.uint8) != image for part in parts):
        raise DataError(
            f"{parts[0].origin} holds {parts[0].x.dtype}, but {parts[1].origin} {parts[1].x.dtype}. "
            "Bytes are scaled to [0, 1] and other numbers are not: store both parts alike."
        )
    inputs = [_inputs(part, tokens=arrays.vocabulary is not None) for part in parts]
    ready = [
        Dataset(name, task, x, y, outputs, labels, _groups(part), arrays.vocabulary)
        for part, x, y in zip(parts, inputs, targets, strict=True)
    ]
    if len(ready) == 1:
        ready = [ready[0].subset(rows) for rows in split_rows(len(ready[0]), options, where=parts[0].origin)]
    elif ready[0].input_shape != ready[1].input_shape:
        ours, theirs = (part.input_shape for part in ready)
        raise DataError(
            f"{parts[0].origin} has samples of shape {ours}, but {parts[1].origin} of shape {theirs}. "
            "Bring both parts to the same shape."
        )
    if image and options.normalise:
        ready = _standardised(ready)
    return Split(*ready)


def _standardised(parts: list[Dataset]) -> list[Dataset]:
    """Every channel shifted and scaled by the mean and deviation it has in the first part."""
    x = parts[0].x
    # A flat row of pixels is one channel: per-pixel statistics would blow up the rim that never varies.
    across = [0, *range(2, x.ndim)] if x.ndim > 2 else [0, 1]
    deviation, mean = torch.std_mean(x, dim=across, correction=0, keepdim=True)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return [replace(part, x=part.x.sub(mean).div_(deviation)) for part in parts]


def _check_counts(part: Part) -> None:
    if part.x.ndim < 2:
        raise DataError(f"{part.origin}: samples have shape {part.x.shape}; one row per sample is needed, (N, ...).")
    if len(part.x) == 0:
        raise DataError(f"{part.origin}: there are no samples.")
    for what, array in (("labels", part.y), ("groups", part.groups)):
        if array is not None and (array.ndim == 0 or len(array) != len(part.x)):
            count = 1 if array.ndim == 0 else len(array)
            raise DataError(f"{part.origin}: {len(part.x)} samples but {count} {what}; they do not belong together.")


def _inputs(part: Part, *, tokens: bool) -> Tensor:
    x = part.x
    if x.dtype.kind not in "biuf":
        raise DataError(f"{part.origin}: samples are of type {x.dtype}; numbers are needed.")
    if tokens:
        if x.dtype.kind not in "iu":
            raise DataError(f"{part.origin}: token ids must be whole numbers, not {x.dtype}.")
        return torch.from_numpy(x.astype(np.int64))
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4:
        last, first = x.shape[3] in _CHANNELS, x.shape[1] in _CHANNELS
        # Bytes are pictures, mostly channel last; other numbers are only turned when it is beyond doubt.
        if (x.dtype == np.uint8 and (last or not first)) or (last and not first):
            x = x.transpose(0, 3, 1, 2)
    with np.errstate(over="ignore"):
        ready = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if x.dtype == np.uint8:
        return ready.div_(255.0)
    check_finite(ready, what="x", where=part.origin)
    return ready


def _groups(part: Part) -> Tensor | None:
    if part.groups is None:
        return None
    if part.groups.dtype.kind not in "iu" or part.groups.ndim != 1:
        raise DataError(f"{part.origin}: groups must be one whole number per sample.")
    return torch.from_numpy(part.groups.astype(np.int64))


def _targets(parts: list[Part], arrays: Arrays, task: Task | None) -> tuple[Task, int, tuple[str, ...], list[Tensor]]:
    raw = [part.y.reshape(-1) if part.y.ndim == 2 and part.y.shape[1] == 1 else part.y for part in parts]
    kinds = "".join(y.dtype.kind for y in raw)
    classes = arrays.classes
    if any(kind not in "biufUS" for kind in kinds):
        raise DataError(f"{parts[0].origin}: targets of type {raw[0].dtype} are neither numbers nor names.")
    if "U" in kinds or "S" in kinds:
        classes = classes or tuple(sorted({str(value) for value in raw[0].reshape(-1).astype(np.str_)}))
        raw = [_codes(y, classes, origin=part.origin) for part, y in zip(parts, raw, strict=True)]
    if task == "regression" and len(classes) > 2:
        raise DataError(
            f"{parts[0].origin}: {len(classes)} named classes have no order to regress on. Use task='classification'."
        )
    if task in ("regression", "multilabel") or (task is None and kinds[0] == "f"):
        values = [_values(y, origin=part.origin) for part, y in zip(parts, raw, strict=True)]
        return task or "regression", int(values[0].shape[1]), classes, values
    labels = [_labels(y, origin=part.origin) for part, y in zip(parts, raw, strict=True)]
    outputs = arrays.outputs or len(classes) or int(labels[0].max()) + 1
    for part, y in zip(parts, labels, strict=True):
        if int(y.max()) >= outputs:
            raise DataError(
                f"{part.origin}: sample {int(y.argmax())} has class {int(y.max())}, but {parts[0].origin} "
                f"knows {outputs} classes, 0 to {outputs - 1}."
            )
    return "classification", outputs, classes, labels


def _codes(names: Array, classes: tuple[str, ...], *, origin: str) -> Array:
    position = {name: code for code, name in enumerate(classes)}
    try:
        codes = [position[str(name)] for name in names.reshape(-1).astype(np.str_)]
        return np.array(codes, dtype=np.int64).reshape(names.shape)
    except KeyError as error:
        raise DataError(
            f"{origin}: class {error} is not among the training part's classes: {', '.join(classes)}."
        ) from error


def _values(y: Array, *, origin: str) -> Tensor:
    with np.errstate(over="ignore"):
        values = torch.from_numpy(y.astype(np.float32))
    if values.ndim > 2:
        raise DataError(f"{origin}: regression targets have shape {y.shape}; (N,) or (N, outputs) is needed.")
    values = values.reshape(len(values), -1)
    check_finite(values, what="y", where=origin)
    return values


def _labels(y: Array, *, origin: str) -> Tensor:
    if y.ndim != 1:
        raise DataError(f"{origin}: labels have shape {y.shape}; one whole number per sample is needed.")
    labels = y.astype(np.int64)
    if y.dtype.kind == "f" and not np.array_equal(labels.astype(y.dtype), y):
        raise DataError(f"{origin}: labels are not whole numbers. Use task='regression', or mend the labels.")
    if labels.min() < 0:
        raise DataError(f"{origin}: sample {int(labels.argmin())} has class {int(labels.min())}; classes count from 0.")
    return torch.from_numpy(labels)


_X = ("x", "data", "images", "features")
_Y = ("y", "labels", "targets", "target", "label")
_GROUPS = ("groups", "group")
_DAMAGES = (
    *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, TypeError, MemoryError),
    *(tokenize.TokenError, OverflowError),
)
TEST_NAMES = ("test", "val", "valid", "validation")


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
    second = next((name for name in TEST_NAMES if name in files), None)
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
            whole = sum(member.file_size for member in archive.infolist())
            if whole > largest_of(path.stat().st_size):
                raise ValueError(f"it holds {whole:,} bytes, too many for its size")
            return {member.filename.removesuffix(".npy"): _member(archive, member) for member in archive.infolist()}
    except _DAMAGES as error:
        raise DataError(f"{path}: not a readable .npz file ({error}).") from error


def read_array(path: Path) -> Array:
    """The one array of an .npy file; its header is compared with the file's size before anything is allocated."""
    try:
        with path.open("rb") as file:
            _check_header(file, path.stat().st_size)
        array: Array = np.load(path, allow_pickle=False)
        return array
    except _DAMAGES as error:
        raise DataError(f"Cannot read {path} as a .npy array: {error}") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        _check_header(file, info.file_size)
    with archive.open(info) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


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
    test = next((name for name in TEST_NAMES if _find(arrays, _X, name)), None)
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
