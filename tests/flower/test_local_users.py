"""Another user of the machine, who wants to become whoever started the cluster: Flower asks nobody who they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower.cluster import CONNECTION, Cluster
from fedveil.flower.commands import environment, flwr

NOBODY = 65534
_PROJECT = """
[project]
name = "intruder"
version = "1.0.0"
description = "Says who runs it."
license = "Apache-2.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "intruder:server_app"
clientapp = "intruder:client_app"
"""
_CODE = """
import os
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid, context):
    with open({proof!r}, "w") as file:
        file.write(str(os.getuid()))
"""


@pytest.fixture
def intruder() -> Iterator[Path]:
    """A folder that another user can read, with an app in it that leaves its user's number where anybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="intruder-"))
    folder.chmod(0o777)
    app = folder / "intruder"
    app.mkdir()
    (app / "pyproject.toml").write_text(_PROJECT)
    (app / "intruder.py").write_text(_CODE.format(proof=str(folder / "proof")))
    (folder / "home").mkdir(mode=0o777)
    (folder / "home").chmod(0o777)
    app.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


_SUBMIT = """
import http.client, os, sys
from pathlib import Path
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab
import encodings.idna, hashlib

address, app, user = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
content = build_fab_from_disk(app)
request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))).SerializeToString()
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(user), os.setuid(user)
asking = http.client.HTTPConnection(address, timeout=20)
asking.request("POST", "/v1/control/start-run", request, {"content-type": "application/protobuf"})
answer = asking.getresponse()
print(os.getuid(), answer.status, answer.read())
sys.exit(0 if answer.status == 200 else 1)
"""


def submitted(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """What a stranger's run is answered; it brings no credentials, and knows the address alone, which any user can
    read off the processes. The package is read first, as it may lie where the stranger has no access."""
    command = [sys.executable, "-c", _SUBMIT, address, str(folder / "intruder"), str(NOBODY)]
    return subprocess.run(command, env=environment(folder / "home"), capture_output=True, text=True, timeout=120)


def proof(folder: Path, *, seconds: float) -> str:
    """The number of the user as whom the stranger's code ran; empty if it did not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (folder / "proof").exists() and (said := (folder / "proof").read_text()):
            return said
        time.sleep(0.2)
    return ""


@pytest.mark.slow
def test_a_cluster_that_is_shared_runs_a_strangers_code_as_its_owner(tmp_path: Path, intruder: Path) -> None:
    with Cluster(tmp_path, nodes=1, shared=True) as cluster:
        said = submitted(intruder, cluster.address)
        assert said.returncode == 0, said.stdout + said.stderr
        assert proof(intruder, seconds=60) == str(os.geteuid())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no network namespaces")
def test_a_stranger_reaches_no_cluster_with_a_network_of_its_own(tmp_path: Path, intruder: Path) -> None:
    with Cluster(tmp_path, nodes=1) as cluster:
        for process in cluster.processes:
            assert process.alive
        said = submitted(intruder, cluster.address)
        assert said.returncode != 0
        assert "ConnectionRefusedError" in said.stderr
        keeper = cluster.places.remembered().network  # type: ignore[union-attr]
        if os.geteuid() == 0:
            entered = subprocess.run(
                ["nsenter", f"--net=/proc/{keeper}/ns/net", "true"], user=NOBODY, group=NOBODY, capture_output=True
            )
            assert entered.returncode != 0, "nor can a stranger enter"
        # Its owner does, and is served.
        assert flwr("supernode", "list", CONNECTION, env=cluster.places.environment())["success"]
        assert proof(intruder, seconds=10) == ""
