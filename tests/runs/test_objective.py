"""The loss that settings make: weights of classes, smoothing, several labels, from the command line's settings."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import data
from fedveil.config import BEFORE, RunConfig
from fedveil.errors import ConfigError, DataError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import job_from_config
from fedveil.runs.objective import class_counts, loss_of
from fedveil.runs.predicting import predict_dataset
from fedveil.work import BinaryCrossEntropy, CrossEntropy, SquareLoss

SMALL: dict[str, Any] = {
    "scheme": "fedavg",
    "dataset": "breast-cancer",
    "rounds": 2,
    "clients": 3,
    "seed": 1,
    "model_options": {"depth": 2, "width": 8},
}


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_mapping({**SMALL, **changes})


def test_balanced_weights_are_counted_and_make_every_class_count_alike() -> None:
    job = job_from_config(config(class_weights="balanced"))
    assert isinstance(job.loss, CrossEntropy)
    y = torch.cat([client.take(torch.arange(len(client)))[1] for client in job.pool.clients])
    each = [float((y == label).sum()) * weight for label, weight in enumerate(job.loss.class_weights)]
    assert each == pytest.approx([len(y) / 2, len(y) / 2])


@pytest.mark.parametrize("scheme", ["ldp", "nadp", "cdp", "veil-secagg", "veil-dp", "paraaegis", "ckks-fedavg"])
def test_balanced_weights_are_refused_where_a_scheme_promises_something_about_data(scheme: str) -> None:
    with pytest.raises(ConfigError, match="as numbers, --class-weights"):
        job_from_config(config(scheme=scheme, class_weights="balanced", cohort=None))
    job = job_from_config(config(scheme=scheme, class_weights="1,2.5"))
    assert getattr(job.loss, "class_weights", ()) == (1.0, 2.5)


def test_a_run_stores_its_weights_and_its_ledger_says_what_they_rest_on(tmp_path: Path) -> None:
    summary = session.run(config(class_weights="balanced", label_smoothing=0.1), tmp_path / "a", quiet=True)
    stored = RunFolder(tmp_path / "a").config()
    assert (stored.class_weights, stored.label_smoothing) == ("balanced", 0.1)
    assert sum("tell how often each class occurs" in note for note in summary["ledger"]["notes"]) == 1
    given = session.run(config(class_weights="1,3", scheme="ldp"), tmp_path / "b", quiet=True)
    assert sum("class weights (1, 3) are public" in note for note in given["ledger"]["notes"]) == 1
    again = session.resume(tmp_path / "a", changes={"rounds": 3}, quiet=True)
    assert again["rounds"] == 3


@pytest.mark.parametrize(
    ("task", "settings", "expected"),
    [
        ("classification", {}, CrossEntropy()),
        ("regression", {}, SquareLoss()),
        ("multilabel", {}, BinaryCrossEntropy()),
        ("multilabel", {"class_weights": "2,3"}, BinaryCrossEntropy((2.0, 3.0))),
        ("multilabel", {"class_weights": "balanced"}, BinaryCrossEntropy((4.0, 1.0))),
        ("classification", {"class_weights": "balanced"}, CrossEntropy((2.5, 1.0))),
        ("classification", {"loss": "square", "label_smoothing": 0.2}, SquareLoss(smoothing=0.2)),
        ("regression", {"class_weights": "1,2"}, "leave them out"),
        ("multilabel", {"class_weights": "1,2", "loss": "square"}, "leave them out"),
        ("multilabel", {"label_smoothing": 0.1}, "for classes"),
        ("multilabel", {"loss": "cross-entropy"}, "binary-cross-entropy for several labels"),
        ("regression", {"loss": "cross-entropy"}, "square for regression"),
        ("classification", {"loss": "binary-cross-entropy"}, "--task multilabel"),
        ("classification", {"class_weights": "heavy"}, "one number per class"),
        ("classification", {"class_weights": "1,-2"}, "at least 0"),
        ("classification", {"class_weights": "1,inf"}, "at least 0"),
        ("classification", {"loss": "python:mine"}, "given as an object from Python"),
    ],
)
def test_settings_and_task_make_the_loss_or_are_refused(task: str, settings: dict[str, Any], expected: Any) -> None:
    given = RunConfig.from_mapping(settings)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            loss_of(given, task, "auto", counted=(10, 2, 5))
    else:
        assert loss_of(given, task, "auto", counted=(10, 2, 5)) == expected


def test_nobody_counts_where_data_are_elsewhere_or_a_class_is_missing() -> None:
    balanced = RunConfig(class_weights="balanced")
    with pytest.raises(ConfigError, match="here nobody may"):
        loss_of(balanced, "classification", "auto")
    with pytest.raises(DataError, match="class 1 has no sample"):
        loss_of(balanced, "classification", "auto", counted=class_counts(torch.tensor([0, 0, 2]), 3))


def test_weights_of_another_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 numbers, and the data have 2 classes"):
        job_from_config(config(class_weights="1,2,3"))


def test_checkpoints_from_before_these_settings_stay_valid() -> None:
    """At their defaults they are no part of what identifies a run; at other values they are."""
    base = RunConfig(seed=1, lr=0.1, bn_eps="secret").with_changes(**BEFORE)
    assert base.fingerprint() == "0cfe10adb749b26c3e5515a3eab58c46189111cca68c22cc3ce811c8511aca48"
    for changes in ({"class_weights": "1,2"}, {"label_smoothing": 0.1}, {"weights": "a.safetensors"}):
        assert base.with_changes(**changes).fingerprint() != base.fingerprint()
    for changes in ({"early_stopping": 3}, {"monitor": "loss"}):
        assert base.with_changes(**changes).fingerprint() == base.fingerprint()


def _copied(folder: Path) -> Path:
    return Path(shutil.copy(folder / "t.csv", folder / "new.csv"))


def test_several_target_columns_of_a_table_are_several_labels(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(80, 3, generator=generator)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "ill", "smokes"])
        for a, b, c in rows.tolist():
            writer.writerow([a, b, c, int(a > 0), "yes" if b + c > 0 else "no"])
    given = {"dataset": str(tmp_path / "t.csv"), "target": "ill,smokes", "task": "multilabel"}
    split = data.load(given["dataset"], target="ill,smokes", task="multilabel")
    assert (split.train.labels, split.train.outputs, split.train.input_shape) == (("ill", "smokes"), 2, (3,))
    summary = session.run(config(**given, rounds=30, lr=1.0), tmp_path / "run", quiet=True)
    assert summary["loss"] == "binary-cross-entropy"
    assert summary["test_accuracy"] > 0.8
    known, new = (predict_dataset(tmp_path / "run", dataset=path) for path in (None, str(_copied(tmp_path))))
    assert known.accuracy == summary["test_accuracy"]
    assert new.accuracy is None, "which of two words is 1 is not kept with a model"
    for made in (known, new):
        assert set(made.columns["labels"]) <= {"", "ill", "smokes", "ill;smokes"}
        assert all(0 <= chance <= 1 for chance in made.columns["p_smokes"])
    for wrong, error in (("ill,nobody", ConfigError), ("ill,ill", ConfigError), ("ill,a", DataError)):
        with pytest.raises(error):
            data.load(given["dataset"], target=wrong, task="multilabel")
