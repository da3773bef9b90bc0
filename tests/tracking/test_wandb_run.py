"""Weights & Biases, offline: its own reader finds every round once, over all folders of a run."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil
from fedveil.errors import ConfigError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.tracking import Tracked, figures_of, trackers
from interrupting import UNSEEDED, interrupted_run
from shell import fedveil as command

needs_wandb = pytest.mark.skipif(not find_spec("wandb"), reason="needs the extra wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)


def records(place: Path) -> list[Any]:
    """What the offline folders of a run hold, the oldest first; a process of its own writes them, and ends each."""
    files = sorted(place.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    ends = time.monotonic() + 30
    while any(not kept or kept[-1].WhichOneof("record_type") != "exit" for kept in map(_read, files)):
        assert time.monotonic() < ends, "an offline run was not ended"
        time.sleep(0.05)
    return [record for file in files for record in _read(file)]


def _read(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    kept, store = [], DataStore()
    store.open_for_scan(str(file))
    with contextlib.suppress(AssertionError):  # its reader's word for a record that is still being written
        while (raw := store.scan_data()) is not None:
            kept.append(Record.FromString(raw))
    return kept


def rounds_of(place: Path) -> list[tuple[int, dict[str, float]]]:
    """(round, figures) in the order in which they were told."""
    told = []
    for record in records(place):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            told.append((items["_step"], {name: value for name, value in items.items() if not name.startswith("_")}))
    return told


def check_all_rounds(place: Path, run: Path) -> None:
    """Every figure of metrics.jsonl is there at its round, once, and no other."""
    rows = RunFolder(run).metrics()
    told = rounds_of(place)
    assert [step for step, _ in told] == [row["round"] for row in rows]
    for (_, figures), row in zip(told, rows, strict=True):
        assert figures == pytest.approx(figures_of(row))


@needs_wandb
@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_goes_on_and_repeats_no_round(tmp_path: Path, at: int) -> None:
    run, said = tmp_path / "run", []
    interrupted_run(UNSEEDED, run, at=at, follow=trackers(Tracked(wandb=str(tmp_path)), run, say=said.append))
    summary = session.resume(run, quiet=True, follow=trackers(Tracked(wandb=str(tmp_path)), run, say=said.append))
    assert said == []
    check_all_rounds(tmp_path, run)
    kinds = [record.WhichOneof("record_type") for record in records(tmp_path)]
    assert kinds.count("run") >= 2
    (first, *others) = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {first.run_id, *(other.run_id for other in others)} == {RunFolder(run).lineage}
    closing = {
        item.key: json.loads(item.value_json)
        for record in records(tmp_path)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    (server,) = [line for line in summary["ledger"]["lines"] if line["adversary"] == "server"]
    assert closing["epsilon_server"] == pytest.approx(server["epsilon"])
    assert closing["ledger"].startswith("# Ledger of nadp")


@needs_wandb
def test_training_from_python_is_tracked_by_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a local store of MLflow puts its artefacts
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    net = torch.nn.Linear(4, 2)
    data = [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(2)]
    place = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracked = {"wandb": tmp_path, "tensorboard": "", "mlflow": place}
    fedveil.train(net, data, scheme="fedavg", rounds=2, progress=False, out=tmp_path / "run", **tracked)
    check_all_rounds(tmp_path, tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert (tmp_path / "mlflow.db").exists()


@needs_wandb
def test_links_are_kept_out_of_a_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="may hold no links"):
        trackers(Tracked(wandb=str(tmp_path / "run" / "wandb")), tmp_path / "run")


def test_tracking_takes_a_folder() -> None:
    data = [(torch.randn(6, 4), torch.randint(0, 2, (6,)))]
    with pytest.raises(ConfigError, match=r"give one \(out\)"):
        fedveil.train(torch.nn.Linear(4, 2), data, scheme="fedavg", rounds=1, tensorboard="")


def test_a_missing_package_is_named_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = command("run", "--rounds", 1, "--wandb", "--out", tmp_path / "run")
    assert done.code == 8
    assert "pip install 'fedveil[wandb]'" in done.error
    assert not (tmp_path / "run").exists()
