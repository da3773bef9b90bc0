"""What a comparison runs, one cell per scheme and seed with the same settings, and where its cells stand."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedveil import schemes
from fedveil.audit.findings import ORDER
from fedveil.config import RunConfig, as_before, unknown_setting
from fedveil.errors import CheckpointError, ConfigError, FedVeilError, MissingExtraError, TraceError, unknown_name
from fedveil.own_code import OwnCode, refuse_code, typed
from fedveil.plain import read_named
from fedveil.runs.folder import ledger_from, write_atomically
from fedveil.runs.job import located
from fedveil.runs.judgement import judgement_from
from fedveil.version import __version__

# What makes runs comparable: no scheme may have its own.
_SHARED = frozenset(
    "scheme seed dataset target task text group site test_fraction validation_fraction split partition alpha ratio "
    "clients simulate_dropout client_test_fraction".split()
)


@dataclass(frozen=True)
class Preset:
    """A comparison of everything there is, by name: one setting for all, in which every registered scheme takes part.

    It lists no schemes: what one needs besides, it declares itself (`SchemeInfo.compared`), and so does one whose
    cipher takes too long to train with (`SchemeInfo.twin`).
    """

    what: str
    settings: Mapping[str, Any]
    audit: bool = True

    def only(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The settings that schemes declare for themselves."""
        infos = {label_of(name): schemes.find(name) for name in names}
        return {label: {**info.compared, **info.twin} for label, info in infos.items()}


PRESETS = {
    "papers": Preset(
        "every scheme there is, on one data set, under one setting, and attacked",
        {
            "clients": 10,
            "rounds": 100,
            "local_steps": 1,  # the one form that all have: a gradient a round
            "lr": 0.02,
            "momentum": 0.9,
            "true_weight": 5.0,  # of the square loss, which head noise needs: with 1 wide nets hardly begin to train
            "epsilon": 8.0,
            "evaluate_every": 10,
            "checkpoint_every": 20,
            "workers": 1,
        },
    ),
}


def preset_of(name: str) -> Preset:
    """A preset by name; an unknown name suggests the nearest."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    scheme: str
    """Its name in the comparison."""
    seed: int
    config: RunConfig
    folder: str
    """Relative to the comparison's folder."""

    @property
    def name(self) -> str:
        """How the cell is called in messages."""
        return f"{self.scheme}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A whole comparison: common settings, those of one scheme only, and the cells."""

    common: dict[str, Any]
    only: dict[str, dict[str, Any]]
    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    left_out: dict[str, tuple[str, ...]]
    need_square: tuple[str, ...] = ()
    """The schemes for whose sake all train on the square loss."""
    preset: str | None = None
    audit: bool = False
    """Whether every run is attacked, too."""
    whole: bool = False
    """Whether a preset has all its schemes, also those that come later."""

    def twin(self, scheme: str) -> dict[str, Any]:
        """Under which options a scheme is trained without its cipher, which is then timed by itself; mostly none."""
        twin = schemes.find(scheme).twin if self.preset is not None and ":" not in scheme else {}
        own = self.only.get(scheme, {})
        return dict(twin) if twin and all(own.get(name) == value for name, value in twin.items()) else {}

    def said(self) -> list[str]:
        """On which loss all train, and which settings were left out for which schemes, a line each."""
        by_names: dict[tuple[str, ...], list[str]] = {}
        for scheme, names in self.left_out.items():
            by_names.setdefault(names, []).append(scheme)
        loss = f"all schemes train on the square loss, which {', '.join(self.need_square)} need"
        shared = [f"{loss}s (--loss sets another)" if len(self.need_square) == 1 else f"{loss} (--loss sets another)"]
        return (shared if self.need_square else []) + [
            f"{', '.join(who)}: left out {', '.join(names)}, which {'it does' if len(who) == 1 else 'they do'} not have"
            for names, who in by_names.items()
        ]


def label_of(scheme: str) -> str:
    """What a comparison calls a scheme: its name; of one's own, file.py:function wherever the file lies."""
    if not isinstance(scheme, OwnCode):
        return scheme
    place, _, function = scheme.rpartition(":")
    return f"{Path(place).name if place.endswith('.py') else place}:{function}"


def planned(
    names: Sequence[str],
    *,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    only: Mapping[str, Mapping[str, Any]],
    where: str = "The comparison",
    resumed: bool = False,
    preset: str | None = None,
    audit: bool = False,
    whole: bool = False,
) -> Plan:
    """The plan for schemes and seeds; wrong settings are refused, those a scheme does not have left out for it.

    Where one of the schemes needs the square loss and no loss was set, all train on it, unless `resumed`: a comparison
    goes on as it began.

    Schemes that are code are of the type OwnCode; text that names code is refused, as `where` names it.
    """
    if not names:
        raise ConfigError("Name the schemes to compare: --schemes fedavg,lossless.")
    labels = {label_of(name): name for name in names}
    for what, named in (("scheme", [label_of(name) for name in names]), ("seed", seeds)):
        for item, times in Counter[object](named).items():
            if times > 1:
                raise ConfigError(f"The {what} {item} is named twice.")
    if not seeds:
        raise ConfigError("A comparison needs at least one seed.")
    for name in names:
        refuse_code(name, where=where, what="scheme", flag="schemes")
    own = {label_of(scheme): dict(settings) for scheme, settings in only.items() if settings}
    for label in own:
        if label not in labels:
            raise unknown_name("scheme of a setting:", label, labels, hint="Only schemes of the comparison have any.")
    common = located(RunConfig.from_mapping(settings, where="the comparison"))
    needs = [] if resumed or common.loss is not None else _need_square(labels, own)
    if needs:
        common = common.with_changes(loss="square")
    veils = {label: _veil(scheme, common, own.get(label, {})) for label, scheme in labels.items()}
    if common.bn_eps == "auto" and not resumed and "scale" in veils.values():
        common = common.with_changes(bn_eps="secret")  # one ε for veils of scales and what they are compared with
    cells: list[Cell] = []
    left_out: dict[str, tuple[str, ...]] = {}
    given = {name: value for name, value in common.scheme_options.items() if value is not None}
    for label, scheme in labels.items():
        options = schemes.find(scheme).options
        foreign = tuple(name for name in (*given, *(common.options or {})) if name not in options)
        if common.family != "auto" and "family" not in own.get(label, {}) and veils[label] not in (common.family, ""):
            foreign = (*foreign, "family")
        if foreign:
            left_out[label] = foreign
        declared = {name: value for name, value in (common.options or {}).items() if name in options}
        unset = dict.fromkeys(name for name in given if name not in options)
        unset |= {"family": "auto"} if "family" in foreign else {}
        config = located(common.with_changes(scheme=scheme, options=declared or None, **unset))
        config = _with_own(config, own.get(label, {}), label=label, options=options)
        folder = label.replace(":", "-")
        cells += [Cell(label, seed, config.with_changes(seed=seed), f"{folder}/seed-{seed}") for seed in seeds]
    return Plan(
        common=settings_of(common),
        only=own,
        schemes=tuple(labels),
        seeds=tuple(seeds),
        cells=tuple(cells),
        left_out=left_out,
        need_square=tuple(needs),
        preset=preset,
        audit=audit,
        whole=whole,
    )


def _need_square(labels: Mapping[str, str], own: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The schemes that train on the square loss whatever the data are, and have no loss set for themselves."""
    open_ = {label: scheme for label, scheme in labels.items() if own.get(label, {}).get("loss") is None}
    return [label for label, scheme in open_.items() if schemes.find(scheme).default_loss == "square"]


def _veil(scheme: str, common: RunConfig, own: Mapping[str, Any]) -> str | None:
    """The family that hides the model under a scheme; "" where settings do not fit it, of which its run tells."""
    info = schemes.find(scheme)
    given = {**common.scheme_options, **(common.options or {}), **own}
    try:
        options = {name: value for name, value in given.items() if name in info.options}
        return info.veil(options, family=own.get("family", common.family))
    except FedVeilError:
        return ""


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings that all cells share, as plain data."""
    data = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return {name: value for name, value in data.items() if name not in ("scheme", "seed")}


def changed(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two sets of settings, each as NAME (A, now B)."""
    names = sorted(name for name in {*stored, *now} if stored.get(name) != now.get(name))
    return [f"{name} ({_word(stored.get(name))}, now {_word(now.get(name))})" for name in names]


def check_unchanged(cell: Cell, out: Path) -> None:
    """Refuse to go on with a run that was started with other settings."""
    file = out / cell.folder / "config.toml"
    if not file.exists():
        return
    stored = RunConfig.from_mapping(as_before(RunConfig.read(file)), where=str(file))
    # A rate and a number of clients that were left open are settled where the run begins.
    given = cell.config if isinstance(cell.config.lr, float) else cell.config.with_changes(lr=stored.lr)
    given = given if given.clients else given.with_changes(clients=stored.clients)
    given = given.with_changes(**given.unsaid())
    differ = changed(dataclasses.asdict(stored), dataclasses.asdict(given))
    if differ:
        raise ConfigError(
            f"{file.parent} was started with other settings: {', '.join(differ)}. Give those it was started with, or "
            "another --out."
        )


def _with_own(config: RunConfig, own: Mapping[str, Any], *, label: str, options: Mapping[str, Any]) -> RunConfig:
    whole = dataclasses.asdict(config)
    declared = dict(config.options or {})
    for name, value in own.items():
        if name in _SHARED:
            raise ConfigError(f"{label}.{name} cannot differ between schemes that are compared: set it for all.")
        if name in config.scheme_options and name not in options:
            takes = f"It takes: {', '.join(options)}." if options else "It takes no options of its own."
            raise ConfigError(f"Scheme {label!r} has no option {name!r}. {takes}")
        if name not in whole and name not in options:
            raise unknown_setting(name, where=f"the settings of {label}", further=options)
        (whole if name in whole else declared)[name] = value
    whole["options"] = declared or None
    return RunConfig.from_mapping(whole, where=f"the settings of {label}")


def parse_own(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """scheme.option=value as it is typed, with values read as TOML (true, 3, 0.5, text)."""
    from fedveil.plain import parse_model_options

    settings: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        scheme, _, name = key.rpartition(".")
        if not equals or not scheme or not name:
            raise ConfigError(
                "A setting of one scheme is written scheme.option=value, like nadp.lr=3 or mine.py:veil.keep=0.2 (got "
                f"{pair!r})."
            )
        (value,) = parse_model_options([f"{name}={text}"]).values()
        own = typed(value) if name == "model" and isinstance(value, str) else value
        settings.setdefault(label_of(typed(scheme)), {})[name.replace("-", "_")] = own
    return settings


def _word(value: object) -> str:
    return "not set" if value is None else str(value)


# --- where the cells of a comparison stand, while they run

State = Literal["waiting", "starting", "running", "auditing", "timing", "finished", "kept", "failed"]
OVER = ("finished", "kept", "failed")
CANNOT = frozenset(kind.exit_code for kind in (ConfigError, TraceError, MissingExtraError))
"""How a run ends that was refused before it began: settings, network or packages do not fit the scheme."""


@dataclass
class CellProgress:
    """One cell, as it stands now."""

    cell: Cell
    state: State = "waiting"
    round: int = 0
    loss: float | None = None
    score: float | None = None
    """Test accuracy, or for a regression the test MSE."""
    regression: bool = False
    seconds: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    summary: dict[str, Any] | None = None
    besides: dict[str, Any] = field(default_factory=dict)
    """What the run cost, and what attackers got from it (`fedveil.compare.grid.besides`)."""
    reason: str = ""
    exit_code: int = 0

    @property
    def cannot(self) -> bool:
        """Whether the scheme cannot be trained like this at all."""
        return self.state == "failed" and self.exit_code in CANNOT and not self.round

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in OVER

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a round's figures."""
        self.state = "running"
        self.round = row["round"]
        self.loss = row["loss"] if row["loss"] is not None else self.loss
        self._judge(row)
        self.seconds += row["seconds"]
        self.bytes_up, self.bytes_down = row["bytes_up"], row["bytes_down"]

    def finish(self, summary: dict[str, Any], besides: Mapping[str, Any] | None = None, *, kept: bool = False) -> None:
        """Take in the figures of the finished run; `kept`: it was there already."""
        self.state = "kept" if kept else "finished"
        self.summary, self.besides = summary, dict(besides or {})
        self.round = summary["rounds"]
        self.loss = summary["train_loss"]
        self._judge(summary)
        self.seconds = summary["seconds"]
        self.bytes_up, self.bytes_down = summary["bytes_up"], summary["bytes_down"]

    def _judge(self, figures: Mapping[str, Any]) -> None:
        self.regression = self.regression or "test_mse" in figures
        self.score = figures.get("test_accuracy", figures.get("test_mse", self.score))

    def fail(self, reason: str, *, code: int) -> None:
        """Take in why it failed."""
        self.state, self.reason, self.exit_code = "failed", reason, code


@dataclass(frozen=True)
class CellEvent:
    """Something happened to a cell; `text` is what its run said, where it said something."""

    standing: CellProgress
    kind: Literal["start", "round", "over", "say"]
    text: str = ""


FORMAT = "fedveil-compare-1"
FIGURES = (
    *("test_accuracy", "test_mse", "test_loss", "train_loss", "client_view_accuracy", "client_view_mse"),
    *("bytes_down", "bytes_up", "seconds", "rounds"),
)
_LINE = ("verdict", "epsilon", "delta", "outright", "unit", "add_remove_epsilon")


def results_of(plan: Plan, standings: Sequence[CellProgress]) -> dict[str, Any]:
    """Everything a comparison found, as plain data."""
    return {
        "format": FORMAT,
        "fedveil": __version__,
        **({} if plan.preset is None else {"preset": plan.preset}),
        **({"audit": True} if plan.audit else {}),
        **({} if plan.preset is None else {"whole": plan.whole}),
        "common": plan.common,
        "only": plan.only,
        "left_out": {scheme: list(names) for scheme, names in plan.left_out.items()},
        "seeds": list(plan.seeds),
        "runs": [_run(progress) for progress in standings],
        "schemes": {
            name: _scheme([progress for progress in standings if progress.cell.scheme == name]) for name in plan.schemes
        },
    }


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write compare.json."""
    write_atomically(file, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def read_results(file: Path) -> dict[str, Any]:
    """A compare.json as it was written; anything else is refused."""
    return _checked(read_named(file), file)


def _checked(data: dict[str, Any], file: Path) -> dict[str, Any]:
    kinds: dict[str, type | tuple[type, ...]] = {"common": dict, "only": dict, "seeds": list, "schemes": dict}
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not a comparison's compare.json.")
    if not all(isinstance(data.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError(f"{file} is damaged: it names no settings, schemes or seeds.")
    own = data["only"].values()
    if not all(type(seed) is int for seed in data["seeds"]) or not all(isinstance(settings, dict) for settings in own):
        raise CheckpointError(f"{file} is damaged: a seed is no number, or a scheme's settings have no names.")
    return data


def verdicts_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ledger's verdict and figures against each adversary."""
    lines = ledger_from(summary["ledger"], where="a summary's ledger").lines
    return {line.adversary: {name: getattr(line, name) for name in _LINE} for line in lines}


def _run(progress: CellProgress) -> dict[str, Any]:
    run: dict[str, Any] = {
        "scheme": progress.cell.scheme,
        "seed": progress.cell.seed,
        "folder": progress.cell.folder,
        "ok": progress.summary is not None,
        "reason": progress.reason if progress.over else "has not ended",
    }
    if progress.exit_code:
        run["exit_code"] = progress.exit_code
    if progress.summary is not None:
        run |= {"privacy": verdicts_of(progress.summary), **progress.besides, "summary": progress.summary}
    return run


def _scheme(standings: Sequence[CellProgress]) -> dict[str, Any]:
    summaries = [progress.summary for progress in standings if progress.summary is not None]
    result: dict[str, Any] = {"n": len(summaries), "failed": sum(progress.state == "failed" for progress in standings)}
    for name in FIGURES:
        values = [float(summary[name]) for summary in summaries if summary.get(name) is not None]
        if values:
            result[name] = {"mean": statistics.fmean(values), "deviation": _deviation(values)}
    if summaries:
        result["loss"] = summaries[0]["loss"]
        if any("diverged" in summary and not summary.get("recovered") for summary in summaries):
            result["came_off"] = True
        if "family" in summaries[0]:
            result["family"] = summaries[0]["family"]
        result |= _judged(summaries)
        result["privacy"] = _weakest([verdicts_of(summary) for summary in summaries])
        result |= _besides([progress.besides for progress in standings if progress.summary is not None])
    elif cannot := next((progress.reason for progress in standings if progress.cannot), ""):
        result["cannot"] = cannot
    return result


def _besides(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of what runs cost, and of every asset what the run that was worst off gave away."""
    costs = [run["cost"] for run in runs if "cost" in run]
    attacked = [run["attacked"] for run in runs if "attacked" in run]
    found: dict[str, Any] = {}
    if costs:
        figures = {name for name, value in costs[0].items() if isinstance(value, int | float)}
        means = {name: statistics.fmean(cost[name] for cost in costs) for name in sorted(figures)}
        found["cost"] = {**costs[0], **means}
    if attacked:
        assets = dict.fromkeys(asset for run in attacked for asset in run)
        found["attacked"] = {
            asset: min((run[asset] for run in attacked if asset in run), key=lambda one: ORDER.index(one["verdict"]))
            for asset in assets
        }
    return found


def _judged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure's mean over runs, and its interval where there is one run; and how many beat a constant answer."""
    judged = [judgement_from(each["judged"], where="a summary") for each in summaries if "judged" in each]
    if not judged:
        return {}
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in judged for name in each.figures):
        measured = [each.figures[name] for each in judged if name in each.figures]
        values = [each.value for each in measured if each.value is not None]
        if not values:
            continue
        constant = [each.baseline for each in measured if each.baseline is not None]
        figures[name] = {
            "mean": statistics.fmean(values),
            "deviation": _deviation(values),
            "baseline": statistics.fmean(constant) if constant else None,
        }
        if len(judged) == 1:
            figures[name] |= {"low": measured[0].low, "high": measured[0].high}
    return {"judged": figures, "beat_baseline": sum(each.beats_baseline is True for each in judged)}


def _deviation(values: Sequence[float]) -> float | None:
    """The sample's standard deviation; None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def _weakest(runs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Against each adversary the verdict of the run that is worst off: none at all, or else the largest ε."""

    def badness(line: dict[str, Any]) -> tuple[bool, float]:
        return line["verdict"] == "none", line["epsilon"] or 0.0

    return {name: max((run[name] for run in runs if name in run), key=badness) for name in runs[0]}
