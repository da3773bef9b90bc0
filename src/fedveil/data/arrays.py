"""From arrays as a file holds them to a Split: one shape, one scale, one meaning of a label.

Files may be compressed, damaged or missing.
"""

from __future__ import annotations

import gzip
import lzma
import math
import tokenize
import unicodedata
import zipfile
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.dataset import Dataset, Options, Split, Task, check_finite
from fedveil.data.lazy import LazyTensor, mapped, whole
from fedveil.data.partition import Samples, split_rows
from fedveil.data.preparation import Preparation, fit_pixels, from_bytes, laid_out, numbers_like
from fedveil.errors import DataError, unknown_name

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

MOST_NUMBERS = 200_000_000
"""Pictures of more numbers than that stay bytes, and become numbers batch by batch."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part as it was read; ``origin`` names its file in errors."""

    origin: str
    x: Array
    y: Array
    groups: Array | None = None
    sites: Array | None = None
    site_names: tuple[str, ...] = ()  # where sites are numbers that stand for them
    remark: str = field(default="", kw_only=True)
    """What a reader had to guess about it."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a reader of array files returns; what it holds no ``test`` or ``validation`` of, the training part gives."""

    train: Part
    test: Part | None = None
    classes: tuple[str, ...] = ()
    outputs: int | None = None
    vocabulary: int | None = None
    validation: Part | None = None
    resized: bool = False


def assemble(arrays: Arrays, options: Options, *, name: str) -> Split:
    """Turn the arrays of one source into a Split."""
    named = {"train": arrays.train, "test": arrays.test, "validation": arrays.validation}
    given = {which: part for which, part in named.items() if part is not None}
    parts = list(given.values())
    for part in parts:
        _check_counts(part)
    task, outputs, labels, targets = _targets(parts, arrays, options.task)
    image = arrays.train.x.dtype == np.uint8 and arrays.vocabulary is None
    for part in parts[1:]:
        if arrays.vocabulary is None and (part.x.dtype == np.uint8) != image:
            raise DataError(
                f"{parts[0].origin} holds {parts[0].x.dtype}, but {part.origin} {part.x.dtype}. "
                "Bytes are scaled to [0, 1] and other numbers are not: store both parts alike."
            )
    samples = [_inputs(part, tokens=arrays.vocabulary is not None) for part in parts]
    groups, group_names = _owners(parts, "groups")
    sites, site_names = _owners(parts, "sites")
    ready = {
        which: Dataset(name, task, x, y, outputs, labels, group, arrays.vocabulary, site, site_names, group_names)
        for which, x, y, group, site in zip(given, samples, targets, groups, sites, strict=True)
    }
    for part, dataset in zip(parts[1:], list(ready.values())[1:], strict=True):
        if ready["train"].input_shape != dataset.input_shape:
            raise DataError(
                f"{parts[0].origin} has samples of shape {ready['train'].input_shape}, but {part.origin} of shape "
                f"{dataset.input_shape}. Bring both parts to the same shape."
            )
    ready = _parted(ready, options, where=parts[0].origin)
    if image:
        pixels = fit_pixels(ready["train"].x, standardise=options.normalise, resize=arrays.resized)
        ready = {which: replace(part, x=mapped(part.x, pixels.standardised)) for which, part in ready.items()}
        if sum(part.x.numel() for part in ready.values()) <= MOST_NUMBERS:
            ready = {which: replace(part, x=whole(part.x)) for which, part in ready.items()}
    inputs = pixels if image else numbers_like(ready["train"].x)
    remarks = tuple(dict.fromkeys(part.remark for part in parts if part.remark))
    preparation = Preparation(inputs, labels)
    return Split(ready["train"], ready["test"], ready.get("validation"), preparation=preparation, remarks=remarks)


def _parted(ready: dict[str, Dataset], options: Options, *, where: str) -> dict[str, Dataset]:
    """The parts that are there, and those that are drawn from the training part."""
    train = ready["train"]
    if "validation" in ready:
        options = replace(options, validation_fraction=0.0)
    if "test" in ready and not options.validation_fraction:
        return ready
    rows = np.arange(len(train))
    fixed = (rows, rows[:0]) if "test" in ready else None
    drawn = split_rows(Samples(where, train.task, train.y, train.groups, train.sites), options, fixed=fixed)
    chosen = {"train": drawn.train, "test": drawn.test, "validation": drawn.validation}
    new = {which: train.subset(rows) for which, rows in chosen.items() if rows is not None and len(rows)}
    return {**ready, **new}


def _check_counts(part: Part) -> None:
    if part.x.ndim < 2:
        raise DataError(f"{part.origin}: samples have shape {part.x.shape}; one row per sample is needed, (N, ...).")
    if len(part.x) == 0:
        raise DataError(f"{part.origin}: there are no samples.")
    for what, array in (("labels", part.y), ("groups", part.groups), ("sites", part.sites)):
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
    x = laid_out(x, None, where=part.origin)
    if x.dtype == np.uint8:
        return LazyTensor(lambda rows: from_bytes(x[rows.numpy()]), x.shape, dtype=torch.float32)
    with np.errstate(over="ignore"):
        ready = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    check_finite(ready, what="x", where=part.origin)
    return ready


def _owners(parts: list[Part], what: str) -> tuple[list[Tensor | None], tuple[str, ...]]:
    """The groups or sites of every part as numbers, and their names: numbers of groups are kept as they are."""
    given: list[Array | None] = [getattr(part, what) for part in parts]
    for part, codes in zip(parts, given, strict=True):
        if codes is not None and (codes.dtype.kind not in "iuUSO" or codes.ndim != 1):
            raise DataError(f"{part.origin}: {what} must be one whole number or one name per sample.")
    kinds = {codes.dtype.kind in "iu" for codes in given if codes is not None}
    if len(kinds) > 1:
        raise DataError(f"{parts[0].origin}: {what} are numbers in one part and names in another. Write them alike.")
    names = parts[0].site_names if what == "sites" else ()
    if kinds == {True} and (what == "groups" or names):
        return [None if codes is None else torch.from_numpy(codes.astype(np.int64)) for codes in given], names
    if kinds == {True}:
        numbers = sorted({int(number) for codes in given if codes is not None for number in np.unique(codes)})
        names = tuple(map(str, numbers))
        return [
            None if codes is None else torch.from_numpy(_positions(map(str, codes), names)) for codes in given
        ], names
    written = [None if codes is None else _names(codes, part, what) for part, codes in zip(parts, given, strict=True)]
    names = tuple(sorted({name for listed in written if listed is not None for name in listed}))
    if "" in names:
        raise DataError(f"{parts[0].origin}: some {what} have no name. Fill them in or remove those samples.")
    return [None if listed is None else torch.from_numpy(_positions(listed, names)) for listed in written], names


def _names(codes: Array, part: Part, what: str) -> list[str]:
    """One spelling of every sample's owner. Not by numpy, which makes every name as long as the longest."""
    known: dict[object, str] = {}
    try:
        for code in codes:
            if code not in known:
                known[code] = one_spelling(code.decode("utf-8") if isinstance(code, bytes) else str(code))
        return [known[code] for code in codes]
    except UnicodeDecodeError as reason:
        raise DataError(f"{part.origin}: some {what} are bytes that are no text. Store them as text.") from reason


def _positions(names: Iterable[str], known: tuple[str, ...]) -> npt.NDArray[np.int64]:
    position = {name: code for code, name in enumerate(known)}
    return np.fromiter((position[name] for name in names), np.int64)


def one_spelling(text: str) -> str:
    """The name of a class, a patient or a site, however it is stored: 7, 7.0 and 007 are the same.

    Characters that nobody sees (of no width, marks of direction, soft hyphens) tell no two patients apart.
    """
    if not text.isascii():
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    name = " ".join(unicodedata.normalize("NFC", text).split())
    try:
        number = float(name)
    except ValueError:
        return name
    return str(int(number)) if math.isfinite(number) and number == int(number) else name


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
_SITES = ("sites", "site")
_DAMAGES = (
    *(ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, TypeError, MemoryError),
    *(tokenize.TokenError, OverflowError),
)
VALIDATION_NAMES = ("val", "valid", "validation")
TEST_NAMES = ("test", *VALIDATION_NAMES)


def recognises(path: Path) -> bool:
    """Whether this is an .npz file or a folder that holds some."""
    return any(file.suffix == ".npz" for file in (files_of(path) if path.is_dir() else [path]))


def read(path: Path, options: Options) -> Arrays:
    """Read one .npz file, or train.npz and test.npz (or val.npz, or all three) of a folder."""
    if not path.is_dir():
        return _single(path, options)
    files = {file.stem: file for file in files_of(path) if file.suffix == ".npz"}
    if "train" not in files:
        if len(files) == 1:
            return _single(next(iter(files.values())), options)
        raise DataError(
            f"{path}: {len(files)} .npz files ({', '.join(sorted(files))}), but none called train.npz. "
            "Rename them to train.npz and test.npz, or pass the path of one file."
        )
    second, third = held_out_names(files)
    if second is None:
        return _single(files["train"], options)
    train = _lowered(read_arrays(files["train"]))
    others = []
    for name in (second, third):
        arrays = None if name is None else _lowered(read_arrays(files[name]))
        if arrays is not None and _classes(train) and _classes(arrays) and _classes(train) != _classes(arrays):
            raise DataError(
                f"{files[str(name)]}: its classes {_classes(arrays)} differ from the training part's {_classes(train)}."
            )
        others.append(None if arrays is None else _part(arrays, files[str(name)], options))
    first = _part(train, files["train"], options)
    return Arrays(first, others[0], _classes(train), None, _vocabulary(train), others[1])


def held_out_names(present: Container[str]) -> tuple[str | None, str | None]:
    """Which of the names that are there mean the test part, and which the validation part.

    Where nothing is called test, a part called validation is what there is to test with.
    """
    validation = next((name for name in VALIDATION_NAMES if name in present), None)
    return ("test", validation) if "test" in present else (validation, None)


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


def _single(path: Path, options: Options) -> Arrays:
    arrays = _lowered(read_arrays(path))
    second, third = held_out_names({name for name in TEST_NAMES if _find(arrays, _X, name)})
    if _find(arrays, _X, "train") and second:
        pair = _part(arrays, path, options, "train"), _part(arrays, path, options, second)
        validation = None if third is None else _part(arrays, path, options, third)
        return Arrays(*pair, _classes(arrays), None, _vocabulary(arrays), validation)
    part = _part(arrays, path, options, "train" if _find(arrays, _X, "train") else "")
    return Arrays(part, None, _classes(arrays), None, _vocabulary(arrays))


def _part(arrays: Mapping[str, Array], path: Path, options: Options, part: str = "") -> Part:
    x, y = (_find(arrays, names, part) for names in (_X, _Y))
    if x is None or y is None:
        of = f" of the {part} part" if part else ""
        raise DataError(
            f"{path}: no {'samples' if x is None else 'labels'}{of}; it holds {', '.join(arrays) or 'nothing'}. "
            "Expected x and y (or data and labels, images and labels, x_train, y_train, x_test, y_test)."
        )
    groups = _owner(arrays, path, "group", options.group, _GROUPS, part)
    sites = _owner(arrays, path, "site", options.site, _SITES, part)
    used = {
        x,
        y,
        "classes",
        "vocabulary",
        *_GROUPS,
        *_SITES,
        (options.group or "").lower(),
        (options.site or "").lower(),
    }
    ignored = [name for name in arrays if name not in used]
    spare = [name for name in ignored if not any(word in name.split("_") for word in ("train", *TEST_NAMES))]
    remark = ""
    if not {"x", "y"} <= {*x.split("_"), *y.split("_")} or spare:
        left = f"; {', '.join(spare)} {'was' if len(spare) == 1 else 'were'} not used" if spare else ""
        remark = f"{path}: {x} was taken as the inputs and {y} as the targets{left}"
    return Part(f"{path} ({part})" if part else str(path), arrays[x], arrays[y], groups, sites, remark=remark)


def _owner(
    arrays: Mapping[str, Array], path: Path, role: str, asked: str | None, usual: tuple[str, ...], part: str
) -> Array | None:
    """The array that says whose each sample is: the one that was asked for, or one of the usual name."""
    name = _find(arrays, usual if asked is None else (asked.lower(),), part)
    if name is None and asked is not None:
        raise unknown_name(f"{role} array", asked, arrays, hint=f"These are the arrays of {path}.")
    return None if name is None else arrays[name]


def labelled(arrays: Mapping[str, Array], path: Path) -> tuple[Array, Array | None]:
    """The samples among the arrays of a file, or its only array, and their targets where it has them."""
    lowered = _lowered(arrays)
    x, y = _find(lowered, _X, ""), _find(lowered, _Y, "")
    if x is None and len(lowered) == 1:
        x = next(iter(lowered))
    if x is None:
        raise DataError(f"{path}: no samples x; it holds {', '.join(arrays) or 'nothing'}.")
    return lowered[x], None if y is None else lowered[y]


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
