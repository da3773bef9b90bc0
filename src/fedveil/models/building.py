"""``build``: from a name to a checked network with reproducible initial parameters."""

from __future__ import annotations

import torch
from torch import nn

from fedveil.errors import unknown_name
from fedveil.models.catalogue import CATALOGUE, OptionValue
from fedveil.models.checks import check_input, check_options, check_output, check_sizes
from fedveil.models.custom import Factory, call_factory, refuse_code


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    seed: int = 0,
    vocabulary: int | None = None,
    **options: OptionValue,
) -> nn.Module:
    """Build a model for samples of ``input_shape`` (without the batch) and ``outputs`` numbers each.

    ``name`` is one of :func:`names`, or code of your own, ``Factory("package.module:factory")`` or
    ``Factory("path/to/file.py:factory")``; plain text never names code, since it may come from a file.
    A factory gets those of input_shape, outputs, vocabulary that its signature has, and the options.
    Equal seeds give equal parameters; the global random state is left as it was. Before it is
    returned the model is run on a random batch of two, and a wrong output shape is refused.

    >>> build("mlp", input_shape=(8, 8), outputs=10, depth=2)(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    """
    input_shape = tuple(input_shape)
    check_sizes(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed every GPU as well and fork_rng would not undo it.
        torch.default_generator.manual_seed(seed)
        if isinstance(name, Factory):
            data = {"input_shape": input_shape, "outputs": outputs, "vocabulary": vocabulary}
            model = call_factory(name, data=data, options=options)
        else:
            model = _named(name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, options=options)
        check_output(model, name=name, input_shape=input_shape, outputs=outputs, vocabulary=vocabulary)
    return model


def _named(
    name: str,
    *,
    input_shape: tuple[int, ...],
    outputs: int,
    vocabulary: int | None,
    options: dict[str, OptionValue],
) -> nn.Module:
    """A model of the catalogue, after its inputs and options were checked."""
    refuse_code(name)
    if name not in CATALOGUE:
        hint = "Your own model: package.module:factory or path/to/file.py:factory."
        raise unknown_name("model", name, CATALOGUE, hint=hint)
    entry = CATALOGUE[name]
    check_input(entry, input_shape=input_shape, vocabulary=vocabulary)
    check_options(entry.info, options)
    if vocabulary is None:
        return entry.builder(input_shape=input_shape, outputs=outputs, **options)
    return entry.builder(input_shape=input_shape, outputs=outputs, vocabulary=vocabulary, **options)
