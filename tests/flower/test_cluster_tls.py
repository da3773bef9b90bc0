"""A cluster under TLS, in real processes: certificates and keys are taken, strangers are not."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower.certificates import create_node_key
from fedveil.flower.cluster import CONNECTION, free_port
from fedveil.flower.commands import Submission, environment, healthy, program, superexec_command, supernode_command
from fedveil.processes import descendants
from flower_echo import create_echo
from harmed_cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, tls=True, shared=True) as made:
        yield made
    assert descendants(os.getpid()) == []


def test_a_run_passes_through_every_node(cluster: Cluster, tmp_path: Path) -> None:
    followed = Submission(CONNECTION, env=cluster.places.environment())
    events = list(followed.events(create_echo(tmp_path / "echo"), ""))
    assert [one["event"] for one in events] == ["began", "round", "round", "done"]
    assert events[-2]["homes"] == [str(cluster.places.home(node)) for node in range(2)]


def test_nothing_answers_without_tls(cluster: Cluster) -> None:
    assert healthy(cluster.address, ca=cluster.places.certificates.ca)
    assert not healthy(cluster.address, ca=None)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"https://{cluster.address}/health", timeout=30)


def ended(command: list[str], folder: Path) -> str:
    """What a command of Flower's wrote until it ended by itself."""
    with (folder / "log").open("w") as log:  # not a pipe: a process it starts would hold that open
        env = environment(folder / "flwr")
        subprocess.run([program(command[0]), *command[1:]], env=env, stdout=log, stderr=log, timeout=200)
    return (folder / "log").read_text()


def test_a_node_with_a_key_that_nobody_registered_is_turned_away(cluster: Cluster, tmp_path: Path) -> None:
    create_node_key(tmp_path / "stranger")
    said = ended(
        supernode_command(
            address=cluster.address,
            home=tmp_path,
            port=free_port(),
            key=tmp_path / "stranger",
            certificates=cluster.places.certificates,
        ),
        tmp_path,
    )
    assert "Exit Code: 305" in said
    assert "SuperNode ID" not in said


def test_a_superexec_with_another_secret_gets_no_work(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 32)
    certificates = cluster.places.certificates
    said = ended(
        superexec_command(address=cluster.address, secret=tmp_path / "secret", certificates=certificates), tmp_path
    )
    assert "SuperExec terminated" in said
    superexec = next(one for one in cluster.processes if one.name == "superexec")
    assert superexec.alive, "with the right one it goes on asking"


def test_registered_nodes_are_known_after_a_new_start(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with Cluster(tmp_path, nodes=1, tls=True, say=said.append):
            pass
    assert said.count("registering node 0") == 1


def test_a_node_that_is_killed_is_let_in_again_once_its_heartbeat_is_missed(cluster: Cluster) -> None:
    cluster.kill_node(0)
    cluster.start_node(0)
    assert all(one.alive for one in cluster.processes)
