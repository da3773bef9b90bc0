"""MLflow's own client finds every round once, with settings, ledger and files; nothing leaves the machine."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.tracking import LINEAGE, Tracked, figures_of, ledger_in_words, trackers
from interrupting import UNSEEDED, interrupted_run
from shell import fedveil

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
# Looked for and not imported, which takes seconds of every process that only collects tests.
pytestmark = pytest.mark.skipif(not (find_spec("mlflow") and find_spec("sqlalchemy")), reason="needs the extra mlflow")

SMALL = ("--scheme", "nadp", "--rounds", 3, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One data base for all tests: making its tables takes longer than they do."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a local store puts its artefacts


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> NoReturn:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def client_of(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def found(store: str, run: Path) -> Any:
    """The one MLflow run of a run folder."""
    client = client_of(store)
    experiment = client.get_experiment_by_name("fedveil").experiment_id
    (one,) = client.search_runs([experiment], f"tags.`{LINEAGE}` = '{RunFolder(run).lineage}'")
    return one


def check_all_rounds(store: str, run: Path) -> None:
    """Every figure of metrics.jsonl is there at its round, once, and no other."""
    client, one = client_of(store), found(store, run)
    rows = RunFolder(run).metrics()
    names = {name for row in rows for name in figures_of(row)}
    assert {"clients", "seconds", "bytes_down", "bytes_up", "test_accuracy"} <= names
    for name in names:
        told = {row["round"]: figures_of(row)[name] for row in rows if name in figures_of(row)}
        history = [(entry.step, entry.value) for entry in client.get_metric_history(one.info.run_id, name)]
        assert sorted(history) == sorted(told.items()), name


def test_a_run_is_read_back_with_settings_ledger_and_files(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    done = fedveil("run", *SMALL, "--mlflow", store, "--out", run)
    assert done.code == 0, done.error
    check_all_rounds(store, run)
    one, client = found(store, run), client_of(store)
    assert (one.info.status, one.info.run_name) == ("FINISHED", "run")
    assert one.data.params["scheme"] == "nadp"
    assert one.data.params["model.width"] == "8"
    assert one.data.tags["against server"] == "differential privacy"
    summary = session.resume(run, quiet=True)
    (server,) = [line for line in summary["ledger"]["lines"] if line["adversary"] == "server"]
    assert one.data.metrics["epsilon_server"] == server["epsilon"]
    for name in ("model.safetensors", "ledger.json", "ledger.md", "config.toml", "summary.json", "metrics.jsonl"):
        file = Path(client.download_artifacts(one.info.run_id, name, str(tmp_path)))
        assert file.stat().st_size > 0, name
    assert (tmp_path / "ledger.md").read_text(encoding="utf-8") == ledger_in_words(summary)
    assert (tmp_path / "ledger.json").read_bytes() == (run / "ledger.json").read_bytes()


@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_run_goes_on_as_the_same_run_and_repeats_no_round(tmp_path: Path, store: str, at: int) -> None:
    run = tmp_path / "run"
    interrupted_run(UNSEEDED, run, at=at, follow=trackers(Tracked(mlflow=store), run))
    assert found(store, run).info.status == "KILLED"
    session.resume(run, quiet=True, follow=trackers(Tracked(mlflow=store), run))
    assert found(store, run).info.status == "FINISHED"
    check_all_rounds(store, run)


def test_rounds_that_were_not_tracked_are_filled_in_and_a_longer_run_goes_on(tmp_path: Path, store: str) -> None:
    run = tmp_path / "run"
    session.run(dataclasses.replace(UNSEEDED, rounds=2), run, quiet=True)
    session.resume(run, quiet=True, follow=trackers(Tracked(mlflow=store), run))
    check_all_rounds(store, run)
    session.resume(run, changes={"rounds": 4}, quiet=True, follow=trackers(Tracked(mlflow=store), run))
    check_all_rounds(store, run)
    assert found(store, run).data.tags["fedveil.rounds"] == "4"


def test_a_store_that_cannot_be_opened_is_told_before_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = fedveil("run", *SMALL, "--mlflow", f"sqlite:///{tmp_path}/file/mlflow.db", "--out", tmp_path / "run")
    assert done.code == 1
    assert "does not answer as it should" in done.error
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    done = fedveil("run", *SMALL, "--mlflow", "--out", tmp_path / "run")
    assert done.code == 8
    assert "pip install 'fedveil[mlflow]'" in done.error
    assert not (tmp_path / "run").exists()
