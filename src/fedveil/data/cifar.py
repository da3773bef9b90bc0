"""CIFAR-10 and CIFAR-100: the binary batches and the pickled Python batches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part
from fedveil.data.files import files_of, read_bytes
from fedveil.data.pickles import read_pickle
from fedveil.errors import DataError

_PIXELS = 3 * 32 * 32
_BATCH = re.compile(r"(?P<part>(?P<batch>data_batch_\d+)|test_batch|train|test)(?P<binary>\.bin)?")
_NAMES = {  # where the class names lie beside the batches
    (10, True): "batches.meta.txt",
    (100, True): "fine_label_names.txt",
    (10, False): "batches.meta",
    (100, False): "meta",
}


def recognises(path: Path) -> bool:
    """Whether this is a folder with CIFAR batches, or one of the batches."""
    if path.is_dir():
        return any(_is_training(file) for file in files_of(path))
    return _BATCH.fullmatch(path.name) is not None


def read(folder: Path) -> Arrays:
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
    if isinstance(y, list) and not all(type(one) is int and 0 <= one < classes for one in y):
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
