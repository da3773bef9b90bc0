"""What an audit consists of: trials of attacks on views, what was found, and audit.json, which keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedveil.audit.views import View
from fedveil.errors import CheckpointError, ConfigError, spelled
from fedveil.plain import made, read_named
from fedveil.runs.folder import write_atomically
from fedveil.version import __version__

RECOGNISABLE = 20.0
"""The decibels from which a picture can be recognised."""
TOLD_APART = 0.6

Settings = Mapping[str, Any]
Found = Mapping[str, Tensor]
Truth = Mapping[str, Tensor]


@dataclass(frozen=True)
class Asset:
    """What an attack can be after: what an adversary does that gets all of it, a part, nothing.

    `asked` is the figure that an attack has to exceed on an unprotected reference before it is believed, `needs` what a
    run must have for it to be there at all.
    """

    whole: str
    part: str
    nothing: str
    asked: float
    needs: tuple[str, ...] = ()


ASSETS = {
    "labels": Asset(
        "reads the labels of what a client trained on",
        "reads some of the labels",
        "cannot tell labels",
        asked=0.9,
        needs=("classes",),
    ),
    "data": Asset(
        "rebuilds what a client trained on",
        "sees traces of what a client trained on",
        "cannot rebuild what a client trained on",
        asked=RECOGNISABLE,
    ),
    "the model's function": Asset(
        "can use the model as if it were its own",
        "can use a worse copy of the model",
        "cannot use the model",
        asked=1.0,
    ),
    "the model's parameters": Asset(
        "knows the parameters up to scales that leave the function as it is",
        "knows part of the parameters, up to scales that leave the function as it is",
        "knows none of the parameters, not even up to scales",
        asked=1.0,
    ),
    "the server's updates": Asset(
        "follows the server's training, update by update, up to one secret that never changes",
        "sees part of the server's updates",
        "cannot tell the server's updates",
        asked=1.0,
    ),
    # Chance is one half, and the reference an overfitted model.
    "members": Asset(
        "tells whose data was trained on",
        "tells members better than by chance",
        "cannot tell members",
        asked=TOLD_APART,
        needs=("classes",),
    ),
    # Chance is one in ten on a reference of digits.
    "what classes look like": Asset(
        "makes recognisable pictures of the classes",
        "makes pictures that are sometimes recognised",
        "cannot picture the classes",
        asked=0.5,
        needs=("classes", "pictures"),
    ),
}

KNOWN_FIRST = "exact, were the first model known"
"""The share of the last model's numbers that a client has who knows what training began with."""

NOT_TRIED = "–"
"""Stands for an attack where none was tried."""

Verdict = Literal["as if unprotected", "in part", "nothing", "not decided", "not effective", "not applicable", "failed"]


@dataclass(frozen=True)
class Score:
    """A figure, the interval that holds it with 95 % confidence where there is one, and others beside it.

    `floor` is the lower end with 99 %, by which it is decided: several attacks are tried, and the best is told.
    `chance` is there where it depends on what was scored. `some`: whether something was got for sure, where the measure
    has a test of its own for that; elsewhere that follows from the floor.
    `capped` is the mean with every sample cut at what is enough, so that a few exact ones do not stand for all.
    """

    value: float
    low: float | None = None
    high: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    floor: float | None = None
    chance: float | None = None
    some: bool | None = None
    capped: float | None = None

    @property
    def surely(self) -> float:
        """The least the figure can be taken to be."""
        known = self.low if self.floor is None else self.floor
        return self.value if known is None else known

    def above(self, measure: Measure) -> bool:
        """Whether it says more than chance."""
        return self.surely > self.blind(measure) + measure.margin if self.some is None else self.some

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
    taken_out: int = 0
    """Samples that were left out because they occur more than once in the data."""

    def told(self, attempt: Attempt) -> Settings:
        """What the attack is told for one of its attempts."""
        return {**self.settings, **attempt.settings}

    def score(self, found: Sequence[Found]) -> Score:
        """The figure of what was found on the views."""
        return self.measure.score(found, [attempt.truth for attempt in self.attempts])

    def twin_score(self, found: Sequence[Found]) -> Score:
        """The figure of what was found on the twins."""
        truths = [attempt.truth if attempt.twin_truth is None else attempt.twin_truth for attempt in self.attempts]
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
    taken_out: int = 0
    seconds: float = 0.0
    more: Mapping[str, float] = field(default_factory=dict)
    more_unprotected: Mapping[str, float] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    pictures: str = ""

    def text(self, figure: str) -> str:
        """A figure as a person reads it: value (with its interval, where it has one), chance or unprotected."""
        said = self.shown.get(figure, "–")
        if figure != "value" or said == "–" or self.low is None or self.high is None:
            return said
        return f"{said} [{100 * self.low:.0f}–{100 * self.high:.0f}]"


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
        if twin.value >= measure.enough:
            blind = measure.text(twin.blind(measure))
            return "not decided", f"too few samples: blind guessing gets {blind}, so that all of them right may be luck"
        return "not effective", (
            f"even without protection it gets {measure.text(twin.value)}, by chance "
            f"{measure.text(twin.blind(measure))}: nothing follows about the scheme"
        )
    if not score.above(measure):
        if score.high is not None and twin.low is not None and twin.low <= score.high:
            return "not decided", "too few samples: it may be chance, and it may be the unprotected figure"
        return "nothing", ""
    enough = enough_above(chance, measure)
    ours, theirs = (
        min(measured.value if measured.capped is None else measured.capped, enough) for measured in (score, twin)
    )
    reached = (ours - chance) / (theirs - twin.blind(measure))
    return ("as if unprotected" if reached >= 0.8 else "in part"), ""


CAVEAT = (
    "An audit shows what these attacks got, not what no attack can get. Not tried: servers that send crafted or "
    "different models, poisoning, side channels."
)

TAKEN_OUT = (
    "samples that occur more than once in the data, as candidates for membership or among public data: of those nobody "
    "can say who trained on them"
)

SHORT = {
    "as if unprotected": "as if unprotected",
    "in part": "in part",
    "nothing": "as chance",
    "not decided": "not decided",
    "not effective": "not effective here",
    "not applicable": "not applicable",
    "failed": "failed to run",
}
ORDER = ("as if unprotected", "in part", "not decided", "nothing", "not effective", "not applicable", "failed")


_WHO = ("server", "clients", "wire", "client")


def sentences(findings: Iterable[Finding]) -> dict[str, str]:
    """What each adversary got, by its best attack on every asset, with chance and no protection beside it."""
    by_adversary: dict[str, list[Finding]] = {}
    for finding in findings:
        by_adversary.setdefault(finding.adversary, []).append(finding)
    order = sorted(by_adversary, key=lambda who: (_WHO.index(who.split()[-1]) if who.split()[-1] in _WHO else 1, who))
    return {who: _sentence(who, by_adversary[who]) for who in order}


def by_adversary(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """What was tried, under who is after what, from what."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.attack != NOT_TRIED:
            who = f"{finding.adversary[0].upper()}{finding.adversary[1:]}"
            groups.setdefault(f"{who}, after {finding.asset}, from {finding.seen}", []).append(finding)
    return groups


def best_of(findings: Iterable[Finding]) -> list[Finding]:
    """For every adversary and asset the attack that got most."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.adversary, finding.asset), []).append(finding)
    return [min(group, key=_rank) for group in groups.values()]


ALONE = ("the server", "somebody on the wire", "a client")
"""Adversaries with nobody on their side."""


def at_a_glance(findings: Iterable[Finding]) -> dict[str, dict[str, Any]]:
    """What one adversary alone got of every asset, by the attack that got most: plain data, a line for each."""
    best: dict[str, Finding] = {}
    for one in best_of(finding for finding in findings if finding.adversary in ALONE and finding.attack != NOT_TRIED):
        best[one.asset] = min(best.get(one.asset, one), one, key=_rank)
    return {
        asset: {
            "who": one.adversary,
            "attack": one.attack,
            "seen": one.seen,
            "verdict": one.verdict,
            "got": one.text("value"),
            "chance": one.text("chance"),
            "unprotected": one.text("unprotected"),
            **{name: one.more[name] for name in ("exact", "auc") if name in one.more},
        }
        for asset, one in best.items()
    }


def _sentence(who: str, findings: Sequence[Finding]) -> str:
    parts = [
        _about(finding, [each for each in findings if each.asset == finding.asset]) for finding in best_of(findings)
    ]
    return f"{who[0].upper()}{who[1:]} {'; '.join(parts)}."


def _about(best: Finding, findings: Sequence[Finding]) -> str:
    """One asset: by the attack that got most, and what could not be tried where it got nothing."""
    said = _got(best)
    if (exact := best.more.get(KNOWN_FIRST)) is not None:
        said += f", and one that knew the first model would have {100 * exact:.1f} % of the numbers it became exactly"
    untried = [
        finding for finding in findings if finding.verdict in ("not applicable", "failed") and finding is not best
    ]
    if best.verdict in ("nothing", "not decided", "not effective") and untried:
        said += f" (not measured: {', '.join(dict.fromkeys(_untried(finding) for finding in untried))})"
    return said


def _untried(finding: Finding) -> str:
    return finding.reason.rstrip(".") if finding.attack == NOT_TRIED else f"{finding.attack} on {finding.seen}"


def _got(best: Finding) -> str:
    shown = best.shown
    figures = (
        f"({best.attack} on {best.seen}: {shown.get('value')}; chance {shown.get('chance')}, without protection "
        f"{shown.get('unprotected')})"
    )
    asset, words = best.asset, ASSETS[best.asset]
    if best.verdict == "as if unprotected":
        return f"{words.whole} {figures}"
    if best.verdict == "in part":
        return f"{words.part} {figures}"
    if best.verdict == "nothing":
        return f"{words.nothing} by these attacks {figures}"
    if best.verdict == "not decided":
        return f"was measured on {asset} with too few samples to decide {figures}"
    if best.verdict == "not effective":
        return f"gets nothing that says anything about {asset}: no attack is effective here even without protection"
    return f"was not measured on {asset}: {best.reason.rstrip('.') or best.verdict}"


def _rank(finding: Finding) -> tuple[int, float, float]:
    return ORDER.index(finding.verdict), -_reached(finding), -(finding.value or 0.0)


def _reached(finding: Finding) -> float:
    if (
        finding.value is None
        or finding.chance is None
        or finding.unprotected is None
        or finding.unprotected == finding.chance
    ):
        return 0.0
    return (finding.value - finding.chance) / (finding.unprotected - finding.chance)


FORMAT = "fedveil-audit-1"


class AuditStore:
    """Findings by trial in FOLDER/audit.json, pictures in FOLDER/pictures."""

    def __init__(self, folder: Path, *, identity: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "audit.json"
        self.pictures = folder / "pictures"
        self.findings: dict[str, Finding] = {}
        self.replaced = False
        self._identity = json.loads(json.dumps(identity))
        self._about = dict(about)
        self._sentences: dict[str, str] = {}
        self._own_code: dict[str, str] = {}
        if self.path.exists():
            stored = read_audit(self.path)
            if stored["identity"] == self._identity:
                self.findings = {finding.name: finding for finding in map(finding_from, stored["findings"])}
                self._own_code = {str(name): str(digest) for name, digest in stored.get("own", {}).items()}
            elif {**stored["identity"], "quick": True} == self._identity and stored["findings"]:
                raise ConfigError(
                    f"{self.path} holds a full audit of this run, which a quick one would replace: give another "
                    f"{spelled('out')}, or leave --quick out."
                )
            else:
                self.replaced = True

    def has(self, name: str, *, code: str = "") -> bool:
        """Whether a trial was made; one that failed to run is made again, and one whose attack is another code by now.

        `code` is the digest of a file that came with the command; the package's own attacks have none.
        """
        made = name in self.findings and self.findings[name].verdict != "failed"
        return made and self._own_code.get(name, "") == code

    def keep(self, finding: Finding, *, code: str = "") -> None:
        """Write a finding down."""
        self.findings[finding.name] = finding
        if code:
            self._own_code[finding.name] = code
        self._write()

    def conclude(self, sentences: Mapping[str, str]) -> None:
        """Write the verdict on each adversary down."""
        self._sentences = dict(sentences)
        self._write()

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "identity": self._identity,
            **self._about,
            "versions": {"fedveil": __version__, "torch": torch.__version__},
            **({"own": self._own_code} if self._own_code else {}),
            "adversaries": self._sentences,
            "findings": [asdict(finding) for finding in self.findings.values()],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_audit(path: Path) -> dict[str, Any]:
    """What an audit.json holds; anything else is refused."""
    try:
        content = read_named(path)
    except CheckpointError as reason:
        raise CheckpointError(f"{reason} Remove it to audit anew.") from reason
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no audit of this version. Remove it to audit anew.")
    findings = content.get("findings")
    plain = isinstance(content.get("identity"), dict) and isinstance(content.get("own", {}), dict)
    if not plain or not isinstance(findings, list):
        raise CheckpointError(f"{path} is damaged: it holds no findings. Remove it to audit anew.")
    return content


def finding_from(data: object) -> Finding:
    """A finding back from plain data."""
    own = {field.name for field in fields(Finding)}
    given = {name: value for name, value in data.items() if name in own} if isinstance(data, Mapping) else data
    try:
        return made(Finding, given, where="A finding of an audit")
    except CheckpointError as reason:
        raise CheckpointError(f"{reason} Remove audit.json to audit anew.") from reason
