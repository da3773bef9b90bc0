"""The settings flags of `fedveil run`, for other commands that take the same settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from fedveil.cli import options as flag
from fedveil.cli.run import NOT_SETTINGS, run

_OF_RUN_ALONE = (NOT_SETTINGS | {"context"}) - {"config"}


def takes_flags(*, without: Collection[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `fedveil run`, after its own, but for those that it has itself and those it goes
    `without`; it receives them as `flags`, a dict."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in _parameters(command) if one.name != "flags"]
        had = {one.name for one in own} | {"context", *without}
        shared = [one for one in _parameters(run) if one.name not in had]

        @functools.wraps(command)
        def taking(**given: Any) -> None:
            flags = {one.name: given.pop(one.name) for one in shared}
            command(**given, flags=flags)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
        taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taking.__annotations__ = {one.name: one.annotation for one in parameters}
        return taking

    return give


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every settings flag of `fedveil run` and its --config; it receives them as `settings`, a dict."""

    @functools.wraps(command)
    def taking(*, flags: dict[str, Any], **given: Any) -> None:
        command(**given, settings=_settings(flags.pop("config"), flags))

    own = [one for one in _parameters(command) if one.name != "settings"]
    taking.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return takes_flags(without=_OF_RUN_ALONE)(taking)


def _parameters(command: Callable[..., None]) -> Iterable[inspect.Parameter]:
    return inspect.signature(command, eval_str=True).parameters.values()


def _settings(config: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    from fedveil.config import RunConfig

    stored = RunConfig.read(config) if config is not None else {}
    RunConfig.from_mapping(stored, where=str(config))  # so that a mistake is named with the file it stands in
    return {**stored, **flag.settings_given(flags, stored)}


def located_here(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with a data set's file named so that processes in other folders of this machine find it."""
    given = settings.get("dataset")
    if given is None or not Path(given).exists():
        return settings
    from fedveil.data.sources import EMBEDDED

    return settings if given in EMBEDDED else {**settings, "dataset": str(Path(given).resolve())}
