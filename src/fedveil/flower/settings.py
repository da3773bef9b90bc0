"""A run's settings on their way through Flower: hyphenated, flat, and with room for what is not written down.

Flower flattens the tables of an app's configuration (`model-options.depth`) and refuses to override a key that the app
does not have. What a command line adds therefore travels as JSON in the one key `settings`, which every app has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import ConfigError, ProtocolError

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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise ConfigError(f"deadline must be a positive number of seconds (got {self.deadline}).")
        if self.resume and not self.out:
            raise ConfigError("resume needs the folder of the run to continue: give out as well.")
        if self.data and not all(part.isidentifier() for part in self.data.split(".")):
            raise ConfigError(f"data names a Python module of the app folder, like fedveil_data (got {self.data!r}).")


def settings_of(run_config: Mapping[str, Value]) -> tuple[RunConfig, Extras]:
    """The settings and extras of a run from Flower's flattened run configuration; every mistake is named."""
    merged = merged_settings(run_config)
    extras = {name: merged.pop(name) for name in _EXTRAS if name in merged}
    return RunConfig.from_mapping(merged, where=_WHERE), _extras_of(extras)


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


_EXTRAS = {one.name: type(one.default) for one in fields(Extras)}


def _extras_of(given: Mapping[str, Any]) -> Extras:
    checked = asdict(Extras())
    for name, value in given.items():
        kind = _EXTRAS[name]
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) if kind is float else type(value) is kind
        if not fits:
            raise ConfigError(f"{_WHERE}: {name} must be {kind.__name__} (got {value!r}).")
        checked[name] = float(value) if kind is float else value
    return Extras(**checked)


# Where the server keeps things, what it does with them, and the limits that clients set themselves.
_SERVERS_OWN = frozenset(
    {
        *("policy", "roster", "identities", "simulate_dropout", "min_coverage", "device", "vectorise"),
        *("checkpoint_every", "evaluate_every", "record", "record_rounds", "record_clients"),
    }
)
_FACTS = ("input_shape", "outputs", "task", "vocabulary")


@dataclass(frozen=True)
class Setup:
    """One attempt at a run. `lineage` names the run through all its attempts, `start` the version of the model that
    its clients begin with where they hold it themselves."""

    lineage: str
    attempt: int
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    start: int = 0

    @staticmethod
    def of(config: RunConfig, facts: Mapping[str, Any], *, lineage: str, attempt: int, start: int = 0) -> Setup:
        """What clients are told of a server's configuration."""
        told = {name: value for name, value in dataclasses.asdict(config).items() if name not in _SERVERS_OWN}
        kept = {name: value for name, value in told.items() if value is not None}
        return Setup(lineage, attempt, kept, {name: facts.get(name) for name in _FACTS}, start)

    def to_text(self) -> str:
        """As it travels."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Setup:
        """A setup from what arrived; anything malformed is refused."""
        try:
            given = json.loads(text)
            setup = Setup(**given)
        except (ValueError, TypeError, RecursionError) as reason:
            raise ProtocolError("a run's setup is malformed") from reason
        name = setup.lineage
        well = (
            isinstance(name, str)
            and len(name) == 32
            and set(name) <= set("0123456789abcdef")
            and all(type(one) is int and 0 <= one < 1 << 31 for one in (setup.attempt, setup.start))
            and isinstance(setup.settings, dict)
            and isinstance(setup.facts, dict)
            and set(setup.facts) == set(_FACTS)
        )
        if not well:
            raise ProtocolError("a run's setup is malformed")
        return setup

    def digest(self) -> str:
        """SHA-256 over everything."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def name(self) -> str:
        """How the run's name begins. Every key, mask and signature is bound to that name, so that clients who were told
        different settings, or are in different attempts, share nothing.

        A simulation protects nothing, and is to give the numbers of the local engine: its name says nothing.
        """
        return f"{self.digest()}." if self.settings.get("secrets") == "os" else ""
