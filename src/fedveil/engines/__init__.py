"""Engines carry messages between roles; they know no mathematics."""

from fedveil.engines.local import ClientPool, LocalEngine

__all__ = ["ClientPool", "LocalEngine"]
