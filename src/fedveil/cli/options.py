"""Flags: those of every setting, built from the declaration in `RunConfig`; of trackers; and of the user's own code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from fedveil.config import PANELS, RunConfig
from fedveil.errors import ConfigError
from fedveil.own_code import SETTINGS, refuse_code, typed
from fedveil.plain import parse_model_options

TensorBoard = Annotated[
    str | None,
    typer.Option(
        "--tensorboard",
        metavar="[DIR]",
        help="Also write TensorBoard's event files. (alone: OUT/tensorboard; extra tensorboard)",
        rich_help_panel="Tracking",
    ),
]
Mlflow = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="[URI]",
        help="Also log to MLflow; rounds arrive with the checkpoint that holds them. (alone: MLFLOW_TRACKING_URI, or "
        "./mlflow.db; extra mlflow)",
        rich_help_panel="Tracking",
    ),
]
Wandb = Annotated[
    str | None,
    typer.Option(
        "--wandb",
        metavar="[DIR]",
        help="Also log to Weights & Biases, offline unless WANDB_MODE says otherwise; rounds arrive with the "
        "checkpoint that holds them. (alone: WANDB_DIR, or this folder; extra wandb)",
        rich_help_panel="Tracking",
    ),
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with these settings; flags win.")]
SUGGESTS_COMMANDS = not hasattr(sys.modules[typer.BadParameter.__module__], "NoSuchCommand")
"""Whether typer suggests the nearest command: with this exception click does it already, and it would be said twice."""
_ALONE = ("--tensorboard", "--mlflow", "--wandb")


def flowing(text: str | None) -> str:
    """A docstring whose paragraphs are lines: Typer breaks those of the source, and the terminal's again."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(one if one.startswith(" ") else " ".join(one.split()) for one in paragraphs)


class Command(TyperCommand):
    """A command whose tracking flags may stand alone: they then have an empty value, which is the usual place."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Give a flag that stands alone its empty value."""
        following: list[str | None] = [*args[1:], None]
        given = [
            f"{word}=" if word in _ALONE and (after is None or after.startswith("-")) else word
            for word, after in zip(args, following, strict=False)
        ]
        try:
            parsed: list[Any] = super().parse_args(ctx, given)
        except Exception as reason:
            unknown = type(reason).__name__ == "NoSuchOption"  # a class that Typer raises and does not offer
            if unknown and any(parameter.name == "option" for parameter in self.params) and _own_scheme_in(args):
                vars(reason).update(message=_as_set(vars(reason)["option_name"], args), possibilities=None)
            raise
        return parsed


def _own_scheme_in(args: Sequence[str]) -> bool:
    joined = " ".join(args).replace("--scheme=", "--scheme ").split(" ")
    return any(flag == "--scheme" and ":" in value for flag, value in pairwise(joined))


def _as_set(flag: str, args: Sequence[str]) -> str:
    """How an option of the user's own scheme is given, which has no flag."""
    values = [word.partition("=")[2] for word in args if word.startswith(f"{flag}=")]
    values += [value for word, value in pairwise(args) if word == flag and not value.startswith("-")]
    option = flag.lstrip("-").replace("-", "_")
    return f"No such option '{flag}'. If it is an option of your own scheme, write --set {option}={(*values, '…')[0]}."


_TABLES = {"model_options": ("model_option", "--model-option", "-o"), "options": ("option", "--set")}


def _flags() -> dict[str, inspect.Parameter]:
    """A command's parameter for every setting, by name."""
    hints = get_type_hints(RunConfig)
    settings = sorted(
        dataclasses.fields(RunConfig), key=lambda setting: PANELS.index(setting.metadata.get("panel", ""))
    )
    flags = {}
    for setting in settings:
        kinds = {kind for kind in (get_args(hints[setting.name]) or (hints[setting.name],)) if kind is not type(None)}
        name, names = setting.name, [f"--{setting.name.replace('_', '-')}"]
        kind: Any = str if len(kinds) > 1 else kinds.pop()
        if setting.name in _TABLES:
            name, *names = _TABLES[setting.name]
        elif kind is bool:
            names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
        told = typer.Option(
            *names, help=setting.metadata["help"], rich_help_panel=setting.metadata.get("panel") or None
        )
        table = setting.name in _TABLES
        annotation: Any = Annotated[list[str], told] if table else Annotated[kind | None, told]
        default: Any = [] if table else None
        flags[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return flags


FLAGS = _flags()
_OF_SCHEMES = RunConfig().scheme_options


def takes_flags(
    *, without: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every setting, in the place of its parameter `flags`; those it has itself are left out.

    Args:
        without: Settings it does not take.
        only: The settings it takes. (None: all.)

    Returns:
        A decorator. The command receives the flags as `flags`, a dict by name.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = {parameter.name for parameter in parameters}
        wanted = FLAGS if only is None else only
        shared = [FLAGS[name] for name in wanted if name not in own and name not in without]

        @functools.wraps(command)
        def taking(**given: Any) -> None:
            flags = {parameter.name: given.pop(parameter.name) for parameter in shared}
            command(**given, flags=flags)

        placed = [part for parameter in parameters for part in (shared if parameter.name == "flags" else [parameter])]
        placed = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in placed]
        taking.__signature__ = inspect.Signature(placed)  # type: ignore[attr-defined]
        taking.__annotations__ = {parameter.name: parameter.annotation for parameter in placed}
        return taking

    return give


def read_settings(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a command: those of its TOML file, and its flags over them.

    Code that the file names is refused here: on its way through Flower, where an app may name code, nobody could tell
    any more who named it.
    """
    stored = RunConfig.read(config) if config is not None else {}
    RunConfig.from_mapping(stored, where=str(config))  # so that a mistake is named with the file it stands in
    given = settings_given(flags, stored)
    for name in SETTINGS:
        if name not in given:
            refuse_code(stored.get(name), where=str(config), what=name)
    return {**stored, **given}


def settings_given(flags: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a command's flags, as a configuration takes them; `stored` are those of its TOML file."""
    settings = {name: value for name, value in flags.items() if value is not None}
    for name in SETTINGS:
        if name in settings:
            settings[name] = typed(settings[name])  # on a command, code may be named; in a file it may not
    if "cohort" in settings:
        settings["cohort"] = cohort_of(settings["cohort"])
    if "lr" in settings and settings["lr"] != "auto":
        settings["lr"] = _rate_of(settings["lr"])
    if pairs := settings.pop("model_option", []):
        settings["model_options"] = {**_table(stored, "model_options"), **parse_model_options(pairs)}
    for name, value in parse_model_options(settings.pop("option", []), example="keep=0.2").items():
        known = name.replace("-", "_")
        if known in _OF_SCHEMES:
            settings[known] = value
        else:
            settings["options"] = {**settings.get("options", _table(stored, "options")), name: value}
    return settings


def _table(stored: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = stored.get(name, {})
    return table if isinstance(table, dict) else {}


def cohort_of(text: str) -> float | int:
    """A cohort as it is typed: 0.1 is a fraction, 5 a count."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"cohort is a fraction like 0.1 or a count like 5 (got {text!r}).") from None


def _rate_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"lr is a number like 0.05, or auto (got {text!r}).") from None


def located_here(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with a data set's file named so that processes in other folders of this machine find it."""
    given = settings.get("dataset")
    if given is None or not Path(given).exists():
        return settings
    from fedveil.data.sources import EMBEDDED

    return settings if given in EMBEDDED else {**settings, "dataset": str(Path(given).resolve())}


def _own(what: str, builds: str) -> Any:
    return typer.Option(
        f"--{what}",
        help=f"Your own code that {builds}, file.py:factory or package.module:factory: code that files name is not "
        "run.",
    )


OwnModel = Annotated[str | None, _own("model", "builds the model")]
OwnScheme = Annotated[str | None, _own("scheme", "builds the scheme")]
OwnDataset = Annotated[str | None, _own("dataset", "loads the data")]


def own_code(**given: str | None) -> dict[str, str]:
    """Settings by name as they are typed, those that were: on a command, code may be named."""
    return {name: typed(text) for name, text in given.items() if text is not None}
