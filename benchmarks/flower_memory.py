"""Resident memory of a cluster's processes, by kind, looked at in the background."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any

Sample = dict[str, Any]
_KINDS = (
    ("fedveil.flower.worker", "worker"),
    ("flower-superlink", "SuperLink"),
    ("flower-supernode", "SuperNode"),
    ("flwr-clientapp", "client app"),
    ("flwr-serverapp", "server app"),
    ("flower-superexec", "SuperExec"),
    ("fedveil.", "supervisor"),
)


class Watch:
    """Samples every `every` seconds the memory of all processes that belong to the cluster in `folder`.

    Two figures per kind: `resident` counts pages that processes share in each of them, `share` divides them up.
    """

    def __init__(self, folder: Path, *, every: float = 5.0) -> None:
        self.samples: list[Sample] = []
        self._folder, self._every = str(folder), every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            self.samples.append({"at": time.time(), "kinds": memory_by_kind(self._folder)})


def memory_by_kind(folder: str) -> dict[str, dict[str, int]]:
    """How many processes of each kind there are, and their bytes of memory."""
    mine = _members(folder)
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"processes": 0, "resident": 0, "share": 0})
    for pid, command in mine.items():
        kind = _kind(command)
        with contextlib.suppress(OSError):
            sizes = _sizes(pid)
            one = found[kind]
            one["processes"] += 1
            one["resident"] += sizes["Rss"]
            one["share"] += sizes["Pss"]
    return dict(found)


def processor_by_kind(folder: str) -> dict[str, float]:
    """Seconds of processor time that the cluster in `folder` has used, by processes that have ended too."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = defaultdict(float)
    for pid, command in _members(folder).items():
        with contextlib.suppress(OSError):
            times = list(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            kind = _kind(command)
            found[kind] += sum(times[:2]) / tick
            # What has ended and was waited for: a SuperExec starts one app after the other.
            found["client app" if kind == "SuperExec" else kind] += sum(times[2:]) / tick
    return dict(found)


def processor_seconds(folder: str) -> float:
    """The same, of all processes together."""
    return sum(processor_by_kind(folder).values())


def _members(folder: str) -> dict[int, str]:
    """Processes whose commands name the folder, and all their descendants; not this one."""
    commands, parents = _processes()
    mine = {pid for pid, command in commands.items() if folder in command} - {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine |= more
        grown = bool(more)
    return {pid: commands[pid] for pid in mine}


def _kind(command: str) -> str:
    # A supervisor's command names what it holds.
    named = "fedveil.processes" if "fedveil.processes" in command else command
    return next((name for mark, name in _KINDS if mark in named), "other")


def _processes() -> tuple[dict[int, str], dict[int, int]]:
    commands, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return commands, {pid: parent for pid, parent in parents.items() if pid in commands}


def _sizes(pid: int) -> dict[str, int]:
    lines = (one.split() for one in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {one[0].rstrip(":"): 1024 * int(one[1]) for one in lines}


def available() -> int:
    """Bytes of memory that this machine has left."""
    from fedveil.processes import available_memory  # not at the top: `split --before` measures copies without it

    return available_memory() or 0
