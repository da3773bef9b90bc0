"""The user's own code by name: ``path/to/file.py:name`` or ``package.module:name`` for a scheme, a model or data.

Such a name makes FedVeil import a module and call what is in it, so only the person at the command line, or the
program that calls us, may give one. Their names are of the type :class:`OwnCode`; what is read from a file, a folder or
a message is plain text, and plain text is never imported. The mark cannot be stored: writing it down loses it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import operator
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from fedveil.errors import ConfigError

SETTINGS = ("scheme", "model", "dataset")
"""The settings that may name code."""


class OwnCode(str):
    """The name of the user's own code, given by whoever runs it: by hand or in a program, never by a file.

    >>> OwnCode("mypackage.nets:make")
    'mypackage.nets:make'
    """

    __slots__ = ()

    def located(self) -> OwnCode:
        """The same, with a file's path that holds from any folder."""
        file, _, attribute = self.rpartition(":")
        return OwnCode(f"{Path(file).resolve()}:{attribute}") if file.endswith(".py") and Path(file).exists() else self


def names_code(text: str) -> bool:
    """Whether a name is written as code is; a file may have a colon in its name."""
    try:
        return ":" in text and not Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # no name that a file could have
        return True


def typed(name: str) -> str:
    """A setting as somebody typed it on the command that runs: a name, a path, or their own code."""
    return OwnCode(name).located() if names_code(name) else name


def refuse_code(name: str | None, *, where: str = "", what: str = "model", flag: str = "") -> None:
    """Refuse a name of code that did not come from whoever runs it; `flag` is where it could, if not `what`."""
    if name is not None and not isinstance(name, OwnCode) and names_code(name):
        raise ConfigError(
            f"{where or 'A file'} names code as its {what}, {name!r}. What a file names is never imported: nothing was "
            f"run. If you know that code and want it to run, say so on this command: --{flag or what} {name} (in "
            f"Python: fedveil.own_code.OwnCode({name!r}))."
        )


def vouched(
    stored: str | None, given: str | None, *, where: str, say: Callable[[str], None], what: str = "model"
) -> str | None:
    """What `where` names; or what the caller has `given` in its place. Text that names code is refused."""
    if given is None:
        refuse_code(stored, where=where, what=what)
        return stored
    refuse_code(given, where="A settings file", what=what)
    used = given.located() if isinstance(given, OwnCode) else given
    code = isinstance(given, OwnCode) or (stored is not None and names_code(stored))
    if used != stored and (code or what == "model"):
        say(f"{where} names the {what} {stored!r}; {str(used)!r} is used instead, as you say.")
    return used


def vouched_settings(
    stored: Mapping[str, str], given: Mapping[str, str], *, where: str, say: Callable[[str], None]
) -> dict[str, str]:
    """Every setting that may name code, as `vouched` has it."""
    settings = {
        setting: vouched(stored.get(setting), given.get(setting), where=where, say=say, what=setting)
        for setting in SETTINGS
    }
    return {name: value for name, value in settings.items() if value is not None}


def load(reference: OwnCode, *, what: str) -> object:
    """What ``module:attribute`` names; `what` it is to be, for the errors."""
    place, _, attribute = reference.rpartition(":")
    kind = what.split()[-1]
    if not place or not attribute:
        raise ConfigError(f"{kind.capitalize()} {reference!r} is not of the form package.module:factory.")
    module = load_file(Path(place), what=what) if place.endswith(".py") else _import(place, what)
    try:
        member: object = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        where = module.__file__ or place
        raise ConfigError(
            f"{kind.capitalize()} {reference!r}: {where} was imported but has no {attribute!r}.{guess}"
        ) from error
    return member


def load_callable(reference: OwnCode, *, what: str) -> Callable[..., object]:
    """The function that ``module:attribute`` names."""
    function = load(reference, what=what)
    if not callable(function):
        kind, attribute = what.split()[-1].capitalize(), reference.rpartition(":")[2]
        raise ConfigError(f"{kind} {reference!r}: {attribute!r} is {function!r}, not a callable.")
    return function


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"Tried to import the module {name!r} for {what}: {type(error).__name__}: {error}. "
            f"Install it or put its folder on PYTHONPATH, or name the file: path/to/file.py:factory."
        ) from error


_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}


def load_file(place: Path, *, what: str) -> ModuleType:
    """The user's own code in a file, run once as long as it stays as it is; `what` is to be found there."""
    path = place.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"Tried to load {what} from {path}, but there is no such file.")
    stands = (path.stat().st_mtime_ns, path.stat().st_size)
    if path in _loaded and _loaded[path][0] == stands:
        return _loaded[path][1]
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
    _loaded[path] = stands, module
    return module
