"""The way up: what protects a contribution, and what sums contributions."""

from fedveil.uplink.accumulate import ExactSum

__all__ = ["ExactSum"]
