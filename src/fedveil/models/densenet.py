"""The densely connected network of Huang et al. 2017, without bottlenecks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError
from fedveil.models.networks import at_least, conv, he_init, image_norm, not_too_deep

STEM_CHANNELS = 16
DENSE_BLOCKS = 3
# Besides the dense layers: the stem, two transitions and the head.
OTHER_LAYERS = 4


class DenseLayer(nn.Module):
    """Appends ``growth`` new channels, norm-ReLU-conv of all earlier ones, to its input."""

    def __init__(self, *, inputs: int, growth: int, norm: str) -> None:
        super().__init__()
        self.norm = image_norm(norm, inputs)
        self.relu = nn.ReLU()
        self.conv = conv(inputs, growth)

    def forward(self, x: Tensor) -> Tensor:
        """The input with the new channels behind it."""
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], dim=1)


def densenet(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    growth: int = 12,
    depth: int = 22,
    compression: float = 0.5,
    norm: Literal["batch", "group"] = "batch",
) -> nn.Module:
    """Three dense blocks of ``(depth - 4)/3`` layers; transitions keep ``compression`` of the channels."""
    at_least(1, growth=growth)
    not_too_deep(depth)
    per_block, rest = divmod(depth - OTHER_LAYERS, DENSE_BLOCKS)
    if per_block < 1 or rest:
        nearest = OTHER_LAYERS + DENSE_BLOCKS * max(1, per_block)
        raise ConfigError(
            f"The depth of 'densenet' must be 4 + 3·n with n ≥ 1, not {depth}: take {nearest} "
            f"or {nearest + DENSE_BLOCKS}."
        )
    if not 0 < compression <= 1:
        raise ConfigError(f"The compression of 'densenet' must be in (0, 1], not {compression}.")

    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv(input_shape[0], STEM_CHANNELS))
    channels = STEM_CHANNELS
    for i in range(1, DENSE_BLOCKS + 1):
        block: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(1, per_block + 1):
            block[f"layer{j}"] = DenseLayer(inputs=channels, growth=growth, norm=norm)
            channels += growth
        layers[f"block{i}"] = nn.Sequential(block)
        if i < DENSE_BLOCKS:
            kept = max(1, int(channels * compression))
            layers[f"transition{i}"] = _transition(channels, kept, norm=norm)
            channels = kept
    layers["norm"] = image_norm(norm, channels)
    layers["relu"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(channels, outputs)
    model = nn.Sequential(layers)
    he_init(m for m in model.modules() if isinstance(m, nn.Conv2d))
    return model


def _transition(inputs: int, outputs: int, *, norm: str) -> nn.Module:
    """Fewer channels and half the size."""
    return nn.Sequential(
        OrderedDict(
            norm=image_norm(norm, inputs),
            relu=nn.ReLU(),
            conv=conv(inputs, outputs, kernel=1),
            pool=nn.AvgPool2d(2),
        )
    )
