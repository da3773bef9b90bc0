"""Figures as they are read from files and as people read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.audit.findings import Finding, finding_from, read_audit
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.ledger.statement import Ledger, Line
from fedveil.plain import figure, legible_size, read_named, read_text
from fedveil.runs.folder import RunFolder, read_ledger, refuse_links
from fedveil.runs.judgement import Judgement, judgement_from

DASH = "–"
_LONG = 1000.0
_KEEP = "\u00a0"  # a space at which no line ends


def sentence(text: str) -> str:
    """A capital letter in front; names in code keep theirs."""
    return f"{text[0].upper()}{text[1:]}" if text else ""


def number(figures: Mapping[str, Any], name: str) -> float | None:
    """A figure by name; None where it is missing, no number, or not finite."""
    value = figures.get(name)
    return float(value) if figure(value) and math.isfinite(value) else None


def percent(value: float | None) -> str:
    """A share in percent."""
    return DASH if value is None else f"{100 * value:.1f} %"


def plain(value: float | None) -> str:
    """A number with four digits, or whole where it is long."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= _LONG else f"{value:.4g}"


def size(count: float | None) -> str:
    """Bytes in the unit a person reads, or a dash."""
    return DASH if count is None else legible_size(count)


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return DASH
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The mean, and the lowest and highest where there are several that differ; no figure loses its unit in a line."""
    if not values:
        return DASH
    mean, low, high = (
        shown(value).replace(" ", _KEEP) for value in (sum(values) / len(values), min(values), max(values))
    )
    if low == high:
        return mean
    lowest, _, unit = low.partition(_KEEP)
    return f"{mean} ({lowest if high.endswith(_KEEP + unit) else low}–{high})"


@dataclass(frozen=True)
class Grid:
    """A table: the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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

    @cached_property
    def judged(self) -> Judgement | None:
        """How good its model is; None of runs that were not judged."""
        judged = self.summary.get("judged")
        return None if judged is None else judgement_from(judged, where=str(self.folder))

    def total(self, *names: str) -> float | None:
        """The sum of some figures over all rounds."""
        values = [value for row in self.rows for name in names if (value := number(row, name)) is not None]
        return sum(values) if values else None


@dataclass(frozen=True)
class Failure:
    """A run of a comparison that did not end well, and why."""

    scheme: str
    seed: Any
    reason: str


@dataclass(frozen=True)
class ReportSources:
    """Everything a report is about."""

    runs: tuple[Run, ...]
    audits: tuple[Audited, ...]
    """Audits whose run is not there."""
    failures: tuple[Failure, ...]
    compared: tuple[Mapping[str, Any], ...] = ()
    """What comparisons found: the content of each compare.json."""


def gather(sources: Sequence[Path]) -> ReportSources:
    """Read every source; a folder named twice, or as a run and as its audit, is read once."""
    if not sources:
        raise ConfigError("Name what to report on: a run folder, a comparison's folder, or an audit's.")
    folders: list[Path] = []
    audits: list[Path] = []
    failures: list[Failure] = []
    compared: list[Mapping[str, Any]] = []
    for source in sources:
        place = source.parent if source.name in (_COMPARE, _AUDIT) and source.is_file() else source
        if (place / "config.toml").exists():
            folders.append(place)
        elif (place / _COMPARE).exists():
            content, inside, failed = _compared(place)
            compared.append(content)
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
    return ReportSources(
        runs=tuple(_run(folder) for folder in _once(folders)),
        audits=tuple(_audit(folder) for folder in _once(audits)),
        failures=tuple(failures),
        compared=tuple(compared),
    )


def _once(folders: Iterable[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in reversed(list(folders))}.values())[::-1]


def _compared(place: Path) -> tuple[dict[str, Any], list[Path], list[Failure]]:
    """What a comparison found, its run folders, and what failed."""
    file = place / _COMPARE
    content = read_named(file)
    runs = content.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise CheckpointError(f"{file} is damaged or not a comparison: it holds no list of runs.")
    folders, failures = [], []
    for run in runs:
        name = str(run.get("folder", ""))
        folder = place / name
        if not name or not folder.resolve().is_relative_to(place.resolve()):
            raise CheckpointError(f"{file} names a run outside its folder: {name!r}.")
        there = (folder / "config.toml").exists()
        if not run.get("ok", True) or not there:
            reason = str(run.get("reason") or ("it has not ended" if there else "its folder is gone"))
            failures.append(Failure(str(run.get("scheme", "unknown")), run.get("seed"), reason))
        else:
            folders.append(folder)
    return content, folders, failures


def _run(path: Path) -> Run:
    refuse_links(path)
    folder = RunFolder(path)
    rows = folder.metrics()
    return Run(
        folder=path,
        toml=read_text(folder.config_file),
        settings=RunConfig.read(folder.config_file),
        rows=tuple(rows),
        summary=folder.summary() or {},
        ledger=read_ledger(path) if folder.ledger_file.exists() else None,
        audit=_audit(path / "audit") if (path / "audit" / _AUDIT).exists() else None,
    )


def _audit(folder: Path) -> Audited:
    refuse_links(folder)
    content = read_audit(folder / _AUDIT)
    told = content.get("adversaries")
    return Audited(
        folder=folder,
        scheme=str(content.get("scheme", "unknown")),
        dataset=str(content.get("dataset", "unknown")),
        model=str(content.get("model", "unknown")),
        quick=bool(content["identity"].get("quick")),
        sentences=tuple(map(str, told.values())) if isinstance(told, dict) else (),
        findings=tuple(finding_from(finding) for finding in content["findings"]),
    )


_NO_MATTER = frozenset({"seed", "record", "record_rounds", "record_clients", "checkpoint_every", "evaluate_every"})
_UNPROVEN = {"none": 2, "aggregate only": 1, "ciphertexts only": 1}


@dataclass(frozen=True)
class Curve:
    """A figure over rounds: the mean over seeds, and the lowest and highest of them."""

    rounds: tuple[int, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "hexagon")
DASHES = (
    *("solid", "7px,4px", "2px,3px", "7px,3px,2px,3px", "12px,4px", "12px,3px,2px,3px", "4px,2px"),
    "12px,3px,2px,3px,2px,3px",
)


@dataclass(frozen=True)
class SourceGroup:
    """Runs of the same settings under several seeds; `slot` decides colour, dash and symbol."""

    label: str
    slot: int
    runs: tuple[Run, ...]

    @property
    def symbol(self) -> str:
        """The sign of its points."""
        return SYMBOLS[self.slot % len(SYMBOLS)]

    @property
    def dash(self) -> str:
        """How its lines are broken."""
        return DASHES[self.slot % len(DASHES)]

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
        values: dict[int, list[float]] = {row["round"]: [] for run in self.runs for row in run.rows}
        for run in self.runs:
            for row in run.rows:
                value = number(row, name)
                if value is not None:
                    values[row["round"]].append(value)
        rounds = tuple(sorted(values))
        every = [values[round] for round in rounds]
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
        known = [line for line in lines if line is not None]
        return max(known, key=_weakness) if known and len(known) == len(lines) else None


def line_of(run: Run, adversary: str) -> Line | None:
    """One adversary's line of a run's ledger."""
    lines = () if run.ledger is None else run.ledger.lines
    return next((line for line in lines if line.adversary == adversary), None)


def _weakness(line: Line | None) -> tuple[int, float]:
    if line is None:
        return (3, 0.0)
    return (_UNPROVEN.get(line.verdict, 0), line.epsilon or 0.0)


def grouped(runs: Sequence[Run]) -> tuple[SourceGroup, ...]:
    """Groups in the order their first runs were named; equal schemes are told apart by what differs."""
    parted: dict[str, list[Run]] = {}
    for run in runs:
        parted.setdefault(json.dumps(_settings(run), sort_keys=True, default=str), []).append(run)
    parts = list(parted.values())
    return tuple(SourceGroup(_label(part[0], parts), slot, tuple(part)) for slot, part in enumerate(parts))


def _settings(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.settings.items() if name not in _NO_MATTER}


def _label(run: Run, parts: Sequence[Sequence[Run]]) -> str:
    alike = [_settings(part[0]) for part in parts if part[0].scheme == run.scheme]
    own = _settings(run)
    names = dict.fromkeys(name for settings in alike for name in settings)
    differing = [name for name in names if any(settings.get(name) != own.get(name) for settings in alike)]
    told = [f"{name} {_told(own[name])}" for name in differing if own.get(name) is not None]
    return ", ".join([run.scheme, *told])


def _told(value: Any) -> str:
    return " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


# --- a comparison of all schemes, as one picture shows it

_GOT = {"as if unprotected": "all", "in part": "part", "nothing": "nothing"}


@dataclass(frozen=True)
class Spot:
    """A scheme in the picture: how often its model is right, with the interval; the rest by tables of `figures`."""

    label: str
    height: float
    low: float
    high: float
    costs: Mapping[str, float]
    proven: str
    given: str
    hidden: bool
    """Whether a client does not know most of the model's numbers."""


def spots_of(results: Mapping[str, Any]) -> list[Spot]:
    """Every scheme of a comparison (the content of compare.json) that was trained to tell classes, and attacked."""
    return [
        _spot(name, figures)
        for name, figures in results.get("schemes", {}).items()
        if figures.get("n") and "test_accuracy" in figures and "cost" in figures and "attacked" in figures
    ]


CAME_OFF = " †"
"""Behind the name of a scheme whose training came off: its accuracy tells of the learning rate."""


def _spot(name: str, figures: Mapping[str, Any]) -> Spot:
    cost, attacked, privacy = figures["cost"], figures["attacked"], figures["privacy"]
    judged, mean = figures.get("judged", {}).get("accuracy", {}), figures["test_accuracy"]["mean"]
    data, numbers = attacked.get("data"), attacked.get("the model's parameters", {})
    return Spot(
        f"{'= ' * ('slice' in cost)}{name}{CAME_OFF * ('came_off' in figures)}",
        mean,
        judged.get("low") or mean,
        judged.get("high") or mean,
        {
            "bytes": sum(cost.get(way, figures[way]["mean"]) for way in ("bytes_down", "bytes_up")),
            "seconds": cost["seconds"],
        },
        _proven(privacy),
        "unread" if data is None else _GOT.get(data["verdict"], "open"),
        numbers.get("exact", 1.0) < 0.5,
    )


def _proven(privacy: Mapping[str, Mapping[str, Any]]) -> str:
    server, clients = privacy.get("server", {}), privacy.get("clients", {})
    verdict = server.get("verdict")
    if verdict == "differential privacy":
        return "client" if str(server["unit"]).startswith("all data") else "record"
    if verdict in ("conditional", "estimate"):
        return "conditional"
    if verdict in ("aggregate only", "ciphertexts only"):
        return "sums"
    return "none" if clients.get("epsilon") is None else "clients"


def what_was_compared(results: Mapping[str, Any]) -> str:
    """Data, network, clients and rounds in a line."""
    common = results["common"]
    runs = [run["summary"] for run in results["runs"] if run.get("ok")]
    data = str(common["dataset"]).rstrip("/").rsplit("/", 1)[-1]
    samples = runs[0].get("data", {}).get("samples") if runs else None
    size_of = f" ({samples:,} samples)" if isinstance(samples, int) else ""
    numbers = f", {runs[0]['parameters']:,} parameters" if runs else ""
    return f"{data}{size_of}, {common['model']}{numbers}, {common['clients']} clients, {common['rounds']} rounds"
