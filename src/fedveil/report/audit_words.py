"""An audit's findings, ready to be read: tables per adversary, and pictures with words beside them."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from fedveil.errors import CheckpointError
from fedveil.report.sources import Audited
from fedveil.report.values import DASH
from fedveil.trials.pictures import RECORDS, ROWS
from fedveil.trials.trial import NOT_TRIED, Finding
from fedveil.trials.words import CAVEAT, SHORT

_TONE = {"as if unprotected": "bad", "in part": "fair", "nothing": "good"}
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIGINALS = "data"
_READING = {
    "Original": "The more a picture looks like the original above it, the more was got.",
    "Got from this run": "There is no original: the clearer each shows a class, the more was got.",
}
_LABELS = {ROWS[0]: "Original", ROWS[1]: "Got from this run", ROWS[2]: "Got without protection"}


@dataclass(frozen=True)
class Row:
    """One attack's figures."""

    attack: str
    adaptive: bool
    gets: str
    chance: str
    unprotected: str
    verdict: str
    tone: str
    reason: str


@dataclass(frozen=True)
class Table:
    """Who is after what, from what."""

    title: str
    rows: tuple[Row, ...]


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
    tables: tuple[Table, ...]
    sheets: tuple[Sheet, ...]
    left_out: int
    """How many pictures are not shown, since they hold clients' records."""
    holds_records: bool
    caveat: str = CAVEAT


def audit_view(audit: Audited, *, with_records: bool) -> AuditView:
    """Everything an audit found; its pictures become part of the page, clients' records only where asked for."""
    pictured = [one for one in audit.findings if one.pictures]
    shown = [one for one in pictured if with_records or not _holds_records(one)]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in audit.findings:
        if one.attack != NOT_TRIED:
            groups.setdefault((one.adversary, one.asset, one.seen), []).append(one)
    return AuditView(
        quick=audit.quick,
        sentences=audit.sentences,
        tables=tuple(
            Table(f"{_capital(who)}, after {asset}, from {seen}", tuple(map(_row, found)))
            for (who, asset, seen), found in groups.items()
        ),
        sheets=tuple(_sheet(one, audit.folder / "pictures") for one in shown),
        left_out=len(pictured) - len(shown),
        holds_records=any(map(_holds_records, shown)),
    )


def _holds_records(one: Finding) -> bool:
    """Whether a picture shows samples of clients, or what was rebuilt of them."""
    return one.asset == _ORIGINALS or one.pictures.endswith(RECORDS)


def _row(one: Finding) -> Row:
    return Row(
        attack=one.attack,
        adaptive=one.adaptive,
        gets=_figure(one),
        chance=one.shown.get("chance", DASH),
        unprotected=one.shown.get("unprotected", DASH),
        verdict=SHORT[one.verdict],
        tone=_TONE.get(one.verdict, "mute"),
        reason=one.reason,
    )


def _figure(one: Finding) -> str:
    value = one.shown.get("value", DASH)
    if one.low is None or one.high is None or value == DASH:
        return value
    return f"{value} [{100 * one.low:.0f}–{100 * one.high:.0f}]"


def _sheet(one: Finding, folder: Path) -> Sheet:
    rows = tuple(_LABELS[name] for name in (ROWS if one.asset == _ORIGINALS else ROWS[1:]))
    file = folder / Path(one.pictures).name  # never a path of the file's choosing
    try:
        raw = file.read_bytes()
    except OSError as reason:
        raise CheckpointError(f"A picture of the audit is missing: {file}. Audit the run anew.") from reason
    if not raw.startswith(_PNG):
        raise CheckpointError(f"{file} is not a PNG picture. Audit the run anew.")
    shown = one.shown
    figures = (
        f"{one.figure}: {shown.get('value', DASH)}; by chance {shown.get('chance', DASH)}, without protection "
        f"{shown.get('unprotected', DASH)}: {SHORT[one.verdict]}."
    )
    return Sheet(
        title=f"{_capital(one.adversary)}, {one.attack}{' *' * one.adaptive}, on {one.seen}",
        source=f"data:image/png;base64,{base64.b64encode(raw).decode()}",
        rows=rows,
        alternative=(
            f"Pictures in {len(rows)} rows, from the top: {', '.join(rows).lower()}. {_capital(one.adversary)} used "
            f"the attack {one.attack} on {one.seen}. {_capital(figures)}"
        ),
        reading=f"{_capital(figures)} {_READING[rows[0]]}",
    )


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
