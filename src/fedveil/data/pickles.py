"""Pickled dictionaries of arrays from strangers, read without running anything they name.

numpy's own reconstruction is not used either: its ``__setstate__`` trusts flags that a file may forge. The
few names such a file needs are answered by the stand-ins below, which only copy bytes and check sizes.
They are classes with a ``__setstate__`` so that a file cannot change the stand-ins themselves.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path

import numpy as np

from fedveil.data.arrays import Array
from fedveil.data.files import read_bytes
from fedveil.errors import DataError


def read_pickle(path: Path) -> dict[str, object]:
    """The dictionary in ``path``: text keys; arrays of numbers, lists, text and numbers as values."""
    content = read_bytes(path)
    try:
        _check_memo(content)
        loaded = _Reader(io.BytesIO(content), encoding="latin1").load()
    except _Refused as error:
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


def _check_memo(content: bytes) -> None:
    """Refuse a memo index beyond any honest count: five bytes of it could claim gigabytes of memory."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(content):
            raise ValueError(f"memo index {argument}")


class _Refused(pickle.UnpicklingError):
    """The file names something outside the list."""


class _Dtype:
    """Stands in for numpy.dtype: plain numbers only."""

    def __init__(self, code: str, *_: object) -> None:
        self.kind = np.dtype(_text(code))
        if self.kind.kind not in "biuf":
            raise ValueError(f"arrays of type {self.kind}")

    def __setstate__(self, state: tuple[object, ...]) -> None:
        if _text(state[1]) == ">":
            self.kind = self.kind.newbyteorder(">")


class _Array:
    """Stands in for numpy's array reconstruction; the second half of the pickle gives the content."""

    def __init__(self, *_: object) -> None:
        self.array: Array = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        _, shape, kind, columns_first, content = state
        self._fill(content, kind, shape, "F" if columns_first else "C")

    def _fill(self, content: object, kind: object, shape: object, order: str) -> None:
        if not isinstance(kind, _Dtype) or not isinstance(shape, tuple) or order not in ("C", "F"):
            raise ValueError("an array without type, shape or order")
        # Python 2 wrote the bytes as a string, which the latin1 reading above preserves.
        raw = content.encode("latin1") if isinstance(content, str) else content
        if not isinstance(raw, bytes | bytearray):
            raise ValueError("an array whose content is not bytes")
        values = np.frombuffer(bytes(raw), dtype=kind.kind)
        self.array = values.reshape(shape, order="F" if order == "F" else "C")


class _Buffer(_Array):
    """Stands in for numpy's reconstruction under pickle protocol 5, which comes in one piece."""

    def __init__(self, content: object, kind: object, shape: object, order: str, *_: object) -> None:
        self._fill(content, kind, shape, order)


class _Encoded(bytes):
    """Stands in for codecs.encode, which Python 3 uses to write bytes under the old protocols."""

    def __new__(cls, text: str, encoding: str) -> _Encoded:
        if encoding != "latin1":
            raise ValueError(f"bytes encoded as {encoding}")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, state: object) -> None:
        raise ValueError("bytes with a state")


class _Class:
    """Stands in for numpy.ndarray where it is only named."""

    def __setstate__(self, state: object) -> None:
        raise ValueError("a bare numpy.ndarray")


_STAND_INS: dict[tuple[str, str], type] = {
    ("_codecs", "encode"): _Encoded,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Class,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Buffer,
    ("numpy._core.numeric", "_frombuffer"): _Buffer,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> type:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
