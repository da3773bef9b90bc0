"""Attacks by name. A name leads to `module:function`, which is imported where the attack runs and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedveil.audit.views import View
from fedveil.errors import ConfigError, unknown_name

Settings = Mapping[str, Any]
Progress = Callable[[float], None]
Attack = Callable[[View, Settings, Progress], Mapping[str, Tensor]]

_ATTEMPTS: dict[str, tuple[str, ...]] = {
    "reconstruction": ("closed-form", "dlg", "idlg", "inverting", "labels"),
    "generative": ("generative", "class-inversion"),
    "veiled": ("phi",),
    "history": ("averaging",),
    "extraction": ("received", "calibration", "probe", "parameters"),
    "membership": ("membership", "membership-layers", "likelihood"),
}

ATTACKS: dict[str, str] = {
    "surroundings": "fedveil.audit.surroundings:surroundings",
    **{
        name: f"fedveil.audit.attempts.{module}:{name.replace('-', '_')}"
        for module, names in _ATTEMPTS.items()
        for name in names
    },
}


def target_of(name: str, attacks: Mapping[str, str] = ATTACKS) -> str:
    """Where an attack is found."""
    if name not in attacks:
        raise unknown_name("attack", name, attacks)
    return attacks[name]


def attack_at(target: str) -> Attack:
    """The attack itself."""
    module, _, function = target.partition(":")
    try:
        found: Attack = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as reason:
        raise ConfigError(f"The attack {target} cannot be loaded: {reason}.") from reason
    return found
