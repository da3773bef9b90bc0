"""Cells of a grid run apart from each other: what one does to its process is no other's loss."""

from __future__ import annotations

import os
import subprocess
import sys
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
    if number == 7:
        try:
            tell({"kind": "asleep", "pid": os.getpid()})
            signal.pause()
        except KeyboardInterrupt:
            open(os.path.join(job["folder"], "put away"), "w").close()
            raise
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
        job_of=lambda number: {"number": number, "folder": str(folder)},
        path=[folder],
        **{"take": lambda number, report: heard.setdefault(number, []).append(report), **settings},
    )
    return heard


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
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


def test_a_stopped_cell_can_put_its_things_away_and_leaves_no_process(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a log: what libraries say, here in the cell before, reaches standard error."""
    workers = []

    def interrupt(number: int, report: Report) -> None:
        if report["kind"] == "asleep":
            workers.append(report["pid"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, range(6, 8), jobs=1, take=interrupt)
    assert (folder / "put away").exists()
    assert not alive(workers[0])
    said = capsys.readouterr().err
    assert "a library talks" in said
    assert "Traceback" not in said


PARENT = """
import sys
from pathlib import Path
from fedveil.compare.grid import run_grid

def take(number, report):
    if report["kind"] == "asleep":
        print(report["pid"], flush=True)

if __name__ == "__main__":
    folder = sys.argv[1]
    job = {"number": 7, "folder": folder}
    run_grid([7], work="squares:work", job_of=lambda number: job, take=take, path=[folder], log=Path(folder, "log"))
"""


@pytest.mark.slow
def test_no_process_outlives_whoever_started_it(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.kill()
    until = time.monotonic() + 60
    while alive(worker):
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # an orphan that nobody asks for stays as a zombie
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
