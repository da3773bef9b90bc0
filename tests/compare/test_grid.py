"""Cells of a grid run apart from each other: what one does to its process is no other's loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedveil.compare.grid import Report, run_grid
from fedveil.errors import ConfigError

WORK = """
import os, signal
from fedveil.errors import ConfigError

def work(job, tell):
    number = job["number"]
    tell({"kind": "half", "of": number})
    if number == 1:
        raise ConfigError("the second cell cannot be run")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        raise ValueError("a defect")
    print("a library talks")
    return {"square": number**2, "threads": os.environ.get("OMP_NUM_THREADS")}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "squares.py").write_text(WORK)
    return tmp_path


def run(folder: Path, numbers: range, **settings: Any) -> dict[int, list[Report]]:
    heard: dict[int, list[Report]] = {}
    run_grid(
        numbers,
        work="squares:work",
        job_of=lambda number: {"number": number},
        take=lambda number, report: heard.setdefault(number, []).append(report),
        path=[folder],
        **settings,
    )
    return heard


@pytest.mark.parametrize("jobs", [1, 2])
def test_cells_that_fail_or_die_take_no_other_with_them(folder: Path, jobs: int) -> None:
    heard = run(folder, range(6), jobs=jobs, threads=1, log=folder / "log")
    assert all(reports[0] == {"kind": "start"} for reports in heard.values())
    assert all(reports[1] == {"kind": "half", "of": number} for number, reports in heard.items())
    last = {number: reports[-1] for number, reports in heard.items()}
    assert [last[number]["kind"] for number in range(6)] == ["done", "failed", "failed", "failed", "done", "done"]
    assert (last[1]["reason"], last[1]["code"]) == ("the second cell cannot be run", ConfigError.exit_code)
    assert "killed by signal 9" in last[2]["reason"]
    assert last[3]["reason"] == "ValueError: a defect"
    assert (last[5]["square"], last[5]["threads"]) == (25, "1")
    assert "a library talks" in (folder / "log").read_text()


def test_the_same_work_runs_here_where_no_process_is_asked_for(folder: Path) -> None:
    heard = run(folder, range(4, 6), jobs=None)
    assert [reports[-1]["square"] for reports in heard.values()] == [16, 25]
    with pytest.raises(ConfigError, match="second cell"):
        run(folder, range(3), jobs=None)


TORN = """
import os
def work(job, tell):
    if job["number"] == 0:
        for one in range(3, 20):  # the pipe to the parent, wherever it lies
            try:
                if "pipe" in os.readlink(f"/proc/self/fd/{one}"):
                    os.write(one, b'{"kind": "ro')
            except OSError:
                pass
        os._exit(0)
    return {"square": job["number"] ** 2}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_ends_in_the_middle_of_a_report_fails_its_own_cell_alone(folder: Path) -> None:
    (folder / "squares.py").write_text(TORN)
    heard: dict[int, list[Report]] = {}
    thread = threading.Thread(target=lambda: heard.update(run(folder, range(2), jobs=1)), daemon=True)
    thread.start()
    thread.join(90)
    assert not thread.is_alive(), "the grid waits for a process that is gone"
    assert [heard[number][-1]["kind"] for number in range(2)] == ["failed", "done"]


STUCK = """
import os, subprocess, sys, time
def work(job, tell):
    below = subprocess.Popen(["sleep", "600"], start_new_session=True)
    sys.stderr.write(f"{os.getpid()} {below.pid}\\n")
    sys.stderr.flush()
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_at_work_ends_with_its_parent_and_takes_along_what_it_started(folder: Path) -> None:
    (folder / "squares.py").write_text(STUCK)
    code = f"""
from fedveil.compare.grid import run_grid
run_grid([0], work="squares:work", job_of=lambda n: {{}}, take=lambda c, r: None, path=[{str(folder)!r}])
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        family = [int(one) for one in parent.stderr.readline().split()]
        parent.kill()
        deadline = time.monotonic() + 60
        while any(alive(one) for one in family) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [one for one in family if alive(one)]
        for one in left:
            os.kill(one, signal.SIGKILL)
    assert left == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
