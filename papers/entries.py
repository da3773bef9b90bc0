"""What an entry is: a table or figure of a paper, its texts, settings and printed numbers in the paper's TOML file.

A paper has one TOML file (settings, printed numbers, titles, notes, the few figures that stand for a table) and one
module, which says what TOML cannot: which cells follow from the settings, how they are judged.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil import schemes
from papers.cells import Cell, Figures, Results
from papers.report import EMPTY, Check, Figure, Report
from papers.stage import OnRound, Stage

Work = Callable[[Stage, Cell, int, OnRound], Figures]
Draw = Callable[[Results, bool, Path], None]
"""Makes a picture of the cells that are there; told whether the quick form is meant, and the file."""

_BOTH = " / "


def train(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """The usual work of a cell: train it."""
    return stage.train(cell, seed=seed, on_round=on_round)


def built(scheme: str) -> bool:
    """Whether a scheme is here: rows of one that is not show the paper's figures and say so."""
    return any(one.name == scheme for one in schemes.schemes())


@dataclass(frozen=True)
class Entry:
    """A table or figure of a paper. `cells` and `report` are told whether the quick form is meant.

    `takes` and `takes_quick` say how long the two forms take. An entry that is not `random` needs one seed only.
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
    draw: Draw | None = None
    takes_quick: str = ""
    also: tuple[str, ...] = ()
    """Other names that it goes by, where it covers more than one table or figure."""


@dataclass(frozen=True)
class Table:
    """The section of a paper's TOML file that belongs to one entry."""

    paper: str
    data: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def form(self, quick: bool) -> dict[str, Any]:
        """The settings of the full or of the quick form."""
        found: dict[str, Any] = self.data.get("quick" if quick else "full", {})
        return found

    def forms(self) -> dict[str, dict[str, Any]]:
        """Both."""
        return {name: self.data[name] for name in ("full", "quick") if name in self.data}

    def notes(self, **words: object) -> list[str]:
        """The notes that stand below the table."""
        return [one.format(**words) for one in self.data.get("notes", ())]

    def report(
        self, rows: Sequence[Sequence[str]], checks: Sequence[Check], *, quick: bool, notes: Sequence[str] = ()
    ) -> Report:
        """The table with its verdict."""
        title = self.data.get("title_quick", self["title"]) if quick else self["title"]
        report = Report(
            title, tuple(self["columns"]), tuple(map(tuple, rows)), tuple(checks), tuple(notes), quick=quick
        )
        picked = self.form(quick).get("figures", self.form(False).get("figures", ()))
        figures = (_figure(report, *one) for one in picked)
        return replace(report, figures=tuple(one for one in figures if one is not None))

    def entry(
        self, cells: Callable[[bool], tuple[Cell, ...]], report: Callable[[Results, bool], Report], **own: Any
    ) -> Entry:
        """The entry, with what only code can say of it."""
        texts = {name: self[name] for name in ("name", "what", "takes", "needs")}
        more = {name: self[name] for name in ("random", "has_quick", "takes_quick") if name in self.data}
        more["also"] = tuple(self.data.get("also", ()))
        return Entry(**texts, **more, paper=self.data.get("paper", self.paper), cells=cells, report=report, **own)


@dataclass(frozen=True)
class Paper:
    """A paper's TOML file."""

    data: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def table(self, name: str) -> Table:
        """The section of one entry."""
        return Table(self["paper"], self[name])


def read_paper(name: str) -> Paper:
    """The TOML file of a paper, which lies beside its module."""
    return Paper(tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8")))


def _figure(report: Report, what: str, start: Sequence[str], column: str, printed: str = "") -> Figure | None:
    """One of the few numbers that stand for a table, read off it: the row that begins with `start`, and a column.

    `printed` is the column with the paper's number, or words in its place; without it the column holds "paper / ours".
    The small form is run on other data: no number of the paper's stands beside its own.
    """
    row = next((row for row in report.rows if row[: len(start)] == tuple(start)), None)
    if row is None:
        return None
    place = {name: number for number, name in enumerate(report.columns)}
    theirs, _, ours = row[place[column]].rpartition(_BOTH)
    if printed:
        theirs = row[place[printed]] if printed in place else printed
    return Figure(what, EMPTY if report.quick else theirs, ours)
