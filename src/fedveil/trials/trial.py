"""What an audit consists of: trials of attacks on views, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from fedveil.audit.views import View

Settings = Mapping[str, Any]
Found = Mapping[str, Tensor]
Truth = Mapping[str, Tensor]

NOT_TRIED = "–"
"""Stands for an attack where none was tried."""

Verdict = Literal["as if unprotected", "in part", "nothing", "not decided", "not effective", "not applicable", "failed"]


@dataclass(frozen=True)
class Score:
    """A figure, the interval that holds it with 95 % confidence where there is one, and others beside it.

    `floor` is the lower end with 99 %, by which it is decided: several attacks are tried, and the best is told.
    `chance` is there where it depends on what was scored. `some`: something was got for sure, whatever the mean is.
    `capped` is the mean with every sample cut at what is enough, so that a few exact ones do not stand for all.
    """

    value: float
    low: float | None = None
    high: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    floor: float | None = None
    chance: float | None = None
    some: bool = False
    capped: float | None = None

    @property
    def surely(self) -> float:
        """The least the figure can be taken to be."""
        known = self.low if self.floor is None else self.floor
        return self.value if known is None else known

    def above(self, measure: Measure) -> bool:
        """Whether it says more than chance."""
        return self.some or self.surely > self.blind(measure) + measure.margin

    def blind(self, measure: Measure) -> float:
        """What one gets who saw nothing."""
        return measure.chance if self.chance is None else self.chance


class Measure(Protocol):
    """How results are judged: higher is better for the attacker."""

    @property
    def name(self) -> str:
        """The figure's name, with its unit."""
        ...

    @property
    def chance(self) -> float:
        """What one gets who saw nothing."""
        ...

    @property
    def margin(self) -> float:
        """How far above chance a figure has to be to mean anything."""
        ...

    @property
    def enough(self) -> float:
        """Beyond this, more means nothing."""
        ...

    def score(self, found: Sequence[Found], truths: Sequence[Truth]) -> Score:
        """Judge the results of all attempts of a trial together."""
        ...

    def text(self, value: float) -> str:
        """A figure as a person reads it."""
        ...


@dataclass(frozen=True, eq=False)
class Attempt:
    """A view under attack, the same as an unprotected run would have given it, and the truth for the scorer.

    Without a twin nothing was hidden: the view is its own. `settings` are the attack's for this view alone;
    `twin_truth` is there where the twin is of other samples.
    """

    view: View
    twin: View | None
    truth: Truth
    settings: Settings = field(default_factory=dict)
    twin_truth: Truth | None = None


@dataclass(frozen=True, eq=False)
class Trial:
    """One attack on one kind of view. `seen` says in words what is attacked; `twin_settings` are for the twins."""

    name: str
    adversary: str
    asset: str
    attack: str
    seen: str
    measure: Measure
    attempts: tuple[Attempt, ...]
    settings: Settings = field(default_factory=dict)
    twin_settings: Settings = field(default_factory=dict)
    adaptive: bool = False
    unprotected: Score | None = None
    """The figure without protection, where it needs no attack: then twins are not attacked."""

    def told(self, attempt: Attempt) -> Settings:
        """What the attack is told for one of its attempts."""
        return {**self.settings, **attempt.settings}

    def score(self, found: Sequence[Found]) -> Score:
        """The figure of what was found on the views."""
        return self.measure.score(found, [one.truth for one in self.attempts])

    def twin_score(self, found: Sequence[Found]) -> Score:
        """The figure of what was found on the twins."""
        truths = [one.truth if one.twin_truth is None else one.twin_truth for one in self.attempts]
        return self.measure.score(found, truths)


@dataclass(frozen=True)
class Finding:
    """What a trial showed. Figures are the attack's on this run, by chance, without protection, on its reference."""

    name: str
    adversary: str
    asset: str
    attack: str
    seen: str
    adaptive: bool
    figure: str
    verdict: Verdict
    reason: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    unprotected: float | None = None
    reference: float | None = None
    threshold: float | None = None
    attempts: int = 0
    seconds: float = 0.0
    more: Mapping[str, float] = field(default_factory=dict)
    more_unprotected: Mapping[str, float] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    pictures: str = ""


def enough_above(chance: float, measure: Measure) -> float:
    """Beyond this, more means nothing; well above chance, wherever that lies."""
    return max(measure.enough, chance + 5 * measure.margin)


def judged(measure: Measure, score: Score, twin: Score) -> tuple[Verdict, str]:
    """What a figure means beside chance and the unprotected one.

    Nothing follows from an attack that gets nothing even without protection. Otherwise: above chance for sure, and
    at least four fifths of the way from chance to the unprotected figure is as if unprotected. No more than chance
    is to a scheme's credit only where the unprotected figure is for sure higher.
    """
    chance = score.blind(measure)
    if not twin.above(measure):
        if score.above(measure):
            return "in part", "more than from the unprotected twin: perhaps luck; look again with other seeds"
        return "not effective", (
            f"even without protection it gets {measure.text(twin.value)}, by chance "
            f"{measure.text(twin.blind(measure))}: nothing follows about the scheme"
        )
    if not score.above(measure):
        if score.high is not None and twin.low is not None and twin.low <= score.high:
            return "not decided", "too few samples: it may be chance, and it may be the unprotected figure"
        return "nothing", ""
    enough = enough_above(chance, measure)
    ours, theirs = (min(one.value if one.capped is None else one.capped, enough) for one in (score, twin))
    reached = (ours - chance) / (theirs - twin.blind(measure))
    return ("as if unprotected" if reached >= 0.8 else "in part"), ""
