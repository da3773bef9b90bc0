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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from fedveil.compare.progress import Event, Standing
from fedveil.errors import FedVeilError
from fedveil.models import Factory
from fedveil.tracking import Tracked

_PATIENCE = 10.0  # seconds that a stopped process has for closing its files
_LISTEN = 0.5  # seconds between looks at the keyboard
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _Worker:
    """One process and the thread that listens to it."""

    def __init__(self, heard: queue.Queue[tuple[_Worker, dict[str, Any] | None]], log: IO[bytes]) -> None:
        # A session of its own: Ctrl-C reaches the parent only, which then stops its children one by one.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedveil.compare.worker"],
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
        "own_model": isinstance(cell.config.model, Factory),
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
