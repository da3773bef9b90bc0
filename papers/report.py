"""A table with its verdict: what a paper claims, whether it held here, and what was seen."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from papers.cells import difference, mean, standard_error

EMPTY = "–"
_TRAINED = 30.0
REPRODUCED, ELSEWHERE, HOLDS = "reproduced", "holds at other numbers", "holds"
IN_PART, REFUTED, UNDECIDED = "refuted in part", "refuted", "not decidable"
WORDS = (REPRODUCED, ELSEWHERE, HOLDS, IN_PART, REFUTED, UNDECIDED)
"""What can be said of a table."""
POINTS, SHARE = 2.0, 0.1
"""How near to a printed percentage, and to any other printed number, one has to come to have reproduced it."""


@dataclass(frozen=True)
class Check:
    """One claim of a paper: whether it held here (None: cells are missing), and what was seen.

    A `premise` is what claims of its `topic` stand on, such as that an attack works without protection: where it holds,
    nothing of the paper is reproduced yet. One of `ours` stands beside the paper's, of which it decides nothing.
    `adaptive`: a claim of the paper's that an attacker of ours judges, whom it did not run: one who knows the scheme.
    """

    claim: str
    held: bool | None
    seen: str = ""
    premise: bool = False
    ours: bool = False
    adaptive: bool = False
    topic: str = ""

    @property
    def sign(self) -> str:
        """yes, no, or open."""
        return {True: "yes", False: "no", None: "open"}[self.held]

    def __str__(self) -> str:
        """The claim, marked where it is not the paper's."""
        return f"ours: {self.claim}" if self.ours else self.claim


@dataclass(frozen=True)
class Figure:
    """One number of the table: what it is, what the paper prints, and what came out here."""

    what: str
    paper: str
    ours: str

    @property
    def met(self) -> bool | None:
        """Whether what came out is what the paper prints, within `POINTS` of a percentage or `SHARE` of another number.

        None where either is no number, or there is nothing printed to compare with.
        """
        theirs, ours = _numbers(self.paper), _numbers(self.ours)
        if not theirs or len(theirs) != len(ours):
            return None
        points = "%" in self.what or "points" in self.what
        near = (abs(a - b) <= (POINTS if points else SHARE * abs(a)) for a, b in zip(theirs, ours, strict=True))
        return all(near)


def _numbers(text: str) -> list[float]:
    """The numbers of a figure, without intervals and remarks in brackets; none where it is anything else."""
    bare = re.sub(r"\([^)]*\)|\[[^\]]*\]|±.*", "", text).replace("−", "-")
    try:
        return [float(part) for part in bare.split(",")]
    except ValueError:
        return []


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
    def missed(self) -> tuple[Figure, ...]:
        """The figures that stand for the table and did not come out as they are printed."""
        return tuple(one for one in self.figures if one.met is False)

    @property
    def claims(self) -> tuple[Check, ...]:
        """Those that decide the verdict: the paper's own, without what they stand on."""
        return tuple(one for one in self.checks if not (one.premise or one.ours))

    @property
    def judged(self) -> tuple[Check, ...]:
        """The claims that are settled: those that did not hold, and those that did where what they stand on holds."""
        broken = {one.topic for one in self.checks if one.premise and one.held is False}
        return tuple(one for one in self.claims if one.held is False or (one.held is True and one.topic not in broken))

    @property
    def word(self) -> str:
        """What the settled claims amount to: one of `WORDS`.

        Two curves that agree at another accuracy than the paper's hold what it claims of them and do not reproduce it:
        that takes its numbers too.
        """
        settled = [one.held for one in self.judged]
        if not settled:
            return UNDECIDED
        if not all(settled):
            return IN_PART if any(settled) else REFUTED
        if self.missed:
            return ELSEWHERE
        return REPRODUCED if any(one.met for one in self.figures) else HOLDS

    @property
    def standing(self) -> str:
        """The word, which is one "so far" where claims are open."""
        waiting = len(self.judged) < len(self.claims)
        return f"so far {self.word}" if waiting and self.word != UNDECIDED else self.word

    @property
    def by_whom(self) -> str:
        """Where attackers of ours refute a claim: how many held by the paper's own means, and how many against them."""
        whose = {
            False: "by the paper's own attacks and comparisons",
            True: "by attackers of ours, who know the scheme,",
        }
        parts = {words: [one.held for one in self.judged if one.adaptive is kind] for kind, words in whose.items()}
        if all(parts[whose[True]]):
            return ""
        return ", ".join(f"{words} {sum(map(bool, held))} of {len(held)} held" for words, held in parts.items() if held)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the word is what it is; open claims are named, not counted."""
        waiting = len(self.claims) - len(self.judged)
        failed = [one for one in self.checks if one.held is False and not one.ours]
        told = [self.by_whom] if self.by_whom else []
        told += [f"{'what it stands on ' * one.premise}did not hold: {one.claim}" for one in failed]
        if self.word == UNDECIDED and not failed:
            told.append("no claim can be judged by the cells there are")
        if self.word == ELSEWHERE:
            told += [f"{one.what}: {one.ours}, printed {one.paper}" for one in self.missed]
        if self.word == HOLDS:
            told.append("no number here stands beside a printed one")
        return (*told, *((f"{waiting} of {len(self.claims)} claims are open",) if waiting else ()))

    @property
    def verdict(self) -> str:
        """The word, and why."""
        small = "in the quick form, which shows directions only, " if self.quick and self.word != UNDECIDED else ""
        word = f"{small}{self.standing}"
        return ": ".join(filter(None, (word, "; ".join(self.reasons))))

    def as_data(self) -> dict[str, object]:
        """Figures, claims and verdict as plain data."""
        return {
            "title": self.title,
            "word": self.word,
            "verdict": self.verdict,
            "quick": self.quick,
            "figures": [{"what": one.what, "paper": one.paper, "ours": one.ours} for one in self.figures],
            "claims": [{"claim": str(one), "held": one.sign, "seen": one.seen} for one in self.checks],
        }

    def text(self) -> str:
        """As plain text."""
        lines = [self.title, "", *_aligned([self.columns, *self.rows]), ""]
        lines += [f"[{one.sign:>4}] {one}" + (f" ({one.seen})" if one.seen else "") for one in self.checks]
        lines += [f"{one.what}: paper {one.paper}, here {one.ours}" for one in self.figures]
        return "\n".join([*lines, f"verdict: {self.verdict}", *(f"note: {note}" for note in self.notes)])

    def markdown(self) -> str:
        """As a Markdown page."""
        table = [
            "| " + " | ".join(self.columns) + " |",
            "| " + " | ".join("---" for _ in self.columns) + " |",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        checks = [f"| {one} | {one.sign} | {one.seen} |" for one in self.checks]
        judged = ["| claim | held | seen |", "| --- | --- | --- |", *checks, ""] if checks else []
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"# {self.title}", "", *table, "", *judged, f"**Verdict: {self.verdict}.**", "", *notes, ""])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def shown(values: Mapping[int, float], *, signed: bool = False, digits: int = 1) -> str:
    """mean ± standard error, or a dash."""
    centre, error = mean(values), standard_error(values)
    if centre is None:
        return EMPTY
    text = f"{centre:{'+' if signed else ''}.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def paper(value: float | None) -> str:
    """A paper's figure with the decimals it has, two at most; or a dash."""
    return EMPTY if value is None or math.isnan(value) else f"{value:.2f}".rstrip("0").rstrip(".")


def trained(found: Mapping[str, float | None], *, least: float = _TRAINED, where: str = "", topic: str = "") -> Check:
    """What margins between noisy runs stand on: that the same training without noise gets somewhere."""
    there = {name: value for name, value in found.items() if value is not None}
    seen = ", ".join(f"{name}: {value:.1f}" for name, value in there.items())
    held = all(value >= least for value in there.values()) if there and len(there) == len(found) else None
    return Check(f"{where}without DP the model trains (at least {least:g} %)", held, seen, premise=True, topic=topic)


def beside_trained(found: Check, accuracy: float | None, guess: float | None) -> Check:
    """A comparison with a rival; open where the rival's model is no better than a guess, up to `POINTS`."""
    if accuracy is None or guess is None or accuracy > guess + POINTS:
        return found
    why = f"the rival has not trained: {accuracy:.1f} %, by a guess {guess:.1f}"
    return replace(found, held=None, seen=f"{found.seen}; {why}" if found.seen else why)


_CONFIDENCE = 0.95


def decided(
    values: Mapping[int, float], bound: float = 0.0, *, leeway: float | None = None, runs: int = 2
) -> bool | None:
    """Whether a figure, by seed, lies above a bound; None where the seeds cannot tell.

    The mean has to lie outside its 95 % interval around the bound (Student's t over seeds); one seed does not tell what
    it varies by, and has to be `POINTS` away for the difference of two `runs`, as many times that as there are pairs of
    them in the figure. Where figures are no accuracies, `leeway` takes the interval's place.
    """
    from scipy.stats import t

    centre, error = mean(values), standard_error(values)
    if centre is None:
        return None
    if leeway is None:
        leeway = POINTS * runs / 2 if error is None else error * float(t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1))
    return None if abs(centre - bound) <= leeway else centre > bound


def above(claim: str, values: Mapping[int, float], bound: float = 0.0, *, below: bool = False) -> Check:
    """Whether a figure lies above a bound, or below it; open where its seeds cannot tell."""
    found = decided(values, bound)
    seen = shown(values, signed=True) if values else "not run"
    if values and found is None:
        seen += f", {len(values)} seed{'s' * (len(values) != 1)}: too near to {bound:+g} to tell"
    return Check(claim, None if found is None else found != below, seen)


def all_above(
    claim: str, values: Mapping[str, Mapping[int, float]], bound: float = 0.0, *, below: bool = False
) -> Check:
    """Whether every one of several figures lies above a bound, or below it; one that surely does not decides."""
    each = [decided(one, bound) for one in values.values()]
    seen = ", ".join(f"{name}: {shown(one, signed=True)}" for name, one in values.items() if one)
    if below in each:
        return Check(claim, False, seen)
    return Check(claim, None if None in each or not each else True, seen)


def within(claim: str, values: Mapping[int, float], points: float, *, premise: bool = False, topic: str = "") -> Check:
    """Whether a difference is at most so many points, either way; open where its seeds cannot tell."""
    low, high = decided(values, -points), decided(values, points)
    held = False if low is False or high is True else None if low is None or high is None else True
    seen = shown(values, signed=True) if values else "not run"
    if values and held is None:
        seen += f", {len(values)} seed{'s' * (len(values) != 1)}: too few to tell"
    return Check(claim, held, seen, premise=premise, topic=topic)


def rising(
    claim: str,
    values: Sequence[Mapping[int, float]],
    names: Sequence[str],
    *,
    unit: str = "",
    signed: bool = True,
    leeway: float | None = None,
    runs: int = 2,
) -> Check:
    """Whether figures, each by seed, grow from the first to the last, and no step of theirs goes down.

    A step is the difference of so many `runs`.

    Steps down are named. What the seeds cannot tell (`decided`) decides nothing; fewer than two figures leave it open.
    """
    there = [(name, one) for name, one in zip(names, values, strict=True) if one]
    seen = ", ".join(f"{name}: {shown(one, signed=signed)}{unit}" for name, one in there)
    if len(there) < 2:
        return Check(claim, None, seen)
    down = [
        f"{a} → {b} ({shown(difference(other, one), signed=True)}{unit})"
        for (a, one), (b, other) in itertools.pairwise(there)
        if decided(difference(other, one), leeway=leeway, runs=runs) is False
    ]
    if down:
        return Check(claim, False, f"{seen}; not from {', '.join(down)}")
    return Check(claim, decided(difference(there[-1][1], there[0][1]), leeway=leeway, runs=runs), seen)


def short(value: float | None, form: str = "{:.3g}") -> str:
    """A number, or a dash."""
    return EMPTY if value is None else form.format(value)


def compared(
    claim: str,
    values: Mapping[str, float | None],
    holds: Callable[[float], bool],
    *,
    form: str = "{:.3g}",
    premise: bool = False,
) -> Check:
    """Whether every number is as claimed; open where one is missing, unless another says no already."""
    there = {name: value for name, value in values.items() if value is not None}
    seen = ", ".join(f"{name}: {form.format(value)}" for name, value in there.items())
    held = all(holds(value) for value in there.values())
    missing = not there or len(there) < len(values)
    return Check(claim, None if held and missing else held, seen, premise=premise)


def ratio(one: float | None, other: float | None) -> float | None:
    """One over the other, where both are there."""
    return None if one is None or other is None or other <= 0 else one / other
