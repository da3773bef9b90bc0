"""An app folder: what `fedveil flower init` writes into it, and a run's settings on their way through Flower.

Flower flattens the tables of an app's configuration (`model-options.depth`) and refuses to override a key that the app
does not have. What a command line adds therefore travels as JSON in the one key `settings`, which every app has.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.plain import toml_of

Value = bool | int | float | str

FURTHER = "settings"
_MODEL_OPTIONS = "model_options"
_WHERE = "the app's configuration"


@dataclass(frozen=True)
class Extras:
    """What a run on Flower is told besides its settings."""

    out: str = ""
    """The run folder on the SuperLink's machine; empty: runs/flower-<run id>, from where the SuperLink runs."""
    resume: bool = False
    """Continue the run in `out` from its newest checkpoint."""
    deadline: float = 600.0
    """Seconds that a phase of a round may take before a client that has not answered counts as missing."""
    data: str = ""
    """The module of the app folder that describes the data; empty: the data set that the settings name."""
    keep_days: float = 365.0
    """Days after which the checkpoints of finished runs beside this one are deleted."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise ConfigError(f"deadline must be a positive number of seconds (got {self.deadline}).")
        if not (math.isfinite(self.keep_days) and self.keep_days > 0):
            raise ConfigError(f"keep_days must be a positive number of days (got {self.keep_days}).")
        if self.resume and not self.out:
            raise ConfigError("resume needs the folder of the run to continue: give out as well.")
        if self.data and not all(part.isidentifier() for part in self.data.split(".")):
            raise ConfigError(f"data names a Python module of the app folder, like fedveil_data (got {self.data!r}).")


def settings_of(run_config: Mapping[str, Value]) -> tuple[RunConfig, Extras]:
    """The settings and extras of a run from Flower's flattened run configuration; every mistake is named."""
    merged = merged_settings(run_config)
    extras = {name: merged.pop(name) for name in _EXTRAS if name in merged}
    config = RunConfig.from_mapping(merged, where=_WHERE)
    if not config.clients:
        raise ConfigError("On Flower, data stay with the clients: say how many there are (--clients).")
    return config, _extras_of(extras)


def merged_settings(run_config: Mapping[str, Value]) -> dict[str, Any]:
    """Settings and extras by their names, not yet checked: the tables are put together, and `settings` wins."""
    merged: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in run_config.items():
        table, dot, option = key.partition(".")
        name = table.replace("-", "_")
        if dot and name == _MODEL_OPTIONS:
            options[option] = value
        elif name in merged:
            raise ConfigError(f"{_WHERE}: {name} is given twice, as {name} and as {name.replace('_', '-')}.")
        elif key != FURTHER:
            merged[f"{name}{dot}{option}"] = value
    further = _further(run_config.get(FURTHER, ""))
    options |= further.pop(_MODEL_OPTIONS, {})
    merged |= further
    return {**merged, _MODEL_OPTIONS: options} if options else merged


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """A table of tables as Flower hands it to an app."""
    flat: dict[str, Value] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def override(run_config: Mapping[str, Value], changes: Mapping[str, Any]) -> str:
    """A TOML document for `flwr run --run-config` that makes `changes`, on top of what the app says by itself."""
    further = _further(run_config.get(FURTHER, ""))
    options = {**further.get(_MODEL_OPTIONS, {}), **changes.get(_MODEL_OPTIONS, {})}
    merged = {**further, **changes, **({_MODEL_OPTIONS: options} if options else {})}
    text = json.dumps(merged, ensure_ascii=False)
    return f"{FURTHER} = {json.dumps(text, ensure_ascii=False)}\n"


def _further(text: Value) -> dict[str, Any]:
    if text == "":
        return {}
    try:
        given = json.loads(text) if isinstance(text, str) else None
    except ValueError as reason:
        raise ConfigError(f"{_WHERE}: settings is not valid JSON: {reason}.") from reason
    if not isinstance(given, dict):
        raise ConfigError(
            f"{_WHERE}: settings must be a JSON object in a string, like '{{\"lr\": 0.5}}' (got {text!r})."
        )
    named: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in named:
            raise ConfigError(f"{_WHERE}: settings gives {name} twice, as {name} and as {name.replace('_', '-')}.")
        named[name] = value
    if not isinstance(named.get(_MODEL_OPTIONS, {}), dict):
        raise ConfigError(f"{_WHERE}: model_options must be a table (got {named[_MODEL_OPTIONS]!r}).")
    return named


_EXTRAS = {field.name: type(field.default) for field in fields(Extras)}


def _extras_of(given: Mapping[str, Any]) -> Extras:
    checked = asdict(Extras())
    for name, value in given.items():
        kind = _EXTRAS[name]
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) if kind is float else type(value) is kind
        if not fits:
            raise ConfigError(f"{_WHERE}: {name} must be {kind.__name__} (got {value!r}).")
        checked[name] = float(value) if kind is float else value
    return Extras(**checked)


PYPROJECT = """\
[project]
name = "<<name>>"
version = "1.0.0"
description = "Federated training with FedVeil."
license = "LicenseRef-Proprietary"
dependencies = []  # FedVeil is installed where the nodes run; Flower installs nothing

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "fedveil.flower:server_app"
clientapp = "fedveil.flower:client_app"

# Every setting of `fedveil run`, with hyphens. To change one for a single run: fedveil flower run . --lr 0.5
[tool.flwr.app.config]
<<settings>>

# Run folder on the SuperLink's machine; "": runs/flower-<run id>, from where the SuperLink runs.
out = ""
# Continue the run in `out`.
resume = false
# Seconds that a phase of a round may take before a client that has not answered counts as missing.
deadline = <<deadline>>
# Module of this folder that describes your own data; "": the data set named by `dataset`.
data = <<data>>
# When a run begins: delete checkpoints of finished runs beside its folder that ended more days ago. All else is kept.
keep-days = <<keep_days>>
# JSON object of further settings, which win: how a command line hands over what is not written above.
<<further>> = ""
<<options>>"""

GITIGNORE = """\
__pycache__/
*.fab
*.key
runs/
.fedveil/
"""

README = """\
# <<name>>

A Flower app that trains with FedVeil (scheme <<scheme>>, <<clients>> clients). It holds settings, in `pyproject.toml`;
the code is FedVeil's, installed on every machine that takes part.

## On one machine

    fedveil flower up --nodes <<clients>>      # in one terminal, in the folder above this one
    fedveil flower run <<folder>>             # in another

## On several machines

1. On the SuperLink's machine, once: `fedveil flower certificates certificates --host NAME`.
2. On every client's machine, once: `fedveil flower client HOME --number N`, and `fedveil flower node-key node.key`.
   Hand `node.key.pub` to whoever runs the SuperLink, who registers it.
3. Start Flower as `fedveil flower up --tls` prints it, with your machines' names; `fedveil flower init --deploy` writes
   service units and compose files for that.
4. `fedveil flower run <<folder>> --superlink NAME`, where NAME is a connection of your Flower configuration.

A client's home (`HOME/client.toml`) says which data it trains on, whose keys it trusts, and which settings it accepts.
Nothing that is shipped with this app can change that.

## Your own data

`fedveil flower init --own-data` writes `fedveil_data.py`: FACTS and test() are the server's, client() is loaded by each
client from its own home.
"""

DATA = '''\
"""The data of this federation. As it stands, it deals scikit-learn's digits: replace the three parts with your own.

FACTS and test() are used where the server runs. client() is used by a client's worker, which loads this file from its
own home (`data = "fedveil_data.py"` in client.toml) and never from what is shipped with a run: copy it there.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

CLIENTS = <<clients>>

# What everybody knows about the data: the shape of one sample, the number of classes (or of values to predict, for a
# regression), and the task.
FACTS = dict(input_shape=(64,), outputs=10, task="classification")


def test() -> tuple[torch.Tensor, torch.Tensor] | None:
    """The server's samples and labels to measure accuracy on, or None if it has none."""
    x, y = _digits()
    return x[::5], y[::5]


def client(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples and labels of the client with this number. Only its own machine calls this."""
    x, y = _digits()
    mine = [row for row in range(len(x)) if row % 5 and row % CLIENTS == number]
    return x[mine], y[mine]


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
'''


DATA_MODULE = "fedveil_data"
_ALWAYS_SHOWN = ("scheme", "dataset", "model", "clients", "rounds", "lr", "batch_size", "checkpoint_every")
_ON_ONE_MACHINE = ("identities", "policy", "simulate_dropout", "vectorise", "workers")
_LONGEST_NAME = 32


def create_app(folder: str | Path, config: RunConfig, *, own_data: bool = False, deadline: float = 600.0) -> Path:
    """Write an app folder for these settings; returns its pyproject.toml. A folder that holds anything is refused.

    `own_data` adds a module that describes data of one's own, as every client's worker loads it.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something already: give a new or empty folder.")
    for name in _ON_ONE_MACHINE:
        if getattr(config, name) not in (None, 0.0, False):
            raise ConfigError(
                f"{name} belongs to a run on one machine. On Flower each client has its own key and policy in its "
                "home (`fedveil flower client`), and clients that vanish do so by themselves."
            )
    extras = Extras(deadline=deadline, data=DATA_MODULE if own_data else "")
    shown = {
        field.name: getattr(config, field.name)
        for field in fields(RunConfig)
        if (field.name in _ALWAYS_SHOWN and getattr(config, field.name) is not None)
        or (getattr(config, field.name) != _default(field) and field.name != "model_options")
    }
    if config.lr is None:
        from fedveil import schemes  # only here: the rest of this module needs no torch
        from fedveil.runs.recipe import usual_rate

        loss = config.loss or schemes.find(config.scheme).default_loss
        shown["lr"] = usual_rate(config, "square" if loss == "auto" and config.task == "regression" else loss)
    if own_data:
        shown.pop("dataset")
    name = _project_name(folder)
    filled = {
        "name": name,
        "settings": "\n".join(f"{key.replace('_', '-')} = {toml_of(value)}" for key, value in shown.items()),
        "deadline": toml_of(extras.deadline),
        "data": toml_of(extras.data),
        "keep_days": toml_of(extras.keep_days),
        "further": FURTHER,
        "options": _table(config.model_options),
    }
    folder.mkdir(parents=True, exist_ok=True)
    project = folder / "pyproject.toml"
    project.write_text(_fill(PYPROJECT, filled), encoding="utf-8")
    (folder / ".gitignore").write_text(GITIGNORE, encoding="utf-8")
    place = {"name": name, "folder": folder.name, "clients": str(config.clients), "scheme": config.scheme}
    (folder / "README.md").write_text(_fill(README, place), encoding="utf-8")
    if own_data:
        (folder / f"{DATA_MODULE}.py").write_text(_fill(DATA, place), encoding="utf-8")
    return project


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be submitted."""

    config: RunConfig
    extras: Extras
    override: str
    """A TOML document for `flwr run --run-config`; empty where the app is run as it is."""


def prepared(folder: str | Path, changes: Mapping[str, Any]) -> Prepared:
    """The run that an app folder and these changes (settings and extras) describe, checked before anybody sees it."""
    project = Path(folder) / "pyproject.toml"
    try:
        app = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        stored = flattened(app["config"])
        parts = dict(app.get("components", {}))
    except OSError as reason:
        raise ConfigError(
            f"{folder} is no app folder: {project} cannot be read ({reason.strerror}). Make one with "
            "`fedveil flower init`."
        ) from reason
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        raise ConfigError(
            f"{project} is no Flower app's: it has no valid [tool.flwr.app.config] ({reason}). Make a folder with "
            "`fedveil flower init`."
        ) from reason
    if any(str(part).startswith("fedveil.engines.") for part in parts.values()):
        raise ConfigError(
            f"{project} was made by an earlier version, and names a module that has moved. Make the folder anew with "
            '`fedveil flower init`, or write serverapp = "fedveil.flower:server_app" and clientapp = '
            '"fedveil.flower:client_app" there.'
        )
    if changes and FURTHER not in stored:
        raise ConfigError(
            f'{project} has no key {FURTHER} = "" in [tool.flwr.app.config], which carries changes: add it.'
        )
    merged = override(stored, changes) if changes else ""
    settings, extras = settings_of({**stored, **(tomllib.loads(merged) if merged else {})})
    return Prepared(settings, extras, merged)


def _default(field: Any) -> object:
    return field.default if field.default is not MISSING else field.default_factory()


def _project_name(folder: Path) -> str:
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"Flower wants an app folder named with letters, digits and hyphens, a letter first, at most "
            f"{_LONGEST_NAME} of them (got {name!r}). Give another name."
        )
    return name


def _fill(template: str, values: dict[str, str]) -> str:
    # Not str.format: the templates are TOML and Python, which use braces themselves.
    return re.sub(r"<<(\w+)>>", lambda mark: values[mark[1]], template)


def _table(options: dict[str, Any]) -> str:
    if not options:
        return ""
    lines = [f"{json.dumps(key)} = {toml_of(value)}" for key, value in options.items()]
    return "\n".join(["", "[tool.flwr.app.config.model-options]", *lines, ""])
