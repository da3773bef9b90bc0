"""The page: what it shows of its sources, and one HTML file that needs nothing else, no network and no other file."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedveil.config import RunConfig
from fedveil.errors import ConfigError, missing_extra
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER
from fedveil.ledger.statement import Ledger
from fedveil.plain import IN_PYTHON, parse_model_options
from fedveil.report.figures import Figure, Worth, curves, overview, trade_offs, worth_of
from fedveil.report.sources import (
    DASH,
    Audited,
    Failure,
    Grid,
    ReportSources,
    Run,
    SourceGroup,
    duration,
    gather,
    grouped,
    number,
    percent,
    plain,
    size,
    spread,
)
from fedveil.report.words import (
    AuditView,
    Claim,
    JudgedView,
    LedgerEntry,
    audit_view,
    claim,
    constant_answer,
    entry,
    judged_table,
    judged_views,
    reliability,
    whole,
)
from fedveil.runs.folder import write_atomically
from fedveil.version import __version__

_ALWAYS = ("scheme", "dataset", "model", "clients", "rounds")
_TABLES = {"model_options": "-o", "options": "--set"}
_COLUMNS = ("What a client's copy gets", "… noise taken off", "Down", "Up", "Time")


def command_for(settings: Mapping[str, Any], *, out: str) -> str:
    """`fedveil run …` with every setting that is not the default; "" for a run that was started from Python."""
    if settings.get("dataset") == IN_PYTHON:
        return ""
    words = ["fedveil", "run"]
    for setting in dataclasses.fields(RunConfig):
        if setting.name in _TABLES or setting.name not in settings:
            continue
        value = settings[setting.name]
        if setting.name in _ALWAYS or value != setting.default:
            words += _flag(setting.name, value)
    for table, flag in _TABLES.items():
        options = settings.get(table)
        for key, value in options.items() if isinstance(options, Mapping) else ():
            words += [flag, f"{key}={_option(value)}"]
    return shlex.join([*words, "--out", out])


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def _option(value: Any) -> str:
    """A model option as it is typed: bare where that reads back as the same."""
    if isinstance(value, bool):
        return str(value).lower()
    bare = str(value)
    return bare if parse_model_options([f"k={bare}"])["k"] == value else json.dumps(value, ensure_ascii=False)


Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class LedgerView:
    """A group's ledger in words; `glance` is against the server, it with clients, the other clients."""

    label: str
    note: str
    ledger: Ledger
    glance: tuple[LedgerEntry | None, ...]
    entries: tuple[LedgerEntry, ...]
    claim: Claim | None

    @property
    def assumed(self) -> tuple[str, ...]:
        """What every line assumes that assumes anything: said once."""
        lines = [entry.assumptions for entry in self.entries if entry.assumptions]
        return tuple(each for each in lines[0] if all(each in line for line in lines)) if lines else ()


@dataclass(frozen=True)
class Again:
    """How to get one group's runs again."""

    label: str
    commands: tuple[str, ...]
    facts: Pairs
    toml: str
    python: bool
    flower: bool


@dataclass(frozen=True)
class Page:
    """The page."""

    title: str
    lead: str
    simulated: bool
    tiles: Pairs
    results: Grid
    warnings: tuple[str, ...]
    failures: tuple[Failure, ...]
    common: Pairs
    """What all groups were trained with."""
    own: Grid
    """What differs between them."""
    groups: tuple[SourceGroup, ...]
    judged: tuple[JudgedView, ...]
    side_by_side: Grid
    """The judged figures of several groups."""
    reliability: Figure | None
    curves: tuple[Figure, ...]
    trade_offs: tuple[Figure, ...]
    ledgers: tuple[LedgerView, ...]
    without_ledger: tuple[str, ...]
    audits: tuple[tuple[str, AuditView], ...]
    again: tuple[Again, ...]

    @property
    def holds_records(self) -> bool:
        """Whether the page shows samples of clients, or what was rebuilt of them."""
        return any(audit.holds_records for _, audit in self.audits)


def view_of(material: ReportSources, *, with_records: bool = False) -> Page:
    """The page about what was gathered; samples of clients, and what was rebuilt of them, only where asked for."""
    groups = grouped(material.runs)
    worth = worth_of(groups)
    common, own = _shared({group.label: _trained(group) for group in groups})
    audited = [(_run_label(run, groups), run.audit) for run in material.runs if run.audit is not None]
    audited += [(f"{audit.scheme} on {audit.dataset}", audit) for audit in material.audits]
    return Page(
        title=_title(groups, material.audits),
        lead=_lead(material.runs),
        simulated=any(run.ledger is not None and run.ledger.simulation for run in material.runs),
        tiles=_tiles(groups[0], worth) if len(groups) == 1 else (),
        results=Grid(("Scheme", "Runs", worth.title, *_COLUMNS), _results(groups, worth)),
        warnings=tuple(_warnings(material.runs, groups)),
        failures=material.failures,
        common=common,
        own=own,
        groups=groups,
        judged=judged_views(groups),
        side_by_side=judged_table(groups),
        reliability=reliability(groups),
        curves=tuple(curves(groups)),
        trade_offs=(
            *(
                figure
                for compared in material.compared
                for figure in overview(compared, {group.label: group.slot for group in groups})
            ),
            *trade_offs(groups),
        ),
        ledgers=tuple(made for group in groups if (made := _ledger(group)) is not None),
        without_ledger=tuple(group.label for group in groups if group.worst.ledger is None),
        audits=tuple((label, audit_view(audit, with_records=with_records)) for label, audit in audited),
        again=tuple(map(_again, groups)),
    )


def _title(groups: Sequence[SourceGroup], audits: Sequence[Audited]) -> str:
    datasets = list(dict.fromkeys(str(group.runs[0].settings.get("dataset", "unknown")) for group in groups))
    data = datasets[0].rstrip("/").rsplit("/", 1)[-1] if len(datasets) == 1 else f"{len(datasets)} data sets"
    if len(groups) > 1:
        return f"{len(groups)} schemes on {data}"
    if groups:
        return f"{groups[0].label} on {data}"
    return " and ".join(f"An audit of {audit.scheme} on {audit.dataset}" for audit in audits)


def _lead(runs: Sequence[Run]) -> str:
    clients = {_text(run.last.get("clients", run.settings.get("clients"))) for run in runs}
    rounds = {_text(run.last.get("rounds", run.last.get("round"))) for run in runs}
    models = {_text(run.settings.get("model")) for run in runs}
    seeds = list(dict.fromkeys(_text(run.seed) for run in runs))
    told = []
    for values, what in ((models, "model"), (clients, "clients"), (rounds, "rounds")):
        if len(values) == 1:
            (value,) = values
            told.append(f"{what} {value}" if what == "model" else f"{value} {what}")
    if seeds:
        told.append("no seed" if seeds == [DASH] else f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}")
    return " · ".join(told)


def _tiles(group: SourceGroup, worth: Worth) -> Pairs:
    line = group.line(SERVER)
    held = DASH if line is None else (plain(line.epsilon) if line.epsilon is not None else "none proven")
    if line is not None and (other := line.add_remove_epsilon) is not None:
        held += f" (add/remove: {plain(other)})"
    return (
        (worth.title, spread(group.values(worth.name), worth.shown)),
        ("ε against the server", held),
        ("Sent up per client and round", spread(group.values("bytes_up"), size)),
        ("Time", spread(group.values("seconds"), duration)),
    )


def _results(groups: Sequence[SourceGroup], worth: Worth) -> tuple[tuple[str, ...], ...]:
    """A row for each group, and below what the best constant answer gets, where that was judged."""
    rows = tuple(_result(group, worth) for group in groups)
    name = worth.name.removeprefix("test_")
    answer, figure = constant_answer(groups, name)
    return rows if figure == DASH else (*rows, (answer, DASH, figure, *(DASH,) * len(_COLUMNS)))


def _result(group: SourceGroup, worth: Worth) -> tuple[str, ...]:
    kind = "accuracy" if worth.higher else "mse"
    return (
        group.label,
        str(len(group.runs)),
        spread(group.values(worth.name), worth.shown),
        spread(group.values(f"client_view_{kind}"), worth.shown),
        spread(group.values(f"client_view_uncovered_{kind}"), worth.shown),
        spread(group.values("bytes_down"), size),
        spread(group.values("bytes_up"), size),
        spread(group.values("seconds"), duration),
    )


def _warnings(runs: Sequence[Run], groups: Sequence[SourceGroup]) -> list[str]:
    warnings = []
    for run in runs:
        label = _run_label(run, groups)
        if not run.ended:
            warnings.append(f"{label} has not ended: figures are those of its {len(run.rows)} rounds so far.")
        if "stopped" in run.summary:
            warnings.append(f"{label} ended early: {run.summary['stopped']}")
        if "warning" in run.summary:
            warnings.append(f"{label}: {run.summary['warning'].rstrip('.')}.")
        if run.judged is not None and not run.judged.beats_baseline:
            warnings.append(f"{label}: {run.judged.verdict}")
        failed = number(run.summary, "failed_rounds")
        if failed:
            warnings.append(f"{label}: {failed:.0f} of its rounds failed and moved nothing.")
    return warnings


def _run_label(run: Run, groups: Sequence[SourceGroup]) -> str:
    group = next(group for group in groups if run in group.runs)
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {_text(run.seed)}"


def _shared(trained: Mapping[str, Mapping[str, str]]) -> tuple[Pairs, Grid]:
    """What is the same for all groups, and a table of the rest."""
    names = dict.fromkeys(name for settings in trained.values() for name in settings)
    values = {name: [settings.get(name, DASH) for settings in trained.values()] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    common = tuple((name, values[name][0]) for name in names if name not in differing)
    columns = [name for name in differing if name != "Scheme"]
    rows = tuple((label, *(settings.get(name, DASH) for name in columns)) for label, settings in trained.items())
    return common, Grid(("Scheme", *columns), rows if columns else ())


def _trained(group: SourceGroup) -> dict[str, str]:
    run = group.runs[0]
    last, settings = run.last, run.settings
    options = settings.get("model_options")
    chosen = ", ".join(f"{key} = {value}" for key, value in options.items()) if isinstance(options, dict) else ""
    holder = {"server": "the server", "clients": "the clients; the server never has it"}
    machines = "clients on machines of their own (Flower)"
    engine = machines if last.get("engine") == "flower" else "all clients simulated on it"
    pairs = [
        ("Scheme", run.scheme),
        ("Data", _text(settings.get("dataset"))),
        ("How it is divided", _text(settings.get("partition"))),
        ("Model", _text(settings.get("model")) + (f" ({chosen})" if chosen else "")),
        ("Parameters", plain(number(last, "parameters"))),
        ("Parameters hidden", _hidden(last)),
        ("Who holds the model", holder.get(str(last.get("holder")), "")),
        ("Clients", _text(last.get("clients", settings.get("clients")))),
        ("Rounds", f"{_text(last.get('rounds', last.get('round')))} of {_text(settings.get('rounds'))}"),
        ("Loss", _text(last.get("loss")) if run.ended else ""),
        ("By clients' held-back samples", _by_clients(last)),
        ("Seeds" if len(group.runs) > 1 else "Seed", ", ".join(_text(run.seed) for run in group.runs)),
        ("Machine", f"{_text(settings.get('device'))}, {_text(settings.get('dtype'))}, {engine}"),
    ]
    return {name: value for name, value in pairs if value}


def _by_clients(last: Mapping[str, Any]) -> str:
    """What clients say together of the model, by samples that they held back."""
    named = {"accuracy": percent, "mse": plain, "loss": plain}
    told = [(name, number(last, f"client_test_{name}")) for name in named]
    figures = [f"{name} {named[name](value)}" for name, value in told if value is not None]
    samples = number(last, "client_test_samples")
    return f"{', '.join(figures)}, of {samples:.0f} samples" if figures and samples is not None else ""


def _hidden(last: Mapping[str, Any]) -> str:
    """How much of the model a veil hides, and how: up to scale, or by the levels of its family."""
    share, levels = number(last, "coverage"), last.get("levels")
    if not share:
        return "" if share is None else percent(share)
    if not isinstance(levels, dict):
        return f"{percent(share)}, up to scale"
    shares = ((name, number(levels, name)) for name in ("moved", "signed", "scaled", "mixed"))
    family = f" (family {_text(last['family'])})" if "family" in last else ""
    return f"{percent(share)}: {', '.join(f'{percent(part)} {name}' for name, part in shares if part)}{family}"


def _ledger(group: SourceGroup) -> LedgerView | None:
    ledger = group.worst.ledger
    if ledger is None:
        return None
    several = f"of the seed that is worst off ({_text(group.worst.seed)})" if len(group.runs) > 1 else ""
    lines = [group.line(adversary) for adversary in (SERVER, COLLUSION, CLIENTS)]
    return LedgerView(
        label=group.label,
        note=several,
        ledger=ledger,
        glance=tuple(None if line is None else entry(line) for line in lines),
        entries=tuple(map(entry, ledger.lines)),
        claim=claim(ledger),
    )


def _again(group: SourceGroup) -> Again:
    run = group.runs[0]
    out = f"runs/{group.scheme}"
    names = [out if len(group.runs) == 1 else f"{out}-{_text(run.seed)}" for run in group.runs]
    commands = (command_for(run.settings, out=name) for run, name in zip(group.runs, names, strict=True))
    facts = [
        ("FedVeil", "fedveil"),
        ("PyTorch", "torch"),
        ("Python", "python"),
        ("Device", "device"),
        ("Engine", "engine"),
    ]
    return Again(
        label=group.label,
        commands=tuple(command for command in commands if command),
        facts=tuple((name, str(run.summary[key])) for name, key in facts if key in run.summary),
        toml=run.toml,
        python=run.settings.get("dataset") == IN_PYTHON,
        flower=run.summary.get("engine") == "flower",
    )


def _text(value: Any) -> str:
    return DASH if value is None else str(value)


def write_report(sources: Sequence[Path], out: Path, *, with_records: bool = False) -> Path:
    """Write a report on run folders, comparisons and audits.

    The file holds everything it shows, opens from disk, and its own policy forbids browsers any connection.

    Args:
        sources: The folders to report on.
        out: The file to write.
        with_records: Whether to put in pictures of clients' samples, and of what attacks rebuilt of them; the file's
            name then says so: report.html becomes report.with-records.html.

    Returns:
        The file that was written.

    Raises:
        ConfigError: There is nothing to report on, or `out` is a folder.
        CheckpointError: A source holds nothing to report on, or is damaged.
        MissingExtraError: plotly is not installed.
    """
    plotly = _plotly()
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: give the report's file, like {out / 'report.html'}.")
    view = view_of(gather([Path(source) for source in sources]), with_records=with_records)
    page = rendered(view, plotly=plotly)
    if view.holds_records and "records" not in out.name:
        out = out.with_name(f"{out.stem}.with-records{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def rendered(view: Page, *, plotly: str) -> str:
    """The page; whatever came from files is escaped, and only our own scripts may run."""
    ours = _asset("report.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["whole"] = whole
    drawn = (view.reliability, *view.curves, *view.trade_offs)
    figures = {figure.name: figure.drawing for figure in drawn if figure is not None}
    scripts = [plotly, ours] if figures else [ours]
    return environment.from_string(_asset("report.html")).render(
        view=view,
        figures=figures,
        style=Markup(_asset("report.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts],
        version=__version__,
    )


def _plotly() -> str:
    """plotly's script, as a text whose hash a browser gets too."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_extra("plotly", "report", "Writing a report") from None
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")


def _asset(name: str) -> str:
    return (files("fedveil.report") / "assets" / name).read_text(encoding="utf-8")
