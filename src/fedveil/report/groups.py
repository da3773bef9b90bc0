"""Runs that differ in nothing but the seed stand together: one line, one colour, one point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedveil.ledger.statement import Line
from fedveil.report.sources import Run
from fedveil.report.values import number

_NO_MATTER = frozenset({"seed", "record", "record_rounds", "record_clients", "checkpoint_every", "evaluate_every"})
_UNPROVEN = {"none": 2, "aggregate only": 1, "ciphertexts only": 1}


@dataclass(frozen=True)
class Curve:
    """A figure over rounds: the mean over seeds, and the lowest and highest of them."""

    rounds: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Group:
    """Runs of the same settings under several seeds; `slot` decides colour, dash and symbol."""

    label: str
    slot: int
    runs: tuple[Run, ...]

    @property
    def scheme(self) -> str:
        """The scheme's name."""
        return self.runs[0].scheme

    def values(self, name: str) -> list[float]:
        """A closing figure of every run that has it."""
        return [value for run in self.runs if (value := number(run.last, name)) is not None]

    def totals(self, *names: str) -> list[float]:
        """Sums over all rounds, per run."""
        return [value for run in self.runs if (value := run.total(*names)) is not None]

    def curve(self, name: str) -> Curve:
        """A figure over the rounds of all runs."""
        found: dict[int, list[float]] = {row["round"]: [] for run in self.runs for row in run.rows}
        for run in self.runs:
            for row in run.rows:
                value = number(row, name)
                if value is not None:
                    found[row["round"]].append(value)
        rounds = tuple(sorted(found))
        every = [found[one] for one in rounds]
        return Curve(
            rounds,
            tuple(sum(some) / len(some) if some else None for some in every),
            tuple(min(some, default=None) for some in every),
            tuple(max(some, default=None) for some in every),
        )

    @cached_property
    def worst(self) -> Run:
        """The run whose ledger promises least against the server: what holds for all of them."""
        return max(self.runs, key=lambda run: _weakness(line_of(run, "server")))

    def line(self, adversary: str) -> Line | None:
        """The weakest line against an adversary among the runs; None where a run has none."""
        lines = [line_of(run, adversary) for run in self.runs]
        known = [one for one in lines if one is not None]
        return max(known, key=_weakness) if known and len(known) == len(lines) else None


def line_of(run: Run, adversary: str) -> Line | None:
    """One adversary's line of a run's ledger."""
    lines = () if run.ledger is None else run.ledger.lines
    return next((one for one in lines if one.adversary == adversary), None)


def _weakness(line: Line | None) -> tuple[int, float]:
    if line is None:
        return (3, 0.0)
    return (_UNPROVEN.get(line.verdict, 0), line.epsilon or 0.0)


def grouped(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Groups in the order their first runs were named; equal schemes are told apart by what differs."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(_settings(run), sort_keys=True, default=str), []).append(run)
    parts = list(found.values())
    return tuple(Group(_label(part[0], parts), slot, tuple(part)) for slot, part in enumerate(parts))


def _settings(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.settings.items() if name not in _NO_MATTER}


def _label(run: Run, parts: Sequence[Sequence[Run]]) -> str:
    alike = [_settings(part[0]) for part in parts if part[0].scheme == run.scheme]
    own = _settings(run)
    names = dict.fromkeys(name for one in alike for name in one)
    differing = [name for name in names if any(one.get(name) != own.get(name) for one in alike)]
    told = [f"{name} {_told(own[name])}" for name in differing if own.get(name) is not None]
    return ", ".join([run.scheme, *told])


def _told(value: Any) -> str:
    return " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
