"""The command line that starts a run again, from its settings."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any

from fedveil.config import RunConfig, parse_model_options

_ALWAYS = ("scheme", "dataset", "model", "clients", "rounds")
_IN_PYTHON = "python"


def command_for(settings: Mapping[str, Any], *, out: str) -> str:
    """`fedveil run …` with every setting that is not the default; "" for a run that was started from Python."""
    if settings.get("dataset") == _IN_PYTHON:
        return ""
    words = ["fedveil", "run"]
    for one in dataclasses.fields(RunConfig):
        if one.name == "model_options" or one.name not in settings:
            continue
        value = settings[one.name]
        if one.name in _ALWAYS or value != one.default:
            words += _flag(one.name, value)
    options = settings.get("model_options")
    if isinstance(options, Mapping):
        for key, value in options.items():
            words += ["-o", f"{key}={_option(value)}"]
    return shlex.join([*words, "--out", out])


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def _option(value: Any) -> str:
    """A model option as it is typed: bare where that reads back as the same."""
    if isinstance(value, bool):
        return str(value).lower()
    bare = str(value)
    return bare if parse_model_options([f"k={bare}"])["k"] == value else json.dumps(value, ensure_ascii=False)
