"""``build``: from a name to a checked network with reproducible initial parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedveil.errors import ConfigError, unknown_name
from fedveil.models.catalogue import (
    CATALOGUE,
    MOST_PARAMETERS,
    OptionValue,
    check_input,
    check_options,
    check_output,
    check_sizes,
)
from fedveil.models.custom import call_factory, plain, refuse_hooks, refuse_shared_memory
from fedveil.own_code import OwnCode, refuse_code
from fedveil.secrets import SecretStream, drawn_from

LIGHT = 1 << 28


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    seed: int | SecretStream = 0,
    vocabulary: int | None = None,
    **options: OptionValue,
) -> nn.Module:
    """Build a model for samples of ``input_shape`` (without the batch) and ``outputs`` numbers each.

    Equal seeds give equal parameters; the global random state is left as it was. Before it is returned
    the model is run on a random batch of two, and a wrong output shape is refused.

    Args:
        name: One of :func:`names`, or code of your own, ``OwnCode("package.module:factory")`` or
            ``OwnCode("path/to/file.py:factory")``; plain text never names code, since it may come from a file.
            A factory gets those of input_shape, outputs, vocabulary that its signature has, and the options.
        input_shape: A sample's shape.
        outputs: Classes, or numbers to predict.
        seed: What draws the parameters. Weights that are to be secret take a secret stream: of a number
            PyTorch keeps 32 bits.
        vocabulary: How many different tokens there are, where samples are token ids.
        options: Those of the model, like ``depth``.

    Returns:
        The model.

    Raises:
        ConfigError: The model or an option is unknown, too large, or does not go with the data.

    >>> build("mlp", input_shape=(8, 8), outputs=10, depth=2)(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    """
    input_shape = tuple(input_shape)
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    with drawn_from(seed) if isinstance(seed, SecretStream) else _seeded(seed):
        if isinstance(name, OwnCode):
            data = {"input_shape": input_shape, "outputs": outputs, "vocabulary": vocabulary}
            model = call_factory(name, data=data, options=options)
            refuse_shared_memory(model)
            refuse_hooks(model)
            said = check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
            model = plain(model, said)
        else:
            parameters_of(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
            if _is_light(model, input_shape):
                check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return model


def parameters_of(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: Mapping[str, OptionValue],
) -> int:
    """How many parameters a model of the catalogue has; one that is too large is refused.

    Nothing is allocated for that: names and sizes may come from a file. A model whose outputs would take much memory
    is tried on the data's shape as well, without any.
    """
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    try:
        with torch.device("meta"), _Undrawn():
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise ConfigError(f"Model {name!r} cannot be built with {dict(options)}: {error}") from error
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"Model {name!r} would have {size:,} parameters with {dict(options)}; {MOST_PARAMETERS:,} are the most."
        )
    if not _is_light(model, input_shape):
        check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return size


def _is_light(model: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether running a model of the catalogue takes little memory.

    A layer has as many channels as its parameters have rows, and no more positions than a sample has numbers. Running
    it without memory is for what may not fit: that loads torch's compiler, which takes a second.
    """
    return sum(len(parameter) for parameter in model.parameters()) * math.prod(input_shape) <= LIGHT


class _Undrawn(TorchFunctionMode):
    """Leaves normal numbers undrawn: without memory there are none, and drawing them loads torch's compiler too."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.normal_:
            return args[0]
        return given["tensor"] if func is nn.init.normal_ else func(*args, **given)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed every GPU as well and fork_rng would not undo it.
        torch.default_generator.manual_seed(seed)
        yield


def _named(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """A model of the catalogue, after its inputs and options were checked."""
    refuse_code(name)
    if name not in CATALOGUE:
        hint = "Your own model: package.module:factory or path/to/file.py:factory."
        raise unknown_name("model", name, CATALOGUE, hint=hint)
    entry = CATALOGUE[name]
    check_input(entry, input_shape=input_shape, vocabulary=vocabulary)
    check_options(entry.info, options)
    tokens = {} if vocabulary is None else {"vocabulary": vocabulary}
    return entry.builder(input_shape=input_shape, outputs=outputs, **tokens, **options)
