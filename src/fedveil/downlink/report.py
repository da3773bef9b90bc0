"""What a veil hides of a network, parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.edges import Pin
from fedveil.downlink.table import Scaled, ScaleTable
from fedveil.errors import TraceError

_PROBES = 2


@dataclass(frozen=True)
class ParameterCover:
    """How well one parameter is hidden."""

    name: str
    shape: tuple[int, ...]
    size: int
    hidden: int
    sides: str

    @property
    def fraction(self) -> float:
        """The fraction of its numbers that are hidden on at least one side."""
        return self.hidden / self.size if self.size else 1.0


@dataclass(frozen=True)
class Coverage:
    """A network's cover: every parameter, and which operations pin."""

    parameters: tuple[ParameterCover, ...]
    pins: tuple[Pin, ...]
    head_noise: bool
    head_refusal: str
    secrets: int

    @property
    def fraction(self) -> float:
        """The fraction of all numbers that are hidden on at least one side."""
        total = sum(one.size for one in self.parameters)
        return sum(one.hidden for one in self.parameters) / total if total else 0.0

    @property
    def visible(self) -> tuple[ParameterCover, ...]:
        """Parameters that are not hidden, or not entirely."""
        return tuple(one for one in self.parameters if one.hidden < one.size)

    def as_data(self) -> dict[str, object]:
        """The same as plain data, for JSON."""
        return {
            "coverage": self.fraction,
            "head_noise": self.head_noise,
            "head_noise_refused": self.head_refusal or None,
            "secret_scales": self.secrets,
            "parameters": [
                {"name": p.name, "shape": list(p.shape), "size": p.size, "hidden": p.hidden, "sides": p.sides}
                for p in self.parameters
            ],
            "visible": [one.name for one in self.visible],
            "pins": [{"operation": p.operation, "where": p.where, "reason": p.reason} for p in self.pins],
        }


def coverage(table: ScaleTable, *, head_noise: bool, secret_epsilon: bool = True) -> Coverage:
    """Judge a table. With a public ε, whatever a normalisation reads is seen and hides nothing."""
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(_PROBES):
        logs = torch.rand(table.classes.count, generator=generator, dtype=torch.float64) + 0.5
        if not secret_epsilon:
            for norm in table.norms:
                logs[norm.read] = 0.0
        draws.append(table.classes.scales(logs))
    noised = table.head if head_noise else None
    # The noise adds one number per output to the weight's whole row and to the bias: differences inside a
    # row stay, so it hides one number per output and no more.
    covered = None if noised is None else noised.bias or noised.weight
    covers = tuple(
        _cover(entry, draws, noise=noised.outputs if noised is not None and entry.name == covered else 0)
        for entry in table.parameters
    )
    return Coverage(covers, table.pins, noised is not None, table.head_refusal, table.free())


def _cover(entry: Scaled, draws: list[Tensor], *, noise: int) -> ParameterCover:
    size = math.prod(entry.shape)
    if entry.out is None:
        return _judged(entry, size, noise, both=False)
    out = torch.stack([draw[entry.out] for draw in draws])
    into = None if entry.into is None else torch.stack([draw[entry.into] for draw in draws])
    # An element is visible if its factor is 1 under every draw: both sides pinned, or equal classes.
    factor = out if into is None else out / into
    hidden = ((factor - 1.0).abs() > 1e-9).any(0).expand(entry.view)
    on_both = into is not None and bool((out != 1.0).all()) and bool((into != 1.0).all())
    return _judged(entry, size, max(int(hidden.sum()), noise), both=on_both)


def _judged(entry: Scaled, size: int, hidden: int, *, both: bool) -> ParameterCover:
    sides = "visible" if hidden == 0 else "partly" if hidden < size else "both" if both else "one"
    return ParameterCover(entry.name, entry.shape, size, hidden, sides)


def require_coverage(found: Coverage, *, minimum: float) -> None:
    """Stop a run whose model would be too visible, naming what pins."""
    if found.fraction >= minimum:
        return
    pins = "; ".join(f"{p.operation} at {p.where} ({p.reason})" for p in found.pins[:6]) or "nothing but the ends"
    names = ", ".join(one.name for one in found.visible[:6])
    raise TraceError(
        f"A veil would hide only {found.fraction:.1%} of this model's parameters (min_coverage is {minimum:.0%}). "
        f"Visible: {names}. Operations that pin: {pins}. Replace them by ReLU-like operations, lower "
        "--min-coverage, or train with --scheme fedavg."
    )
