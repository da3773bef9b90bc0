"""What a comparison runs: one cell per scheme and seed, all with the same settings as far as a scheme has them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import schemes
from fedveil.config import RunConfig, as_before, unknown_setting
from fedveil.errors import ConfigError, FedVeilError, unknown_name
from fedveil.own_code import OwnCode, refuse_code, typed
from fedveil.runs.job import located

# What makes runs comparable: no scheme may have its own.
_SHARED = frozenset(
    "scheme seed dataset target task text group site test_fraction validation_fraction split partition alpha ratio "
    "clients simulate_dropout client_test_fraction".split()
)


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
