"""Nothing of a leashed command outlives its parent, its end or a kill; a client's worker does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.deploy.leash import descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A child in a session of its own, as Flower's are, and one whose parent has gone.
FAMILY = "setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &) ; "
LEASH = [sys.executable, "-P", "-m", "fedveil.deploy.leash"]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def leashed() -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], list[int]]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        leash = subprocess.Popen([*LEASH, "sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
        started.append(leash)
        until(lambda: len(descendants(leash.pid)) >= 5)
        return leash, descendants(leash.pid)

    yield start
    for leash in started:
        assert leash.stdin is not None
        leash.stdin.close()
        leash.wait(60)


Start = Callable[[str], tuple["subprocess.Popen[bytes]", list[int]]]


@pytest.mark.parametrize("way", ["parent-gone", "told", "cut"])
def test_everything_ends(leashed: Start, way: str) -> None:
    leash, below = leashed(FAMILY + "exec sleep 600")
    assert leash.stdin is not None
    if way == "parent-gone":
        leash.stdin.close()
    else:
        leash.send_signal(signal.SIGTERM if way == "told" else signal.SIGUSR1)
    assert leash.wait(60) == 128 + (signal.SIGKILL if way == "cut" else signal.SIGTERM)
    until(lambda: not any(map(alive, below)))


def test_a_command_that_ends_takes_its_family_along_and_its_status_is_told(leashed: Start) -> None:
    leash, below = leashed(FAMILY + "sleep 1; exit 7")
    assert leash.wait(60) == 7
    until(lambda: not any(map(alive, below)))


def test_a_command_that_will_not_end_is_killed(leashed: Start) -> None:
    leash, below = leashed(FAMILY + "trap '' TERM; while :; do sleep 0.2; done")
    leash.terminate()
    assert leash.wait(60) == 128 + signal.SIGKILL
    until(lambda: not any(map(alive, below)))


def test_a_leash_that_is_killed_takes_its_command_along(leashed: Start) -> None:
    leash, below = leashed(FAMILY + "exec sleep 600")
    command = next(pid for pid in below if os.getpgid(pid) == leash.pid)
    leash.kill()
    leash.wait()
    until(lambda: not alive(command))
    for pid in below:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_lives_on(leashed: Start) -> None:
    code = "import time; time.sleep(600)  # fedveil.engines.flower.worker"
    leash, below = leashed(f"setsid {sys.executable} -c '{code}' & {FAMILY} exec sleep 600")
    (worker,) = (pid for pid in below if b"import time" in Path(f"/proc/{pid}/cmdline").read_bytes())
    leash.terminate()
    leash.wait(60)
    until(lambda: not any(alive(pid) for pid in below if pid != worker))
    assert alive(worker)
    os.kill(worker, signal.SIGKILL)
