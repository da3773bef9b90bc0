"""Runs over real processes of Flower's: the same model as the local engine's, with and without a worker's death."""

from __future__ import annotations

import contextlib
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
    COMMON,
    Run,
    Weights,
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

AGAIN = "the same message again"
"""What a worker's log says of an answer that is kept and repeated."""


@contextlib.contextmanager
def of_nodes(folder: Path, nodes: int) -> Iterator[Cluster]:
    before = set(descendants(os.getpid()))  # other tests may have left helpers of their own
    with Cluster(folder, nodes=nodes) as made:
        yield made
    assert set(descendants(os.getpid())) <= before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with of_nodes(tmp_path_factory.mktemp("cluster"), 3) as made:
        yield made


def finished(
    cluster: Cluster, folder: Path, *, killed: str | None = None, **settings: Any
) -> tuple[Run, dict[str, Any], Weights]:
    """A run that its server found nothing wrong with, its summary, and the local engine's model of the same run.

    With `killed`, the last client's worker is killed in the first round: its courier starts another, which answers the
    message or repeats the answer that the first one kept.
    """
    settings["clients"] = cluster.nodes
    home = cluster.places.home(cluster.nodes - 1)
    log = home / "worker.log"
    told = log.read_text().count(AGAIN) if log.exists() else 0
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(ordered_worker(home, ("Train", 1, killed))) if killed else None
        run = stack.enter_context(Run(cluster, made_app(folder / "app", **settings), folder / "run"))
        expected = local_model(folder / "local", **settings)
        if worker is not None:
            run.eventually(lambda: is_waiting(home), "the worker is in the middle of its work")
            worker.kill()
            worker.wait()
        summary = run.summary()
        if worker is not None:
            assert worker_of(home) != worker.pid
    rounds = settings.get("rounds", COMMON["rounds"])
    assert [row["clients"] for row in rows(run.out)] == [cluster.nodes] * rounds
    assert events(run.out) == [], "nothing went wrong, and nothing is said to have"
    assert log.read_text().count(AGAIN) - told == (killed == "answer, then wait")
    return run, summary, expected


def test_a_run_over_real_processes_gives_the_local_engines_model(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A single round of few messages to a single client, for each message starts a process of Flower's."""
    settings = {"scheme": "lossless", "rounds": 1, "vectorise": False}
    with of_nodes(tmp_path_factory.mktemp("alone"), 1) as alone:
        run, summary, expected = finished(alone, tmp_path, **settings)
        assert_same(model_of(run.out, homes_of(alone)), expected)
    assert (summary["engine"], summary["rounds"]) == ("flower", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"scheme": "lossless"}, id="lossless"),
        pytest.param({"scheme": "veil-secagg"}, id="veil-secagg"),
        pytest.param({"scheme": "nadp"}, id="nadp"),
        pytest.param({"scheme": "paraaegis", "cipher": "pads", "share": 0.1, "clip": 0.01}, id="paraaegis with pads"),
        pytest.param({"scheme": "paraaegis", "cipher": "ckks", "share": 0.1, "clip": 0.01}, id="paraaegis with ckks"),
    ],
)
def test_schemes_over_real_processes_give_the_local_engines_model(
    cluster: Cluster, settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings.get("cipher") == "ckks":
        pytest.importorskip("tenseal")
    run, _, expected = finished(cluster, tmp_path, **settings)
    found = model_of(run.out, homes_of(cluster))
    if settings["scheme"] == "nadp":
        # Noise that cancels, in floating-point numbers: the last digit may differ between two processes.
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    else:
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        pytest.param("wait, then answer", id="before its answer is made"),
        pytest.param("answer, then wait", id="after its answer is kept"),
    ],
)
def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(cluster: Cluster, order: str, tmp_path: Path) -> None:
    run, _, expected = finished(cluster, tmp_path, killed=order, scheme="lossless")
    assert_same(model_of(run.out, homes_of(cluster)), expected)
