"""Engines carry messages between roles; they know no mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.engine.local import ClientPool, LocalEngine, SharedWork

__all__ = ["ClientPool", "LocalEngine", "SharedWork"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a client's thin process on Flower must not pay for torch.
    if name in __all__:
        from fedveil.engine import local

        return getattr(local, name)
    raise AttributeError(f"module 'fedveil.engine' has no attribute {name!r}")
