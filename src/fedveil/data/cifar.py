"""Pickled dictionaries of arrays from strangers, read without Python's unpickler.

The few instructions that such a file needs are carried out here: texts, numbers, flat lists, one dictionary, and
numpy's arrays, which are made from their bytes and checked for size. Nothing is imported, nothing it names is run,
keys are text (a nested key takes forever to hash), lists hold no lists (thirty that hold each other twice are a billion
numbers), and what is made of the bytes is bounded by the file's own length.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.arrays import Array, Arrays, Part
from fedveil.data.files import files_of, read_bytes
from fedveil.errors import DataError

_MOST_COPIES = 4
_MARK = object()


def read_pickle(path: Path) -> dict[str, object]:
    """The dictionary in ``path``: text keys; arrays of numbers, lists, text and numbers as values."""
    content = read_bytes(path)
    try:
        loaded = _Machine(content).run()
    except _RefusedError as error:
        raise DataError(
            f"{path}: names {error}, which a pickled batch of arrays does not need; nothing was run. "
            "Do not trust this file: fetch it from its official place."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{path}: not a readable pickled batch ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: a pickled {type(loaded).__name__} where a dictionary is expected.")
    return {_text(key): value.array if isinstance(value, _Array) else value for key, value in loaded.items()}


class _RefusedError(Exception):
    """The file names something outside the list."""


class _Dtype:
    """Stands in for numpy.dtype: plain numbers only."""

    def __init__(self, code: object) -> None:
        self.kind = np.dtype(_text(code))
        if self.kind.kind not in "biuf":
            raise ValueError(f"arrays of type {self.kind}")

    def built(self, state: tuple[object, ...]) -> None:
        """Its byte order."""
        if _text(state[1]) == ">":
            self.kind = self.kind.newbyteorder(">")


class _Array:
    """Stands in for numpy's array reconstruction; the second half of the pickle gives the content."""

    def __init__(self) -> None:
        self.array: Array = np.zeros(0, np.uint8)

    def built(self, state: tuple[object, ...]) -> None:
        """Its content."""
        _, shape, kind, columns_first, content = state
        self.fill(content, kind, shape, "F" if columns_first else "C")

    def fill(self, content: object, kind: object, shape: object, order: object) -> None:
        """Take the bytes as numbers of a shape."""
        if not isinstance(kind, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
            raise ValueError("an array without type, shape or order")
        if not all(type(one) is int and one >= 0 for one in shape):
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
    found = _Array()
    found.fill(content, kind, shape, order)
    return found


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
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_PUTS, _GETS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """A pickle's instructions, one after the other, on a stack."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = _MOST_COPIES * len(content)

    def run(self) -> object:
        """What the file leaves on the stack."""
        for opcode, argument, _ in pickletools.genops(self._content):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        (found,) = self._stack
        return found

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            if not 0 <= argument <= len(self._memo) + 1:
                raise ValueError(f"memo index {argument}")
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("LIST", "DICT", "TUPLE"):
            found = self._since_mark()
            made: Any = tuple(found) if name == "TUPLE" else [] if name == "LIST" else {}
            stack.append(made)
            if name != "TUPLE":
                self._add(made, found)
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            found = stack[-count:]
            del stack[-count:]
            self._add(stack[-1], found)
        elif name in ("APPENDS", "SETITEMS"):
            found = self._since_mark()
            self._add(stack[-1], found)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            place = argument.split(" ") if name == "GLOBAL" else [stack.pop(-2), stack.pop()]
            stack.append(_named(*place))
        elif name == "REDUCE":
            given = stack.pop()
            stack.append(self._called(stack.pop(), given))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], _Array | _Dtype) or not isinstance(state, tuple):
                raise ValueError("a state of something that has none")
            self._pay(state)
            stack[-1].built(state)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the instruction {name}, which no batch of arrays needs")

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def _add(self, to: object, found: list[Any]) -> None:
        if isinstance(to, list):
            if not all(isinstance(one, str | bytes | int | float) for one in found):
                raise ValueError("a list of something else than texts and numbers")
            to += found
        elif isinstance(to, dict) and len(found) % 2 == 0:
            if not all(isinstance(key, str | bytes) for key in found[::2]):
                raise ValueError("a key that is no text")
            to.update(zip(found[::2], found[1::2], strict=True))
        else:
            raise ValueError("items of something that holds none")

    def _called(self, function: object, given: object) -> object:
        if not isinstance(function, _Named) or not isinstance(given, tuple):
            raise ValueError("a call of something that is no name")
        self._pay(given)
        return function.stand_in(*given)

    def _pay(self, given: tuple[object, ...]) -> None:
        """Bytes may be named again and again, and are copied each time: only so often."""
        self._left -= sum(len(one) for one in given if isinstance(one, str | bytes | bytearray))
        if self._left < 0:
            raise ValueError("many times its own size in arrays")


class _Named:
    """A name of the list, until it is called."""

    def __init__(self, stand_in: Callable[..., object]) -> None:
        self.stand_in = stand_in


def _named(module: object, name: object) -> _Named:
    if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _STAND_INS:
        raise _RefusedError(f"{_text(module)}.{_text(name)}")
    return _Named(_STAND_INS[module, name])


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise ValueError("a text that is none")
    return value


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
