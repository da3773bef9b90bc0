"""What every attempt reads from its settings, and what it may ask of a view.

Settings are plain data: seed (0), quick (False), device ("cpu"), box ([low, high], or None where the range of
input values is not known).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch

from fedveil.audit.attacks.matching import Budget
from fedveil.audit.registry import Settings
from fedveil.audit.views import ClientView, Facts, OutsiderView, ServerHistory, ServerView, View
from fedveil.errors import ConfigError, NotApplicableError

_ROLES: dict[type, str] = {
    ClientView: "a client",
    OutsiderView: "an outsider",
    ServerView: "the server",
    ServerHistory: "the server over several rounds",
}
Kind = TypeVar("Kind", ClientView, OutsiderView, ServerView, ServerHistory)


def budget_of(settings: Settings) -> Budget:
    """How much may be spent: `quick`."""
    return Budget(quick=bool(settings.get("quick", False)))


def generator_of(settings: Settings) -> torch.Generator:
    """The attacker's own randomness, on the CPU, from `seed`."""
    return torch.Generator().manual_seed(int(settings.get("seed", 0)))


def device_of(settings: Settings) -> torch.device:
    """Where to compute: `device`."""
    name = str(settings.get("device", "cpu"))
    try:
        return torch.device(name)
    except RuntimeError as reason:
        raise ConfigError(f"The device {name!r} of an attack is not one of this machine.") from reason


def box_of(settings: Settings) -> tuple[float, float] | None:
    """The least and the greatest value an input can have: `box`; None where that is not known."""
    given = settings.get("box")
    if given is None:
        return None
    try:
        low, high = (float(one) for one in given)
    except (TypeError, ValueError) as reason:
        raise ConfigError(f"box must be two numbers, the least and the greatest input value (got {given}).") from reason
    return low, high


def count_of(settings: Settings, name: str, default: int | None = None) -> int | None:
    """A setting that is a count of at least one, or `default` where it is not given."""
    given = settings.get(name)
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1 (got {given!r}).")
    return given


def seen_by(view: View, kind: type[Kind]) -> Kind:
    """The view, if it is of this kind; refused otherwise."""
    if not isinstance(view, kind):
        raise NotApplicableError(f"what {_ROLES[type(view)]} sees: this attack is made on what {_ROLES[kind]} sees")
    return view


def require_classes(facts: Facts) -> None:
    """Refuse tasks whose targets are numbers."""
    if facts.task != "classification":
        raise NotApplicableError(f"a {facts.task} task: this attack needs classes")


def require_pictures(facts: Facts) -> None:
    """Refuse inputs that are no pictures (channels, height, width)."""
    if facts.input_dtype.startswith("int") or len(facts.input_shape) != 3:
        raise NotApplicableError("inputs that are no pictures: this attack makes pictures")


def require_numbers(facts: Facts) -> None:
    """Refuse inputs that are tokens, through which no gradient passes."""
    if facts.input_dtype.startswith("int"):
        raise NotApplicableError("text as input: words are no numbers that a gradient could lead to")


@contextlib.contextmanager
def applicable() -> Iterator[None]:
    """Around an attack on inputs that were checked: what it then refuses, it cannot be tried on."""
    try:
        yield
    except NotApplicableError:
        raise
    except ConfigError as reason:
        raise NotApplicableError(str(reason)) from reason
