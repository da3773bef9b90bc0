"""summary.json and config.toml: what a run leaves for others to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs import session

Small = Callable[..., RunConfig]
NEEDED = {
    *("scheme", "dataset", "model", "clients", "rounds", "seed", "test_loss", "seconds", "bytes_down", "bytes_up"),
}


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


def test_the_summary_has_what_a_table_of_results_needs(straight: Path) -> None:
    summary = summary_of(straight)
    assert NEEDED | {"test_accuracy"} <= set(summary)
    assert (summary["scheme"], summary["dataset"], summary["model"]) == ("lossless", "digits", "mlp")
    assert (summary["clients"], summary["rounds"], summary["seed"]) == (4, 10, 5)
    assert 0 <= summary["test_accuracy"] <= 1
    assert summary["seconds"] > 0
    assert summary["simulation"] is True
    assert summary["coverage"] == 1.0


SCHEMES = {
    "fedavg": ({"scheme": "fedavg", "loss": "square"}, 1),
    "pbpfl": ({"scheme": "pbpfl"}, 3),
    "lossless": ({"scheme": "lossless"}, 12),
    "lossless, m = 4": ({"scheme": "lossless", "head_groups": 4}, 6),
    "lossless without head noise": ({"scheme": "lossless", "head_noise": False}, 1),
}


@pytest.mark.parametrize(("settings", "tensors"), SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_client_sends_m_plus_two_models_and_receives_one(
    tmp_path: Path, small: Small, settings: dict[str, Any], tensors: int, dtype: str
) -> None:
    config = small(rounds=2, dtype=dtype, model_options={"depth": 3, "width": 64}, **settings)
    summary = session.run(config, tmp_path / "run", quiet=True)
    model = summary["parameters"] * (8 if dtype == "float64" else 4)
    assert summary["bytes_up"] == pytest.approx(tensors * model, rel=0.01)
    assert summary["bytes_down"] == pytest.approx(model, rel=0.02)


def test_the_summary_says_when_an_accuracy_was_reached(tmp_path: Path, small: Small) -> None:
    summaries = [
        session.run(small(rounds=3, evaluate_every=1, target_accuracy=target), tmp_path / str(target), quiet=True)
        for target in (0.02, 1.0)
    ]
    rows = [json.loads(line) for line in (tmp_path / "0.02" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["test_accuracy"] >= 0.02)
    seconds = sum(row["seconds"] for row in rows[: first["round"]])
    assert summaries[0]["target"] == {
        "accuracy": 0.02,
        "round": first["round"],
        "seconds": pytest.approx(seconds, abs=1e-3),
    }
    assert summaries[1]["target"] == {"accuracy": 1.0, "round": None, "seconds": None}


def test_an_accuracy_that_nobody_looks_for_is_refused(tmp_path: Path, small: Small) -> None:
    with pytest.raises(ConfigError, match="nothing is evaluated before the end"):
        session.run(small(target_accuracy=0.5, evaluate_every=0), tmp_path / "run", quiet=True)


def test_bytes_are_per_client_and_round_also_for_a_cohort(tmp_path: Path, small: Small) -> None:
    all_of_them, some = (
        session.run(small(rounds=2, cohort=cohort), tmp_path / str(cohort), quiet=True) for cohort in (None, 2)
    )
    assert some["bytes_up"] == pytest.approx(all_of_them["bytes_up"], rel=1e-3)


def test_the_declared_releases_are_in_the_summary(straight: Path) -> None:
    ledger = summary_of(straight)["ledger"]
    assert json.loads((straight / "ledger.json").read_text()) == ledger
    fields = {one["field"] for one in ledger["releases"]}
    assert {"train.parameters", "upload.gradients", "upload.weight"} <= fields


def test_what_a_client_sees_is_no_better_than_guessing_and_the_servers_model_is(tmp_path: Path, small: Small) -> None:
    config = small(rounds=60, head_strength=3.0, model_options={"depth": 2, "width": 32}, batch_size=0, lr=0.1)
    summary = session.run(config, tmp_path / "run", quiet=True)
    assert summary["test_accuracy"] > 0.85
    assert summary["client_view_accuracy"] < 0.5
    plain = session.run(
        config.with_changes(scheme="fedavg", head_strength=None, loss="square"), tmp_path / "b", quiet=True
    )
    assert plain["client_view_accuracy"] == plain["test_accuracy"]
    assert "coverage" not in plain


def test_the_config_file_says_the_same_run_again(straight: Path, small: Small) -> None:
    assert RunConfig.from_mapping(RunConfig.read(straight / "config.toml")) == small()


def test_a_run_without_a_seed_draws_one_and_real_secrets(tmp_path: Path, small: Small) -> None:
    summary = session.run(small(rounds=2, seed=None), tmp_path / "a", quiet=True)
    again = session.run(small(rounds=2, seed=None), tmp_path / "b", quiet=True)
    stored = RunConfig.from_mapping(RunConfig.read(tmp_path / "a" / "config.toml"))
    assert summary["simulation"] is False
    assert stored.secrets == "os"
    assert stored.seed == summary["seed"] != again["seed"]
    resumed = session.resume(tmp_path / "a", changes={"rounds": 4}, quiet=True)
    assert (resumed["rounds"], resumed["simulation"]) == (4, False)


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4])])
def test_the_model_is_judged_as_often_as_asked(tmp_path: Path, small: Small, every: int, expected: list[int]) -> None:
    session.run(small(rounds=5, evaluate_every=every), tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if "test_accuracy" in row] == expected
    assert "test_accuracy" in summary_of(tmp_path / "run")


def test_the_model_file_is_in_the_runs_precision(tmp_path: Path, small: Small) -> None:
    import torch

    for dtype in ("float32", "float64"):
        session.run(small(rounds=1, dtype=dtype), tmp_path / dtype, quiet=True)
        tensors = load_file(tmp_path / dtype / "model.safetensors")
        assert {value.dtype for value in tensors.values()} == {getattr(torch, dtype)}
