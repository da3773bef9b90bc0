"""Models from the user's own code: ``package.module:factory`` or ``path/to/file.py:factory``.

Such a name makes FedVeil import a module and call what is in it, so only the person at the command line, or the
program that calls us, may give one. Their names are of the type :class:`Factory`; what is read from a file, a folder or
a message is plain text, and plain text is never imported. The mark cannot be stored: writing it down loses it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from torch import nn

from fedveil.errors import ConfigError, FedVeilError
from fedveil.models.catalogue import DATA_ARGUMENTS, OptionValue, unknown_option

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Factory(str):
    """The name of code that builds a model, given by whoever runs it: by hand or in a program, never by a file.

    >>> Factory("mypackage.nets:make")
    'mypackage.nets:make'
    """

    __slots__ = ()

    def located(self) -> Factory:
        """The same, with a file's path that holds from any folder."""
        file, _, attribute = self.rpartition(":")
        return Factory(f"{Path(file).resolve()}:{attribute}") if file.endswith(".py") and Path(file).exists() else self


def typed(name: str) -> str:
    """A model as somebody typed it on the command that runs: a name of the catalogue, or their own code."""
    return Factory(name).located() if ":" in name else name


def vouched(stored: str | None, given: str | None, *, where: str, say: Callable[[str], None]) -> str | None:
    """The model that `where` names; or what the caller has `given` in its place. Text that names code is refused."""
    if given is None:
        refuse_code(stored, where=where)
        return stored
    refuse_code(given, where="A settings file")
    model = given.located() if isinstance(given, Factory) else given
    if model != stored:
        say(f"{where} names the model {stored!r}; {str(model)!r} is used instead, as you say.")
    return model


def refuse_code(name: str | None, *, where: str = "") -> None:
    """Refuse a name of code that did not come from whoever runs it."""
    if name is not None and ":" in name and not isinstance(name, Factory):
        raise ConfigError(
            f"{where or 'A file'} names code as its model, {name!r}. What a file names is never imported: nothing was "
            f"run. If you know that code and want it to run, say so on this command: --model {name} (in Python: "
            f"fedveil.models.Factory({name!r}))."
        )


def call_factory(
    reference: Factory,
    *,
    data: Mapping[str, object],
    options: Mapping[str, OptionValue],
) -> nn.Module:
    """Import the factory and call it with what its signature accepts.

    ``data`` (input_shape, outputs, vocabulary) is passed as far as the factory asks for it; an
    option it does not take is an error, because a setting without effect would mislead.
    """
    factory = _find(reference)
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


def _find(reference: Factory) -> Callable[..., object]:
    """The callable that ``module:attribute`` names."""
    place, _, attribute = reference.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"Model {reference!r} is not of the form package.module:factory.")
    module = load_file(Path(place), what="a model") if place.endswith(".py") else _import(place)
    try:
        factory = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise ConfigError(
            f"Model {reference!r}: {module.__file__ or place} was imported but has no {attribute!r}."
        ) from error
    if not callable(factory):
        raise ConfigError(f"Model {reference!r}: {attribute!r} is {factory!r}, not a callable.")
    found: Callable[..., object] = factory
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"Tried to import the module {name!r} for a model: {type(error).__name__}: {error}. "
            f"Install it or put its folder on PYTHONPATH, or name the file: path/to/file.py:factory."
        ) from error


def load_file(place: Path, *, what: str) -> ModuleType:
    """The user's own code in a file; `what` is to be found there, for the errors."""
    path = place.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"Tried to load {what} from {path}, but there is no such file.")
    name = f"_fedveil_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"Tried to load {what} from {path}, but Python cannot import it.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"Tried to load {what} from {path}: {type(error).__name__}: {error}") from error
    return module


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
                raise unknown_option(reference, option, sorted(keywords - DATA_ARGUMENTS))
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
