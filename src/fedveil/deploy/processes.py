"""One process of a cluster: on a leash, with a log file, startable again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedveil.deploy.flower import FlowerError, program
from fedveil.deploy.namespace import entering

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_SETTLED_AFTER = 60.0
_TAIL_LINES, _TAIL_BYTES = 15, 20_000
_MOST_PATIENCE = 30.0


class Leashed:
    """A command of Flower's that ends when this process ends, and takes everything it started along."""

    def __init__(self, name: str, *, log: Path, env: Mapping[str, str], held: int) -> None:
        """`held` is the end of a pipe that the leash keeps open as long as it lives."""
        self.name, self.log, self._env, self._held = name, log, dict(env), held
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._log_start = 0
        self._started = self._next_start = 0.0
        self._delay = 0.0

    def start(self, command: Sequence[str]) -> None:
        """Start it, once what ran before is gone; its output is appended to the log."""
        self.wait()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            leash = [sys.executable, "-P", "-m", "fedveil.deploy.leash"]
            self._process = subprocess.Popen(
                [*entering(self._env), *leash, program(command[0]), *command[1:]],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                pass_fds=(self._held,),
            )
        self._started, self._wanted = time.monotonic(), True

    @property
    def pid(self) -> int | None:
        """The leash's process id, if it runs."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def due(self) -> bool:
        """Whether it ended unasked and should be started again now; the wait doubles as long as it keeps ending."""
        if self.alive or not self._wanted:
            return False
        now = time.monotonic()
        if self._next_start < self._started:
            settled = now - self._started > _SETTLED_AFTER
            self._delay = _FIRST_DELAY if settled else min(max(2 * self._delay, _FIRST_DELAY), _LONGEST_DELAY)
            self._next_start = now + self._delay
        return now >= self._next_start

    def said(self) -> str:
        """What it has written since it was last started."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")
        return ""

    def tail(self) -> str:
        """The last lines of that, for an error message."""
        return "\n".join(self.said()[-_TAIL_BYTES:].strip().splitlines()[-_TAIL_LINES:])

    def failed(self, what: str) -> FlowerError:
        """An error that shows what it said last."""
        return FlowerError(f"{self.name} {what}. The end of {self.log}:\n{self.tail() or '(nothing)'}")

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would (its client's worker apart), and wait."""
        self._signal(signal.SIGUSR1)
        self.wait()

    def wait(self) -> None:
        """Until it and all it started are gone."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_MOST_PATIENCE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        self._wanted = False
        if self._process is not None and self.alive:
            self._process.send_signal(number)


class Janitor:
    """Ends the workers of these homes when the cluster is gone, however that came about."""

    def __init__(self, homes: Sequence[Path], *, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        waiting, self.held = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedveil.deploy.janitor", *map(str, homes)],
                stdin=waiting,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(waiting)

    def finish(self) -> None:
        """Let it end the workers now, and wait until it has."""
        with contextlib.suppress(OSError):
            os.close(self.held)
        if self._process.wait() != 0:
            raise FlowerError(f"A client's worker would not end: see {self.log}.")


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
