"""What an entry ends in: a table beside the paper's figures, claims that held or did not, and a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EMPTY = "–"


@dataclass(frozen=True)
class Check:
    """One claim of a paper: whether it held here (None: cells are missing), and what was seen."""

    claim: str
    held: bool | None
    seen: str = ""

    @property
    def sign(self) -> str:
        """yes, no, or open."""
        return {True: "yes", False: "no", None: "open"}[self.held]


@dataclass(frozen=True)
class Report:
    """A table with its verdict."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    quick: bool = False

    @property
    def verdict(self) -> str:
        """reproduced, partly reproduced or not reproduced, and why; open claims are named, not counted."""
        settled = [one for one in self.checks if one.held is not None]
        failed = [one for one in settled if not one.held]
        waiting = [one for one in self.checks if one.held is None]
        if not settled:
            return "not run: no claim can be judged by the cells there are"
        word = "reproduced" if not failed else "not reproduced" if len(failed) == len(settled) else "partly reproduced"
        word = f"so far {word}" if waiting else word
        word = f"in the quick form, which shows directions only, {word}" if self.quick else word
        why = "; ".join(f"did not hold: {one.claim}" for one in failed)
        rest = f"{len(waiting)} of {len(self.checks)} claims are open" if waiting else ""
        return ": ".join(filter(None, (word, "; ".join(filter(None, (why, rest))))))

    def text(self) -> str:
        """As plain text."""
        lines = [self.title, "", *_aligned([self.columns, *self.rows]), ""]
        lines += [f"[{one.sign:>4}] {one.claim}" + (f" ({one.seen})" if one.seen else "") for one in self.checks]
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


def rising(claim: str, values: Sequence[float | None], names: Sequence[str]) -> Check:
    """Whether the numbers grow from the first to the last; open where fewer than two are there."""
    there = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    seen = ", ".join(f"{name}: {value:+.1f}" for name, value in there)
    if len(there) < 2:
        return Check(claim, None, seen)
    return Check(claim, all(one[1] < other[1] for one, other in itertools.pairwise(there)), seen)
