"""Messages and stored state as bytes: a JSON header, then the tensors' raw bytes (`fedveil.framing.Format`).

No pickle, nothing executable.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.framing import Format
from fedveil.ledger.releases import ContributionSections, Released
from fedveil.shapes import check, declared
from fedveil.tensors import from_raw, raw

_MESSAGE = Format("message", b"FVW1", longest=1 << 14)
# Without magic bytes: so do all versions write states and records.
_STORED = Format("stored state", b"", length="<Q", separators=(", ", ": "))
_DTYPES: dict[str, torch.dtype] = {"f4": torch.float32, "f8": torch.float64, "i8": torch.int64, "u1": torch.uint8}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 8
_T = TypeVar("_T")
_TYPES: dict[str, type[Any]] = {}
_KINDS: set[type[Any]] = set()


def message(kind: type[_T]) -> type[_T]:
    """Register a dataclass as something that may travel.

    Each of its tensors must declare its shape, and each of its fields what leaves with it, unless that is a message.
    It travels by its name, and takes no name of FedVeil's own messages; a user's own file may be loaded anew.
    """
    for name in declared(kind):
        released(kind, name)
    other = _TYPES.get(kind.__name__, kind)
    if other is not kind and _ours(other):
        raise TypeError(f"{kind.__name__} is a message of {other.__module__} already: give yours another name")
    _TYPES[kind.__name__] = kind
    _KINDS.add(kind)
    return kind


def _ours(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def released(kind: type[Any], name: str) -> Released | ContributionSections | type[Any]:
    """What a field of a message declares to leave with it; a message inside it declares that for itself."""
    field = declared(kind)[name]
    for mark in field.metadata:
        if isinstance(mark, (Released, ContributionSections)):
            return mark
    inside = [nested for nested in field.types if nested is not type(None)]
    alike = inside and all(issubclass(kind, inside[0]) for kind in inside)  # those that say more declare the rest
    if not alike or not dataclasses.is_dataclass(inside[0]):
        raise TypeError(
            f"{kind.__name__}.{name} may not travel: declare what leaves with it, as Annotated[…, Released(what)]"
        )
    return inside[0]


def registered() -> tuple[type[Any], ...]:
    """Every type that may travel."""
    return tuple(_TYPES.values())


def encode(value: object) -> bytes:
    """The bytes of a registered message."""
    tensors: list[Tensor] = []
    header = _plain(value, tensors)
    return _MESSAGE.pack(header, [raw(tensor).data for tensor in tensors])


def size(value: object) -> int:
    """len(encode(value)) without copying the tensors, or writing the header where it has been measured before."""
    tensors: list[Tensor] = []
    form = _form(value, tensors)
    if form not in _HEADERS:
        if len(_HEADERS) >= _MOST_HEADERS:
            _HEADERS.clear()
        _HEADERS[form] = _MESSAGE.size(_plain(value, []))
    return _HEADERS[form] + sum(tensor.nbytes for tensor in tensors)


_HEADERS: dict[object, int] = {}
"""How long the header of a message of some form is."""
_MOST_HEADERS = 1 << 10


def _form(value: Any, tensors: list[Tensor]) -> object:
    """Whatever a header's length depends on; of whole numbers, that is how many digits they have."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, value.shape
    if type(value) is int:
        return len(str(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    fields = declared(type(value)) if type(value) in _KINDS else {}
    return type(value), *(_form(getattr(value, name), tensors) for name in fields)


def decode(data: bytes) -> Any:
    """The message in `data`; anything malformed, truncated, unknown or not as declared is refused.

    It takes memory of the order of the message's size, whatever the message says about itself.
    """
    header, start = _MESSAGE.unpack(data)
    reader = _Reader(memoryview(data), start)
    value = reader.message(header, registered())
    if reader.position != len(data):
        raise ProtocolError(f"a message carries {len(data) - reader.position} bytes too many")
    check(value)
    return value


def tensor_at(data: memoryview, position: int, dtype: torch.dtype, shape: object) -> tuple[Tensor, int]:
    """The tensor whose bytes begin at `position`, in memory of its own, and where they end.

    A shape that names more than there are bytes is refused, even of a tensor without elements: to go over
    the rows of one of shape (10¹², 0) takes as long as if they held something.
    """
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ProtocolError("a tensor's shape is malformed")
    if len(shape) > _MOST_DIMENSIONS or math.prod(n or 1 for n in shape) > len(data):
        raise ProtocolError("a tensor is described that is larger than what carries it")
    end = position + math.prod(shape) * dtype.itemsize
    content = data[position:end]
    if position + len(content) != end:
        raise ProtocolError("a tensor's bytes are missing: what carries it is truncated")
    if dtype is torch.bool and max(content, default=0) > 1:
        raise ProtocolError("a truth value is neither true nor false")
    return from_raw(content, dtype, shape), end


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
    if dataclasses.is_dataclass(value) and _TYPES.get(type(value).__name__) is type(value):
        fields = {f.name: _plain(getattr(value, f.name), tensors) for f in dataclasses.fields(value)}
        return {"m": type(value).__name__, "f": fields}
    raise ProtocolError(f"{type(value).__name__} is not something that may travel")


class _Reader:
    """Takes tensors off the bytes in the order the header names them."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position

    def message(self, header: Any, allowed: tuple[type[Any], ...]) -> Any:
        """A message of one of the `allowed` kinds: nothing nests deeper than messages are declared to."""
        kind = _TYPES.get(str(header.get("m"))) if isinstance(header, dict) else None
        if kind is None or kind not in allowed:
            raise ProtocolError("a message names an unknown type, or one that does not belong where it stands")
        fields, given = declared(kind), header.get("f")
        if not isinstance(given, dict) or set(given) != set(fields):
            raise ProtocolError(f"a {kind.__name__} message has wrong fields")
        return kind(**{name: self.value(item, fields[name].types) for name, item in given.items()})

    def value(self, header: Any, allowed: tuple[type[Any], ...]) -> Any:
        if not isinstance(header, dict):
            return header
        if "t" not in header:
            return self.message(header, allowed)
        dtype = _DTYPES.get(str(header["t"]))
        if dtype is None:
            raise ProtocolError("a message describes a tensor wrongly")
        tensor, self.position = tensor_at(self.data, self.position, dtype, header.get("s"))
        return tensor


_DTYPES_stored = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)}


def as_bytes(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Length of the header, the header (JSON), the tensors' raw bytes in its order."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return _STORED.pack({"fields": fields, "tensors": shapes}, [raw(tensor).data for tensor in tensors.values()])


def from_stored(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields and tensors back; damage is refused, and takes no more memory than what is damaged."""
    try:
        header, position = _STORED.unpack(data)
        content, tensors = memoryview(data), {}
        for name, (kind, shape) in header["tensors"].items():
            tensors[name], position = tensor_at(content, position, _DTYPES_stored[kind], shape)
        return dict(header["fields"]), tensors
    except (ProtocolError, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise ProtocolError("stored state is damaged") from reason
