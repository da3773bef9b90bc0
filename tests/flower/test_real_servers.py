"""The server's processes killed in the middle of a real run: it goes on, or is resumed, to the same model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedveil.flower.commands import FlowerError
from fedveil.processes import descendants
from flower_runs import (
    Run,
    assert_same,
    events,
    homes_of,
    is_waiting,
    local_model,
    made_app,
    model_of,
    ordered_worker,
    process_of,
    rows,
)
from harmed_cluster import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=3) as made:
        yield made
    assert descendants(os.getpid()) == []


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        pytest.param("lossless", "Train", id="in the only phase of a round"),
        pytest.param("veil-secagg", "Train", id="in the first phase"),
        pytest.param("veil-secagg", "Unmask", id="in the second phase"),
    ],
)
def test_a_superlink_killed_and_restarted_in_a_round_changes_nothing(
    cluster: Cluster, scheme: str, what: str, tmp_path: Path
) -> None:
    home = cluster.places.home(1)
    settings = {"scheme": scheme, "rounds": 3}
    with (
        ordered_worker(home, (what, 2, "wait, then answer")),
        Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run,
    ):
        run.eventually(lambda: is_waiting(home), "a client is in the middle of its work")
        cluster.restart_superlink()
        (home / "go").touch()
        expected = local_model(tmp_path / "local", **settings)
        summary = run.summary()
    assert_same(model_of(run.out, homes_of(cluster)), expected)
    assert summary["rounds"] == 3
    assert [(row["round"], row["clients"]) for row in rows(run.out)] == [(1, 3), (2, 3), (3, 3)]
    assert events(run.out) == []


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        pytest.param({"scheme": "lossless"}, "Train", id="lossless"),
        pytest.param({"scheme": "veil-secagg"}, "Unmask", id="veil-secagg"),
        pytest.param({"scheme": "nadp"}, "Train", id="nadp"),
        pytest.param({"scheme": "paraaegis", "cipher": "pads", "share": 0.1, "clip": 0.01}, "Divide", id="paraaegis"),
    ],
)
def test_a_server_app_killed_in_a_round_is_resumed_from_the_round_before(
    cluster: Cluster, settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    home, out = cluster.places.home(1), tmp_path / "run"
    settings = {**settings, "rounds": 3}
    app = made_app(tmp_path / "app", **settings)
    with ordered_worker(home, (what, 2, "wait, then answer")):
        with Run(cluster, app, out) as run:
            run.eventually(lambda: is_waiting(home), "a client is in the middle of its work")
            server = process_of(cluster, "superexec", "flwr-serverapp")
            assert server is not None
            os.kill(server, signal.SIGKILL)
            (home / "go").touch()
            with pytest.raises(FlowerError, match=r"ended .*finished:failed"):
                run.ended()
        assert [row["round"] for row in rows(out)] == [1]
        with Run(cluster, app, out, resume=True) as run:
            summary = run.summary()
    # A round that was asked for and lost has cost what it costs: where a target binds, the last one is missing.
    rounds = [1, 2] if settings["scheme"] in ("nadp", "paraaegis") else [1, 2, 3]
    assert [row["round"] for row in rows(out)] == rounds
    assert [row["clients"] for row in rows(out)] == [3] * len(rounds)
    assert summary["rounds"] == len(rounds)
    assert [(one["round"], one["attempt"]) for one in events(out, "resumed")] == [(1, 1)]
    assert not [one for one in events(out) if "client" in one], "no client had any trouble"
    found = model_of(out, homes_of(cluster))  # where clients hold it, they all hold the same
    if settings["scheme"] in ("lossless", "veil-secagg"):
        assert_same(found, local_model(tmp_path / "local", **settings))
    else:
        lost = [note for note in summary["ledger"]["notes"] if "rounds asked for that are not in the model" in note]
        assert len(lost) == 1
        assert ": 1;" in lost[0]
