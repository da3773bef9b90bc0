"""Named schemes: a few lines each that put parts together, found by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedveil.errors import ConfigError, unknown_name
from fedveil.protocol.parts import Scheme
from fedveil.work.batches import Batches, Schedule
from fedveil.work.losses import Loss

Option = int | float | str | bool | None


@dataclass(frozen=True)
class Setting:
    """What every scheme is given: the loss, the batches, the learning rate over rounds, and how long it all takes.

    `participations` is the largest number of rounds any one client takes part in, `rate` the share of
    clients in a round, `cohort` their number (0: not known), drawn from `clients`.
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


@dataclass(frozen=True)
class SchemeInfo:
    """One named scheme."""

    name: str
    paper: str
    summary: str
    protects: str
    default_loss: str
    build: Callable[..., Scheme]

    @property
    def options(self) -> dict[str, Option]:
        """The scheme's own options and their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_SCHEMES: dict[str, SchemeInfo] = {}


def scheme(
    name: str, *, paper: str, summary: str, protects: str, default_loss: str = "auto"
) -> Callable[[Callable[..., Scheme]], Callable[..., Scheme]]:
    """Register a function (setting, *, options) → Scheme under a name."""

    def register(build: Callable[..., Scheme]) -> Callable[..., Scheme]:
        _SCHEMES[name] = SchemeInfo(name, paper, summary, protects, default_loss, build)
        return build

    return register


def schemes() -> tuple[SchemeInfo, ...]:
    """Every named scheme."""
    return tuple(_SCHEMES.values())


def find(name: str) -> SchemeInfo:
    """A scheme by name; an unknown name suggests the nearest."""
    if name not in _SCHEMES:
        raise unknown_name("scheme", name, _SCHEMES)
    return _SCHEMES[name]


def assemble(name: str, setting: Setting, options: Mapping[str, Option]) -> Scheme:
    """Build a scheme; options it does not have are refused, options that are None take its defaults."""
    info = find(name)
    known = info.options
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in known:
            raise ConfigError(
                f"Scheme {name!r} has no option {key!r}. "
                + (f"It takes: {', '.join(known)}." if known else "It takes no options of its own.")
            )
    return info.build(setting, **given)
