"""Models from the user's own code: ``package.module:factory`` or ``path/to/file.py:factory``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import nn

from fedveil.errors import ConfigError, FedVeilError, unknown_option
from fedveil.models.catalogue import DATA_ARGUMENTS, OptionValue
from fedveil.own_code import OwnCode, load_callable

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_factory(
    reference: OwnCode,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """Import the factory and call it with what its signature accepts.

    ``data`` (input_shape, outputs, vocabulary) is passed as far as the factory asks for it; an
    option it does not take is an error, because a setting without effect would mislead.
    """
    return call(load_callable(reference, what="a model"), reference, data=data, options=options)


def call(
    factory: Callable[..., object],
    reference: str,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """Call a factory that the user gave, named `reference` in errors, with what its signature accepts."""
    arguments = _accepted(factory, reference, data=data, options=options)
    try:
        model = factory(**arguments)
    except FedVeilError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Model factory {reference!r}, called with {_shown(arguments)}, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Model factory {reference!r} returned {model!r}, not a torch.nn.Module.")
    return model


def _accepted(
    factory: Callable[..., object],
    reference: str,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> dict[str, object]:
    """The keyword arguments for the factory, checked against its signature."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Model factory {reference!r} has no readable signature: wrap it in a Python function."
        ) from error
    parameters = signature.parameters.values()
    keywords = {p.name for p in parameters if p.kind in _KEYWORDS}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in keywords:
                raise unknown_option(f"Model {reference!r}", option, sorted(keywords - DATA_ARGUMENTS))
        data = {key: value for key, value in data.items() if key in keywords}
    arguments: dict[str, object] = {**data, **options}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"Model factory {reference!r} takes {signature}, but gets {_shown(arguments)}: {error}. "
            f"Give defaults to its other arguments, or set them as options of the model."
        ) from error
    return arguments


def _shown(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
