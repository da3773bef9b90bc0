"""`fedveil flower up` and `run` as a person types them: in processes of their own, ended by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.errors import ConfigError, ProtocolError
from fedveil.flower import worker_client as courier
from fedveil.flower.cluster import CONNECTION, Places
from fedveil.flower.commands import flwr
from fedveil.flower.network import entering
from fedveil.processes import descendants
from flower_echo import create_echo

FEDVEIL = [sys.executable, "-P", "-m", "fedveil", "flower"]
ENV = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "OMP_NUM_THREADS": "1"}

AS_ROOT = ["--as-root"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.slow


@dataclass
class Up:
    process: subprocess.Popen[str]
    folder: Path
    said: str

    def run(self, *arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
        command = [*FEDVEIL, "run", *map(str, arguments), "--folder", str(self.folder)]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    process = subprocess.Popen(
        [*FEDVEIL, "up", "--nodes", "2", "--folder", str(folder), *AS_ROOT],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C ends everything" in line:
            break
    yield Up(process, folder, "".join(lines))

    below = descendants(process.pid)
    homes = [Places(folder).home(node) for node in range(2)]
    workers = [said["pid"] for home in homes if (said := courier.ping(home)) is not None]
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    process.stdout.close()
    assert (process.wait(60), rest) == (0, "ended; the folder is kept for the next time\n")
    assert len(below) >= 9, "four supervisors, what they hold, and that of the workers"
    assert len(workers) == 2, "a real run has started them"
    deadline = time.monotonic() + 60  # what has ended is gone once somebody has asked for its status
    while left := [pid for pid in {*below, *workers} if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_the_first_thing_it_says_is_who_can_run_code_as_whom(up: Up) -> None:
    first, second = up.said.splitlines()[:2]
    assert "runs code as" in first
    assert "network of its own" in second


def test_it_says_what_runs_and_what_to_type_elsewhere(up: Up) -> None:
    for words in ("superlink", "supernode-1", "flower-superlink --host", "flwr supernode register", "flower-superexec"):
        assert words in up.said
    assert f"fedveil flower run APP --folder {up.folder}" in up.said


def test_a_run_is_shown_as_one_on_this_machine_is(up: Up, tmp_path: Path) -> None:
    init = [*FEDVEIL, "init", str(tmp_path / "app"), "--clients", "2", "-o", "depth=2", "-o", "width=8", "--seed", "1"]
    subprocess.run(init, env=ENV, check=True, capture_output=True)
    done = up.run(tmp_path / "app", "--rounds", 1, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Ledger of lossless after 1 round" in done.stdout
    assert f"in full: {tmp_path / 'run' / 'ledger.json'}" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 1
    again = up.run(tmp_path / "app", "--out", tmp_path / "run", "--quiet")
    assert again.returncode == 7, "the folder holds another run, as `fedveil run` would say"
    assert "--resume" in again.stderr


def test_a_run_for_another_number_of_clients_is_not_submitted(up: Up, tmp_path: Path) -> None:
    done = up.run(create_echo(tmp_path / "echo"), "--clients", 3)
    assert done.returncode == ConfigError.exit_code
    assert "has 3 clients, but the cluster" in done.stderr
    assert "--nodes 3" in done.stderr


@pytest.mark.parametrize("named", ["folder", "superlink"])
def test_a_run_that_fails_ends_with_its_words_and_its_exit_code(up: Up, tmp_path: Path, named: str) -> None:
    arguments = [create_echo(tmp_path / "echo"), "--seed", 13, "--quiet"]
    if named == "folder":
        done = up.run(*arguments)
    else:
        places = Places(up.folder)
        env = {**ENV, "FLWR_HOME": str(places.flwr_home)}
        inside = entering(places.environment())
        command = [*inside, *FEDVEIL, "run", *map(str, arguments), "--superlink", CONNECTION]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (ProtocolError.exit_code, "")
    assert done.stderr == "error: 13 brings bad luck\n"


@pytest.mark.parametrize("times", [1, 2], ids=["watching", "run"])
def test_ctrl_c_stops_watching_and_twice_stops_the_run(up: Up, tmp_path: Path, times: int) -> None:
    echo = create_echo(tmp_path / "echo")
    command = [*FEDVEIL, "run", str(echo), "--rounds", "1000", "--folder", str(up.folder)]
    with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stderr is not None
        found = re.match(r"run (\d+) in ", watching.stderr.readline())
        assert found is not None
        time.sleep(0.5)
        watching.send_signal(signal.SIGINT)
        assert "The run goes on" in watching.stderr.readline()
        if times == 2:
            time.sleep(0.5)
            watching.send_signal(signal.SIGINT)
        said = watching.stderr.read()
        code = watching.wait(60)
    env = Places(up.folder).environment()
    status = flwr("list", CONNECTION, "--run-id", found[1], env=env)["runs"][0]["status"]
    if times == 1:
        assert (code, status) == (129, "running")
        assert f"flwr stop {found[1]} {CONNECTION}" in said
        flwr("stop", found[1], CONNECTION, env=env)
    else:
        assert (code, status) == (130, "finished:stopped")


def test_a_second_one_in_the_same_folder_is_refused(up: Up) -> None:
    done = subprocess.run(
        [*FEDVEIL, "up", *AS_ROOT, "--folder", str(up.folder)], env=ENV, capture_output=True, text=True
    )
    assert done.returncode == ConfigError.exit_code
    assert "is up in" in done.stderr


def test_a_node_that_ends_is_started_again(up: Up) -> None:
    (node,) = (
        pid
        for pid in descendants(up.process.pid)
        if b"flower-supernode" in (line := Path(f"/proc/{pid}/cmdline").read_bytes())
        and b"fedveil.processes" not in line
        and b"client-1" in line
    )
    os.kill(node, signal.SIGKILL)
    assert up.process.stdout is not None
    assert "supernode-1 has ended: starting it again" in up.process.stdout.readline()
    deadline = time.monotonic() + 90
    while Places(up.folder).log("supernode-1").read_text().count("SuperNode ID") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
