"""Plain data that others may have written: parsed and checked piece by piece before anybody relies on it.

Whatever is wrong with it (no JSON, a missing name, a text where a number belongs, nesting without end) is one error
that names the place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from fedveil.errors import CheckpointError, ConfigError

ModelOption = int | float | str | bool
T = TypeVar("T")
LARGEST_WHOLE = 1 << 63
IN_PYTHON = "python"
"""What stands for the data set of a run whose samples were handed over in Python."""
_MOST_DIGITS = 7
_AUGMENTING = re.compile(r"(crop|flip|cutout)(?::(\d{1,4}))?")


def parsed(text: str | bytes, *, where: str) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise CheckpointError(f"{where} is damaged: it is no JSON ({_short(reason)}).") from reason


def named(text: str | bytes, *, where: str) -> dict[str, Any]:
    """What a JSON text says by name."""
    content = parsed(text, where=where)
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is damaged: it holds no values by name.")
    return content


def read_named(file: Path) -> dict[str, Any]:
    """What a JSON file says by name."""
    return named(read_text(file), where=str(file))


def read_text(file: Path) -> str:
    """A text file's content."""
    try:
        return read_raw(file).decode("utf-8")
    except ValueError as reason:
        raise CheckpointError(f"{file} cannot be read: {_short(reason)}.") from reason


def read_raw(file: Path) -> bytes:
    """A file's content; what is no file, like a device or a pipe that never ends, is not opened."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no file.")
    try:
        return file.read_bytes()
    except (OSError, MemoryError) as reason:
        raise CheckpointError(f"{file} cannot be read: {_short(reason)}.") from reason


def whole(value: object) -> bool:
    """Whether it is a whole number of a size that files may name."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_WHOLE


def figure(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that can be reckoned with: whole ones beyond any float are none."""
    return isinstance(value, float) or whole(value)


def made(kind: type[T], data: object, *, where: str) -> T:
    """A dataclass from plain data: every field there, none besides, each of its type, at every depth."""
    try:
        value: T = _made(kind, data)
    except (_WrongError, ValueError, OverflowError, RecursionError) as reason:
        raise CheckpointError(f"{where} is damaged, or of another version: {_short(reason)}.") from reason
    return value


class _WrongError(Exception):
    """Something is not of the type it should have."""


def _made(kind: Any, data: object) -> Any:
    if not isinstance(data, Mapping):
        raise _WrongError(f"{_shown(data)} stands where values by name belong")
    hints, own = _declared(kind)
    strange = [name for name in data if name not in own]
    if strange:
        raise _WrongError(f"{_shown(strange[0])} is no name in it")
    given: dict[str, Any] = {}
    for name, field in own.items():
        if name in data:
            given[name] = _fitting(hints[name], data[name], name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _WrongError(f"{name} is missing")
    return kind(**given)


@functools.cache
def _declared(kind: Any) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """Types and fields by name; types are written as text, which takes long to read."""
    return get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}


def _fitting(hint: Any, value: Any, name: str) -> Any:
    """The value as the type wants it (lists become tuples, whole numbers floats)."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _of_several(inner, value, name)
    if origin is Literal:
        fits = isinstance(value, str | int | bool | None) and value in inner
    elif dataclasses.is_dataclass(hint):
        return _made(hint, value)
    elif origin is tuple or origin is Sequence:
        return _several(inner, value, name)
    elif origin in (dict, Mapping):
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: _fitting(inner[1], item, name) for key, item in value.items()}
        fits = False
    elif hint is float:
        fits = figure(value)
        value = float(value) if fits else value
    elif hint is int:
        fits = whole(value)
    else:
        fits = isinstance(value, type(None) if hint is None else hint)
    if not fits:
        raise _WrongError(f"{name} is {_shown(value)}")
    return value


def _of_several(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    # A whole number is taken as one where both are allowed.
    for kind in sorted(kinds, key=lambda candidate: candidate is float):
        try:
            return _fitting(kind, value, name)
        except _WrongError:
            continue
    raise _WrongError(f"{name} is {_shown(value)}")


def _several(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _WrongError(f"{name} is {_shown(value)}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_fitting(kinds[0], item, name) for item in value)
    if len(value) != len(kinds):
        raise _WrongError(f"{name} is {_shown(value)}")
    return tuple(_fitting(kind, item, name) for kind, item in zip(kinds, value, strict=True))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _short(reason: BaseException) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def numbers_of(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers as they are typed, 1,2,10 or 0-9: ascending, each once."""
    numbers: set[int] = set()
    for word in text.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        ends = (first, last) if dash else (first, first)
        fit = all(end.isascii() and end.isdigit() and len(end) <= _MOST_DIGITS for end in ends)
        if not fit or int(ends[0]) > int(ends[1]):
            raise ConfigError(f"{name} is a list of whole numbers like 1,2,10 or 0-9 (got {text[:60]!r}).")
        numbers.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(numbers))


def list_of(text: str, name: str) -> tuple[float, ...]:
    """Numbers as they are typed, 1,2.5,4, in their order."""
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"{name} is a list of numbers like 1,2.5,4 (got {text[:60]!r}).")
    return numbers


def legible_size(count: float) -> str:
    """Bytes in the unit a person reads."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def toml_of(value: object) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def parse_model_options(pairs: list[str], *, example: str = "depth=5") -> dict[str, ModelOption]:
    """key=value pairs from a command line, with values read as TOML (true, 3, 0.5, text)."""
    options: dict[str, ModelOption] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"An option is written key=value, like {example} (got {pair!r}).")
        try:
            options[key] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            options[key] = text
    return options


def augmenting(text: str) -> dict[str, int | None]:
    """What is done to pictures, as it is typed, crop:4,flip: by name, with the size where there is one; none where the
    text is something else."""
    words = [_AUGMENTING.fullmatch(word.strip()) for word in text.split(",")]
    named = {word[1]: None if word[2] is None else int(word[2]) for word in words if word is not None}
    fits = len(named) == len(words) and named.get("flip") is None and 0 not in named.values()
    return named if fits else {}


_LARGEST_SETTING = 1 << 53


def shares_of(text: str) -> tuple[float, ...]:
    """Shares as they are typed, 0.5,0.75: ascending, each between 0 and 1; none where the text is something else."""
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        return ()
    return shares if all(0 < share < 1 for share in shares) and list(shares) == sorted(set(shares)) else ()


Check = tuple[Callable[[Any], bool], str]
"""Whether a setting's value will do, and what is said where it will not."""
POSITIVE: Check = (lambda value: value > 0, "must be positive")
NOT_NEGATIVE: Check = (lambda value: value >= 0, "must not be negative")
BELOW_ONE: Check = (lambda value: 0 <= value < 1, "must lie in [0, 1)")


def up_to(most: int, *, least: int = 1) -> Check:
    """At least `least`, which is 0 or 1, and at most this."""
    words = "must be positive" if least else "must not be negative"
    return (lambda value: least <= value <= most, f"{words}, and at most {most:,}")


SHARE: Check = (lambda value: 0 < value <= 1, "must lie above 0 and be at most 1")
SHARES: Check = (
    lambda value: bool(shares_of(value)),
    "must be shares of the rounds in ascending order, like 0.5,0.75",
)


def declare(
    panel: str,
    words: str,
    default: Any = None,
    *,
    shown: str = "",
    check: Check | None = None,
    choices: tuple[str, ...] = (),
    of_scheme: bool = False,
    shapes_run: bool = True,
    listed: type | None = None,
    before: Any = dataclasses.MISSING,
    before_of: tuple[str, ...] = (),
) -> Any:
    """One setting: where its flag stands in the help, what is said of it, and what it may be.

    `shown` is the default in words, where the value does not say it; settings `of_scheme` are options that some
    schemes have; one that does not shape the run does not decide about the trained model. One that is `listed` is typed
    as 1,2,4, and files and Python may give a list. `before` is what runs did
    before there was this setting (those of the schemes `before_of`, where it is an option): folders without it mean
    that, and it leaves no mark in their fingerprint.
    """
    if not shown and default is not None:
        shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else f"{default:{_form(default)}}"
    told = f"{words} (default: {shown})" if shown else words
    kept: dict[str, Any] = {"help": told, "words": words, "panel": panel, "check": check, "choices": choices}
    kept |= {"of_scheme": of_scheme, "shapes_run": shapes_run, "before": before, "before_of": before_of}
    kept["listed"] = listed
    return dataclasses.field(default=default, metadata=kept)


def _form(default: object) -> str:
    return "g" if isinstance(default, float) else ""


def typed_list(name: str, values: Iterable[object], where: str) -> str:
    """A list of numbers, or of words, as it would be typed."""
    given = list(values)
    if given and all(isinstance(value, str) for value in given):
        return ",".join(map(str, given))
    numbers = [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]
    if not given or len(numbers) != len(given):
        raise ConfigError(f"{where}: {name} is a list of numbers, and not {given!r}.")
    return ",".join(f"{number!r}" for number in numbers)


def checked_setting(name: str, value: object, kind: str, where: str) -> object:
    """A setting's value as its type wants it; one of another type is refused by name."""
    if type(value) is not bool and isinstance(value, numbers.Integral):
        value = int(value)  # numpy's, too
    accepted: list[type] = []
    for word, kinds in (("int", [int]), ("float", [float, int]), ("str", [str]), ("bool", [bool]), ("dict", [dict])):
        if word in kind.split("[")[0].replace("|", " ").split():
            accepted += kinds
    fits = isinstance(value, tuple(accepted)) and not (isinstance(value, bool) and bool not in accepted)
    if not fits:
        raise ConfigError(f"{where}: {name} must be {kind.replace(' | None', '')} (got {repr(value)[:60]}).")
    if type(value) is int and name != "seed" and abs(value) > _LARGEST_SETTING:
        raise ConfigError(f"{where}: {name} is too large a number.")
    if isinstance(value, dict):
        for option, choice in value.items():
            if not isinstance(option, str) or not isinstance(choice, int | float | str | bool):
                raise ConfigError(f"{where}: {name} holds numbers, texts and true or false by name.")
    # A whole number where a float belongs (lr = 1); a cohort keeps the difference between 1 and 1.0.
    return float(value) if float in accepted and type(value) is int and name != "cohort" else value
