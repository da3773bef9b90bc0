"""What is done to messages on their way, with and without TLS: nothing wrong is ever counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.flower.certificates import create_node_key
from fedveil.flower.cluster import Cluster, Service, WorkerSupervisor, free_port
from fedveil.flower.commands import environment, supernode_command
from fedveil.processes import descendants
from fedveil.runs.terms import create_identities
from flower_proxy import DOWN, UP, Proxy, proxied
from flower_runs import (
    Run,
    assert_same,
    events,
    eventually,
    homes_of,
    is_waiting,
    local_model,
    made_app,
    model_of,
    model_without,
    ordered_worker,
    rows,
)

pytestmark = pytest.mark.slow
Wire = tuple[Cluster, Proxy]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "TLS"])
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A cluster in which client 1 is behind the proxy, and whatever ends is started again."""
    folder = tmp_path_factory.mktemp("wire")
    create_identities(folder / "keys", clients=3)
    over = threading.Event()
    with (
        proxied(client=1) as proxy,
        Cluster(folder / "cluster", nodes=3, tls=request.param, keys=folder / "keys", shared=True) as cluster,
    ):
        watching = threading.Thread(target=cluster.watch, args=(over,))
        watching.start()
        try:
            yield cluster, proxy
        finally:
            over.set()
            watching.join()
    assert descendants(os.getpid()) == []


def test_signed_secure_aggregation_gives_the_local_engines_model_and_a_stranger_changes_nothing(
    wire: Wire, tmp_path: Path
) -> None:
    cluster, proxy = wire
    settings = {"scheme": "veil-secagg"}
    supervisor = WorkerSupervisor([], log=tmp_path / "supervisor.log")
    stranger = Service("stranger", log=tmp_path / "log", env=environment(tmp_path / "flwr"), held=supervisor.held)
    if cluster.tls:
        create_node_key(tmp_path / "key")
    try:
        with Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run:
            stranger.start(
                supernode_command(
                    address=cluster.address,
                    home=tmp_path / "no home",
                    port=free_port(),
                    key=tmp_path / "key" if cluster.tls else None,
                    certificates=cluster.places.certificates if cluster.tls else None,
                )
            )
            expected = local_model(tmp_path / "local", **settings)
            summary = run.summary()
        if cluster.tls:
            eventually(lambda: not stranger.alive, "a node with a key that nobody registered ends")
            assert "Exit Code: 305" in stranger.said()
    finally:
        stranger.kill()
        supervisor.finish()
    assert_same(model_of(run.out, homes_of(cluster)), expected)
    assert [row["clients"] for row in rows(run.out)] == [3, 3]
    assert {one["event"] for one in events(run.out)} <= (set() if cluster.tls else {"turned away"})
    assert "without a roster" not in str(summary["ledger"]), "every client knows the others' keys"
    name = b"MaskedUpload"  # as every message of the protocol, small or large, begins with its kind
    assert (name in proxy.heard[UP]) == (not cluster.tls), "who listens reads along without TLS, and only then"


@pytest.mark.parametrize(
    ("way", "when", "receiver"),
    [pytest.param(UP, 2, "superlink", id="answers"), pytest.param(DOWN, 1, "supernode-1", id="requests")],
)
def test_messages_changed_on_the_way_are_refused_and_the_client_is_missing_until_they_are_not(
    wire: Wire, way: str, when: int, receiver: str, tmp_path: Path
) -> None:
    cluster, proxy = wire
    home, rounds = cluster.places.home(1), 6
    settings = {"scheme": "lossless", "rounds": rounds}
    app = made_app(tmp_path / "app", **settings)
    before = proxy.changed
    with (
        ordered_worker(home, ("Train", when, "wait, then answer")),
        Run(cluster, app, tmp_path / "run", deadline=45.0) as run,
    ):
        run.eventually(lambda: is_waiting(home), "the client is in the middle of its work")
        proxy.meddling = way
        (home / "go").touch()
        try:
            run.await_round(2)
        finally:
            proxy.meddling = None
        run.summary()
    found = rows(run.out)
    assert proxy.changed > before
    # Under TLS the connection breaks; without, the receiver misses the content that Flower names by its hash.
    said = cluster.places.log(receiver).read_text()
    assert ("does not match content hash" in said) == (not cluster.tls)
    assert (found[0]["clients"], found[1]["clients"], found[-1]["clients"]) == (3, 2, 3)
    assert {one["client"] for one in events(run.out) if "client" in one} == {1}
    assert [one for one in events(run.out, "missing", "error", "refused") if one["round"] == 2]
    missed = {(1, row["round"]) for row in found if row["clients"] == 2}
    expected = model_without(tmp_path / "expected", missed, **settings)
    assert_same(model_of(run.out, homes_of(cluster)), expected)
