"""Messages as bytes: a JSON header, then the tensors' raw bytes. No pickle, nothing executable.

"FVW1" · header length (4 bytes, little endian) · header · tensors, one after the other
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.flat import from_raw, raw

_MAGIC = b"FVW1"
_DTYPES: dict[str, torch.dtype] = {
    "f4": torch.float32,
    "f8": torch.float64,
    "i8": torch.int64,
    "u1": torch.uint8,
    "b1": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 8
_LARGEST = 1 << 62
_T = TypeVar("_T")
_TYPES: dict[str, type[Any]] = {}


def message(kind: type[_T]) -> type[_T]:
    """Register a dataclass as something that may travel."""
    _TYPES[kind.__name__] = kind
    return kind


def registered() -> tuple[type[Any], ...]:
    """Every type that may travel."""
    return tuple(_TYPES.values())


def encode(value: object) -> bytes:
    """The bytes of a registered message."""
    tensors: list[Tensor] = []
    header = json.dumps(_plain(value, tensors), separators=(",", ":")).encode()
    parts = [_MAGIC, struct.pack("<I", len(header)), header]
    parts += [raw(one).tobytes() for one in tensors]
    return b"".join(parts)


def size(value: object) -> int:
    """len(encode(value)) without copying the tensors."""
    tensors: list[Tensor] = []
    header = len(json.dumps(_plain(value, tensors), separators=(",", ":")).encode())
    return len(_MAGIC) + 4 + header + sum(one.numel() * one.element_size() for one in tensors)


def decode(data: bytes) -> Any:
    """The message in `data`; anything malformed, truncated or unknown is refused."""
    if data[:4] != _MAGIC or len(data) < 8:
        raise ProtocolError("not a FedVeil message (wrong magic bytes)")
    (length,) = struct.unpack("<I", data[4:8])
    reader = _Reader(data, 8 + length)
    try:
        header = json.loads(data[8 : 8 + length], parse_constant=_no_number)
        if not isinstance(header, dict) or "m" not in header:
            raise ProtocolError("a message's header names no message")
        value = reader.value(header)
    except (ValueError, RecursionError) as reason:
        raise ProtocolError("a message's header is truncated or damaged") from reason
    if reader.position != len(data):
        raise ProtocolError(f"a message carries {len(data) - reader.position} bytes too many")
    return value


def _plain(value: object, tensors: list[Tensor]) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ProtocolError("a message cannot carry NaN or infinity as a number")
        return value
    if isinstance(value, Tensor):
        if value.dtype not in _CODES:
            raise ProtocolError(f"a message cannot carry {value.dtype}")
        tensors.append(value)
        return {"t": _CODES[value.dtype], "s": list(value.shape)}
    if isinstance(value, (tuple, list)):
        return [_plain(one, tensors) for one in value]
    if dataclasses.is_dataclass(value) and _TYPES.get(type(value).__name__) is type(value):
        fields = {f.name: _plain(getattr(value, f.name), tensors) for f in dataclasses.fields(value)}
        return {"m": type(value).__name__, "f": fields}
    raise ProtocolError(f"{type(value).__name__} is not something that may travel")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _field_types(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(kind)
    single = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints.items()}
    return {name: tuple(get_origin(one) or one for one in allowed) for name, allowed in single.items()}


class _Reader:
    """Takes tensors off the bytes in the order the header names them."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position

    def value(self, header: Any) -> Any:
        if isinstance(header, list):
            return tuple(self.value(one) for one in header)
        if isinstance(header, float) and not math.isfinite(header):
            raise ProtocolError("a message cannot carry NaN or infinity as a number")
        if not isinstance(header, dict):
            return header
        if "t" in header:
            return self.tensor(header)
        kind = _TYPES.get(str(header.get("m")))
        if kind is None:
            raise ProtocolError("a message names an unknown type")
        types = _field_types(kind)
        given = header.get("f")
        if not isinstance(given, dict) or set(given) != set(types):
            raise ProtocolError(f"a {kind.__name__} message has wrong fields")
        fields = {name: self.value(one) for name, one in given.items()}
        for name, one in fields.items():
            if type(one) not in types[name]:  # exactly: True is not a number here
                raise ProtocolError(f"a {kind.__name__} message has a {type(one).__name__} as its {name}")
        return kind(**fields)

    def tensor(self, header: dict[str, Any]) -> Tensor:
        shape, dtype = header.get("s"), _DTYPES.get(str(header["t"]))
        if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ProtocolError("a message describes a tensor wrongly")
        if len(shape) > _MOST_DIMENSIONS or math.prod(n or 1 for n in shape) >= _LARGEST:
            raise ProtocolError("a message describes a tensor that is too large")
        count = math.prod(shape) * dtype.itemsize
        content = self.data[self.position : self.position + count]
        if len(content) != count:
            raise ProtocolError("a message is truncated: a tensor's bytes are missing")
        if dtype is torch.bool and content.count(0) + content.count(1) != count:
            raise ProtocolError("a message holds a truth value that is neither true nor false")
        self.position += count
        return from_raw(content, dtype, shape)
