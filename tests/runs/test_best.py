"""The best round: which it is, that its model is kept through interruptions, and when nobody waits for a better one."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedveil
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, StopTraining
from fedveil.runs import session
from fedveil.runs.best import BestRound
from fedveil.runs.folder import RunFolder
from fedveil.runs.model_file import load_model
from fedveil.runs.monitor import Monitor
from interrupting import interrupted_run, same_tensors

# A rate at which the loss goes up and down: the best round is none of the last ones.
SWINGING = RunConfig(
    scheme="fedavg",
    rounds=8,
    clients=3,
    seed=1,
    lr=2.5,
    batch_size=8,
    checkpoint_every=3,
    monitor="test_loss",
    model_options={"depth": 2, "width": 8},
)


def best_row(folder: Path) -> dict[str, Any]:
    return min(RunFolder(folder).metrics(), key=lambda row: (row["test_loss"], row["round"]))


def test_the_model_of_the_best_round_is_kept_beside_the_last(tmp_path: Path) -> None:
    summary = session.run(SWINGING, tmp_path / "run", quiet=True)
    row = best_row(tmp_path / "run")
    assert row["round"] < SWINGING.rounds, "otherwise this test shows nothing"
    assert summary["best"] == {"round": row["round"], "monitor": "test_loss", "value": row["test_loss"]}
    until = SWINGING.with_changes(rounds=row["round"], monitor=None)
    session.run(until, tmp_path / "short", quiet=True)
    best, last = (load_model(tmp_path / name).module for name in ("run/best.safetensors", "short/model.safetensors"))
    for ours, theirs in zip(best.parameters(), last.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert any("chosen by test_loss" in note for note in summary["ledger"]["notes"])


@pytest.mark.parametrize("at", [1, 2, 4, 5, 7])
def test_an_interruption_anywhere_changes_neither_the_best_round_nor_its_model(tmp_path: Path, at: int) -> None:
    session.run(SWINGING, tmp_path / "whole", quiet=True)
    interrupted_run(SWINGING, tmp_path / "parts", at=at)
    summary = session.resume(tmp_path / "parts", quiet=True)
    assert summary["best"]["round"] == best_row(tmp_path / "whole")["round"]
    for name in ("best.safetensors", "model.safetensors"):
        assert same_tensors(tmp_path / "whole" / name, tmp_path / "parts" / name)


def test_a_lost_best_model_is_said_and_the_best_from_there_on_is_kept(tmp_path: Path) -> None:
    interrupted_run(SWINGING, tmp_path / "run", at=7)
    for file in (tmp_path / "run" / "checkpoints").glob("best-*"):
        file.unlink()
    said: list[str] = []
    summary = session.resume(tmp_path / "run", quiet=True, say=said.append)
    assert any("is not there" in text for text in said)
    assert summary["best"]["round"] > 6


def test_early_stopping_ends_the_run_and_a_resume_does_not_go_on(tmp_path: Path) -> None:
    settings = SWINGING.with_changes(early_stopping=2, rounds=50)
    summary = session.run(settings, tmp_path / "run", quiet=True)
    assert summary["rounds"] == summary["best"]["round"] + 2 < 50
    assert "early_stopping" in summary["stopped"]
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "before.safetensors")
    again = session.resume(tmp_path / "run", quiet=True)
    assert (again["rounds"], again["best"]) == (summary["rounds"], summary["best"])
    assert same_tensors(tmp_path / "run" / "model.safetensors", tmp_path / "before.safetensors")
    longer = session.resume(tmp_path / "run", changes={"early_stopping": 40, "rounds": 12}, quiet=True)
    assert longer["rounds"] == 12


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"monitor": None, "early_stopping": 3}, "--monitor loss"),
        ({"monitor": "validation_accuracy"}, "hold one out"),
        ({"monitor": "test_acuracy"}, "Did you mean 'test_accuracy'"),
        ({"evaluate_every": 0}, "before the end: --evaluate-every 1"),
        ({"scheme": "ldp", "monitor": "loss"}, "do not tell their training loss"),
        ({"early_stopping": 0}, "must be positive"),
        ({"monitor": "test_auroc"}, r"no auroc \(of many classes it is taken at the end alone\); it has test_loss"),
        ({"monitor": "test_r2"}, "an evaluated round of classification has no r2; it has test_loss, test_accuracy"),
    ],
)
def test_what_tells_no_best_round_is_refused_before_training(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        session.run(SWINGING.with_changes(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_validation_part_chooses_the_round_unless_told_otherwise(tmp_path: Path) -> None:
    config = SWINGING.with_changes(monitor=None, validation_fraction=0.2)
    summary = session.run(config, tmp_path / "run", quiet=True)
    rows = RunFolder(tmp_path / "run").metrics()
    lowest = min(rows, key=lambda row: (row["validation_loss"], row["round"]))
    assert summary["best"] == {
        "round": lowest["round"],
        "monitor": "validation_loss",
        "value": lowest["validation_loss"],
    }
    assert any("by validation_loss, on samples that the server holds" in note for note in summary["ledger"]["notes"])


def test_in_memory_too() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, (x[:, 0] > 0).long())] * 2
    given: dict[str, Any] = {"scheme": "fedavg", "seed": 1, "progress": False, "lr": 30.0}
    done = fedveil.train(net, data, test=data[0], rounds=30, early_stopping=3, monitor="test_loss", **given)
    assert done.best is not None
    loss = float(nn.functional.cross_entropy(done.best(x), data[0][1]).detach())
    assert loss == pytest.approx(done.summary["best"]["value"], rel=1e-5)
    assert done.summary["rounds"] == done.summary["best"]["round"] + 3
    assert fedveil.train(net, data, rounds=1, **given).best is None
    validated = fedveil.train(net, data, validation=data[0], rounds=2, **given)
    assert validated.summary["best"]["monitor"] == "validation_loss"


def test_what_is_better_and_how_long_is_waited() -> None:
    best = BestRound(Monitor("validation_accuracy", higher_is_better=True), patience=2)
    for round, value in enumerate([0.5, math.nan, 0.7, None, 0.7, 0.6], start=1):
        best.check()
        best.hear({"round": round, "validation_accuracy": value}, None)
    assert (best.round, best.value) == (3, 0.7)
    with pytest.raises(StopTraining, match="validation_accuracy"):
        best.check()
    lower = BestRound(Monitor("validation_mse", higher_is_better=False))
    for round, value in enumerate([3.0, 2.0, 2.5], start=1):
        lower.hear({"round": round, "validation_mse": value}, None)
    assert lower.round == 2


@pytest.mark.parametrize("declared", [False, True, None])
def test_a_metric_of_ones_own_says_itself_whether_more_is_better(declared: bool | None) -> None:
    """By its name, a Brier score used to count as one of which more is better."""

    def brier_score(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.softmax(1)[:, 1] - targets).square().mean()

    if declared is not None:
        brier_score.higher_is_better = declared  # type: ignore[attr-defined]
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, (x[:, 0] > 0).long())] * 2
    given: dict[str, Any] = {"scheme": "fedavg", "seed": 1, "progress": False, "lr": 0.5, "rounds": 4}
    given |= {"test": data[0], "metrics": {"brier_score": brier_score}, "monitor": "brier_score"}
    net = nn.Linear(4, 2)
    if declared is None:
        with pytest.raises(ConfigError, match="higher_is_better, True or False"):
            fedveil.train(net, data, **given)
        return
    done = fedveil.train(net, data, **given)
    scores = [row["brier_score"] for row in done.metrics]
    assert scores == sorted(scores, reverse=True), "otherwise this test shows nothing"
    assert done.summary["best"]["round"] == (1 if declared else 4)
