"""Figures as they are read from files and as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

DASH = "–"
_LONG = 1000.0
_KEEP = "\u00a0"  # a space at which no line ends


def number(figures: Mapping[str, Any], name: str) -> float | None:
    """A figure by name; None where it is missing, no number, or not finite."""
    value = figures.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def percent(value: float | None) -> str:
    """A share in percent."""
    return DASH if value is None else f"{100 * value:.1f} %"


def plain(value: float | None) -> str:
    """A number with four digits, or whole where it is long."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= _LONG else f"{value:.4g}"


def size(count: float | None) -> str:
    """Bytes in the unit a person reads."""
    if count is None:
        return DASH
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return DASH
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The mean, and the lowest and highest where there are several that differ; no figure loses its unit in a line."""
    if not values:
        return DASH
    mean, low, high = (shown(one).replace(" ", _KEEP) for one in (sum(values) / len(values), min(values), max(values)))
    if low == high:
        return mean
    lowest, _, unit = low.partition(_KEEP)
    return f"{mean} ({lowest if high.endswith(_KEEP + unit) else low}–{high})"
