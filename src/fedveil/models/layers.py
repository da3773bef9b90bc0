"""Pieces the networks share: normalisation, He initialisation, range checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from fedveil.errors import ConfigError

MOST_GROUPS = 8
LEAST_CHANNELS_PER_GROUP = 4


def groups_for(channels: int) -> int:
    """The number of GroupNorm groups: the largest divisor of ``channels`` up to 8 that leaves 4 in each.

    Fewer than four channels per group would come close to erasing the features where they have no
    spatial extent (one channel per group on a vector normalises everything to zero).
    """
    fitting = (g for g in range(1, MOST_GROUPS + 1) if channels % g == 0 and channels // g >= LEAST_CHANNELS_PER_GROUP)
    return max(fitting, default=1)


def image_norm(kind: str, channels: int) -> nn.Module:
    """The normalisation of a ``(batch, channels, height, width)`` tensor: ``batch`` or ``group``."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(groups_for(channels), channels)


def vector_norm(kind: str, features: int) -> nn.Module:
    """The normalisation of a ``(batch, features)`` tensor: ``batch``, ``layer`` or ``group``."""
    if kind == "batch":
        return nn.BatchNorm1d(features)
    if kind == "layer":
        return nn.LayerNorm(features)
    return nn.GroupNorm(groups_for(features), features)


def conv(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size (divided by ``stride``, rounded up)."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)


def he_init(layers: Iterable[nn.Module], *, mode: Literal["fan_in", "fan_out"] = "fan_in") -> None:
    """Draw the weights of layers that feed a ReLU from N(0, 2/fan) (He et al. 2015); zero their biases.

    Only convolutions and linear layers are touched.
    """
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


MOST_LAYERS = 1000


def not_too_deep(depth: int) -> None:
    """Refuse a depth that would take forever to build."""
    if depth > MOST_LAYERS:
        raise ConfigError(f"The model option 'depth' must be at most {MOST_LAYERS}, not {depth}.")


def at_least(minimum: int, **options: int) -> None:
    """Refuse options smaller than ``minimum``, naming the first of them."""
    for option, value in options.items():
        if value < minimum:
            raise ConfigError(f"The model option {option!r} must be at least {minimum}, not {value}.")
