"""Named schemes: a few lines each that put parts together. A scheme's options are its function's signature."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedveil.errors import ConfigError, FedVeilError, unknown_name, unknown_option
from fedveil.own_code import OwnCode, load, refuse_code
from fedveil.protocol.parts import Scheme
from fedveil.uplink.grouped import in_groups
from fedveil.work.batches import Batches, Schedule
from fedveil.work.losses import Loss, make_loss

Option = int | float | str | bool | None
_PLAIN = (int, float, str, bool)


@dataclass(frozen=True)
class Setting:
    """What every scheme is given: the loss, the batches, the learning rate over rounds, and how long it all takes.

    `participations` is the largest number of rounds any one client takes part in, `rate` the share of
    clients in a round, `cohort` their number (0: not known), drawn from `clients`; where chance decides, the largest
    one, and `least` the smallest.
    """

    loss: Loss
    batches: Batches
    schedule: Schedule
    vectorise: bool | None = None
    rounds: int = 1
    participations: int = 1
    rate: float = 1.0
    cohort: int = 0
    clients: int = 0
    least: int = 0
    family: str = "auto"
    """What hides the model where it travels under a veil (`fedveil.downlink.symmetry.FAMILIES`), or "auto"."""
    known_start: bool = False
    """Whether others know the weights that the model begins with."""
    robust_groups: int = 0
    """In how many groups a round's clients are, whose means are compared; 0: one sum."""
    simulation: bool = False
    """Whether secrets follow from a seed, so that nothing is hidden by them."""

    def family_or(self, fitting: str) -> str:
        """The family that was asked for, or the one that fits the scheme."""
        return fitting if self.family == "auto" else self.family


@dataclass(frozen=True)
class SchemeOption:
    """One option of a scheme, as its signature declares it; `groups` are the parameters that hold it as a field."""

    name: str
    kinds: tuple[Any, ...]
    """The types it may have, None among them; a Literal stands for its values."""
    default: Option
    words: str = ""
    """What the docstring says of it."""
    groups: tuple[str, ...] = ()

    @property
    def type_text(self) -> str:
        """Its types as a reader writes them: float, or exact | paper."""
        words = [
            " | ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else kind.__name__
            for kind in self.kinds
            if kind is not NoneType
        ]
        return " | ".join(words)

    def checked(self, value: Option, *, scheme: str) -> Option:
        """A value as the scheme takes it; one of another type, or beyond the choices, is refused."""
        for kind in self.kinds:
            if get_origin(kind) is Literal:
                if value in get_args(kind):
                    return value
            elif kind is float and type(value) in (int, float):
                return float(value)  # type: ignore[arg-type]
            elif type(value) is kind:
                return value
        choices = [choice for kind in self.kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices and isinstance(value, str):
            raise unknown_name(self.name, value, choices)
        quoted = " Text that looks like a number is written in quotes." if str in self.kinds else ""
        raise ConfigError(
            f"Option {self.name!r} of scheme {scheme!r} must be {self.type_text} (default {self.default!r}), not "
            f"{str(value)[:60]!r}.{quoted}"
        )


@dataclass(frozen=True)
class SchemeInfo:
    """One scheme: what it is, and the function that builds it."""

    name: str
    paper: str
    summary: str
    protects: str
    default_loss: str
    build: Callable[..., Scheme]
    compared: Mapping[str, Option] = field(default_factory=dict)
    """Settings of its own where all schemes are compared under one setting (`fedveil compare --preset`)."""
    twin: Mapping[str, Option] = field(default_factory=dict)
    """Options with which it sums the very same numbers at once: trained in its place where its cipher takes long."""

    @cached_property
    def declared(self) -> Mapping[str, SchemeOption]:
        """The scheme's own options by name, from its signature; a frozen dataclass there is a group of options."""
        return _declared(self.build, self.name, self._groups)

    @cached_property
    def _groups(self) -> Mapping[str, Any]:
        return _groups(self.build)

    @property
    def options(self) -> dict[str, Option]:
        """The scheme's own options and their defaults."""
        return {name: option.default for name, option in self.declared.items()}

    def assemble(self, setting: Setting, options: Mapping[str, Option]) -> Scheme:
        """Build the scheme; options it does not have are refused, options that are None take its defaults."""
        declared = self.declared
        plain: dict[str, Any] = {}
        grouped: dict[str, dict[str, Option]] = {}
        for key, value in options.items():
            if value is None:
                continue
            if key not in declared:
                having = ", ".join(info.name for info in _SCHEMES.values() if key in info.declared)
                hint = f"Schemes that have {key!r}: {having}." if having else ""
                raise unknown_option(f"Scheme {self.name!r}", key, declared, hint=hint)
            option = declared[key]
            value = option.checked(value, scheme=self.name)
            for group in option.groups:
                grouped.setdefault(group, {})[key] = value
            if not option.groups:
                plain[key] = value
        for group, default in self._groups.items():
            plain[group] = dataclasses.replace(default, **grouped.get(group, {}))
        scheme = self.build(setting, **plain) if _ours(self.build) else _built(self, setting, plain)
        scheme = dataclasses.replace(scheme, known_start=setting.known_start)
        if setting.robust_groups:
            scheme = in_groups(scheme, setting.robust_groups)
        asked = {"cohort": setting.cohort, "clients": setting.clients, "least": setting.least}
        return scheme.stating(rounds=setting.rounds, **asked)

    def veil(self, options: Mapping[str, Option], *, family: str = "auto") -> str | None:
        """The family that hides the model under these options; none where it travels as it is."""
        setting = Setting(make_loss("square"), Batches(0, 0), Schedule(1.0), family=family)
        downlink = self.assemble(setting, options).downlink
        return downlink.family if downlink.traced else None


def _ours(build: Callable[..., Scheme]) -> bool:
    return str(build.__module__).startswith("fedveil.")


def _built(info: SchemeInfo, setting: Setting, arguments: Mapping[str, Any]) -> Scheme:
    """What somebody's own function makes of it."""
    try:
        scheme = info.build(setting, **arguments)
    except FedVeilError:
        raise
    except Exception as reason:
        raise ConfigError(f"Scheme {info.name!r} raised {type(reason).__name__}: {reason}") from reason
    if not isinstance(scheme, Scheme):
        raise ConfigError(f"Scheme {info.name!r} gave {type(scheme).__name__}, not a fedveil.protocol.parts.Scheme.")
    return scheme


def _hints(build: Callable[..., Scheme]) -> dict[str, Any]:
    try:
        return get_type_hints(build)
    except Exception as reason:
        raise ConfigError(
            f"The types of scheme {build.__name__!r} cannot be read ({type(reason).__name__}: {reason}): its options "
            "are known by them, so import what they name where the function stands."
        ) from reason


def _groups(build: Callable[..., Scheme]) -> dict[str, Any]:
    """The parameters that are groups of options, with the group that holds their defaults."""
    hints = _hints(build)
    parameters = list(inspect.signature(build).parameters.values())[1:]
    groups = {
        parameter.name: parameter for parameter in parameters if dataclasses.is_dataclass(hints.get(parameter.name))
    }
    return {
        name: hints[name]() if parameter.default is parameter.empty else parameter.default
        for name, parameter in groups.items()
    }


def _declared(build: Callable[..., Scheme], scheme: str, groups: Mapping[str, Any]) -> dict[str, SchemeOption]:
    hints, words = _hints(build), _words(build)
    options: dict[str, SchemeOption] = {}
    for parameter in list(inspect.signature(build).parameters.values())[1:]:
        if parameter.name in groups:
            default = groups[parameter.name]
            inner, told = get_type_hints(type(default)), words | _words(type(default))
            for field in dataclasses.fields(default):
                name, holders = (
                    field.name,
                    (*(options[field.name].groups if field.name in options else ()), parameter.name),
                )
                kinds = _kinds(inner[name], name, scheme)
                options[name] = SchemeOption(name, kinds, getattr(default, name), told.get(name, ""), holders)
            continue
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise ConfigError(f"Scheme {scheme!r} takes {parameter}: name its options, so that others can know them.")
        if parameter.default is parameter.empty:
            raise ConfigError(
                f"Option {parameter.name!r} of scheme {scheme!r} needs a default: write {parameter.name}=… there."
            )
        kinds = _kinds(hints.get(parameter.name, type(parameter.default)), parameter.name, scheme)
        options[parameter.name] = SchemeOption(parameter.name, kinds, parameter.default, words.get(parameter.name, ""))
    return options


def _kinds(kind: Any, name: str, scheme: str) -> tuple[Any, ...]:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if all(part in (*_PLAIN, NoneType) or get_origin(part) is Literal for part in kinds):
        return kinds
    raise ConfigError(
        f"Option {name!r} of scheme {scheme!r} is of the type {kind}: options are int, float, bool, str, a Literal of "
        "texts, or one of these | None."
    )


def _words(thing: object) -> dict[str, str]:
    """What a docstring says under Args, by name."""
    _, _, listed = (inspect.getdoc(thing) or "").partition("Args:\n")
    listed = re.split(r"\n\s*\n", listed)[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^ +(\w+): (.*(?:\n {6,}.*)*)", listed, re.M)}


_SCHEMES: dict[str, SchemeInfo] = {}


def scheme(
    name: str,
    *,
    paper: str = "",
    summary: str = "",
    protects: str = "",
    default_loss: str = "auto",
    compared: Mapping[str, Option] | None = None,
    twin: Mapping[str, Option] | None = None,
) -> Callable[[Callable[..., Scheme]], Callable[..., Scheme]]:
    """Register a function (setting, *, options) → Scheme under a name.

    Args:
        name: How it is called; the name of a scheme that comes with FedVeil is refused.
        paper: Where it is from.
        summary: What it does.
        protects: What it protects from whom.
        default_loss: square, cross-entropy, or auto, which goes by the data.
        compared: Settings it needs to train well where all schemes are compared under one setting.
        twin: Options with which it gives the same sums without its cipher, where that takes too long to train with.

    Returns:
        A decorator that registers the function and gives it back as it is; it raises ConfigError where the name is
        that of a scheme that comes with FedVeil.
    """

    def register(build: Callable[..., Scheme]) -> Callable[..., Scheme]:
        if name in _SCHEMES and _ours(_SCHEMES[name].build) and not _ours(build):
            raise ConfigError(f"{name!r} is a scheme that comes with FedVeil: give yours another name.")
        _SCHEMES[name] = SchemeInfo(*(name, paper, summary, protects, default_loss, build), compared or {}, twin or {})
        return build

    return register


def schemes() -> tuple[SchemeInfo, ...]:
    """Every named scheme."""
    return tuple(_SCHEMES.values())


def find(name: str) -> SchemeInfo:
    """A scheme by name, or by the user's own code; an unknown name suggests the nearest."""
    if isinstance(name, OwnCode):
        return info_of(load(name, what="a scheme"), where=f"Scheme {str(name)!r}")
    refuse_code(name, what="scheme")
    if name.endswith(".py"):
        raise ConfigError(f"The scheme {name!r} is a file: name the function in it too, as in {name}:function.")
    if name not in _SCHEMES:
        raise unknown_name("scheme", name, _SCHEMES, hint="Your own: path/to/file.py:function.")
    return _SCHEMES[name]


def info_of(given: object, *, where: str) -> SchemeInfo:
    """What is known of a function that builds a scheme, registered or not, or of a Scheme that is already built."""
    if isinstance(given, Scheme):
        built = given

        def as_it_is(setting: Setting) -> Scheme:
            return built

        return SchemeInfo(built.name, "", "", "", "auto", as_it_is)
    if not callable(given):
        raise ConfigError(f"{where} is {given!r}: a scheme is a function (setting, *, options) or a Scheme.")
    for info in _SCHEMES.values():
        if info.build is given:
            return info
    said = (inspect.getdoc(given) or "").partition("\n\n")[0]
    name = getattr(given, "__name__", type(given).__name__).replace("_", "-")
    return SchemeInfo(name, "", " ".join(said.split()), "", "auto", given)


def assemble(name: str, setting: Setting, options: Mapping[str, Option]) -> Scheme:
    """Build a scheme by name; options it does not have are refused, options that are None take its defaults."""
    return find(name).assemble(setting, options)
