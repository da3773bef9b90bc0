"""A grid of cells, run in processes of their own.

A cell is whatever its `work` makes of a job: `work` names a function as `module:function`, which is imported where it
runs, takes the job (plain data) and a way to tell how far it is, and gives back plain data. Reports come home as
dictionaries with a `kind`: "start" when a cell is handed out, whatever the work tells on its way, and at the end
"done" with the work's result or "failed" with a reason and an exit code. A process that dies fails the cell it was at
and no other: the next cell gets a new one. Who calls keeps each result as it comes, so that a grid that is stopped
goes on with the cells that are missing.

With `jobs=None` the same work runs here, cell after cell: for a debugger, or where a process would cost too much.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from fedveil import framing
from fedveil.config import RunConfig
from fedveil.errors import FedVeilError, ProtocolError
from fedveil.plain import read_named
from fedveil.processes import ChildDiedError, ChildProcess, channel, processor_seconds, python, usable_cores
from fedveil.runs.callbacks import Callback
from fedveil.runs.folder import RunFolder, write_atomically

# --- a process that does one cell after the other: jobs come in as frames, reports go out as frames
#
# It ends with its parent, whatever it is at; the run it was at can be resumed.

Report = dict[str, Any]
Tell = Callable[[Report], None]


class Frame(IntEnum):
    """What passes between a grid and a worker, each one part of JSON."""

    JOB = 1
    REPORT = 2


def perform(job: Mapping[str, Any], tell: Tell, *, catch: bool = True) -> None:
    """Do one cell and tell how that went; without `catch`, what goes wrong is raised."""
    try:
        result = _work(job)(job, tell)
    except Exception as reason:
        if not catch:
            raise
        if isinstance(reason, FedVeilError):
            tell({"kind": "failed", "code": reason.exit_code, "reason": " ".join(str(reason).split())})
            return
        traceback.print_exc(file=sys.stderr)
        tell({"kind": "failed", "code": FedVeilError.exit_code, "reason": f"{type(reason).__name__}: {reason}"})
    else:
        tell({"kind": "done", **result})


def _work(job: Mapping[str, Any]) -> Callable[[Mapping[str, Any], Tell], dict[str, Any]]:
    sys.path.extend(entry for entry in job["path"] if entry not in sys.path)
    module, _, function = job["work"].partition(":")
    work: Callable[[Mapping[str, Any], Tell], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return work


class _Reporter(Callback):
    """Tells of every round, and notes what processors have spent on it: on a shared machine the clock counts others."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.spent: list[float] = []
        """Seconds of processors after every round, from the first on."""
        self._before = 0.0

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Where the run stands."""
        self._before = processor_seconds()
        self._tell({"kind": "begin", "round": rows[-1]["round"] if rows else 0})

    def round(self, row: dict[str, Any]) -> None:
        """A round's figures."""
        self.spent.append(processor_seconds() - self._before)
        self._tell({"kind": "round", "row": row})


COST = "cost.json"
SLICE: dict[str, Any] = {"dataset": "digits", "model": "mlp", "model_options": {"depth": 2, "width": 8}, "rounds": 2}
"""What a cipher is timed on that takes too long to train with: a network of 610 parameters, whose second round, when
keys are made, is scaled to the model's size."""


def train(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one cell of a comparison, from its beginning or from its checkpoint; then attack it and time its cipher."""
    from fedveil.own_code import OwnCode
    from fedveil.runs import session
    from fedveil.tracking import Tracked, trackers

    def say(text: str) -> None:
        tell({"kind": "say", "text": text})

    folder = RunFolder(job["folder"])
    tracked = trackers(Tracked(**job["tracked"]), folder.path, title=job["title"], say=say)
    reporter = _Reporter(tell)
    follow: list[Callback] = [reporter, *tracked]
    config = RunConfig.from_mapping(job["config"], where=job["title"])
    # Named by whoever started the comparison; no file says that.
    own = {name: OwnCode(getattr(config, name)) for name in job["own"]}
    config = config.with_changes(**own)
    if (summary := folder.summary()) is None:
        if folder.config_file.exists():
            summary = session.resume(folder.path, changes=own, quiet=True, say=say, follow=follow)
        else:
            summary = session.run(config, folder.path, quiet=True, say=say, follow=follow)
        if reporter.spent:
            _note_cost(folder.path, {"seconds": reporter.spent[-1] / len(reporter.spent) * summary["rounds"]})
    if job["twin"] and "slice" not in _cost(folder.path):
        tell({"kind": "stage", "stage": "timing"})
        _time_slice(config, job["twin"], folder.path, summary)
    if job["audit"] and not _audited(folder.path):
        tell({"kind": "stage", "stage": "auditing"})
        _attack(folder.path, own, say)
    return {"summary": summary, "besides": besides(folder.path)}


def besides(folder: Path) -> dict[str, Any]:
    """What stands beside a finished run's summary: what it cost, and what attackers got."""
    from fedveil.audit.findings import at_a_glance, finding_from, read_audit

    cost, audit = _cost(folder), _audited(folder)
    found = {"attacked": at_a_glance(map(finding_from, read_audit(audit)["findings"]))} if audit else {}
    return {**({"cost": cost} if cost else {}), **found}


def complete(folder: Path, *, twin: bool, audit: bool) -> bool:
    """Whether a finished run has everything beside it that was asked for."""
    return not (twin and "slice" not in _cost(folder)) and not (audit and not _audited(folder))


def _cost(folder: Path) -> dict[str, Any]:
    file = folder / COST
    return read_named(file) if file.exists() else {}


def _note_cost(folder: Path, cost: Mapping[str, Any]) -> None:
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    content = {**cost, "load": load, "cores": usable_cores()}
    write_atomically(folder / COST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _audited(folder: Path) -> Path | None:
    """The audit that is there, if it came to its end."""
    from fedveil.audit.findings import read_audit

    file = folder / "audit" / "audit.json"
    return file if file.exists() and read_audit(file).get("adversaries") else None


def _attack(folder: Path, own: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Try every attack that does not search for long, in its quick form."""
    from fedveil.audit.attack import attacks
    from fedveil.audit.running import audit_run

    quick = [name for name, attack in attacks().items() if not attack.slow]
    try:
        audit_run(folder, attacks=quick, quick=True, workers=1, own=own, say=say)
    except FedVeilError as reason:
        say(f"warning: no audit: {reason}")


def _time_slice(config: RunConfig, twin: Mapping[str, Any], folder: Path, summary: Mapping[str, Any]) -> None:
    """Time the real cipher under a real key in real rounds of a small network, and scale that to the model's size."""
    import tempfile

    from fedveil.runs import session

    options = {name: value for name, value in config.scheme_options.items() if name not in twin and value is not None}
    same = {name: getattr(config, name) for name in ("scheme", "clients", "cohort", "loss", "lr")}
    quiet = {"checkpoint_every": 0, "evaluate_every": 0}
    small = RunConfig.from_mapping({**same, **options, **SLICE, **quiet}, where=f"A slice of {config.scheme}")
    reporter = _Reporter(lambda report: None)
    with tempfile.TemporaryDirectory(prefix="fedveil-slice-") as scratch:
        timed = session.run(small, Path(scratch) / "run", quiet=True, follow=[reporter])
    first, second = reporter.spent
    times, rounds = summary["parameters"] / timed["parameters"], summary["rounds"]
    trained = _cost(folder)["seconds"]
    cost = {
        "seconds": trained + (second - first) * times * rounds + 2 * first - second,
        **{way: timed[way] * times for way in ("bytes_up", "bytes_down")},
        "slice": {
            "parameters": timed["parameters"],
            "times": times,
            "round": second - first,
            "keys": 2 * first - second,
            "trained": trained,
        },
    }
    _note_cost(folder, cost)


def main() -> None:
    """Work until there are no more jobs."""
    incoming, outgoing = channel()

    def tell(report: Report) -> None:
        sys.stdout.flush()  # what libraries printed: the last report may be the last thing this process does
        framing.send(outgoing, Frame.REPORT, json.dumps(report).encode())

    try:
        import torch

        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        while True:
            _, (job,) = framing.receive(incoming, Frame)
            perform(json.loads(job), tell)
    except (KeyboardInterrupt, framing.BrokenOffError):
        os._exit(130)  # nobody waits for an answer


Cell = TypeVar("Cell")
Take = Callable[[Cell, Report], None]

_PATIENCE = 10.0  # seconds that stopped processes have for closing their files
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_grid(
    cells: Iterable[Cell],
    *,
    work: str,
    job_of: Callable[[Cell], Mapping[str, Any]],
    take: Take[Cell],
    jobs: int | None = 1,
    threads: int | None = 1,
    path: Iterable[str | Path] = (),
    log: Path | None = None,
) -> None:
    """Run cells, at most `jobs` at a time, each process with `threads` cores (None: as many as there are).

    The next of `cells` is asked for when a process is free for it. `take` hears every report, in this thread. `path`
    are folders from which work may be imported; what libraries say goes to the file `log`, or, when their process ends,
    to standard error.
    """
    order = {"work": work, "path": [str(entry) for entry in path]}
    if jobs is None:
        for cell in cells:
            take(cell, {"kind": "start"})
            perform({**order, **job_of(cell)}, lambda report, cell=cell: take(cell, report), catch=False)  # type: ignore[misc]
        return
    env = {**os.environ, **({} if threads is None else dict.fromkeys(_THREADS, str(threads)))}
    waiting = iter(cells)
    running: dict[ChildProcess, Cell] = {}
    heard: set[ChildProcess] = set()

    def give(process: ChildProcess, cell: Cell) -> None:
        running[process] = cell
        with contextlib.suppress(ChildDiedError):  # its output tells
            process.send(Frame.JOB, json.dumps({**order, **job_of(cell)}).encode())
        take(cell, {"kind": "start"})

    def end(process: ChildProcess) -> None:
        del running[process]
        process.end(patience=_PATIENCE)
        if log is None:
            sys.stderr.write(process.said())

    with log.open("ab+") if log else contextlib.nullcontext() as file, selectors.DefaultSelector() as outputs:
        try:
            while True:
                for cell in itertools.islice(waiting, jobs - len(running)):
                    process = ChildProcess(python("fedveil.compare.grid:main"), name="A worker", log=file, env=env)
                    outputs.register(process.output, selectors.EVENT_READ, process)
                    give(process, cell)
                if not running:
                    break
                for key, _ in outputs.select():
                    process = key.data
                    report = _next_report(process)
                    heard.add(process)
                    take(running[process], report)
                    if report["kind"] not in ("done", "failed"):
                        continue
                    following = [] if "died" in report else [*itertools.islice(waiting, 1)]
                    if following:
                        give(process, *following)
                    else:
                        outputs.unregister(process.output)
                        end(process)
        finally:
            # Interrupted before their input closes, which would end them in the middle of what they write. One that
            # has told nothing yet has nothing to put away, and may lose an interrupt among its imports.
            for process in running:
                if process in heard:
                    process.signal(signal.SIGINT)
                else:
                    process.kill()
            deadline = time.monotonic() + _PATIENCE
            for process in list(running):
                process.wait(max(0.0, deadline - time.monotonic()))
                end(process)


def _next_report(process: ChildProcess) -> Report:
    """What a worker tells, or what is told of the cell whose worker is no more."""
    try:
        _, (report,) = process.receive(Frame)
        told: Report = json.loads(report)
    except (ChildDiedError, ProtocolError, ValueError):  # also one that tells what is no report is given up
        process.kill()
        reason = f"Its process {process.ending()}"
        return {"kind": "failed", "code": FedVeilError.exit_code, "reason": reason, "died": True}
    return told
