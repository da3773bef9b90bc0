"""Runs in TensorBoard and MLflow: every round's figures, the settings, the ledger, and the files a run leaves."""

from __future__ import annotations

from fedveil.tracking.trackers import Tracked, trackers

__all__ = ["Tracked", "trackers"]
