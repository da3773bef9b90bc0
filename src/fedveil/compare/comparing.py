"""Cells in several processes at once: one thread of arithmetic each, and one that dies takes no other with it."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedveil.compare.plan import Plan, changed, check_unchanged, planned
from fedveil.compare.results import Event, Standing, read_results, results_of, write_results
from fedveil.errors import CheckpointError, ConfigError, FedVeilError
from fedveil.own_code import SETTINGS, Code, vouched_settings
from fedveil.runs.folder import RunFolder, ledger_from
from fedveil.tracking import Tracked, trackers

_PATIENCE = 10.0  # seconds that a stopped process has for closing its files
_LISTEN = 0.5  # seconds between looks at the keyboard
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Worker:
    """One process and the thread that listens to it."""

    def __init__(self, heard: queue.Queue[tuple[_Worker, dict[str, Any] | None]], log: IO[bytes]) -> None:
        # A session of its own: Ctrl-C reaches the parent only, which then stops its children one by one.
        # -P: the working folder may be a stranger's, and what lies there is not imported.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedveil.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **dict.fromkeys(_THREADS, "1")},
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
        self.standing: Standing | None = None
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()

    def _listen(self, heard: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard.put((self, json.loads(line)))
        heard.put((self, None))

    def give(self, standing: Standing, job: dict[str, Any]) -> None:
        """Hand over a cell."""
        assert self.process.stdin is not None
        self.standing, standing.state = standing, "starting"
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has died; its listener tells

    def dismiss(self) -> None:
        """No more cells: the process ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def stop(self) -> None:
        """End it now, gently if it lets itself be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)


def run_cells(
    waiting: Iterable[Standing],
    *,
    out: Path,
    jobs: int,
    tracked: Tracked,
    tell: Callable[[Event], None],
) -> None:
    """Train cells, at most `jobs` at a time; `tell` hears of everything, in this thread."""
    left = list(waiting)
    heard: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    workers: list[_Worker] = []

    def next_for(worker: _Worker) -> None:
        if not left:
            workers.remove(worker)
            worker.dismiss()
            return
        standing = left.pop(0)
        worker.give(standing, _job(standing, out, tracked))
        tell(Event(standing, "start"))

    with (out / "workers.log").open("ab") as log:
        try:
            for _ in range(min(jobs, len(left))):
                workers.append(_Worker(heard, log))
                next_for(workers[-1])
            while workers:
                try:
                    worker, report = heard.get(timeout=_LISTEN)
                except queue.Empty:
                    continue
                if worker not in workers:
                    continue
                assert worker.standing is not None
                if report is None:
                    _bury(worker)
                    tell(Event(worker.standing, "over"))
                    workers.remove(worker)
                    if left:
                        workers.append(_Worker(heard, log))
                        next_for(workers[-1])
                elif _take(worker.standing, report, tell):
                    next_for(worker)
        finally:
            _stop_all(workers)


def _job(standing: Standing, out: Path, tracked: Tracked) -> dict[str, Any]:
    cell = standing.cell
    return {
        "config": dataclasses.asdict(cell.config),
        "own": [name for name in SETTINGS if isinstance(getattr(cell.config, name), Code)],
        "folder": str(out / cell.folder),
        "title": cell.name,
        "tracked": dataclasses.asdict(tracked.within(cell.folder)),
    }


def _take(standing: Standing, report: dict[str, Any], tell: Callable[[Event], None]) -> bool:
    """Take in a report; whether the cell is over."""
    kind = report["kind"]
    if kind == "say":
        tell(Event(standing, "say", report["text"]))
    elif kind == "begin":
        standing.state, standing.round = "running", report["round"]
        tell(Event(standing, "round"))
    elif kind == "round":
        standing.take(report["row"])
        tell(Event(standing, "round"))
    else:
        if kind == "done":
            standing.finish(report["summary"])
        else:
            standing.fail(report["reason"], code=report["code"])
        tell(Event(standing, "over"))
    return standing.over


def _bury(worker: _Worker) -> None:
    code = worker.process.wait()
    assert worker.standing is not None
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    worker.standing.fail(
        f"Its process {how} (see workers.log). The run can go on from its last checkpoint: --resume.",
        code=FedVeilError.exit_code,
    )


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
    for worker in workers:
        try:
            worker.process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


DEFAULT_SCHEMES = ("fedavg", "lossless", "veil-secagg", "nadp", "mpdp", "veil-dp", "paraaegis")
DEFAULT_SEEDS = (1,)
SERVER = "server"

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a comparison left: its folder, its plan, where every cell stands, and the content of compare.json."""

    out: Path
    plan: Plan
    standings: tuple[Standing, ...]
    results: dict[str, Any]

    @property
    def file(self) -> Path:
        """compare.json."""
        return self.out / "compare.json"

    @property
    def failed(self) -> list[Standing]:
        """The cells that failed."""
        return [one for one in self.standings if one.state == "failed"]


def compare(
    schemes: Sequence[str] | None = None,
    *,
    out: str | Path,
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    resume: bool = False,
    only: Mapping[str, Mapping[str, Any]] | None = None,
    tracked: Tracked | None = None,
    say: Say = lambda text: None,
    watch: Callable[[Sequence[Standing], Event | None], None] = lambda standings, event: None,
    **settings: Any,
) -> Comparison:
    """Train schemes with the same data, settings and seeds, each in the run folder out/SCHEME/seed-N.

    `settings` are those of `fedveil run`, and hold for every scheme that has them; `only` holds those of single
    schemes, {"nadp": {"lr": 3}}. At most `jobs` runs go on at once, each in a process with one thread (default: one
    per core, and one on a GPU). A scheme that fails ends no other. With `resume`, finished runs are kept and others
    go on from their checkpoints; schemes, seeds and settings are then those of before unless they are given.
    `watch` sees all cells whenever something happens to one.
    """
    if "scheme" in settings or "seed" in settings:
        raise ConfigError("A comparison takes schemes and seeds, not scheme and seed.")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1 (got {jobs}).")
    folder = Path(out)
    plan = _plan(folder, schemes, seeds, only, settings, resume=resume, say=say)
    for cell in plan.cells:
        check_unchanged(cell, folder)
    tracked = tracked or Tracked()
    for cell in plan.cells:
        trackers(tracked.within(cell.folder), folder / cell.folder)  # a missing package is told before anything starts
    for line in plan.said():
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    standings = tuple(Standing(cell) for cell in plan.cells)
    for one in standings:
        _take_finished(one, folder)

    def write() -> dict[str, Any]:
        results = results_of(plan, standings)
        write_results(folder / "compare.json", results)
        return results

    def tell(event: Event) -> None:
        if event.kind == "over":
            write()
        watch(standings, event)

    write()
    watch(standings, None)
    left = [one for one in standings if not one.over]
    run_cells(left, out=folder, jobs=jobs or _cores(plan), tracked=tracked, tell=tell)
    return Comparison(folder, plan, standings, write())


def _plan(
    folder: Path,
    schemes: Sequence[str] | None,
    seeds: Sequence[int] | None,
    only: Mapping[str, Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
    *,
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
        return planned(schemes or DEFAULT_SCHEMES, seeds=seeds or DEFAULT_SEEDS, settings=settings, only=only or {})
    if not file.exists():
        raise CheckpointError(f"{folder} holds no comparison to resume (there is no compare.json).")
    stored = read_results(file)
    own = vouched_settings(stored["common"], settings, where=str(file), say=say)
    plan = planned(
        _joined(list(stored["schemes"]), schemes),
        seeds=_joined(stored["seeds"], seeds),
        settings={**stored["common"], **settings, **own},
        only={**stored["only"], **(only or {})},
    )
    differ = changed(stored["common"], json.loads(json.dumps(plan.common)))
    if differ:
        raise ConfigError(
            f"The comparison in {folder} was started with other settings: {', '.join(differ)}. Leave them out, or give "
            "another --out."
        )
    return plan


def _joined(before: Sequence[Any], now: Sequence[Any] | None) -> list[Any]:
    """What was compared, and what is to be compared with it."""
    return list(dict.fromkeys([*before, *(now or ())]))


def _take_finished(one: Standing, out: Path) -> None:
    file = out / one.cell.folder / "summary.json"
    if not file.exists():
        return
    try:
        summary = RunFolder(file.parent).summary() or {}
        ledger_from(summary["ledger"], where=str(file)).line(SERVER)
        one.finish(summary, kept=True)
    except (CheckpointError, KeyError, StopIteration) as reason:
        raise CheckpointError(f"{file} is damaged: remove it, and the run goes on from its checkpoint.") from reason


def _cores(plan: Plan) -> int:
    """One process per core that is ours; one in all where they would share a GPU."""
    if not str(plan.common["device"]).startswith("cpu"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
