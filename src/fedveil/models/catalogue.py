"""The table of named models: what each takes as input and which options it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args, get_origin, get_type_hints

from torch import nn

from fedveil.models.cnn import cnn
from fedveil.models.densenet import densenet
from fedveil.models.gru import gru
from fedveil.models.lenet import lenet_sigmoid
from fedveil.models.mlp import mlp
from fedveil.models.resnet import cifar_resnet, resnet18

OptionValue: TypeAlias = int | float | str | bool
Builder: TypeAlias = Callable[..., nn.Module]
Inputs: TypeAlias = Literal["numbers", "images", "tokens"]

DATA_ARGUMENTS = frozenset({"input_shape", "outputs", "vocabulary"})


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a user may know about a named model.

    ``inputs`` is ``numbers`` (any shape, flattened), ``images`` (channels, height, width) or
    ``tokens`` (a sequence of ids). ``options`` maps each option to its default, ``choices`` the
    options with a closed set of values to that set.
    """

    name: str
    summary: str
    inputs: Inputs
    options: Mapping[str, OptionValue]
    choices: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the table. ``smallest`` is the least height and width of an image."""

    info: ModelInfo
    builder: Builder
    smallest: int


def _entry(name: str, builder: Builder, inputs: Inputs, summary: str, *, smallest: int = 1) -> Entry:
    """A row whose options are the keyword arguments of ``builder``, so that they are written once."""
    hints = get_type_hints(builder)
    options: dict[str, OptionValue] = {
        key: parameter.default
        for key, parameter in inspect.signature(builder).parameters.items()
        if key not in DATA_ARGUMENTS
    }
    choices = {key: get_args(hints[key]) for key in options if get_origin(hints[key]) is Literal}
    info = ModelInfo(
        name=name,
        summary=summary,
        inputs=inputs,
        options=MappingProxyType(options),
        choices=MappingProxyType(choices),
    )
    return Entry(info=info, builder=builder, smallest=smallest)


_ROWS = (
    _entry("mlp", mlp, "numbers", "linear layers with ReLU between, on flattened inputs of any shape"),
    _entry("cnn", cnn, "images", "two small convolution stages and two linear layers", smallest=4),
    _entry(
        "lenet-sigmoid",
        lenet_sigmoid,
        "images",
        "the sigmoid LeNet of the gradient-inversion literature, a reference for attacks",
    ),
    _entry("resnet20", cifar_resnet(3), "images", "CIFAR ResNet with 20 layers, 0.27 M parameters"),
    _entry("resnet32", cifar_resnet(5), "images", "CIFAR ResNet with 32 layers, 0.46 M parameters"),
    _entry("resnet56", cifar_resnet(9), "images", "CIFAR ResNet with 56 layers, 0.85 M parameters"),
    _entry("resnet18", resnet18, "images", "ImageNet-style ResNet with 18 layers, 11.2 M parameters"),
    _entry("densenet", densenet, "images", "three dense blocks whose layers see all earlier ones", smallest=4),
    _entry("gru", gru, "tokens", "embedding, gated recurrent unit and mean over the words, for text"),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({row.info.name: row for row in _ROWS})


def names() -> tuple[str, ...]:
    """The names ``build`` knows, simplest models first."""
    return tuple(CATALOGUE)


def describe() -> list[ModelInfo]:
    """Name, summary, inputs and options of every named model."""
    return [row.info for row in CATALOGUE.values()]
