"""Clients' processes that die, hang, dawdle or lie, in real runs: the others go on, and who is back takes part."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedveil.flower import worker_client as courier
from fedveil.flower.messages import TEXTS
from fedveil.processes import descendants
from flower_desks import RUBBISH
from flower_runs import (
    Run,
    assert_same,
    events,
    homes_of,
    is_waiting,
    made_app,
    model_of,
    model_without,
    ordered_worker,
    process_of,
    rows,
)
from harmed_cluster import Cluster

pytestmark = pytest.mark.slow

_DEADLINE = 60.0
Worker = subprocess.Popen[bytes]
Act = Callable[[Cluster, Worker], None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=4) as made:
        yield made
    assert descendants(os.getpid()) == []


def signalled(which: str, number: signal.Signals) -> Act:
    def act(cluster: Cluster, worker: Worker) -> None:
        pid = worker.pid if which == "worker" else process_of(cluster, "supernode-1", which)
        assert pid is not None, f"no {which} runs"
        os.kill(pid, number)

    return act


def nothing(cluster: Cluster, worker: Worker) -> None:
    """Time alone does it."""


_MASKED = {"scheme": "veil-secagg", "threshold": 0.5}


@pytest.mark.parametrize(
    ("harm", "heal", "scheme", "rounds"),
    [
        pytest.param(nothing, nothing, {"scheme": "lossless"}, 3, id="its work takes too long"),
        pytest.param(nothing, nothing, _MASKED, 3, id="its masked work takes too long"),
        pytest.param(
            signalled("worker", signal.SIGSTOP),
            signalled("worker", signal.SIGCONT),
            {"scheme": "lossless"},
            4,
            id="its worker hangs",
        ),
        pytest.param(
            signalled("flower-supernode", signal.SIGSTOP),
            signalled("flower-supernode", signal.SIGCONT),
            {"scheme": "lossless"},
            4,
            id="its SuperNode hangs",
        ),
        # Flower notices these two by heartbeats that do not come, after a minute.
        pytest.param(
            signalled("flwr-clientapp", signal.SIGKILL),
            nothing,
            {"scheme": "lossless"},
            6,
            id="its ClientApp is killed",
        ),
        pytest.param(
            lambda cluster, worker: cluster.kill_node(1),
            lambda cluster, worker: cluster.start_node(1),
            {"scheme": "lossless"},
            6,
            id="its SuperNode is killed and started again",
        ),
    ],
)
def test_a_client_that_is_gone_for_a_while_is_missed_and_takes_part_again(
    cluster: Cluster, harm: Act, heal: Act, scheme: dict[str, Any], rounds: int, tmp_path: Path
) -> None:
    home = cluster.places.home(1)
    settings = {**scheme, "clients": 4, "rounds": rounds}
    app = made_app(tmp_path / "app", **settings)
    with (
        ordered_worker(home, ("Train", 2, "wait, then answer")) as worker,
        Run(cluster, app, tmp_path / "run", deadline=_DEADLINE) as run,
    ):
        run.eventually(lambda: is_waiting(home), "the client is in the middle of its work")
        harm(cluster, worker)
        run.await_round(2)
        (home / "go").touch()
        heal(cluster, worker)
        run.summary()
    found = rows(run.out)
    assert len(found) == rounds
    assert (found[0]["clients"], found[1]["clients"], found[-1]["clients"]) == (4, 3, 4)
    assert not any("failed" in row for row in found)
    assert {one["client"] for one in events(run.out) if "client" in one} == {1}, "nobody else had any trouble"
    assert 2 in [one.get("round") for one in events(run.out, "missing")]
    missed = {(1, row["round"]) for row in found if row["clients"] == 3}
    expected = model_without(tmp_path / "expected", missed, **settings)
    assert_same(model_of(run.out, homes_of(cluster)), expected)


def test_rubbish_from_a_worker_costs_its_own_contribution_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    home, kinds = cluster.places.home(1), sorted(RUBBISH)
    rounds = len(kinds) + 1
    orders = [("Train", number, kind) for number, kind in enumerate(kinds, 1)]
    settings = {"scheme": "lossless", "clients": 4, "rounds": rounds}
    app = made_app(tmp_path / "app", **settings)
    with ordered_worker(home, *orders), Run(cluster, app, tmp_path / "run") as run:
        run.summary()
    counted = {kind: row["clients"] for kind, row in zip(kinds, rows(run.out), strict=False)}
    assert counted == dict.fromkeys(kinds, 3)
    assert rows(run.out)[-1]["clients"] == 4
    refused = [(one["client"], one["round"]) for one in events(run.out)]
    assert refused == [(1, number) for number in range(1, rounds)]
    assert {one["event"] for one in events(run.out)} == {"refused"}
    assert "PLANTED-CODE" not in (run.out / "events.jsonl").read_text(), "a code that nobody knows is not repeated"
    expected = model_without(tmp_path / "expected", set(refused), **settings)
    assert_same(model_of(run.out, homes_of(cluster)), expected)


_HOSTILE = """
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fedveil.flower.client_app import answer

client_app = ClientApp()


@client_app.train()
def handle(message, context):
    honest = answer(message, context)
    number = message.metadata.group_id
    if "client-1" not in context.node_config["fedveil-home"] or number not in LIES:
        return honest
    if number == "4":
        raise ValueError("PLANTED-4711")
    return Message(LIES[number](), reply_to=message)


def array(stype, content=b"rubbish"):
    parts = ArrayRecord({"reply": Array(dtype="uint8", shape=(len(content),), stype=stype, data=content)})
    return RecordDict({"fedveil": ConfigRecord({"code": ""}), "fedveil.parts": parts})


LIES = {
    "1": lambda: RecordDict({}),
    "2": lambda: RecordDict({"fedveil": ConfigRecord({"code": "PLANTED-4711"})}),
    "3": lambda: array("numpy.ndarray"),
    "4": lambda: None,
    "5": lambda: array("fedveil", bytes(1000000)),
    "6": lambda: RecordDict({"fedveil": ConfigRecord({"code": [1.0, 2.0]})}),
}
"""


def test_a_hostile_client_app_costs_its_own_contribution_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    settings = {"scheme": "lossless", "clients": 4, "rounds": 7}
    app = made_app(tmp_path / "app", **settings)
    (app / "hostile.py").write_text(_HOSTILE)
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("fedveil.flower:client_app", "hostile:client_app"))
    with Run(cluster, app, tmp_path / "run") as run:
        run.summary()
    assert [row["clients"] for row in rows(run.out)] == [3, 3, 3, 3, 3, 3, 4]
    assert [one["round"] for one in events(run.out, "refused", "error")] == [1, 2, 3, 4, 5, 6]
    assert {one["client"] for one in events(run.out)} == {1}
    told = "".join(file.read_text() for file in run.out.glob("*.json*")) + "".join(map(str, run.heard))
    assert "PLANTED" not in told, "what a client says is not repeated"
    missed = {(1, number) for number in range(1, 7)}
    expected = model_without(tmp_path / "expected", missed, **settings)
    assert_same(model_of(run.out, homes_of(cluster)), expected)


_DEADLY = """
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits

FACTS = dict(input_shape=(1, 8, 8), outputs=10, task="classification")


def client(number):
    if Path(__file__).with_name("deadly").exists():
        os.kill(os.getpid(), 9)
    digits = load_digits()
    images = torch.tensor(digits.images[number::3, None], dtype=torch.float32) / 16
    return images, torch.tensor(digits.target[number::3])
"""


def test_a_message_that_kills_worker_after_worker_is_given_up_and_the_client_comes_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    home = cluster.places.home(1)
    (home / "data.py").write_text(_DEADLY)
    settings = (home / "client.toml").read_text()
    (home / "client.toml").write_text(f'data = "data.py"\n{settings}')
    app = made_app(tmp_path / "app", scheme="lossless", clients=4, rounds=3)
    try:
        with (
            ordered_worker(home, ("Train", 1, "wait, then answer")) as worker,
            Run(cluster, app, tmp_path / "run") as run,
        ):
            run.eventually(lambda: is_waiting(home), "the client is in the middle of its work")
            (home / "deadly").touch()
            worker.kill()
            run.await_round(1)
            (home / "deadly").unlink()
            run.summary()
    finally:
        courier.stop(home)
        (home / "client.toml").write_text(settings)
    assert [row["clients"] for row in rows(run.out)] == [3, 4, 4]
    assert rows(run.out)[0]["refused"] == {"1": TEXTS["lost"]}
    assert [(one["event"], one["client"], one["round"]) for one in events(run.out)] == [("refused", 1, 1)]
