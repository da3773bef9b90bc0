"""A small convolutional network for small images."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from fedveil.models.layers import at_least, conv, he_init, image_norm

HIDDEN = 64


def cnn(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    width: int = 16,
    norm: Literal["none", "batch", "group"] = "none",
) -> nn.Module:
    """Two conv-[norm]-ReLU-maxpool stages of ``width`` and ``2·width`` channels, then two linear layers."""
    at_least(1, width=width)
    channels, height, breadth = input_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, wide in enumerate((width, 2 * width), start=1):
        layers[f"conv{i}"] = conv(channels, wide, bias=norm == "none")
        if norm != "none":
            layers[f"norm{i}"] = image_norm(norm, wide)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(2)
        channels, height, breadth = wide, height // 2, breadth // 2
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(channels * height * breadth, HIDDEN)
    layers["relu3"] = nn.ReLU()
    he_init(layers.values())
    layers["head"] = nn.Linear(HIDDEN, outputs)
    return nn.Sequential(layers)
