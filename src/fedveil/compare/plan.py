"""What a comparison runs: one cell per scheme and seed, all with the same settings as far as a scheme has them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import schemes
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, unknown_name
from fedveil.own_code import typed
from fedveil.runs.job import located

# What makes runs comparable: no scheme may have its own.
_SHARED = frozenset(
    "scheme seed dataset target task text group test_fraction partition alpha ratio clients simulate_dropout".split()
)


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    scheme: str
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

    def said(self) -> list[str]:
        """Which settings were left out for which schemes, a line each."""
        by_names: dict[tuple[str, ...], list[str]] = {}
        for scheme, names in self.left_out.items():
            by_names.setdefault(names, []).append(scheme)
        return [
            f"{', '.join(who)}: left out {', '.join(names)}, which {'it does' if len(who) == 1 else 'they do'} not have"
            for names, who in by_names.items()
        ]


def planned(
    names: Sequence[str],
    *,
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    only: Mapping[str, Mapping[str, Any]],
) -> Plan:
    """The plan for schemes and seeds; wrong settings are refused, those a scheme does not have left out for it."""
    if not names:
        raise ConfigError("Name the schemes to compare: --schemes fedavg,lossless.")
    for what, given in (("scheme", names), ("seed", seeds)):
        for item, times in Counter[object](given).items():
            if times > 1:
                raise ConfigError(f"The {what} {item} is named twice.")
    if not seeds:
        raise ConfigError("A comparison needs at least one seed.")
    for scheme in only:
        if scheme not in names:
            raise unknown_name("scheme of a setting:", scheme, names, hint="Only schemes of the comparison have any.")
    common = located(RunConfig.from_mapping(settings, where="the comparison"))
    cells: list[Cell] = []
    left_out: dict[str, tuple[str, ...]] = {}
    for scheme in names:
        options = schemes.find(scheme).options
        foreign = tuple(k for k, v in common.scheme_options.items() if v is not None and k not in options)
        if foreign:
            left_out[scheme] = foreign
        config = common.with_changes(scheme=scheme, **dict.fromkeys(foreign))
        config = _with_own(config, only.get(scheme, {}), options=options)
        cells += [Cell(scheme, seed, config.with_changes(seed=seed), f"{scheme}/seed-{seed}") for seed in seeds]
    return Plan(
        common=settings_of(common),
        only={scheme: dict(own) for scheme, own in only.items() if own},
        schemes=tuple(names),
        seeds=tuple(seeds),
        cells=tuple(cells),
        left_out=left_out,
    )


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
    stored = RunConfig.from_mapping(RunConfig.read(file), where=str(file))
    differ = changed(dataclasses.asdict(stored), dataclasses.asdict(cell.config))
    if differ:
        raise ConfigError(
            f"{file.parent} was started with other settings: {', '.join(differ)}. Give those it was started with, or "
            "another --out."
        )


def _with_own(config: RunConfig, own: Mapping[str, Any], *, options: Mapping[str, Any]) -> RunConfig:
    for name in own:
        if name in _SHARED:
            raise ConfigError(
                f"{config.scheme}.{name} cannot differ between schemes that are compared: set it for all."
            )
        if name in config.scheme_options and name not in options:
            takes = f"It takes: {', '.join(options)}." if options else "It takes no options of its own."
            raise ConfigError(f"Scheme {config.scheme!r} has no option {name!r}. {takes}")
    whole = {**dataclasses.asdict(config), **own}
    return RunConfig.from_mapping(whole, where=f"the settings of {config.scheme}")


def parse_own(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """scheme.option=value as it is typed, with values read as TOML (true, 3, 0.5, text)."""
    from fedveil.config import parse_model_options

    settings: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        scheme, dot, setting = pair.partition(".")
        if not dot or "=" not in setting or not scheme or setting.startswith("="):
            raise ConfigError(f"A setting of one scheme is written scheme.option=value, like nadp.lr=3 (got {pair!r}).")
        for name, value in parse_model_options([setting]).items():
            own = typed(value) if name == "model" and isinstance(value, str) else value
            settings.setdefault(scheme, {})[name.replace("-", "_")] = own
    return settings


def _word(value: object) -> str:
    return "not set" if value is None else str(value)
