"""Runs one command so that nothing of it outlives its parent: `python -m fedveil.flower.supervisor COMMAND …`.

Flower's processes start others in sessions of their own, which a kill of the first one leaves behind. So this process
adopts whatever the command leaves orphaned (Linux), and ends all of it when the command exits, when it is told to
(SIGTERM: gently; SIGUSR1: as a power cut would), or when its standard input closes, which is how it learns that its
parent is gone. A client's worker is spared: it belongs to the client's home, and its parcels survive a node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_GRACE = 8.0
_SWEEPS, _BETWEEN_SWEEPS = 100, 0.1
_SPARED = b"fedveil.flower.worker"
_PROC = Path("/proc")


def main(command: list[str]) -> int:
    """Run the command to its end or ours; returns its exit status, as a shell would say it."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
    )
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while child.poll() is None:
            for key, _ in selector.select():
                if key.fd == 0 and not os.read(0, 4096):
                    selector.unregister(0)
                    _end(child, gently=True)
                elif key.fd == woken:
                    told = os.read(woken, 4096)
                    if signal.SIGUSR1 in told:
                        _end(child, gently=False)
                    elif signal.SIGTERM in told or signal.SIGINT in told:
                        _end(child, gently=True)
            _reap_adopted(but=child.pid)
    _sweep()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def descendants(root: int) -> list[int]:
    """Every living process below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdecimal():
            try:
                # The name, in brackets, may hold anything; what follows the last bracket is state and parent.
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                yield int(entry.name), int(parent)


def _end(child: subprocess.Popen[bytes], *, gently: bool) -> None:
    if gently:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
    if child.poll() is None:
        child.kill()
        child.wait()


def _sweep() -> None:
    """End whatever the command left; more than once, as a process may start another while it is being ended."""
    for attempt in range(_SWEEPS):
        spared = _workers()
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if attempt else signal.SIGTERM)
        time.sleep(_BETWEEN_SWEEPS)
        _reap_adopted()


def _workers() -> set[int]:
    """The workers below this process, and what they started."""
    found: set[int] = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if _SPARED in (_PROC / str(pid) / "cmdline").read_bytes():
                found |= {pid, *descendants(pid)}
    return found


def _reap_adopted(but: int = 0) -> None:
    # An adopted process that ended stays a zombie until it is asked for; the command itself is asked for elsewhere.
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
