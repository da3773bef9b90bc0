"""Write src/fedveil/settings.py from the declaration of settings: python -m tools.typed_settings."""

from __future__ import annotations

import json
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig
from fedveil.runs.from_python import GIVEN_OTHERWISE

MODULE = Path(__file__).parents[1] / "src" / "fedveil" / "settings.py"

_HEAD = '''"""Every setting of `fedveil.train` by name and type, so that editors complete and check them.

Written from `RunConfig` by `python -m tools.typed_settings`: change that, not this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

Objective = Callable[[Tensor, Tensor], Tensor]


class Settings(TypedDict, total=False):
    """The settings of a run; those that are left out have the defaults that are named."""

'''
# What Python takes beside the text of a command line.
_WIDER = {
    "loss": "{} | nn.Module | Objective",
    "lr_schedule": "{} | Callable[[int, int], float]",
    "augment": "{} | Callable[[Tensor], Tensor]",
    "class_weights": "{} | Sequence[float] | Tensor",
    "device": "{} | torch.device",
    "dtype": "{} | torch.dtype",
    "options": "dict[str, int | float | str | bool]",
}
_ARGUMENTS = ("scheme", "model", "clients")


def module() -> str:
    """The whole module."""
    kept = [setting for setting in fields(RunConfig) if setting.name not in (*GIVEN_OTHERWISE, *_ARGUMENTS)]
    return _HEAD + "".join(_declared(setting) for setting in kept)


def _declared(setting: Field[Any]) -> str:
    kind, choices = str(setting.type), setting.metadata.get("choices")
    if choices:
        kind = kind.replace("str", f"Literal[{', '.join(json.dumps(choice) for choice in choices)}]")
    if (listed := setting.metadata.get("listed")) is not None:
        kind = kind.replace("str", f"str | Sequence[{listed.__name__}]")
    if setting.name in _WIDER:
        none = " | None" if kind.endswith(" | None") else ""
        kind = _WIDER[setting.name].format(kind.removesuffix(" | None")) + none
    told = textwrap.fill(f'"""{setting.metadata["help"]}"""', 116, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(f"{setting.name}: {kind}\n{told}\n", "    ")


if __name__ == "__main__":
    MODULE.write_text(module(), encoding="utf-8")
