"""Pickles of strangers, read without Python's unpickler.

The few instructions that a file of arrays needs are carried out here: texts, numbers, flat lists, dictionaries, and
calls of names on a list, each of which a function of the reader's own stands in for. Nothing is imported, nothing the
file names is run, keys are text (a nested key takes forever to hash), lists hold no lists (thirty that hold each other
twice are a billion numbers), what is made of the bytes is bounded by the file's own length, and so many instructions
are carried out and no more (a dictionary is one byte there and sixty here).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

StandIns = Mapping[tuple[str, str], Callable[..., object]]

_MOST_COPIES = 4
_MOST_STEPS = 1 << 20  # a second's; a state_dict takes 35 a tensor, the batches of CIFAR-100 a quarter of this
_LONGEST_NAME = 80
_MARK = object()


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_PUTS, _GETS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class RefusedError(Exception):
    """The file names something outside the list."""


class TooMuchError(ValueError):
    """The file asks for more than a file of arrays needs."""


class Built:
    """Something that a pickle makes in two steps: a call, and then a state."""

    def built(self, state: object) -> None:
        """Take the state."""
        raise NotImplementedError


class Machine:
    """A pickle's instructions, one after the other, on a stack.

    Args:
        content: The pickle.
        stand_ins: What is called for each name that it may use.
        stored: Gives what lies outside of the pickle, by what the pickle calls it; None: nothing does.
    """

    def __init__(
        self, content: bytes, stand_ins: StandIns, *, stored: Callable[[object], object] | None = None
    ) -> None:
        self._content, self._stand_ins, self._stored = content, stand_ins, stored
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._left = _MOST_COPIES * len(content)

    def run(self) -> object:
        """What the file leaves on the stack."""
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(self._content)):
            if opcode.name == "STOP":
                break
            if steps >= _MOST_STEPS:
                raise TooMuchError(f"more than {_MOST_STEPS:,} instructions")
            self._step(opcode.name, argument)
        (value,) = self._stack
        return value

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
            items = self._since_mark()
            made: Any = tuple(items) if name == "TUPLE" else [] if name == "LIST" else {}
            stack.append(made)
            if name != "TUPLE":
                self._add(made, items)
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            self._add(stack[-1], items)
        elif name in ("APPENDS", "SETITEMS"):
            items = self._since_mark()
            self._add(stack[-1], items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            place = argument.split(" ") if name == "GLOBAL" else [stack.pop(-2), stack.pop()]
            stack.append(self._named(*place))
        elif name == "BINPERSID" and self._stored is not None:
            stack.append(self._stored(stack.pop()))
        elif name == "REDUCE":
            given = stack.pop()
            stack.append(self._called(stack.pop(), given))
        elif name == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Built):
                raise ValueError("a state of something that has none")
            self._pay(state)
            stack[-1].built(state)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the instruction {name}, which no batch of arrays needs")

    def _named(self, module: object, name: object) -> Named:
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in self._stand_ins:
            raise RefusedError(cut(f"{text_of(module)}.{text_of(name)}"))
        return Named(self._stand_ins[module, name], f"{module}.{name}")

    def _since_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _add(self, to: object, items: list[Any]) -> None:
        if isinstance(to, list):
            if not all(isinstance(item, str | bytes | int | float) for item in items):
                raise ValueError("a list of something else than texts and numbers")
            to += items
        elif isinstance(to, dict) and len(items) % 2 == 0:
            if not all(isinstance(key, str | bytes) for key in items[::2]):
                raise ValueError("a key that is no text")
            to.update(zip(items[::2], items[1::2], strict=True))
        else:
            raise ValueError("items of something that holds none")

    def _called(self, function: object, given: object) -> object:
        if not isinstance(function, Named) or not isinstance(given, tuple):
            raise ValueError("a call of something that is no name")
        self._pay(given)
        return function.stand_in(*given)

    def _pay(self, given: object) -> None:
        """Bytes may be named again and again, and are copied each time: only so often."""
        if not isinstance(given, tuple):
            return
        self._left -= sum(len(item) for item in given if isinstance(item, str | bytes | bytearray))
        if self._left < 0:
            raise TooMuchError("many times its own size in arrays")


class Named:
    """A name of the list, until it is called."""

    def __init__(self, stand_in: Callable[..., object], name: str) -> None:
        self.stand_in, self.name = stand_in, name


def cut(name: str) -> str:
    """A name from a file as a message shows it: so much of it, whoever wrote it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def text_of(value: object) -> str:
    """A text, however old the protocol that wrote it."""
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise ValueError("a text that is none")
    return value
