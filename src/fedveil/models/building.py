"""``build``: from a name to a checked network with reproducible initial parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

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
from fedveil.models.custom import call_factory
from fedveil.own_code import OwnCode, refuse_code
from fedveil.secrets import SecretStream, drawn_from


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
            check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
        else:
            parameters_of(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
    return model


def parameters_of(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: Mapping[str, OptionValue],
) -> int:
    """How many parameters a model of the catalogue has; one that is too large or does not fit the data is refused.

    Nothing is allocated for that: names and sizes may come from a file.
    """
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    try:
        with torch.device("meta"):
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise ConfigError(f"Model {name!r} cannot be built with {dict(options)}: {error}") from error
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(
            f"Model {name!r} would have {size:,} parameters with {dict(options)}; {MOST_PARAMETERS:,} are the most."
        )
    check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return size


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
