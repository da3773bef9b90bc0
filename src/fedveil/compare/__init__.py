"""Several schemes under the same data and seeds, side by side."""

from __future__ import annotations

from fedveil.compare.comparing import DEFAULT_SCHEMES, Comparison, compare
from fedveil.compare.results import Event, Standing

__all__ = ["DEFAULT_SCHEMES", "Comparison", "Event", "Standing", "compare"]
