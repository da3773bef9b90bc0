"""Several schemes under the same data and seeds, side by side."""

from __future__ import annotations

from fedveil.compare.comparing import DEFAULT_SCHEMES, Comparison, compare
from fedveil.compare.plan import CellEvent, CellProgress

__all__ = ["DEFAULT_SCHEMES", "CellEvent", "CellProgress", "Comparison", "compare"]
