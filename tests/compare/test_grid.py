"""Cells of a grid run apart from each other: what one does to its process is no other's loss."""

from __future__ import annotations

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
