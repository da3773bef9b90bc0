"""Children answer, end with their parent and say what they died of; supervised commands leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from fedveil import framing
from fedveil.processes import (
    ChildDiedError,
    ChildProcess,
    available_memory,
    channel,
    descendants,
    python,
    supervised,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A child in a session of its own, as Flower's are, and one whose parent has gone.
FAMILY = "setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &) ; "


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Word(IntEnum):
    ASK = 1
    ANSWER = 2


def serve() -> None:
    """A child that answers `echo`, and otherwise does as it is told."""
    incoming, outgoing = channel()
    print("chatter that must not run into an answer", flush=True)
    while True:
        _, (what, more) = framing.receive(incoming, Word)
        if what == b"die":
            os.write(2, more)
            os._exit(3)
        if what == b"family":
            subprocess.Popen(["sleep", "600"])
        if what == b"shell":
            subprocess.Popen(["sh", "-c", more.decode() + "wait"])
        if what == b"work":
            framing.send(outgoing, Word.ANSWER, b"at work")
            end = time.monotonic() + 600
            while time.monotonic() < end:
                pass
        framing.send(outgoing, Word.ANSWER, more)


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess(python("test_processes:serve"), name="The child")
    yield process
    process.end()


def asked(child: ChildProcess, what: bytes, more: bytes = b"") -> bytes:
    child.send(Word.ASK, what, more, deadline=time.monotonic() + 60)
    kind, (answer,) = child.receive(Word, deadline=time.monotonic() + 60)
    assert kind is Word.ANSWER
    return answer


def test_a_child_answers_in_a_session_of_its_own(child: ChildProcess) -> None:
    body = bytes(range(256)) * 10_000
    assert asked(child, b"echo", body) == body
    assert os.getsid(child.pid) == child.pid
    until(lambda: "chatter" in child.said())


def test_a_death_is_told_with_the_last_words(child: ChildProcess) -> None:
    assert asked(child, b"echo", b"before") == b"before"
    with pytest.raises(
        ChildDiedError, match=r"The child ended without a result \(exit code 3\)\.(.|\n)*no more of this$"
    ):
        asked(child, b"die", b"no more of this")
    with pytest.raises(ChildDiedError, match="exit code 3"):
        asked(child, b"echo")


def test_a_killed_child_is_told_from_one_that_leaves(child: ChildProcess) -> None:
    assert asked(child, b"work") == b"at work"
    child.kill()
    with pytest.raises(ChildDiedError, match="was killed by signal 9"):
        child.receive(Word)


def test_waiting_for_an_answer_is_bounded(child: ChildProcess) -> None:
    assert asked(child, b"work") == b"at work"
    with pytest.raises(TimeoutError):
        child.receive(Word, deadline=time.monotonic() + 0.2)
    assert child.wait(0.1) is None


def test_a_kill_takes_what_the_child_started(child: ChildProcess) -> None:
    asked(child, b"family")
    (below,) = descendants(child.pid)
    child.kill()
    until(lambda: not alive(below))


PARENT = """
import os, sys, time
sys.path.insert(0, {here!r})
from test_processes import ChildProcess, asked, python
child = ChildProcess(python("test_processes:serve"), name="The child")
assert asked(child, b"work") == b"at work"
if os.fork():
    print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_at_work_ends_with_its_parent_and_a_copy_of_the_parent_does_not_keep_it() -> None:
    code = PARENT.format(here=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        (copy,) = (one for one in descendants(parent.pid) if one != pid)
        parent.kill()
        try:
            until(lambda: not alive(pid))
        finally:
            os.kill(copy, signal.SIGKILL)


Start = Callable[..., tuple["subprocess.Popen[bytes]", list[int]]]


@pytest.fixture
def supervisor() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, grace: float | None = None) -> tuple[subprocess.Popen[bytes], list[int]]:
        command = supervised(["sh", "-c", script], spare="a worker of ours")
        if grace is not None:
            impatient = f"import sys; from fedveil import processes; processes._GRACE = {grace}; "
            command[1:4] = ["-P", "-c", impatient + "sys.exit(processes.main(sys.argv[1:]))"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        started.append(process)
        until(lambda: len(descendants(process.pid)) >= 5)
        return process, descendants(process.pid)

    yield start
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


@pytest.mark.parametrize("way", ["parent-gone", "told", "cut"])
def test_everything_ends(supervisor: Start, way: str) -> None:
    process, below = supervisor(FAMILY + "exec sleep 600")
    assert process.stdin is not None
    if way == "parent-gone":
        process.stdin.close()
    else:
        process.send_signal(signal.SIGTERM if way == "told" else signal.SIGUSR1)
    assert process.wait(60) == 128 + (signal.SIGKILL if way == "cut" else signal.SIGTERM)
    until(lambda: not any(map(alive, below)))


def test_a_command_that_ends_takes_its_family_along_and_its_status_is_told(supervisor: Start) -> None:
    process, below = supervisor(FAMILY + "sleep 1; exit 7")
    assert process.wait(60) == 7
    until(lambda: not any(map(alive, below)))


def test_a_command_that_will_not_end_is_killed(supervisor: Start) -> None:
    process, below = supervisor(FAMILY + "trap '' TERM; while :; do sleep 0.2; done", grace=0.5)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGKILL
    until(lambda: not any(map(alive, below)))


def test_a_supervisor_that_is_killed_takes_its_command_along(supervisor: Start) -> None:
    process, below = supervisor(FAMILY + "exec sleep 600")
    command = next(pid for pid in below if os.getpgid(pid) == process.pid)
    process.kill()
    process.wait()
    until(lambda: not alive(command))
    for pid in below:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_worker_lives_on(supervisor: Start) -> None:
    code = "import time; time.sleep(600)  # a worker of ours"
    process, below = supervisor(f"setsid {sys.executable} -c '{code}' & {FAMILY} exec sleep 600")
    (worker,) = (pid for pid in below if b"import time" in Path(f"/proc/{pid}/cmdline").read_bytes())
    process.terminate()
    process.wait(60)
    until(lambda: not any(alive(pid) for pid in below if pid != worker))
    assert alive(worker)
    os.kill(worker, signal.SIGKILL)


def test_a_kill_takes_what_the_child_started_in_sessions_of_their_own(child: ChildProcess) -> None:
    asked(child, b"shell", FAMILY.encode())
    until(lambda: len(descendants(child.pid)) >= 4)
    below = descendants(child.pid)
    child.end()
    until(lambda: not any(map(alive, below)))


def test_a_child_whose_parent_was_killed_takes_along_what_it_started() -> None:
    code = PARENT.format(here=str(Path(__file__).parent)).replace(
        "assert asked", f'asked(child, b"shell", {FAMILY.encode()!r})\nassert asked'
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: len(descendants(pid)) >= 4)
        family = [pid, *descendants(pid)]
        (copy,) = (one for one in descendants(parent.pid) if one not in family)
        parent.kill()
        try:
            until(lambda: not any(map(alive, family)))
        finally:
            for one in (copy, *family):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


FREED_AND_ASKED_AGAIN = """
import os, resource
import numpy as np
from fedveil.processes import give_back_memory, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        for block in [np.empty(1 << 21, dtype=np.uint8) for _ in range(8)]:
            block.fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

faults()
usual = faults()
keep_freed_memory()
faults()
kept, held = faults(), resident()
give_back_memory()
print(usual, kept, held - resident())
"""


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
def test_memory_that_training_frees_is_there_for_its_next_step_and_goes_back_in_the_end() -> None:
    told = subprocess.run([sys.executable, "-c", FREED_AND_ASKED_AGAIN], capture_output=True, check=True)
    usual, kept, given_back = map(int, told.stdout.split())
    assert usual > 1000  # 50 times 16 MB
    assert kept < usual / 10
    assert given_back > 8 << 20


def test_free_memory_is_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:   2000000 kB\n")
    assert available_memory(tmp_path / "meminfo") == 2_048_000_000
    assert available_memory(tmp_path / "nothing") is None


@pytest.mark.parametrize(("times", "ends"), [(1, "whole"), (2, "at once")])
def test_ctrl_c_waits_until_what_is_undisturbed_is_done_and_a_second_one_does_not(times: int, ends: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from fedveil.processes import undisturbed\n"
        "try:\n"
        "    with undisturbed():\n"
        f"        for _ in range({times}):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        print('whole')\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == (["whole", "stopped"] if ends == "whole" else ["stopped"])
