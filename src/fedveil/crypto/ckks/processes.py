"""Spreading ciphertexts over processes: TenSEAL computes in one thread and keeps Python's lock while it does.

Workers are plain child processes that run `worker.py`: neither a fork of this process, which may have threads,
nor a second import of the user's script. They are started when first needed and then kept; this process works too.
Keys reach them through their pipes only.
"""

from __future__ import annotations

import atexit
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

from fedveil.crypto.ckks import worker
from fedveil.crypto.ckks.chunks import Refused
from fedveil.crypto.ckks.keys import Material
from fedveil.crypto.ckks.worker import Part
from fedveil.errors import ConfigError

Item = TypeVar("Item")

VARIABLE = "FEDVEIL_WORKERS"
MOST_BY_DEFAULT = 8
FEWEST_CHUNKS = 16
"""Below this (about 20 ms of encryption) a task stays in this process."""

_LARGEST_JOB = 64
_KEYS_KEPT = 8
_LOSSES_BORNE = 3
_PIPE_BYTES = 1 << 20
_FILE = Path(worker.__file__)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_chosen: int | None = None


@dataclass(frozen=True)
class Task(Generic[Item]):
    """`count` independent ciphertexts: how to make one here, how to ask for some and how to read the answer."""

    count: int
    material: Material
    here: Callable[[int], Item]
    request: Callable[[range], list[Part]]
    answer: Callable[[list[memoryview]], Sequence[Item]]


def set_workers(count: int | None) -> None:
    """How many processes work, this one included; None: what FEDVEIL_WORKERS says, or one per core up to 8."""
    global _chosen
    if count is not None and count < 1:
        raise ConfigError(f"At least one process must work, not {count}.")
    _chosen = count
    _dismiss(keep=workers() - 1)


def workers() -> int:
    """How many processes work on long vectors, this one included."""
    if os.name != "posix" or not sys.executable or not _FILE.exists():
        return 1
    if _chosen is not None:
        return _chosen
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        if not named.isdecimal() or int(named) < 1:
            raise ConfigError(f"{VARIABLE} must be a whole number of processes from 1 on, not {named!r}.")
        return int(named)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_BY_DEFAULT)


def spread(task: Task[Item]) -> list[Item]:
    """All of the task's items in order, made by this process and, if there are many, its workers."""
    if task.count < FEWEST_CHUNKS or workers() == 1:
        return [task.here(index) for index in range(task.count)]
    return _Team(task, workers() - 1).run()


class _GoneError(Exception):
    """A worker has ended."""


class _Worker:
    """One child process; it has at most one request to answer."""

    def __init__(self) -> None:
        # -I and -S: nothing in the environment or the working directory decides what it imports, sys.path does.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pipesize=_PIPE_BYTES,
            env={**os.environ, **_ONE_THREAD},
        )
        self._known: set[bytes] = set()
        self.ready = False
        self.job = range(0)
        with suppress(_GoneError):  # found out again when its answer is read
            self._send([os.fsencode(path or os.getcwd()) for path in sys.path])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def replies(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def give(self, job: range, material: Material, request: list[Part]) -> None:
        """Ask for `job`; the worker has the key afterwards."""
        self.job = job
        if material.digest not in self._known:
            if len(self._known) >= _KEYS_KEPT:
                self._send([worker.FORGET])
                self._known.clear()
            self._send([worker.KEY, material.digest, material.serialized])
            self._known.add(material.digest)
        kind, *rest = request
        self._send([kind, material.digest, *rest])

    def take(self) -> list[memoryview]:
        """Its answer; waits for it."""
        try:
            answer = worker.receive(self.replies)  # type: ignore[arg-type]  # without a buffer it is a FileIO
        except OSError as reason:
            raise _GoneError from reason
        if answer is None:
            raise _GoneError
        return answer

    def _send(self, parts: Sequence[Part]) -> None:
        assert self._process.stdin is not None
        try:
            worker.send(self._process.stdin, parts)
        except OSError as reason:
            raise _GoneError from reason

    def end(self, *, now: bool) -> None:
        """Let it end by itself, as its input has, or end it now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if now:
            self._process.kill()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.replies.close()

    def disown(self) -> None:
        """Forget it in a copy of the process that started it."""
        self._process.returncode = 0
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_idle: deque[_Worker] = deque()
"""Taking from and adding to it needs no lock: threads that spread tasks at once have workers of their own."""


class _Team(Generic[Item]):
    """This process and some workers, at one task."""

    def __init__(self, task: Task[Item], helpers: int) -> None:
        self._task = task
        self._size = helpers + 1
        self._helpers = helpers
        self._results: dict[int, Item] = {}
        self._next = 0
        self._lost: list[range] = []
        self._losses = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Item]:
        try:
            for _ in range(self._helpers):
                self._enlist()
            while len(self._results) < self._task.count:
                mine = self._job(largest=1)
                for index in mine:
                    self._results[index] = self._task.here(index)
                for ready, _ in self._selector.select(0 if mine else None):
                    self._hear(ready.data)
        finally:
            self._part()
        return [self._results[index] for index in range(self._task.count)]

    def _job(self, *, largest: int) -> range:
        """The next ciphertexts to work on, fewer towards the end so that all finish together."""
        if self._lost:
            lost = self._lost.pop()
            if len(lost) > largest:
                self._lost.append(lost[largest:])
            return lost[:largest]
        left = self._task.count - self._next
        start = self._next
        self._next += min(left, largest, max(2, left // (2 * self._size)))
        return range(start, self._next)

    def _enlist(self) -> None:
        try:
            helper = _idle.pop() if _idle else _Worker()
        except OSError:  # no more processes, or no memory for one: fewer do the same work
            return
        self._selector.register(helper.replies, selectors.EVENT_READ, helper)
        if helper.ready:
            self._employ(helper)

    def _employ(self, helper: _Worker) -> None:
        job = self._job(largest=_LARGEST_JOB)
        if job:
            try:
                helper.give(job, self._task.material, self._task.request(job))
            except _GoneError:
                self._replace(helper)

    def _hear(self, helper: _Worker) -> None:
        try:
            kind, *parts = helper.take()
        except _GoneError:
            self._replace(helper)
            return
        if kind == worker.REFUSED:
            helper.job = range(0)
            raise Refused(bytes(parts[0]).decode())
        helper.ready = True
        self._results.update(zip(helper.job, self._task.answer(parts) if helper.job else (), strict=True))
        helper.job = range(0)
        self._employ(helper)

    def _replace(self, helper: _Worker) -> None:
        """Its job is done again; one that could not even start, or a few losses in one task, bring no new worker."""
        self._selector.unregister(helper.replies)
        if helper.job:
            self._lost.append(helper.job)
        helper.end(now=True)
        self._losses += 1
        if helper.ready and self._losses <= _LOSSES_BORNE:
            self._enlist()

    def _part(self) -> None:
        for registered in list(self._selector.get_map().values()):
            helper: _Worker = registered.data
            if helper.job:  # an error left it with an answer that nobody will read
                helper.end(now=True)
            else:
                _idle.append(helper)
        self._selector.close()
        _dismiss(keep=workers() - 1)


def _dismiss(*, keep: int = 0) -> None:
    while len(_idle) > keep:
        _idle.popleft().end(now=False)


def _forked() -> None:
    for one in _idle:
        one.disown()
    _idle.clear()


atexit.register(_dismiss)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
