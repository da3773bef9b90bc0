"""What a report is about, read from run folders, comparisons and audits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.ledger.statement import Ledger
from fedveil.plain import read_named
from fedveil.report.values import number
from fedveil.runs.folder import RunFolder
from fedveil.runs.ledger_file import read_ledger
from fedveil.trials.store import finding_from, read_audit
from fedveil.trials.trial import Finding

_COMPARE, _AUDIT = "compare.json", "audit.json"


@dataclass(frozen=True)
class Audited:
    """An audit: a sentence per adversary, findings, and where its pictures lie."""

    folder: Path
    scheme: str
    dataset: str
    model: str
    quick: bool
    sentences: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Run:
    """A run folder's content. Without a summary it has not ended."""

    folder: Path
    settings: Mapping[str, Any]
    toml: str
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    ledger: Ledger | None
    audit: Audited | None

    @property
    def scheme(self) -> str:
        """The scheme's name."""
        return str(self.settings.get("scheme", "unknown"))

    @property
    def seed(self) -> Any:
        """The seed, or None where secrets came from the operating system."""
        return self.settings.get("seed")

    @property
    def ended(self) -> bool:
        """Whether it trained to its end."""
        return bool(self.summary)

    @cached_property
    def last(self) -> Mapping[str, Any]:
        """The summary, or what the newest rows say of a run that has not ended."""
        if self.ended:
            return self.summary
        merged: dict[str, Any] = {}
        for row in self.rows:
            merged |= row
        return merged | {"train_loss": merged.get("loss"), "seconds": self.total("seconds")}

    def total(self, *names: str) -> float | None:
        """The sum of some figures over all rounds."""
        found = [value for row in self.rows for name in names if (value := number(row, name)) is not None]
        return sum(found) if found else None


@dataclass(frozen=True)
class Failure:
    """A run of a comparison that did not end well, and why."""

    scheme: str
    seed: Any
    reason: str


@dataclass(frozen=True)
class Material:
    """Everything a report is about."""

    runs: tuple[Run, ...]
    audits: tuple[Audited, ...]
    """Audits whose run is not there."""
    failures: tuple[Failure, ...]


def gather(sources: Sequence[Path]) -> Material:
    """Read every source; a folder named twice, or as a run and as its audit, is read once."""
    if not sources:
        raise ConfigError("Name what to report on: a run folder, a comparison's folder, or an audit's.")
    folders: list[Path] = []
    audits: list[Path] = []
    failures: list[Failure] = []
    for source in sources:
        place = source.parent if source.name in (_COMPARE, _AUDIT) and source.is_file() else source
        if (place / "config.toml").exists():
            folders.append(place)
        elif (place / _COMPARE).exists():
            inside, failed = _compared(place)
            folders += inside
            failures += failed
        elif (place / _AUDIT).exists():
            own = place.resolve().name == "audit" and (place.resolve().parent / "config.toml").exists()
            (folders if own else audits).append(place.resolve().parent if own else place)
        else:
            raise CheckpointError(
                f"There is nothing to report on at {source}: give a run folder (with config.toml), a comparison's "
                "folder (with compare.json) or an audit's (with audit.json)."
            )
    return Material(
        runs=tuple(_run(one) for one in _once(folders)),
        audits=tuple(_audit(one) for one in _once(audits)),
        failures=tuple(failures),
    )


def _once(folders: Iterable[Path]) -> list[Path]:
    return list({one.resolve(): one for one in reversed(list(folders))}.values())[::-1]


def _compared(place: Path) -> tuple[list[Path], list[Failure]]:
    """The run folders of a comparison, and what failed."""
    file = place / _COMPARE
    content = read_named(file)
    runs = content.get("runs")
    if not isinstance(runs, list) or not all(isinstance(one, dict) for one in runs):
        raise CheckpointError(f"{file} is damaged or not a comparison: it holds no list of runs.")
    folders, failures = [], []
    for one in runs:
        name = str(one.get("folder", ""))
        folder = place / name
        if not name or not folder.resolve().is_relative_to(place.resolve()):
            raise CheckpointError(f"{file} names a run outside its folder: {name!r}.")
        there = (folder / "config.toml").exists()
        if not one.get("ok", True) or not there:
            reason = str(one.get("reason") or ("it has not ended" if there else "its folder is gone"))
            failures.append(Failure(str(one.get("scheme", "unknown")), one.get("seed"), reason))
        else:
            folders.append(folder)
    return folders, failures


def _run(path: Path) -> Run:
    folder = RunFolder(path)
    ended = folder.summary_file.exists()
    rows = folder.metrics()
    try:
        toml = folder.config_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise CheckpointError(f"{folder.config_file} cannot be read: {reason}.") from reason
    return Run(
        folder=path,
        settings=RunConfig.read(folder.config_file),
        toml=toml,
        rows=tuple(rows),
        summary=read_named(folder.summary_file) if ended else {},
        ledger=read_ledger(path) if folder.ledger_file.exists() else None,
        audit=_audit(path / "audit") if (path / "audit" / _AUDIT).exists() else None,
    )


def _audit(folder: Path) -> Audited:
    content = read_audit(folder / _AUDIT)
    told = content.get("adversaries")
    return Audited(
        folder=folder,
        scheme=str(content.get("scheme", "unknown")),
        dataset=str(content.get("dataset", "unknown")),
        model=str(content.get("model", "unknown")),
        quick=bool(content["identity"].get("quick")),
        sentences=tuple(map(str, told.values())) if isinstance(told, dict) else (),
        findings=tuple(finding_from(one) for one in content["findings"]),
    )
