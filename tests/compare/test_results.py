"""Means, sample deviations, and the verdict of the run that is worst off."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedveil.compare.plan import CellProgress, planned, read_results, results_of, write_results
from fedveil.errors import CheckpointError
from fedveil.ledger.gaussian import epsilon_of, mu_of
from fedveil.ledger.statement import Ledger, Line, Verdict


def line(adversary: str, verdict: Verdict, epsilon: float | None = None) -> Line:
    if epsilon is None:
        return Line(adversary, verdict, "")
    return Line(adversary, verdict, "", epsilon, 1e-5, mu_of(epsilon, 1e-5))


def summary(accuracy: float, *lines: Line, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "rounds": 5,
        "loss": "square",
        "train_loss": 0.5,
        "test_accuracy": accuracy,
        "seconds": seconds,
        "bytes_up": 10.0,
        "bytes_down": 20.0,
        "ledger": Ledger("nadp", 5, lines, (), None, True, ()).as_data(),
    }


@pytest.fixture
def results() -> dict[str, Any]:
    plan = planned(["nadp", "fedavg"], seeds=[1, 2, 3], settings={"rounds": 5}, only={"nadp": {"lr": 3.0}})
    standings = [CellProgress(cell) for cell in plan.cells]
    for one, accuracy, epsilon in zip(standings[:3], (0.5, 0.7, 0.9), (2.5, 2.9, 2.7), strict=True):
        one.finish(summary(accuracy, line("server", "differential privacy", epsilon), line("clients", "none")))
    standings[3].finish(summary(0.8, line("server", "none")))
    standings[4].fail("diverged", code=5)
    return results_of(plan, standings)


def test_figures_are_means_and_sample_deviations_over_seeds(results: dict[str, Any]) -> None:
    found = results["schemes"]["nadp"]
    assert (found["n"], found["failed"]) == (3, 0)
    assert found["test_accuracy"] == {"mean": pytest.approx(0.7), "deviation": statistics.stdev([0.5, 0.7, 0.9])}
    assert found["bytes_up"] == {"mean": 10.0, "deviation": 0.0}
    assert "test_mse" not in found


def test_one_run_has_no_deviation(results: dict[str, Any]) -> None:
    found = results["schemes"]["fedavg"]
    assert (found["n"], found["failed"]) == (1, 1)
    assert found["test_accuracy"] == {"mean": 0.8, "deviation": None}


def test_a_scheme_is_as_private_as_its_worst_run(results: dict[str, Any]) -> None:
    worst = results["schemes"]["nadp"]["privacy"]["server"]
    assert worst["epsilon"] == 2.9
    assert worst["add_remove_epsilon"] == pytest.approx(epsilon_of(mu_of(2.9, 1e-5) / 2, 1e-5))
    assert results["schemes"]["fedavg"]["privacy"]["server"]["add_remove_epsilon"] is None
    plan = planned(["nadp"], seeds=[1, 2], settings={}, only={})
    standings = [CellProgress(cell) for cell in plan.cells]
    standings[0].finish(summary(0.5, line("server", "differential privacy", 3.0)))
    standings[1].finish(summary(0.5, line("server", "none")))
    assert results_of(plan, standings)["schemes"]["nadp"]["privacy"]["server"]["verdict"] == "none"


def test_every_run_says_whether_it_is_good_and_why_not(results: dict[str, Any]) -> None:
    told = [(one["scheme"], one["seed"], one["folder"], one["ok"], one["reason"]) for one in results["runs"][2:]]
    assert told == [
        ("nadp", 3, "nadp/seed-3", True, ""),
        ("fedavg", 1, "fedavg/seed-1", True, ""),
        ("fedavg", 2, "fedavg/seed-2", False, "diverged"),
        ("fedavg", 3, "fedavg/seed-3", False, "has not ended"),
    ]
    assert results["runs"][4]["exit_code"] == 5
    assert results["only"] == {"nadp": {"lr": 3.0}}
    assert results["common"]["rounds"] == 5
    assert not {"seed", "scheme"} & results["common"].keys()


def test_what_is_written_is_read_back(results: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    write_results(file, results)
    assert read_results(file) == json.loads(json.dumps(results))


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', "{"], ids=["empty", "list", "other", "torn"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "compare.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"compare\.json"):
        read_results(file)
