"""Ledgers and audits in words that need no training in mathematics, and how good models are."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.audit.findings import CAVEAT, SHORT, TAKEN_OUT, Finding, by_adversary
from fedveil.audit.pictures import RECORDS, ROWS
from fedveil.errors import CheckpointError
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER
from fedveil.ledger.statement import OUTSIDER, Ledger, Line, PaperFigure
from fedveil.plain import read_raw
from fedveil.report.figures import Figure, label
from fedveil.report.sources import DASH, Audited, Grid, Run, SourceGroup, plain, sentence, spread
from fedveil.runs.judgement import TITLES, Judgement, Subset, shown, told

_WHO = {
    SERVER: "The server that runs the training",
    COLLUSION: "The server with clients on its side",
    CLIENTS: "The other clients",
    OUTSIDER: "Somebody who reads every message",
}
SHORT_WHO = {
    SERVER: "the server",
    COLLUSION: "the server with clients",
    CLIENTS: "other clients",
    OUTSIDER: "outsiders",
}
_TONE = {"differential privacy": "good", "conditional": "fair", "estimate": "fair", "none": "bad"}
_VERDICT = {
    "differential privacy": "Proven",
    "conditional": "Proven under a condition",
    "estimate": "Estimated, not proven",
    "aggregate only": "Only sums are seen",
    "ciphertexts only": "Only ciphertexts are seen",
    "none": "Nothing is proven",
}
_PROTECTED = {
    "aggregate only": "What each single client sends",
    "ciphertexts only": "Everything that clients send",
    "none": "Nothing",
}
_LEFT = {
    "differential privacy": "What many records share is not hidden, and several records together less than one.",
    "conditional": "What follows from the hidden part is outside this figure.",
    "estimate": "The figure may be too low.",
    "aggregate only": "The sums are open, and so is whatever follows from them: there is no (ε, δ).",
    "ciphertexts only": "Who takes part, when, and how much is sent.",
    "none": "Clients' data may leak to this party without any limit that we could name.",
}
_USELESS = 1e6
_OF_OUTSIDERS = "who reads every message: "
_FIELDS = {
    "upload.gradients": "what each client's data change in the model (gradients)",
    "upload.values": "the loss on each client's data",
    "upload.statistics": "averages inside the network over each client's data",
    "upload.weight": "the numbers of samples",
    "vote.tags": "votes for the parameters that changed most",
}


@dataclass(frozen=True)
class LedgerEntry:
    """One party's line, ready to be read."""

    who: str
    short: str
    protected: str
    tone: str
    verdict: str
    figure: str
    meaning: str
    relation: str
    others: str
    assumptions: tuple[str, ...]
    sees: str
    left: str


@dataclass(frozen=True)
class Claim:
    """The paper's claim beside what holds."""

    formula: str
    claimed: str
    holds: str
    noise: str


_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|dB|[kMGT]?B|ms|s|min|h|σ)(?:\W|$))|(?<=[=≤≥<>≈±]) (?=[\d−-])|(?<=[εδσμ]) (?==)")
_WITHIN = re.compile(r"(?<=\d)–(?=\d)|(?<=\de)-(?=\d)")


def whole(text: str) -> str:
    """A text in which no line ends within a number: not before its unit, and not within an interval."""
    return _WITHIN.sub("\u2060\\g<0>\u2060", _UNIT.sub("\u00a0", text))


def entry(line: Line) -> LedgerEntry:
    """A line in words."""
    worst = "" if line.worst_client is None else f" Client {line.worst_client} is worst off, and the figure is its."
    unit = line.unit or _PROTECTED.get(line.verdict, line.verdict)
    return LedgerEntry(
        who=_WHO.get(line.adversary, line.adversary),
        short=SHORT_WHO.get(line.adversary, line.adversary),
        protected=sentence(unit),
        tone=_TONE.get(line.verdict, "fair"),
        verdict=_VERDICT.get(line.verdict, line.verdict),
        figure=" ".join(line.result.split()) if line.epsilon is not None else "no (ε, δ)",
        meaning=_meaning(line),
        relation=sentence(line.relation),
        others=f"{sentence(line.add_remove)}." if line.add_remove else "",
        assumptions=tuple(map(sentence, line.assumptions)),
        sees=f"{sentence(_seen(line.why))}.{worst}",
        left=_LEFT.get(line.verdict, ""),
    )


def _seen(why: str) -> str:
    """What a party sees, without the protocol's names for it."""
    for field, words in _FIELDS.items():
        why = why.replace(field, words)
    return why.removeprefix(_OF_OUTSIDERS)


def _meaning(line: Line) -> str:
    """ε as a factor between chances."""
    if line.epsilon is None or line.delta is None:
        return ""
    factor = math.exp(line.epsilon) if line.epsilon < 700 else math.inf
    if factor > _USELESS:
        return "A factor beyond a million: in practice no limit at all."
    what = "all of a client's data" if line.unit.startswith("all data") else "one record"
    return (
        f"Replacing {what} makes nothing this party sees more than {plain(factor)} times as likely, apart from "
        f"a chance of {line.delta:g}."
    )


def claim(ledger: Ledger) -> Claim | None:
    """The paper's own figure beside what this run's account says."""
    paper = ledger.paper
    if paper is None:
        return None
    line = next((line for line in ledger.lines if line.adversary == SERVER), None)
    known = next((told for told in (line, *ledger.lines) if told is not None and told.epsilon is not None), line)
    return Claim(
        formula=paper.formula,
        claimed="no ε" if paper.claimed_epsilon is None else f"ε = {plain(paper.claimed_epsilon)}",
        holds="nothing is proven" if known is None else _holds(known),
        noise=_noise(paper),
    )


def _holds(line: Line) -> str:
    what = entry(line)
    figure = what.verdict.lower() if line.epsilon is None else what.figure
    return f"{figure}, against {what.short}"


def _noise(paper: PaperFigure) -> str:
    if paper.noise_by_paper is None or paper.noise_used is None or paper.saving is None:
        return ""
    beside = f"{100 * abs(paper.saving):.1f} % {'less' if paper.saving > 0 else 'more'}"
    if paper.noise_used >= 10 * paper.noise_by_paper:
        beside = f"{paper.noise_used / paper.noise_by_paper:,.0f} times as much"
    return f"σ = {plain(paper.noise_by_paper)} by the paper, σ = {plain(paper.noise_used)} used here ({beside})"


_TRIAL_TONE = {"as if unprotected": "bad", "in part": "fair", "nothing": "good"}
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIGINALS = "data"
_READING = {
    "Original": "The more a picture looks like the original above it, the more was got.",
    "Got from this run": "There is no original: the clearer each shows a class, the more was got.",
}
_LABELS = {ROWS[0]: "Original", ROWS[1]: "Got from this run", ROWS[2]: "Got without protection"}


@dataclass(frozen=True)
class VerdictRow:
    """One attack's figures: of an audit, or of a paper's table."""

    attack: str
    adaptive: bool
    gets: str
    chance: str
    unprotected: str
    verdict: str
    tone: str = "mute"
    reason: str = ""
    taken_out: int = 0


@dataclass(frozen=True)
class Sheet:
    """A picture with the names of its rows."""

    title: str
    source: str
    rows: tuple[str, ...]
    alternative: str
    reading: str


@dataclass(frozen=True)
class AuditView:
    """An audit as the page shows it."""

    quick: bool
    sentences: tuple[str, ...]
    tables: tuple[tuple[str, tuple[VerdictRow, ...]], ...]
    """By who is after what, from what."""
    sheets: tuple[Sheet, ...]
    left_out: int
    """How many pictures are not shown, since they hold clients' records."""
    holds_records: bool
    taken_out: str = ""
    """What was taken out, in words, where something was."""
    caveat: str = CAVEAT


def audit_view(audit: Audited, *, with_records: bool) -> AuditView:
    """Everything an audit found; its pictures become part of the page, clients' records only where asked for."""
    pictured = [finding for finding in audit.findings if finding.pictures]
    shown = [finding for finding in pictured if with_records or not _holds_records(finding)]
    return AuditView(
        quick=audit.quick,
        sentences=audit.sentences,
        tables=tuple((title, tuple(map(_row, each))) for title, each in by_adversary(audit.findings).items()),
        sheets=tuple(_sheet(finding, audit.folder / "pictures") for finding in shown),
        left_out=len(pictured) - len(shown),
        holds_records=any(map(_holds_records, shown)),
        taken_out=TAKEN_OUT if any(finding.taken_out for finding in audit.findings) else "",
    )


def _holds_records(finding: Finding) -> bool:
    """Whether a picture shows samples of clients, or what was rebuilt of them."""
    return finding.asset == _ORIGINALS or finding.pictures.endswith(RECORDS)


def _row(finding: Finding) -> VerdictRow:
    return VerdictRow(
        attack=finding.attack,
        adaptive=finding.adaptive,
        gets=finding.text("value"),
        chance=finding.text("chance"),
        unprotected=finding.text("unprotected"),
        taken_out=finding.taken_out,
        verdict=SHORT[finding.verdict],
        tone=_TRIAL_TONE.get(finding.verdict, "mute"),
        reason=finding.reason,
    )


def _sheet(finding: Finding, folder: Path) -> Sheet:
    rows = tuple(_LABELS[name] for name in (ROWS if finding.asset == _ORIGINALS else ROWS[1:]))
    file = folder / Path(finding.pictures).name  # never a path of the file's choosing
    try:
        raw = read_raw(file)
    except CheckpointError as reason:
        raise CheckpointError(f"A picture of the audit is missing: {file}. Audit the run anew.") from reason
    if not raw.startswith(_PNG):
        raise CheckpointError(f"{file} is not a PNG picture. Audit the run anew.")
    shown = finding.shown
    figures = (
        f"{finding.figure}: {shown.get('value', DASH)}; by chance {shown.get('chance', DASH)}, without protection "
        f"{shown.get('unprotected', DASH)}: {SHORT[finding.verdict]}."
    )
    return Sheet(
        title=f"{sentence(finding.adversary)}, {finding.attack}{' *' * finding.adaptive}, on {finding.seen}",
        source=f"data:image/png;base64,{base64.b64encode(raw).decode()}",
        rows=rows,
        alternative=(
            f"Pictures in {len(rows)} rows, from the top: {', '.join(rows).lower()}. {sentence(finding.adversary)} "
            f"used the attack {finding.attack} on {finding.seen}. {sentence(figures)}"
        ),
        reading=f"{sentence(figures)} {_READING[rows[0]]}",
    )


# --- how good models are, as the page shows it: figures with intervals, by class and by group, and what is mistaken

_MOST_CONFUSED = 25  # classes of a table that can still be read
_KEEP = "\u00a0"
_JOIN = "\u2060"  # no line ends beside it


@dataclass(frozen=True)
class JudgedView:
    """One group's judgement: that of its only run, or of the run that is worst off."""

    label: str
    note: str
    judged: Judgement
    figures: Grid
    classes: Grid
    parts: Grid
    confusion: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    """By true class: how many samples got each answer, and which share of the class that is."""


def judged_views(groups: Sequence[SourceGroup]) -> tuple[JudgedView, ...]:
    """Every group of which a run was judged."""
    return tuple(_view(group, run, run.judged) for group in groups if (run := _worst(group)) and run.judged)


def _worst(group: SourceGroup) -> Run | None:
    """The run whose deciding figure is lowest, or has none."""
    judged = [(run, run.judged.figures[run.judged.primary].value) for run in group.runs if run.judged is not None]
    return min(judged, key=lambda pair: -1e300 if pair[1] is None else pair[1])[0] if judged else None


def _view(group: SourceGroup, run: Run, judged: Judgement) -> JudgedView:
    several = f"of the seed that is worst off ({run.seed})" if len(group.runs) > 1 else ""
    rows = tuple(
        (
            sentence(judged.title(name)),
            _whole(told(name, figure)) if figure.value is not None else f"{DASH} ({figure.reason})",
            _whole(shown(name, figure.baseline)),
            figure.interval or DASH,
        )
        for name, figure in judged.figures.items()
    )
    names = [part.name for part in judged.classes]
    shares = [(row, max(sum(row), 1)) for row in judged.confusion]
    return JudgedView(
        label=group.label,
        note=several,
        judged=judged,
        figures=Grid(
            ("Figure", "This model [95\u00a0% interval]", sentence(judged.constant_answer), "Interval by"), rows
        ),
        classes=_subsets("Label" if judged.task == "multilabel" else "Class", judged.classes),
        parts=_subsets(sentence(judged.parted_by), judged.parts),
        confusion=tuple(
            (name, tuple((count, count / size) for count in row))
            for name, (row, size) in zip(names, shares, strict=True)
        )
        if 0 < len(shares) <= _MOST_CONFUSED
        else (),
    )


def _subsets(what: str, subsets: Sequence[Subset]) -> Grid:
    names = list(dict.fromkeys(name for subset in subsets for name in subset.figures))
    rows = tuple(
        (
            subset.name,
            str(subset.samples),
            *(_whole(told(name, subset.figures[name])) if name in subset.figures else DASH for name in names),
        )
        for subset in subsets
    )
    return Grid((what, "Samples", *(_title(name) for name in names)), rows)


def judged_table(groups: Sequence[SourceGroup]) -> Grid:
    """Schemes side by side: means over seeds with the lowest and highest, or an interval; the constant answer below."""
    names = list(dict.fromkeys(name for judged in _judged(groups) for name in judged.figures))
    rows = [(group.label, *(_measured(group, name) for name in names)) for group in groups]
    beside = [constant_answer(groups, name) for name in names]
    rows += [(beside[0][0], *(figure for _, figure in beside))] if beside else []
    return Grid(("Scheme", *(_title(name) for name in names)), tuple(rows))


def _judged(groups: Sequence[SourceGroup]) -> list[Judgement]:
    return [judged for group in groups for run in group.runs if (judged := run.judged) is not None]


def constant_answer(groups: Sequence[SourceGroup], name: str) -> tuple[str, str]:
    """The best constant answer and what it gets; splits differ between seeds, and so does that."""
    judged = _judged(groups)
    answers = {sentence(each.constant_answer) for each in judged}
    figures = [each.figures[name].baseline for each in judged if name in each.figures]
    return (
        answers.pop() if len(answers) == 1 else "A constant answer",
        spread([value for value in figures if value is not None], lambda value: shown(name, value)),
    )


def _measured(group: SourceGroup, name: str) -> str:
    figures = [run.judged.figures[name] for run in group.runs if run.judged is not None and name in run.judged.figures]
    if len(figures) == 1:
        return _whole(told(name, figures[0]))
    values = [figure.value for figure in figures if figure.value is not None]
    return spread(values, lambda value: shown(name, value))


def reliability(groups: Sequence[SourceGroup]) -> Figure | None:
    """How often answers are right, by how sure the model is of them."""
    lines, told_of = [], []
    for group in groups:
        run = _worst(group)
        judged = None if run is None else run.judged
        if judged is None or not judged.reliability:
            continue
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(group),
                "x": [each.confidence for each in judged.reliability],
                "y": [each.accuracy for each in judged.reliability],
                "customdata": [
                    f"{each.confidence:.0%} sure, {each.accuracy:.0%} right, {each.samples} samples"
                    for each in judged.reliability
                ],
                "hovertemplate": "%{customdata}",
                "line": {"width": 2, "dash": group.dash},
                "marker": {"size": 6, "symbol": group.symbol},
                "meta": {"slot": group.slot, "role": "line"},
            }
        )
        told_of.append(f"{group.label} is off by {shown('ece', judged.figures['ece'].value)} on average")
    if not lines:
        return None
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "name": "as sure as right",
        "x": [0, 1],
        "y": [0, 1],
        "line": {"width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {"slot": None, "role": "front"},
    }
    axis = {"tickformat": ".0%", "range": [0, 1.02]}
    return Figure(
        name="reliability",
        title="Sure and right",
        reading="Answers by how sure the model is of them. On the dotted line it is right as often as it says; below "
        "it, it is too sure.",
        alternative=f"Line chart of how often answers are right by confidence: {'; '.join(told_of)}.",
        drawing={
            "data": [diagonal, *lines],
            "layout": {
                "xaxis": {"title": {"text": "How sure"}, **axis},
                "yaxis": {"title": {"text": "How often right"}, **axis},
                "hovermode": "closest",
            },
        },
    )


def _title(name: str) -> str:
    return sentence(TITLES[name])


def _whole(text: str) -> str:
    """A figure keeps its unit in one line; its interval, whole too, may go to the next."""
    return text.replace(" %", f"{_KEEP}%").replace("–", f"{_JOIN}–{_JOIN}").replace(" to ", f"{_KEEP}to{_KEEP}")
