"""What the fields of a message must be: declared where a field is defined, checked here before anything touches it.

    cohort: Annotated[Tensor, clients("cohort")]
    keys: Annotated[Tensor, octets("peers", 33)]

A dimension is a number or a name, and a name means one number within a message. Which number that is in a
round is said by whoever receives the message: `check(message, {"cohort": 10, "peers": range(7)})`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedveil.errors import ProtocolError

Sizes = Mapping[str, "int | Container[int]"]
"""What named sizes may be: one number, or any of several."""

Types = Mapping[str, "tuple[torch.dtype, ...]"]
"""What the tensors of named fields may hold, where a field is declared for more than one kind of number."""

MOST = 1 << 53
"""Numbers in messages are whole, not negative, and below this."""

LONGEST_TEXT = 256
"""Characters a text in a message may have; they are printable ASCII."""

REALS = (torch.float32, torch.float64)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DECLARED: dict[type[Any], Mapping[str, Declared]] = {}


@dataclass(frozen=True)
class Shape:
    """One of `dtypes`, and these sizes; whole numbers in it are at least `least`, and below the size named `below`."""

    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int | str, ...]
    least: int | None = None
    below: str = ""
    ascending: bool = False

    def __str__(self) -> str:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return f"{kinds} of shape ({', '.join(map(str, self.sizes))})"


@dataclass(frozen=True)
class Number:
    """A whole number that is itself a named size."""

    name: str


def reals(*sizes: int | str) -> Shape:
    """Floating-point numbers."""
    return Shape(REALS, sizes)


def words(*sizes: int | str) -> Shape:
    """64-bit integers of any kind."""
    return Shape((torch.int64,), sizes)


def octets(*sizes: int | str) -> Shape:
    """Bytes."""
    return Shape((torch.uint8,), sizes)


def counts(*sizes: int | str, below: str = "") -> Shape:
    """Whole numbers that are not negative: lengths, counts, places."""
    return Shape((torch.int64,), sizes, least=0, below=below)


def clients(size: str) -> Shape:
    """Client numbers, each once, in ascending order."""
    return Shape((torch.int64,), (size,), least=0, ascending=True)


@dataclass(frozen=True)
class Declared:
    """What one field of a message may hold."""

    types: tuple[type, ...]
    rule: Shape | Number | None
    metadata: tuple[Any, ...] = ()


def declared(kind: type[Any]) -> Mapping[str, Declared]:
    """What the fields of a message are declared to be; a tensor without a shape is an error of whoever wrote it."""
    if kind in _DECLARED:
        return _DECLARED[kind]
    fields = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        metadata: Sequence[Any] = ()
        if get_origin(hint) is Annotated:
            hint, *metadata = get_args(hint)
        rule = next((mark for mark in metadata if isinstance(mark, (Shape, Number))), None)
        types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        wanted = Shape if Tensor in types else (Number, type(None))
        if not isinstance(rule, wanted) or not all(isinstance(accepted, type) for accepted in types):
            raise TypeError(f"{kind.__name__}.{name} may not travel: declare it as Annotated[Tensor, a shape]")
        fields[name] = Declared(types, rule, tuple(metadata))
    return _DECLARED.setdefault(kind, MappingProxyType(fields))


def named(kind: type[Any]) -> str:
    """A kind of message, in a sentence."""
    return _in_words(kind.__name__)


@functools.lru_cache(maxsize=256)
def _in_words(name: str) -> str:
    words = re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def check(message: object, sizes: Sizes = _NOTHING, types: Types = _NOTHING) -> None:
    """Refuse a message of which any field, however deep, is not what it is declared to be and what is expected.

    Names that `sizes` does not hold are only held to one number each.
    """
    _Check(sizes, types).message(message)


class _Check:
    def __init__(self, sizes: Sizes, types: Types) -> None:
        self._sizes = sizes
        self._types = types
        self._found: dict[str, int] = {}
        self._below: list[tuple[str, Tensor, str]] = []

    def message(self, value: object) -> None:
        kind = type(value)
        for name, field in declared(kind).items():
            self._field(f"the {name} of {named(kind)}", name, getattr(value, name), field)
        while self._below:
            what, tensor, name = self._below.pop()
            if tensor.numel() and int(tensor.max()) >= self._found[name]:
                raise ProtocolError(f"{what} holds {int(tensor.max())} where numbers below {self._found[name]} belong")

    def _field(self, what: str, name: str, value: Any, expected: Declared) -> None:
        rule = expected.rule
        # Exactly these types: True is not a number here.
        if isinstance(value, Tensor) and isinstance(rule, Shape):
            self._tensor(what, value, rule, self._types.get(name, rule.dtypes))
        elif type(value) not in expected.types:
            raise ProtocolError(f"{what} is a {type(value).__name__}")
        elif type(value) is int:
            if not 0 <= value < MOST:
                raise ProtocolError(f"{what} is out of range")
            if isinstance(rule, Number):
                self._size(what, rule.name, value)
        elif type(value) is float and not math.isfinite(value):
            raise ProtocolError(f"{what} is not a finite number")
        elif type(value) is str and not (len(value) <= LONGEST_TEXT and value.isascii() and value.isprintable()):
            raise ProtocolError(f"{what} is too long, or not plain text")
        elif dataclasses.is_dataclass(value):
            self.message(value)

    def _tensor(self, what: str, value: Tensor, rule: Shape, dtypes: tuple[torch.dtype, ...]) -> None:
        if value.dtype not in dtypes or value.dim() != len(rule.sizes):
            wanted = dataclasses.replace(rule, dtypes=dtypes)
            raise ProtocolError(f"{what} is {value.dtype} and has shape {tuple(value.shape)} where {wanted} belongs")
        shaped = f"{what} has shape {tuple(value.shape)}"
        for expected, size in zip(rule.sizes, value.shape, strict=True):
            if isinstance(expected, str):
                self._size(shaped, expected, size)
            elif size != expected:
                raise ProtocolError(f"{shaped} where {rule} belongs")
        if rule.least is not None and value.numel() and int(value.min()) < rule.least:
            raise ProtocolError(f"{what} holds {int(value.min())}, which cannot be")
        if rule.ascending and bool((value[1:] <= value[:-1]).any()):
            raise ProtocolError(f"{what} must name every client once, in ascending order")
        if rule.below:
            self._below.append((what, value, rule.below))

    def _size(self, what: str, name: str, size: int) -> None:
        allowed = self._sizes.get(name, size)
        if size != allowed if isinstance(allowed, int) else size not in allowed:
            why = f"{name} is {allowed}" if isinstance(allowed, int) else f"{name} cannot be {size}"
            raise ProtocolError(f"{what}, and {why} here; do server and client use the same model and scheme?")
        if self._found.setdefault(name, size) != size:
            raise ProtocolError(f"{what}, and {name} is {self._found[name]} elsewhere in the message")
