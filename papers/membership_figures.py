"""What was measured of membership inference, read from the cells: figures with intervals, in words and as claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedveil.audit.rates import CHANCE
from fedveil.trials.measures import Members
from fedveil.trials.references import TOLD_APART
from fedveil.trials.trial import Score, judged
from papers.cells import Results, numbers
from papers.membership_work import ADAPTIVE, BARE, LIKELIHOOD, RECEIVED
from papers.report import EMPTY, Check, mean

GUESS = 100.0 * CHANCE
LEAST = 100.0 * TOLD_APART
"""An attack has to tell this many of an unprotected, overfitted model's members before anything follows from it."""

NAMES = {
    "last": "last layer",
    "second": "second to last",
    "third": "third to last",
    "three": "last three",
    LIKELIHOOD: "likelihood ratio (ours)",
}
OF_PAPER = tuple(row for row in NAMES if row != LIKELIHOOD)
INEFFECTIVE = "attack not effective here"
UNTRAINED = "no members to tell, veiled or not"


@dataclass(frozen=True)
class Told:
    """How many candidates are told right, in percent, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"

    @property
    def blind(self) -> bool:
        """Whether it may be a guess: the interval does not lie above 50 %."""
        return self.low <= GUESS


def told(results: Results, cell: str, row: str, way: str) -> Told | None:
    """A cell's figure. Over seeds value and ends are averaged, which keeps at least the confidence of one."""
    ends = [mean(numbers(results, cell, f"{row} {way}{end}")) for end in ("", " low", " high")]
    value, low, high = ends
    return None if value is None or low is None or high is None else Told(value, low, high)


def written(results: Results, cell: str, row: str, way: str) -> str:
    """A figure, why there is none, or a dash."""
    found = told(results, cell, row, way)
    failed = any(f"{row} {way} failed" in figures for figures in results.get(cell, {}).values())
    return "failed" if found is None and failed else EMPTY if found is None else str(found)


def effective(results: Results, plain: str, row: str) -> bool | None:
    """Whether an attack tells members of the unprotected run; None where it was not run."""
    unprotected = told(results, plain, row, RECEIVED)
    return None if unprotected is None else unprotected.value > LEAST


def meaning(results: Results, cell: str, plain: str, row: str) -> str:
    """What is told once the noise is taken off, beside what the same run's true model tells, in a word."""
    ours, bare = told(results, cell, row, ADAPTIVE), told(results, cell, row, BARE)
    if ours is None or bare is None:
        return EMPTY
    if nobody_told(results, cell):
        return UNTRAINED
    if bare.blind or effective(results, plain, row) is False:
        return INEFFECTIVE
    return judged(Members(), _share(ours), _share(bare))[0]


def nobody_told(results: Results, cell: str) -> bool:
    """Whether no attack tells members even from a run's true model."""
    found = [told(results, cell, row, BARE) for row in NAMES]
    return all(one is not None and one.blind for one in found)


def _share(found: Told) -> Score:
    return Score(found.value / 100, found.low / 100, found.high / 100)


def told_without_protection(results: Results, plain: str, where: str) -> Check:
    """The papers' first line: an unprotected model gives its members away."""
    found = {row: told(results, plain, row, RECEIVED) for row in OF_PAPER}
    seen = ", ".join(f"{NAMES[row]} {one}" for row, one in found.items() if one is not None)
    there = [one for one in found.values() if one is not None]
    held = all(one.value > LEAST for one in there) if len(there) == len(found) else None
    claim = f"{where}: without protection more than {LEAST:g} % are told by every layer"
    return Check(claim, held, seen, premise=True)


def close_accuracy(results: Results, cell: str, plain: str, where: str, *, points: float) -> Check:
    """The papers' second line: protection costs next to nothing."""
    ours, theirs = mean(numbers(results, cell)), mean(numbers(results, plain))
    claim = f"{where}: accuracy within {points:g} points of FedAvg"
    if ours is None or theirs is None:
        return Check(claim, None, stopped(results, cell))
    return Check(claim, abs(ours - theirs) <= points, f"{ours:.1f} and {theirs:.1f}")


def no_better_than_a_guess(results: Results, cell: str, plain: str, where: str, row: str, way: str) -> Check:
    """The papers' claim. It stays open where the attack is not effective, or the true model has no members to tell."""
    how = "as received" if way == RECEIVED else "with the noise taken off"
    claim = f"{where}, {how}, {NAMES[row]}: a blind guess"
    ours, bare = told(results, cell, row, way), told(results, cell, row, BARE)
    if ours is None or bare is None:
        return Check(claim, None, stopped(results, cell))
    seen = f"{ours}; without the veil {bare}"
    if nobody_told(results, cell):
        return Check(claim, None, f"{seen}: {UNTRAINED}")
    if bare.blind or effective(results, plain, row) is not True:
        return Check(claim, None, f"{seen}: {INEFFECTIVE}")
    return Check(claim, ours.blind, seen)


def stopped(results: Results, cell: str) -> str:
    """Why a run has no figures."""
    said = [figures["stopped"] for figures in results.get(cell, {}).values() if "stopped" in figures]
    return str(said[0]) if said else "not run"


def percent(results: Results, cell: str, what: str = "accuracy") -> str:
    """A share of a cell, in percent, or a dash."""
    return _text(mean(numbers(results, cell, what)), lambda value: f"{value:.1f}")


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return EMPTY if value is None else form(value)
