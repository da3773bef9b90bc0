"""Residual networks of basic blocks (He et al. 2016): the CIFAR family and ResNet-18."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from fedveil.models.networks import at_least, conv, he_init, image_norm

SMALL_IMAGE = 64


class PadShortcut(nn.Module):
    """Shortcut A: every ``stride``-th pixel, and zero channels before and after; no parameters."""

    def __init__(self, *, extra: int, stride: int) -> None:
        super().__init__()
        self.front = extra // 2
        self.back = extra - self.front
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """The thinned and widened input."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(thinned, (0, 0, 0, 0, self.front, self.back))


class BasicBlock(nn.Module):
    """``relu(body(x) + shortcut(x))`` with two 3×3 convolutions in the body."""

    def __init__(self, *, inputs: int, outputs: int, stride: int, shortcut: str, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            OrderedDict(
                conv1=conv(inputs, outputs, stride=stride),
                norm1=image_norm(norm, outputs),
                relu1=nn.ReLU(),
                conv2=conv(outputs, outputs),
                norm2=image_norm(norm, outputs),
            )
        )
        self.shortcut: nn.Module
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = PadShortcut(extra=outputs - inputs, stride=stride)
        else:
            projection = conv(inputs, outputs, kernel=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=image_norm(norm, outputs)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _residual_network(
    stem: OrderedDict[str, nn.Module],
    *,
    widths: Sequence[int],
    blocks: int,
    outputs: int,
    shortcut: str,
    norm: str,
) -> nn.Module:
    """Stages of ``blocks`` basic blocks after the stem; every stage but the first halves the size."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(stem))
    inputs = widths[0]
    for i, wide in enumerate(widths, start=1):
        stage: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(1, blocks + 1):
            stride = 2 if i > 1 and j == 1 else 1
            stage[f"block{j}"] = BasicBlock(inputs=inputs, outputs=wide, stride=stride, shortcut=shortcut, norm=norm)
            inputs = wide
        layers[f"stage{i}"] = nn.Sequential(stage)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(inputs, outputs)
    model = nn.Sequential(layers)
    he_init((m for m in model.modules() if isinstance(m, nn.Conv2d)), mode="fan_out")
    return model


def cifar_resnet(blocks: int) -> Callable[..., nn.Module]:
    """The builder of the CIFAR ResNet with 6·blocks + 2 weighted layers."""

    def resnet(
        *,
        input_shape: tuple[int, ...],
        outputs: int,
        shortcut: Literal["A", "B"] = "A",
        norm: Literal["batch", "group"] = "batch",
        width: int = 16,
    ) -> nn.Module:
        at_least(1, width=width)
        stem: OrderedDict[str, nn.Module] = OrderedDict(
            conv=conv(input_shape[0], width), norm=image_norm(norm, width), relu=nn.ReLU()
        )
        widths = (width, 2 * width, 4 * width)
        return _residual_network(stem, widths=widths, blocks=blocks, outputs=outputs, shortcut=shortcut, norm=norm)

    return resnet


def resnet18(
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    stem: Literal["auto", "small", "large"] = "auto",
    norm: Literal["batch", "group"] = "batch",
    width: int = 64,
) -> nn.Module:
    """Four stages of two blocks; ``auto`` takes the small stem (3×3, no pooling) up to 64 pixels."""
    at_least(1, width=width)
    channels, height, breadth = input_shape
    small = stem == "small" or (stem == "auto" and max(height, breadth) <= SMALL_IMAGE)
    first = conv(channels, width) if small else conv(channels, width, kernel=7, stride=2)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=first, norm=image_norm(norm, width), relu=nn.ReLU())
    if not small:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    widths = (width, 2 * width, 4 * width, 8 * width)
    return _residual_network(layers, widths=widths, blocks=2, outputs=outputs, shortcut="B", norm=norm)
