"""Pictures as plain plotly data: what they have in common.

Colours are left to the page, which knows the theme: every trace says in `meta` which group it belongs to (`slot`) and
what it is (`role`).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.report.groups import Group
from fedveil.report.values import percent, plain

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "hexagon")
DASHES = (
    *("solid", "7px,4px", "2px,3px", "7px,3px,2px,3px", "12px,4px", "12px,3px,2px,3px", "4px,2px"),
    "12px,3px,2px,3px,2px,3px",
)
Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture: how it is called, drawn, read by a person and by a screen reader."""

    name: str
    title: str
    reading: str
    alternative: str
    drawing: dict[str, Any]


@dataclass(frozen=True)
class Worth:
    """What counts as good: a figure's name, whether more is better, and how it is shown."""

    name: str
    title: str
    higher: bool
    shown: Callable[[float | None], str]
    ticks: str


ACCURACY = Worth("test_accuracy", "Test accuracy", True, percent, ".0%")
ERROR = Worth("test_mse", "Test error (MSE)", False, plain, "")


def worth_of(groups: Sequence[Group]) -> Worth:
    """Accuracy where classes are told, the mean square error otherwise."""
    named = any(group.values(ERROR.name) for group in groups)
    return ERROR if named and not any(group.values(ACCURACY.name) for group in groups) else ACCURACY


def label(group: Group) -> str:
    """A group's name where plotly reads a little HTML: escaped."""
    return html.escape(group.label)
