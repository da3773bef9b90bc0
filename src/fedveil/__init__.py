"""FedVeil: bidirectional privacy in federated learning.

Data privacy proven, model secrecy measured. What happens is told to the logger `fedveil`: runs and checkpoints at INFO,
rounds at DEBUG; it is quiet unless a program gives it a handler.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from fedveil.version import __version__

if TYPE_CHECKING:
    from fedveil import data, errors, models, schemes
    from fedveil.api import Trained, load, train
    from fedveil.errors import FedVeilError, StopTraining
    from fedveil.runs.callbacks import Callback

__all__ = [
    "Callback",
    "FedVeilError",
    "StopTraining",
    "Trained",
    "__version__",
    "data",
    "errors",
    "load",
    "models",
    "schemes",
    "train",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
_FROM = {
    "train": "fedveil.api",
    "load": "fedveil.api",
    "Trained": "fedveil.api",
    "FedVeilError": "fedveil.errors",
    "StopTraining": "fedveil.errors",
    "Callback": "fedveil.runs.callbacks",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `fedveil.models` and its neighbours must load where only torch is installed.
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    if name in __all__:
        return importlib.import_module(f"fedveil.{name}")
    raise AttributeError(f"module 'fedveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
