"""FedVeil: bidirectional privacy in federated learning.

Data privacy proven, model secrecy measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedveil.version import __version__

if TYPE_CHECKING:
    from fedveil.api import Trained, train
    from fedveil.errors import FedVeilError

__all__ = ["FedVeilError", "Trained", "__version__", "train"]


def __getattr__(name: str) -> Any:
    # Imported on first use: `fedveil.models` and its neighbours must load where only torch is installed.
    if name in {"train", "Trained"}:
        from fedveil import api

        return getattr(api, name)
    if name == "FedVeilError":
        from fedveil.errors import FedVeilError

        return FedVeilError
    raise AttributeError(f"module 'fedveil' has no attribute {name!r}")
