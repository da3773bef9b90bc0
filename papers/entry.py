"""What an entry is: a table or a figure that can be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from papers.cells import Cell, Figures, Results
from papers.report import Report
from papers.stage import OnRound, Stage

Work = Callable[[Stage, Cell, int, OnRound], Figures]
Pictures = Callable[[Results, bool], Sequence[tuple[str, Tensor]]]
"""Rows of a contact sheet with their names, from the cells that are there; told whether the quick form is meant."""


def train(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """The usual work of a cell: train it."""
    return stage.train(cell, seed=seed, on_round=on_round)


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper. `cells` and `report` are told whether the quick form is meant.

    `takes` and `takes_quick` say how long the two forms take.
    """

    name: str
    paper: str
    what: str
    takes: str
    needs: str
    cells: Callable[[bool], tuple[Cell, ...]]
    report: Callable[[Results, bool], Report]
    work: Work = train
    random: bool = True
    has_quick: bool = True
    pictures: Pictures | None = None
    takes_quick: str = ""
