"""Cells of a table: what each one runs, and the file that keeps each figure as soon as it is there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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

    `samples` cuts the training part; `tiers` deals it to clients of so many different sizes; `more` is what else
    decides the figures, such as an attack's effort.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    tiers: int | None = None
    usual: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, object]:
        """What decides the figure, as plain data."""
        own = {"samples": self.samples, "tiers": self.tiers, **self.more}
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
            why = reason if isinstance(reason, ValueError | OSError) else "it is JSON of another form"
            raise CheckpointError(f"{self.path} holds no figures that can be read ({why}). Remove it.") from reason
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


def figures_of(results: Results, cell: str) -> list[Figures]:
    """A cell's figures, one set for each seed."""
    return list(results.get(cell, {}).values())


def listed(results: Results, cell: str, what: str) -> list[float]:
    """A figure that is a list, such as one for each victim, over all seeds."""
    lists = (figures.get(what) for figures in figures_of(results, cell))
    return [float(value) for one in lists if isinstance(one, list) for value in one]


def average(results: Results, cell: str, what: str) -> float | None:
    """The mean of such a list."""
    values = listed(results, cell, what)
    return sum(values) / len(values) if values else None


def number(results: Results, cell: str, what: str) -> float | None:
    """A figure of the first seed that has it."""
    return next(iter(numbers(results, cell, what).values()), None)


def mean(values: Mapping[int, float]) -> float | None:
    """The mean over seeds; None where there is none."""
    return sum(values.values()) / len(values) if values else None


def mean_of(results: Results, cell: str, what: str = "accuracy") -> float | None:
    """One figure of a cell, averaged over seeds."""
    return mean(numbers(results, cell, what))


def standard_error(values: Mapping[int, float]) -> float | None:
    """The standard error of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    centre = sum(values.values()) / len(values)
    return math.sqrt(sum((one - centre) ** 2 for one in values.values()) / (len(values) - 1) / len(values))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """ours − theirs, seed by seed, for the seeds both have."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
