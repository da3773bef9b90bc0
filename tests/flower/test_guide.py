"""docs/deployment.md, followed literally: every block of "Three machines", with folders in place of machines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower import worker_client as courier
from fedveil.flower.cluster import free_port
from fedveil.flower.commands import healthy

GUIDE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
DATA = """
import torch
from sklearn.datasets import load_breast_cancer

FACTS = dict(input_shape=(30,), outputs=2, task="classification")

def _all():
    found = load_breast_cancer()
    x = torch.tensor(found.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(found.target)

def test():
    x, y = _all()
    return x[::4], y[::4]

def client(number):
    x, y = _all()
    mine = [row for row in range(len(x)) if row % 4 == number + 1]
    return x[mine], y[mine]
"""


def blocks(heading: str, language: str = "sh") -> list[str]:
    """The code under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return re.findall(rf"```{language}\n(.*?)```", found.group(1), flags=re.DOTALL)


class Machine:
    """A folder, and the processes that were started in it."""

    def __init__(self, folder: Path, replacements: dict[str, str]) -> None:
        self.folder, self._said = folder, replacements
        folder.mkdir(parents=True)
        self._env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FLWR_HOME": str(folder / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._running: list[subprocess.Popen[bytes]] = []

    def _read(self, text: str) -> str:
        for name, real in self._said.items():
            text = text.replace(name, real)
        return text

    def does(self, text: str) -> str:
        """Run a block to its end."""
        done = subprocess.run(
            ["bash", "-ec", self._read(text)],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def keeps_running(self, text: str) -> None:
        """Start a block that stays."""
        with (self.folder / f"log-{len(self._running)}").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    ["bash", "-ec", self._read(text)],
                    cwd=self.folder,
                    env=self._env,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def logs(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-2000:] for file in sorted(self.folder.glob("log-*")))

    def ends(self) -> None:
        for one in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGTERM)
        for one in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    port, server = str(free_port()), tmp_path / "server"
    common = {
        "server.example.org": "127.0.0.1",
        "8000": port,
        "8443": str(free_port()),
        "/srv/fedveil-server": str(server),
    }
    made = [Machine(server, common)]
    for number in range(3):
        home = tmp_path / f"client-{number}" / "home"
        # One user stands for all: the blocks that make others, and hand them their files, are read and not run.
        key = {"/etc/flower-node.key": "/srv/fedveil/node.key"}
        said = key | {"/srv/fedveil": str(home), "--number 0": f"--number {number}", "9094": str(free_port())}
        made.append(Machine(tmp_path / f"client-{number}", common | said))
        home.mkdir()
    yield made
    for one in made[::-1]:
        one.ends()
    for number in range(3):
        courier.stop(tmp_path / f"client-{number}" / "home")


@pytest.mark.slow
def test_from_nothing_to_three_machines_by_the_guide(machines: list[Machine], tmp_path: Path) -> None:
    server, *clients = machines
    (made,) = blocks("1. The server: certificates")
    server.does(made)
    superlink, superexec, gate = blocks("2. The server: SuperLink, SuperExec and gate")
    server.keeps_running(superlink)
    address = f"127.0.0.1:{server._said['8000']}"
    ca = server.folder / "certificates" / "ca.pem"
    end = time.monotonic() + 120
    while not healthy(address, ca=ca):
        assert time.monotonic() < end, server.logs()
        time.sleep(0.5)
    server.keeps_running(superexec)
    server.keeps_running(gate)
    (users,) = blocks("3. Each client: two users")
    a_home, handed = blocks("4. Each client: a key and a home")
    for text in (users, handed):
        subprocess.run(["bash", "-n", "-c", text], check=True)
    for one in clients:
        (one.folder / "home" / "data.py").write_text(DATA)
        one.does(a_home)
        (one.folder / "ca.pem").write_bytes(ca.read_bytes())
    (known,) = blocks("5. The server: let the clients in", "toml")
    (server.folder / ".flwr").mkdir(exist_ok=True)
    (server.folder / ".flwr" / "config.toml").write_text(server._read(known))
    (register,) = blocks("5. The server: let the clients in")
    for number, one in enumerate(clients):
        public = one.folder / "home" / "node.key.pub"
        server.does(register.replace("client-0.pub", str(public)).replace("once per client", f"client {number}"))
    a_worker, a_node = blocks("6. Each client: the worker and the SuperNode")
    for one in clients:
        one.keeps_running(a_worker)
        one.keeps_running(a_node)
    init, run = blocks("7. Train")
    server.does(init.replace("--rounds 50", "--rounds 2"))
    (server.folder / "app" / "fedveil_data.py").write_text(DATA)
    said = server.does(run)
    out = server.folder / "runs" / "first"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rounds"], summary["simulation"], summary["engine"]) == (2, False, "flower"), said
    assert "test_accuracy" in summary
    assert [json.loads(line)["clients"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [3, 3]
    listed = server.does("flwr supernode list ours")
    assert listed.count("online") == 3, listed
    # Whoever is not on the server's machine reaches the gate alone, and through it no control interface.
    context = ssl.create_default_context(cafile=str(ca))
    for path in (
        "/v1/control/list-runs",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/health",
    ):
        outside = http.client.HTTPSConnection(f"127.0.0.1:{server._said['8443']}", context=context, timeout=30)
        outside.request("POST", path, b"", {"content-type": "application/protobuf"})
        assert outside.getresponse().status == 404, path
        outside.close()
