"""Checks around a build: do the data and the options fit the model, does its output fit the task."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError, unknown_option
from fedveil.models.attention import decoder, transformer, vit
from fedveil.models.networks import (
    BottleneckBlock,
    cifar_resnet,
    cnn,
    densenet,
    gru,
    lenet_sigmoid,
    lstm,
    mlp,
    resnet18,
)

BATCH = 2
MOST_PARAMETERS = 1 << 30
MOST_INPUTS, MOST_DIMENSIONS, MOST_OUTPUTS = 1 << 26, 8, 1 << 22
MOST_STEPS = 1 << 14
MOST_OF_AN_OPTION = 1 << 20
_FITS = {
    "numbers": "'mlp' takes numbers of any shape.",
    "images": "'cnn', 'vit' and the ResNets take images (channels, height, width).",
    "tokens": "'gru', 'lstm', 'transformer' and 'decoder' take token sequences.",
}


def check_sizes(*, input_shape: tuple[int, ...], outputs: int, vocabulary: int | None) -> None:
    """Refuse sizes that no model can have, or that only a mistake or an attack would ask for."""
    if len(input_shape) > MOST_DIMENSIONS or math.prod(input_shape) > MOST_INPUTS:
        raise ConfigError(f"input_shape is too large: a sample has at most {MOST_INPUTS:,} numbers.")
    if max(outputs, vocabulary or 0) > MOST_OUTPUTS:
        raise ConfigError(f"outputs and vocabulary must be at most {MOST_OUTPUTS:,}.")
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(f"input_shape must hold positive sizes (without the batch), not {input_shape}.")
    if outputs < 1:
        raise ConfigError(f"outputs must be at least 1, not {outputs}.")
    if vocabulary is not None and vocabulary < 1:
        raise ConfigError(f"vocabulary must be at least 1 (or None for data that is not text), not {vocabulary}.")


def check_input(entry: CatalogueEntry, *, input_shape: tuple[int, ...], vocabulary: int | None) -> None:
    """Refuse data of a kind or shape that the named model cannot take, and say which model can."""
    name, wants = entry.info.name, entry.info.inputs
    if wants == "tokens":
        if vocabulary is None:
            raise ConfigError(
                f"Model {name!r} reads token ids and needs vocabulary=, the number of different ids "
                f"(padding included). If the data is not text: {_FITS['numbers']} {_FITS['images']}"
            )
        if len(input_shape) == 1 and input_shape[0] > MOST_STEPS:
            raise ConfigError(f"Model {name!r} takes up to {MOST_STEPS:,} tokens a sample, not {input_shape[0]:,}.")
        if len(input_shape) != 1:
            raise ConfigError(
                f"Model {name!r} takes token sequences of shape (length,), not {input_shape}. "
                f"{_FITS['numbers']} {_FITS['images']}"
            )
        return
    if vocabulary is not None:
        raise ConfigError(f"Model {name!r} takes {wants}, not token ids. {_FITS['tokens']}")
    if wants == "images":
        if len(input_shape) != 3:
            grey = f" Grey images have the shape {(1, *input_shape)}." if len(input_shape) == 2 else ""
            raise ConfigError(
                f"Model {name!r} takes images of shape (channels, height, width), not {input_shape}."
                f"{grey} {_FITS['numbers']}"
            )
        if min(input_shape[1:]) < entry.smallest:
            raise ConfigError(
                f"Model {name!r} halves the image twice and needs {entry.smallest}×{entry.smallest} pixels "
                f"or more, not {input_shape[1]}×{input_shape[2]}. {_FITS['numbers']}"
            )


def check_options(info: ModelInfo, options: Mapping[str, OptionValue]) -> None:
    """Refuse options the model does not have, or whose value is of the wrong type or not a choice."""
    for option, value in options.items():
        if option not in info.options:
            raise unknown_option(f"Model {info.name!r}", option, info.options)
        default = info.options[option]
        allowed = (int, float) if isinstance(default, float) else (type(default),)
        if not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool):
            raise ConfigError(
                f"Option {option!r} of model {info.name!r} must be of type {type(default).__name__} "
                f"(default {default!r}), not {value!r}."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"Option {option!r} of model {info.name!r} must be a finite number (got {value}).")
        if isinstance(value, int | float) and not -MOST_OF_AN_OPTION <= value <= MOST_OF_AN_OPTION:
            raise ConfigError(f"Option {option!r} of model {info.name!r} is too large: {MOST_OF_AN_OPTION:,} at most.")
        if option in info.choices and value not in info.choices[option]:
            choices = ", ".join(repr(choice) for choice in info.choices[option])
            raise ConfigError(f"Option {option!r} of model {info.name!r} must be one of {choices}, not {value!r}.")


def check_output(
    model: nn.Module, *, name: str, input_shape: tuple[int, ...], outputs: int, vocabulary: int | None
) -> object:
    """Run a random batch of two in eval mode, compare the shape of the logits that come out, and give what did."""
    batch = _random_batch(model, shape=(BATCH, *input_shape), vocabulary=vocabulary)
    # Module by module, because a factory may have frozen some of its parts in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model.eval()(batch)
    except Exception as error:
        raise ConfigError(
            f"Model {name!r} failed on a batch of shape {tuple(batch.shape)} ({batch.dtype}): {type(error).__name__}: "
            f"{error}. Make its forward accept (batch, *input_shape) with input_shape {input_shape}."
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    scores = logits_of(output)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    if shape != (BATCH, outputs):
        raise ConfigError(
            f"Model {name!r} returns {shape} for a batch of shape {tuple(batch.shape)}, but the task needs "
            f"{(BATCH, outputs)}: make its last layer give {outputs} numbers per sample."
        )
    return output


def logits_of(output: Any) -> Any:
    """The logits of an output that is an object or a dict with such; otherwise the output itself."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def _random_batch(model: nn.Module, *, shape: tuple[int, ...], vocabulary: int | None) -> Tensor:
    """Random input of the kind the data has, on the model's device and in its precision."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if first.is_meta:
        return torch.empty(shape, dtype=torch.int64 if vocabulary is not None else first.dtype, device="meta")
    if vocabulary is not None:
        return torch.randint(vocabulary, shape).to(first.device)
    return torch.randn(shape).to(first)


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
class CatalogueEntry:
    """A row of the table. ``smallest`` is the least height and width of an image."""

    info: ModelInfo
    builder: Builder
    smallest: int


def _entry(name: str, builder: Builder, inputs: Inputs, summary: str, *, smallest: int = 1) -> CatalogueEntry:
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
    return CatalogueEntry(info=info, builder=builder, smallest=smallest)


_ROWS = (
    _entry("mlp", mlp, "numbers", "linear layers with ReLU between, on flattened inputs of any shape"),
    _entry("cnn", cnn, "images", "two small convolution stages and two linear layers", smallest=4),
    _entry(
        "lenet-sigmoid",
        lenet_sigmoid,
        "images",
        "the sigmoid LeNet of the gradient-inversion literature, a reference for attacks",
    ),
    # MP-DP names a ResNet11 and does not say which: of He et al.'s, 9·n + 2 with bottlenecks is the form that has 11.
    _entry(
        "resnet11",
        cifar_resnet(1, BottleneckBlock),
        "images",
        "CIFAR ResNet with 11 layers, one bottleneck a stage, 0.1 M parameters",
    ),
    _entry("resnet20", cifar_resnet(3), "images", "CIFAR ResNet with 20 layers, 0.27 M parameters"),
    _entry("resnet32", cifar_resnet(5), "images", "CIFAR ResNet with 32 layers, 0.46 M parameters"),
    _entry("resnet56", cifar_resnet(9), "images", "CIFAR ResNet with 56 layers, 0.85 M parameters"),
    _entry("resnet18", resnet18, "images", "ImageNet-style ResNet with 18 layers, 11.2 M parameters"),
    _entry("densenet", densenet, "images", "three dense blocks whose layers see all earlier ones", smallest=4),
    _entry("vit", vit, "images", "vision Transformer over patches"),
    _entry("gru", gru, "tokens", "embedding, gated recurrent unit and mean over the words, for text"),
    _entry("lstm", lstm, "tokens", "embedding, long short-term memory and mean over the words, for text"),
    _entry("transformer", transformer, "tokens", "Transformer encoder and mean over the words, for text"),
    _entry(
        "decoder",
        decoder,
        "tokens",
        "RMSNorm, rotary positions, grouped queries and SwiGLU, read at the last word, for text",
    ),
)

_CATALOGUE = {row.info.name: row for row in _ROWS}
CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(_CATALOGUE)


def register(name: str, *, inputs: Inputs = "numbers") -> Callable[[Builder], Builder]:
    """Register a function of your own as a model, by a name that `model` then takes.

    It takes input_shape and outputs (and vocabulary, where `inputs` is tokens) and options with defaults.
    """

    def give(builder: Builder) -> Builder:
        if name in {row.info.name for row in _ROWS}:
            raise ConfigError(f"{name!r} is a model that comes with FedVeil: give yours another name.")
        said = (inspect.getdoc(builder) or "").partition("\n\n")[0]
        _CATALOGUE[name] = _entry(name, builder, inputs, " ".join(said.split()))
        return builder

    return give


def names() -> tuple[str, ...]:
    """The names ``build`` knows, simplest models first."""
    return tuple(CATALOGUE)


def describe() -> list[ModelInfo]:
    """Name, summary, inputs and options of every named model."""
    return [row.info for row in CATALOGUE.values()]
