"""Cells of a table: what each one runs, and the file that keeps each figure as soon as it is there."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from fedveil.errors import CheckpointError, ConfigError
from fedveil.runs.folder import write_atomically

Value = int | float | str | bool | None
Figures = dict[str, Value | list[float]]
Results = Mapping[str, Mapping[int, Figures]]
"""Figures by the cell's name and the seed."""

_WILD = "*?["


@dataclass(frozen=True)
class Cell:
    """One run of a table. `settings` are those of a run; a cell that is not `usual` runs only when asked for.

    `samples` cuts the training part; `tiers` deals it to clients of so many different sizes.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
    samples: int | None = None
    tiers: int | None = None
    usual: bool = True

    def identity(self) -> dict[str, object]:
        """What decides the figure, as plain data."""
        own = {"samples": self.samples, "tiers": self.tiers}
        return {**self.settings, **{name: value for name, value in own.items() if value is not None}}


def chosen(cells: Sequence[Cell], only: Iterable[str] = (), *, full: bool = False) -> list[Cell]:
    """The cells to run: those a pattern of `only` names (a whole name, a leading part, or wildcards), or the usual."""
    patterns = list(only)
    if not patterns:
        return [cell for cell in cells if full or cell.usual]
    for pattern in patterns:
        if not any(_fits(cell.name, pattern) for cell in cells):
            known = ", ".join(cell.name for cell in cells)
            raise ConfigError(f"No cell is called {pattern!r}. Cells: {known}.")
    return [cell for cell in cells if any(_fits(cell.name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    if any(sign in pattern for sign in _WILD):
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(pattern.rstrip("/") + "/")


class Store:
    """The figures of one table in one JSON file; a second run with the same file goes on where the first ended."""

    def __init__(self, path: Path, *, entry: str) -> None:
        self.path = path
        self._entry = entry
        self._kept: dict[str, dict[str, dict[str, object]]] = {}
        self.noted = ""
        """The day on which the last figure was added; empty where there is none."""
        self._verdict: Mapping[str, object] = {}
        if path.exists():
            self._kept = self._read()

    def _read(self) -> dict[str, dict[str, dict[str, object]]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            stored, cells = content["entry"], content["cells"]
            self.noted, self._verdict = str(content.get("noted", "")), content.get("verdict", {})
        except (ValueError, KeyError, TypeError, OSError) as reason:
            raise CheckpointError(f"{self.path} holds no figures that can be read ({reason}). Remove it.") from reason
        if stored != self._entry:
            raise ConfigError(
                f"{self.path} holds the figures of {stored!r}, not of {self._entry!r}: use another --out."
            )
        return dict(cells)

    def has(self, cell: Cell, seed: int) -> bool:
        """Whether the figure is there; one that was taken under other settings is refused."""
        kept = self._kept.get(cell.name, {}).get(str(seed))
        if kept is None:
            return False
        ours = json.loads(json.dumps(cell.identity()))
        if kept["settings"] != ours:
            theirs = kept["settings"]
            assert isinstance(theirs, dict)
            differ = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
            raise ConfigError(
                f"{self.path}: the cell {cell.name} was run with other settings ({', '.join(differ)} differ). Use "
                "another --out, or remove the file to run it again."
            )
        return True

    def keep(self, cell: Cell, seed: int, figures: Figures) -> None:
        """Write a figure down."""
        self._kept.setdefault(cell.name, {})[str(seed)] = {"settings": cell.identity(), "result": figures}
        self.noted = datetime.now(UTC).date().isoformat()
        self._verdict = {}  # it spoke of fewer figures
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def conclude(self, verdict: Mapping[str, object]) -> None:
        """Write beside the figures what they amount to."""
        if verdict != self._verdict:
            self._verdict = verdict
            self._write()

    def _write(self) -> None:
        content = {"entry": self._entry, "noted": self.noted, "verdict": self._verdict, "cells": self._kept}
        write_atomically(self.path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def results(self) -> Results:
        """Every figure there is."""
        return {
            name: {int(seed): _figures(kept["result"]) for seed, kept in seeds.items()}
            for name, seeds in self._kept.items()
        }


def _figures(result: object) -> Figures:
    assert isinstance(result, dict)
    return result


def numbers(results: Results, cell: str, what: str = "accuracy") -> dict[int, float]:
    """One figure of a cell, by seed; empty where it was not run."""
    found = {seed: figures.get(what) for seed, figures in results.get(cell, {}).items()}
    return {seed: float(value) for seed, value in found.items() if isinstance(value, int | float)}


EMPTY = "–"
_TRAINED = 30.0


@dataclass(frozen=True)
class Check:
    """One claim of a paper: whether it held here (None: cells are missing), and what was seen.

    A `premise` is what a claim stands on, such as that an attack works without protection: where it holds, nothing of
    the paper is reproduced yet.
    """

    claim: str
    held: bool | None
    seen: str = ""
    premise: bool = False

    @property
    def sign(self) -> str:
        """yes, no, or open."""
        return {True: "yes", False: "no", None: "open"}[self.held]


@dataclass(frozen=True)
class Figure:
    """One number of the table: what it is, what the paper prints, and what came out here."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True)
class Report:
    """A table with its verdict. `figures` are the few of its numbers that stand for it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    quick: bool = False
    figures: tuple[Figure, ...] = ()

    @property
    def word(self) -> str:
        """reproduced, partly reproduced, not reproduced or not run: what the settled claims amount to."""
        settled = [one.held for one in self.checks if one.held is not None and not one.premise]
        if not settled:
            return "not run"
        if not any(settled):
            return "not reproduced"
        return "partly reproduced" if any(one.held is False for one in self.checks) else "reproduced"

    @property
    def verdict(self) -> str:
        """The word, and why; open claims are named, not counted."""
        waiting = [one for one in self.checks if one.held is None]
        if self.word == "not run":
            return "not run: no claim can be judged by the cells there are"
        word = f"so far {self.word}" if waiting else self.word
        word = f"in the quick form, which shows directions only, {word}" if self.quick else word
        why = "; ".join(f"did not hold: {one.claim}" for one in self.checks if one.held is False)
        rest = f"{len(waiting)} of {len(self.checks)} claims are open" if waiting else ""
        return ": ".join(filter(None, (word, "; ".join(filter(None, (why, rest))))))

    def as_data(self) -> dict[str, object]:
        """Figures, claims and verdict as plain data."""
        return {
            "title": self.title,
            "word": self.word,
            "verdict": self.verdict,
            "quick": self.quick,
            "figures": [{"what": one.what, "paper": one.paper, "ours": one.ours} for one in self.figures],
            "claims": [{"claim": one.claim, "held": one.sign, "seen": one.seen} for one in self.checks],
        }

    def text(self) -> str:
        """As plain text."""
        lines = [self.title, "", *_aligned([self.columns, *self.rows]), ""]
        lines += [f"[{one.sign:>4}] {one.claim}" + (f" ({one.seen})" if one.seen else "") for one in self.checks]
        lines += [f"{one.what}: paper {one.paper}, here {one.ours}" for one in self.figures]
        return "\n".join([*lines, f"verdict: {self.verdict}", *(f"note: {note}" for note in self.notes)])

    def markdown(self) -> str:
        """As a Markdown page."""
        table = [
            "| " + " | ".join(self.columns) + " |",
            "| " + " | ".join("---" for _ in self.columns) + " |",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        checks = [f"| {one.claim} | {one.sign} | {one.seen} |" for one in self.checks]
        judged = ["| claim | held | seen |", "| --- | --- | --- |", *checks, ""] if checks else []
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"# {self.title}", "", *table, "", *judged, f"**Verdict: {self.verdict}.**", "", *notes, ""])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def mean(values: Mapping[int, float]) -> float | None:
    """The mean over seeds; None where there is none."""
    return sum(values.values()) / len(values) if values else None


def standard_error(values: Mapping[int, float]) -> float | None:
    """The standard error of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    centre = sum(values.values()) / len(values)
    return math.sqrt(sum((one - centre) ** 2 for one in values.values()) / (len(values) - 1) / len(values))


def shown(values: Mapping[int, float], *, signed: bool = False) -> str:
    """mean ± standard error, or a dash."""
    centre, error = mean(values), standard_error(values)
    if centre is None:
        return EMPTY
    text = f"{centre:+.1f}" if signed else f"{centre:.1f}"
    return text if error is None else f"{text} ± {error:.1f}"


def paper(value: float | None) -> str:
    """A paper's figure, or a dash."""
    return EMPTY if value is None else f"{value:.1f}"


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """ours − theirs, seed by seed, for the seeds both have."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def trained(found: Mapping[str, float | None]) -> Check:
    """What margins between noisy runs stand on: that the same training without noise gets somewhere."""
    there = {name: value for name, value in found.items() if value is not None}
    seen = ", ".join(f"{name}: {value:.1f}" for name, value in there.items())
    held = all(value >= _TRAINED for value in there.values()) if there and len(there) == len(found) else None
    return Check(f"without DP the model trains (at least {_TRAINED:g} %)", held, seen, premise=True)


def rising(claim: str, values: Sequence[float | None], names: Sequence[str]) -> Check:
    """Whether the numbers grow from the first to the last; open where fewer than two are there."""
    there = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    seen = ", ".join(f"{name}: {value:+.1f}" for name, value in there)
    if len(there) < 2:
        return Check(claim, None, seen)
    return Check(claim, all(one[1] < other[1] for one, other in itertools.pairwise(there)), seen)
