"""Runs over real processes of Flower's: the same model as the local engine's, with and without a worker's death."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedveil.flower.cluster import Cluster
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
    rows,
    worker_of,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = set(descendants(os.getpid()))  # other tests may have left helpers of their own
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=3) as made:
        yield made
    assert set(descendants(os.getpid())) <= before


def test_secure_aggregation_over_real_processes_gives_the_local_engines_model(cluster: Cluster, tmp_path: Path) -> None:
    settings = {"scheme": "veil-secagg"}
    with Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run:
        expected = local_model(tmp_path / "local", **settings)
        summary = run.summary()
    assert_same(model_of(run.out, homes_of(cluster)), expected)
    assert (summary["engine"], summary["rounds"]) == ("flower", 2)
    assert [row["clients"] for row in rows(run.out)] == [3, 3]
    assert events(run.out) == [], "nothing went wrong, and nothing is said to have"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"scheme": "lossless"}, id="lossless"),
        pytest.param({"scheme": "nadp"}, id="nadp"),
        pytest.param({"scheme": "paraaegis", "cipher": "pads", "share": 0.1, "clip": 0.01}, id="paraaegis with pads"),
        pytest.param({"scheme": "paraaegis", "cipher": "ckks", "share": 0.1, "clip": 0.01}, id="paraaegis with ckks"),
    ],
)
def test_other_schemes_over_real_processes_give_the_local_engines_model(
    cluster: Cluster, settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings.get("cipher") == "ckks":
        pytest.importorskip("tenseal")
    with Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run:
        expected = local_model(tmp_path / "local", **settings)
        run.summary()
    found = model_of(run.out, homes_of(cluster))
    if settings["scheme"] == "nadp":
        # Noise that cancels, in floating-point numbers: the last digit may differ between two processes.
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    else:
        assert_same(found, expected)
    assert [row["clients"] for row in rows(run.out)] == [3, 3]
    assert events(run.out) == []


@pytest.mark.parametrize(
    "order",
    [
        pytest.param("wait, then answer", id="before its answer is made", marks=pytest.mark.slow),
        pytest.param("answer, then wait", id="after its answer is kept"),
    ],
)
def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(cluster: Cluster, order: str, tmp_path: Path) -> None:
    """Its courier starts another, which answers the message or repeats the answer that the first one kept."""
    home = cluster.places.home(1)
    settings = {"scheme": "lossless"}
    told = (home / "worker.log").read_text().count("the same message again") if (home / "worker.log").exists() else 0
    with (
        ordered_worker(home, ("Train", 1, order)) as worker,
        Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run,
    ):
        expected = local_model(tmp_path / "local", **settings)
        run.eventually(lambda: is_waiting(home), "the worker is in the middle of its work")
        worker.kill()
        worker.wait()
        run.summary()
        assert worker_of(home) != worker.pid
    assert_same(model_of(run.out, homes_of(cluster)), expected)
    assert [row["clients"] for row in rows(run.out)] == [3, 3]
    assert events(run.out) == [], "the server has noticed nothing"
    again = (home / "worker.log").read_text().count("the same message again") - told
    assert again == (order == "answer, then wait")
