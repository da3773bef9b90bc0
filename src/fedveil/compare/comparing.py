"""Several schemes under the same data and seeds: a grid of runs, each in a folder of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import schemes as registry
from fedveil.compare.grid import Report, besides, complete, run_grid
from fedveil.compare.plan import (
    CellEvent,
    CellProgress,
    Plan,
    changed,
    check_unchanged,
    label_of,
    planned,
    preset_of,
    read_results,
    results_of,
    write_results,
)
from fedveil.config import as_before
from fedveil.errors import CheckpointError, ConfigError
from fedveil.own_code import SETTINGS, OwnCode, vouched_settings
from fedveil.processes import usable_cores
from fedveil.runs.callbacks import Say
from fedveil.runs.folder import RunFolder, ledger_from
from fedveil.tracking import Tracked, trackers

DEFAULT_SCHEMES = ("fedavg", "lossless", "veil-secagg", "nadp", "mpdp", "veil-dp", "paraaegis")
DEFAULT_SEEDS = (1,)
SERVER = "server"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a comparison left: its folder, its plan, where every cell stands, and the content of compare.json."""

    out: Path
    plan: Plan
    standings: tuple[CellProgress, ...]
    results: dict[str, Any]

    @property
    def file(self) -> Path:
        """compare.json."""
        return self.out / "compare.json"

    @property
    def failed(self) -> list[CellProgress]:
        """The cells that failed; under a preset, which has everything in it, not those of schemes that cannot do it."""
        failed = [cell for cell in self.standings if cell.state == "failed"]
        return [cell for cell in failed if self.plan.preset is None or not cell.cannot]


def compare(
    schemes: Sequence[str] | None = None,
    *,
    out: str | Path,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    resume: bool = False,
    only: Mapping[str, Mapping[str, Any]] | None = None,
    preset: str | None = None,
    audit: bool | None = None,
    tracked: Tracked | None = None,
    say: Say = lambda text: None,
    watch: Callable[[Sequence[CellProgress], CellEvent | None], None] = lambda standings, event: None,
    **settings: Any,
) -> Comparison:
    """Train schemes with the same data, settings and seeds, each in the run folder out/SCHEME/seed-N.

    A scheme that fails ends no other.

    Args:
        schemes: Their names; one's own is OwnCode("file.py:function"), and called file.py:function.
        out: The comparison's folder.
        seeds: Every scheme is trained with each of them.
        jobs: How many runs go on at once, each in a process with one thread (default: one per core, and one on a GPU).
        resume: Keep finished runs and continue others from their checkpoints; schemes, seeds and settings are those of
            before unless they are given.
        only: Settings of single schemes, {"nadp": {"lr": 3}}.
        preset: papers: every scheme there is under one setting, which other settings go over, each with what it
            declares for itself, which `only` goes over; those whose cipher takes too long are trained under masks, and
            it is timed by itself.
        audit: Whether to attack every run, quickly; by default where a preset does.
        tracked: Trackers that follow each run.
        say: Gets remarks, a line each.
        watch: Sees all cells whenever something happens to one.
        settings: Those of `fedveil run`; they hold for every scheme that has them.

    Returns:
        Every cell with its outcome, also of those that failed.

    Raises:
        ConfigError: A scheme or setting is unknown, or settings do not go together.
        CheckpointError: The folder holds something else, or no comparison to resume.
    """
    if "scheme" in settings or "seed" in settings:
        raise ConfigError("A comparison takes schemes and seeds, not scheme and seed.")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1 (got {jobs}).")
    folder = Path(out)
    plan = _plan(folder, schemes, seeds, only, settings, preset=preset, audit=audit, resume=resume, say=say)
    for cell in plan.cells:
        check_unchanged(cell, folder)
    tracked = tracked or Tracked()
    for cell in plan.cells:
        trackers(tracked.within(cell.folder), folder / cell.folder)  # a missing package is told before anything starts
    for line in plan.said():
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    standings = tuple(CellProgress(cell) for cell in plan.cells)
    for progress in standings:
        _take_finished(progress, folder, plan)

    def write() -> dict[str, Any]:
        results = results_of(plan, standings)
        write_results(folder / "compare.json", results)
        return results

    def job_of(progress: CellProgress) -> dict[str, Any]:
        config = progress.cell.config
        return {
            "config": dataclasses.asdict(config),
            "own": [name for name in SETTINGS if isinstance(getattr(config, name), OwnCode)],
            "folder": str(folder / progress.cell.folder),
            "title": progress.cell.name,
            "tracked": dataclasses.asdict(tracked.within(progress.cell.folder)),
            "twin": plan.twin(progress.cell.scheme),
            "audit": plan.audit,
        }

    def take(progress: CellProgress, report: Report) -> None:
        event = _event(progress, report)
        if event.kind == "over":
            write()
        watch(standings, event)

    write()
    watch(standings, None)
    run_grid(
        [progress for progress in standings if not progress.over],
        work="fedveil.compare.grid:train",
        job_of=job_of,
        take=take,
        jobs=jobs or _jobs(plan),
        log=folder / "workers.log",
    )
    return Comparison(folder, plan, standings, write())


def _event(progress: CellProgress, report: Report) -> CellEvent:
    """Take in what a cell's process reports."""
    kind = report["kind"]
    if kind == "start":
        progress.state = "starting"
        return CellEvent(progress, "start")
    if kind == "say":
        return CellEvent(progress, "say", report["text"])
    if kind == "begin":
        progress.state, progress.round = "running", report["round"]
        return CellEvent(progress, "round")
    if kind == "round":
        progress.take(report["row"])
        return CellEvent(progress, "round")
    if kind == "stage":
        progress.state = report["stage"]
        return CellEvent(progress, "round")
    if kind == "done":
        progress.finish(report["summary"], report["besides"])
    else:
        further = "; see workers.log. The run can go on from its last checkpoint: --resume." if "died" in report else ""
        progress.fail(report["reason"] + further, code=report["code"])
    return CellEvent(progress, "over")


def _plan(
    folder: Path,
    schemes: Sequence[str] | None,
    seeds: Sequence[int] | None,
    only: Mapping[str, Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
    *,
    preset: str | None,
    audit: bool | None,
    resume: bool,
    say: Say,
) -> Plan:
    file = folder / "compare.json"
    if not resume:
        if file.exists():
            raise CheckpointError(
                f"The folder {folder} holds another comparison. Continue it with --resume, or give another --out."
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} holds other files: give another --out.")
        chosen = None if preset is None else preset_of(preset)
        names = schemes or (DEFAULT_SCHEMES if chosen is None else [info.name for info in registry.schemes()])
        audit = chosen is not None and chosen.audit if audit is None else audit
        base = {} if chosen is None else chosen.settings
        return planned(
            names,
            seeds=seeds or DEFAULT_SEEDS,
            settings={**base, **settings, **({"record": True} if audit else {})},
            only=_merged({} if chosen is None else chosen.only(names), only or {}),
            preset=preset,
            audit=audit,
            whole=chosen is not None and not schemes,
        )
    if not file.exists():
        raise CheckpointError(f"{folder} holds no comparison to resume (there is no compare.json).")
    stored = read_results(file)
    stored["common"] = as_before(stored["common"])
    own = vouched_settings(stored["common"], settings, where=str(file), say=say)
    named = {**{name: name for name in stored["schemes"]}, **{label_of(one): one for one in schemes or ()}}
    begun: str | None = stored.get("preset")
    if preset is not None and preset != begun:
        raise ConfigError(f"The comparison in {folder} was not started with this preset: leave it out.")
    if audit and not stored["common"]["record"]:
        raise ConfigError(
            f"The runs in {folder} kept nothing of what passes, and cannot be attacked: compare with --audit from the "
            "beginning, in another --out."
        )
    declared: dict[str, dict[str, Any]] = {}
    whole = begun is not None and bool(stored.get("whole", True))
    if begun is not None:
        chosen = preset_of(begun)
        if whole and not schemes:  # also those that have come since
            named |= {info.name: info.name for info in registry.schemes() if info.name not in named}
        declared = chosen.only([name for label, name in named.items() if label not in stored["schemes"]])
    plan = planned(
        list(named.values()),
        seeds=list(dict.fromkeys([*stored["seeds"], *(seeds or ())])),
        settings={**stored["common"], **settings, **own},
        only=_merged(_merged(declared, stored["only"]), only or {}),
        where=str(file),
        resumed=True,
        preset=begun,
        audit=bool(stored.get("audit")) if audit is None else audit,
        whole=whole,
    )
    differ = changed(stored["common"], json.loads(json.dumps(plan.common)))
    if differ:
        raise ConfigError(
            f"The comparison in {folder} was started with other settings: {', '.join(differ)}. Leave them out, or give "
            "another --out."
        )
    return plan


def _merged(below: Mapping[str, Mapping[str, Any]], over: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings of single schemes, one set over the other."""
    return {name: {**below.get(name, {}), **over.get(name, {})} for name in {**below, **over}}


def _take_finished(progress: CellProgress, out: Path, plan: Plan) -> None:
    file = out / progress.cell.folder / "summary.json"
    if not file.exists():
        return
    try:
        summary = RunFolder(file.parent).summary() or {}
        ledger_from(summary["ledger"], where=str(file)).line(SERVER)
        if complete(file.parent, twin=bool(plan.twin(progress.cell.scheme)), audit=plan.audit):
            progress.finish(summary, besides(file.parent), kept=True)
    except (CheckpointError, KeyError, StopIteration) as reason:
        raise CheckpointError(f"{file} is damaged: remove it, and the run goes on from its checkpoint.") from reason


def _jobs(plan: Plan) -> int:
    """One process per core that is ours; one in all where they would share a GPU."""
    return usable_cores() if str(plan.common["device"]).startswith("cpu") else 1
