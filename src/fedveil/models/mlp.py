"""The multilayer perceptron: takes any input by flattening it."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal

from torch import nn

from fedveil.errors import ConfigError
from fedveil.models.layers import at_least, he_init, not_too_deep, vector_norm


def mlp(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    depth: int = 3,
    width: int = 128,
    norm: Literal["none", "batch", "layer", "group"] = "none",
) -> nn.Module:
    """``depth`` linear layers with biases, ``width`` units in each hidden one, ReLU between them."""
    at_least(1, depth=depth, width=width)
    not_too_deep(depth)
    if width == 1 and norm in ("layer", "group"):
        raise ConfigError(f"norm={norm!r} over a single unit is always zero: set width to 2 or more.")

    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    features = math.prod(input_shape)
    for i in range(1, depth):
        layers[f"linear{i}"] = nn.Linear(features, width)
        if norm != "none":
            layers[f"norm{i}"] = vector_norm(norm, width)
        layers[f"relu{i}"] = nn.ReLU()
        features = width
    he_init(layers.values())
    layers["head"] = nn.Linear(features, outputs)
    return nn.Sequential(layers)
