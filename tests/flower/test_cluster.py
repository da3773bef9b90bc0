"""A cluster without TLS, in real processes: a run through it, failures, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedveil.errors import ConfigError
from fedveil.flower import worker_client as courier
from fedveil.flower.app_folder import override
from fedveil.flower.cluster import CONNECTION, Places, WorkerSupervisor, free_port, shared_out, shared_polls
from fedveil.flower.commands import POLL_INTERVAL, FlowerError, Submission, parse_event
from fedveil.processes import descendants
from flower_echo import create_echo
from harmed_cluster import Cluster


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_echo(tmp_path_factory.mktemp("apps") / "echo")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster") / "a folder", nodes=2)
    with made:
        yield made
    assert descendants(os.getpid()) == []


def homes_of(cluster: Cluster) -> list[str]:
    return [str(cluster.places.home(node)) for node in range(cluster.nodes)]


def submission(cluster: Cluster, said: list[str] | None = None) -> Submission:
    return Submission(CONNECTION, env=cluster.places.environment(), say=(said if said is not None else []).append)


def rounds_of(events: list[dict[str, Any]]) -> list[int]:
    return [one["round"] for one in events if one["event"] == "round"]


def test_a_supervisor_without_homes_has_the_time_to_end_by_itself(tmp_path: Path) -> None:
    WorkerSupervisor([], log=tmp_path / "supervisor.log").finish()


def test_nodes_of_one_machine_share_its_cores_and_look_for_work_less_often_the_more_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [shared_out(nodes)["OMP_NUM_THREADS"] for nodes in (1, 2, 3, 20)] == ["4", "2", "1", "1"]
    assert [float(shared_polls(nodes)[POLL_INTERVAL]) for nodes in (1, 8, 20, 100)] == [0.2, 0.2, 0.5, 1.0]


@pytest.mark.slow
def test_a_run_passes_through_every_node_and_survives_a_superlink_that_is_killed(cluster: Cluster, echo: Path) -> None:
    said: list[str] = []
    followed = submission(cluster, said)
    events = []
    for event in followed.events(echo, override({}, {"rounds": 3})):
        events.append(event)
        if rounds_of(events) == [1] and event["event"] == "round":
            cluster.restart_superlink()
    assert [one["event"] for one in events] == ["began", "round", "round", "round", "done"]
    assert rounds_of(events) == [1, 2, 3]
    assert all(one["homes"] == homes_of(cluster) for one in events if one["event"] == "round")


@pytest.mark.slow
def test_a_run_that_fails_says_so_and_one_that_breaks_is_quoted(cluster: Cluster, echo: Path) -> None:
    *_, last = submission(cluster).events(echo, override({}, {"seed": 13}))
    assert last == {"event": "failed", "text": "13 brings bad luck", "exit_code": 6}
    with pytest.raises(FlowerError, match=r"(?s)finished:failed.*17 is not caught"):
        list(submission(cluster).events(echo, override({}, {"seed": 17})))


@pytest.mark.slow
def test_what_flower_does_not_take_is_quoted(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(FlowerError, match=r"did not take the run: .*pyproject\.toml"):
        list(submission(cluster).events(tmp_path, ""))


@pytest.mark.slow
def test_a_node_that_is_killed_comes_back(cluster: Cluster, echo: Path) -> None:
    node = cluster.processes[-1]
    before = node.pid
    cluster.kill_node(1)
    assert not node.alive
    cluster.start_node(1)
    assert node.pid not in (None, before)


@pytest.mark.slow
def test_a_second_cluster_in_the_same_folder_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"up in .* already"):
        Cluster(cluster.places.folder, nodes=2).start()
    assert all(one.alive for one in cluster.processes), "the first one is not harmed"


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} is taken"):
            Cluster(tmp_path, nodes=1, port=port, shared=True).start()


@pytest.mark.slow
def test_a_superlink_that_does_not_start_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "superlink.db").write_text("this is no database, and long enough to be recognised as none" * 20)
    before = set(descendants(os.getpid()))
    with pytest.raises(FlowerError, match=r"(?s)superlink ended while it started.*not a database"):
        Cluster(tmp_path, nodes=1).start()
    assert set(descendants(os.getpid())) <= before


@pytest.mark.slow
def test_tls_is_not_changed_under_a_folder(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps({"port": free_port(), "nodes": 1, "tls": True}))
    with pytest.raises(ConfigError, match="was made with TLS"):
        Cluster(tmp_path, nodes=1).start()
    with pytest.raises(ConfigError, match="at least one node"):
        Cluster(tmp_path, nodes=0)


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_nothing_and_the_folder_is_used_again(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from fedveil.flower.cluster import Cluster\n"
        "with Cluster(sys.argv[1], nodes=1) as cluster:\n"
        "    print(cluster.address, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    address = parent.stdout.readline().strip()
    home = Places(tmp_path).home(0)
    worker = subprocess.Popen([sys.executable, "-P", "-m", "fedveil.flower.worker", home])
    while courier.ping(home) is None:
        time.sleep(0.1)
    below = descendants(parent.pid)
    assert len(below) >= 7, "three supervisors, what they hold, and that of the workers"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 90
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below]
        time.sleep(0.2)
    assert worker.wait(60) == 0
    about = home / "client.toml"
    about.write_text(about.read_text() + "# mine\n")
    with Cluster(tmp_path, nodes=1) as again:
        assert again.address == address
    assert about.read_text().endswith("# mine\n")


@pytest.mark.parametrize(
    ("line", "event"),
    [
        pytest.param('FEDVEIL {"event": "said", "text": "x"}\n', {"event": "said", "text": "x"}, id="plain"),
        pytest.param('INFO: FEDVEIL {"event": "e"}INFO: y\n', {"event": "e"}, id="amid-others"),
        pytest.param("FEDVEIL {broken\n", None, id="broken"),
        pytest.param("FEDVEIL [1]\n", None, id="list"),
        pytest.param('FEDVEIL {"text": "x"}\n', None, id="nameless"),
        pytest.param('{"event": "e"}\n', None, id="unmarked"),
    ],
)
def test_events_are_found_wherever_a_log_puts_them(line: str, event: dict[str, Any] | None) -> None:
    assert parse_event(line) == event
