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

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from fedveil.errors import FedVeilError

Report = dict[str, Any]
Cell = TypeVar("Cell")
Take = Callable[[Cell, Report], None]

_PATIENCE = 10.0  # seconds that a stopped process has for closing its files
_LISTEN = 0.5  # seconds between looks at the keyboard
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OVER = ("done", "failed")


class _Process(Generic[Cell]):
    """One process and the thread that listens to it."""

    def __init__(
        self, heard: queue.Queue[tuple[_Process[Cell], Report | None]], log: IO[bytes] | None, threads: int | None
    ) -> None:
        # A session of its own: Ctrl-C reaches the parent only, which then stops its children one by one.
        # -P: the working folder may be a stranger's, and what lies there is not imported.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedveil.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **({} if threads is None else dict.fromkeys(_THREADS, str(threads)))},
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
        self.cell: Cell | None = None
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()

    def _listen(self, heard: queue.Queue[tuple[_Process[Cell], Report | None]]) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                heard.put((self, json.loads(line)))
        except ValueError:  # killed in the middle of a report, or no report at all: nothing more is taken from it
            self.process.kill()
        heard.put((self, None))

    def give(self, cell: Cell, job: Mapping[str, Any]) -> None:
        """Hand over a cell."""
        assert self.process.stdin is not None
        self.cell = cell
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

    def buried(self) -> Report:
        """What is told of the cell whose process is no more."""
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return {"kind": "failed", "code": FedVeilError.exit_code, "reason": f"Its process {how}", "died": True}

    def stop(self) -> None:
        """End it now, gently if it lets itself be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)


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

    `take` hears every report, in this thread. `path` are folders from which work may be imported; what libraries say
    goes to the file `log`, or to standard error.
    """
    order = {"work": work, "path": [str(one) for one in path]}
    if jobs is None:
        from fedveil.compare.worker import perform  # elsewhere only processes import it: it is their main module

        for cell in cells:
            take(cell, {"kind": "start"})
            perform({**order, **job_of(cell)}, lambda report, cell=cell: take(cell, report), catch=False)  # type: ignore[misc]
        return
    if log is None:
        _in_processes(list(cells), order, job_of, take, jobs, threads, None)
        return
    with log.open("ab") as file:
        _in_processes(list(cells), order, job_of, take, jobs, threads, file)


def _in_processes(
    left: list[Cell],
    order: Mapping[str, Any],
    job_of: Callable[[Cell], Mapping[str, Any]],
    take: Take[Cell],
    jobs: int,
    threads: int | None,
    log: IO[bytes] | None,
) -> None:
    heard: queue.Queue[tuple[_Process[Cell], Report | None]] = queue.Queue()
    running: list[_Process[Cell]] = []

    def next_for(process: _Process[Cell]) -> None:
        if not left:
            running.remove(process)
            process.dismiss()
            return
        cell = left.pop(0)
        process.give(cell, {**order, **job_of(cell)})
        take(cell, {"kind": "start"})

    def another() -> None:
        running.append(_Process(heard, log, threads))
        next_for(running[-1])

    try:
        for _ in range(min(jobs, len(left))):
            another()
        while running:
            try:
                process, report = heard.get(timeout=_LISTEN)
            except queue.Empty:
                continue
            if process not in running:
                continue
            assert process.cell is not None
            take(process.cell, process.buried() if report is None else report)
            if report is None:
                running.remove(process)
                if left:
                    another()
            elif report["kind"] in _OVER:
                next_for(process)
    finally:
        _stop_all(running)


def _stop_all(running: list[_Process[Cell]]) -> None:
    for one in running:
        one.stop()
    for one in running:
        try:
            one.process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def cores() -> int:
    """How many cores are ours."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
