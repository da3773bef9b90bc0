"""Judgements on the terminal: of one run, and of several side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.cli.compare import show_comparison
from fedveil.cli.judged import named_metrics, show_judgement
from fedveil.cli.tables import console
from fedveil.compare.comparing import Comparison
from fedveil.compare.plan import CellProgress, planned, results_of
from fedveil.data import Dataset
from fedveil.errors import ConfigError
from fedveil.ledger.statement import Ledger
from fedveil.runs.judgement import Judgement, judge

SCHEMES = ("fedavg", "lossless", "nadp", "ldp", "mpdp")


def judged(*, learned: bool, positive: float = 0.512) -> Judgement:
    """Of a model that knows the answers, or of one that always gives the same."""
    y = (torch.arange(250) < 250 * positive).long()
    data = Dataset(
        "d", "classification", torch.zeros(250, 1), y, 2, ("ill", "well"), sites=y * 0 + torch.arange(250) % 2
    )
    constant = torch.tensor([[0.0, 1.0]]).expand(250, 2)
    return judge(torch.eye(2)[y] if learned else constant, data)


def comparison(*judgements: Judgement | None, seeds: tuple[int, ...] = (1,)) -> Comparison:
    plan = planned(list(SCHEMES[: len(judgements)]), seeds=list(seeds), settings={"rounds": 5}, only={})
    standings = tuple(CellProgress(cell) for cell in plan.cells)
    for progress in standings:
        own = judgements[SCHEMES.index(progress.cell.scheme)]
        summary: dict[str, Any] = {"rounds": 5, "loss": "square", "train_loss": 0.5, "test_accuracy": 0.512}
        summary |= {
            "seconds": 1.0,
            "bytes_up": 1.0,
            "bytes_down": 1.0,
            "ledger": Ledger("", 5, (), (), None, True, ()).as_data(),
        }
        progress.finish(summary if own is None else {**summary, "judged": own.as_data()})
    return Comparison(Path("c"), plan, standings, results_of(plan, standings))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 200)


def test_five_schemes_at_the_majority_rate_are_said_to_be_that(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison(comparison(*[judged(learned=False)] * 5))
    said = capsys.readouterr().out
    assert re.search(r"│ always well +│ +51.2 % │", said)
    assert "5 of 5 runs do not beat a constant answer:" in said
    for scheme in SCHEMES:
        assert f"{scheme}, seed 1: The model does not beat always answering 'well' (51.2 %)" in said


def test_a_comparison_of_schemes_that_learn_says_nothing_of_that(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison(comparison(judged(learned=True), None))
    said = capsys.readouterr().out
    assert "100.0 % [98.5–100.0]" in said
    assert "51.2 % │" in said  # a run of before, which was not judged
    assert "constant answer" not in said


def test_rare_classes_bring_auroc_beside_accuracy_and_flags_choose(capsys: pytest.CaptureFixture[str]) -> None:
    done = comparison(judged(learned=True, positive=0.2), seeds=(1, 2))
    show_comparison(done)
    first = capsys.readouterr().out
    assert "AUROC" in first
    assert "1.000 ± 0.000" in first
    show_comparison(done, named_metrics(["balanced-accuracy,f1", "r2"]))
    said = capsys.readouterr().out
    assert "AUROC" not in said
    assert all(title in said for title in ("balanced accuracy", "F1", "R²"))
    with pytest.raises(ConfigError, match="Did you mean 'auroc'"):
        named_metrics(["aurock"])


def test_one_judgement_has_figures_classes_groups_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    show_judgement(judged(learned=False, positive=0.0))
    said = capsys.readouterr().out
    for words in (
        "On 250 test samples",
        "By class",
        "By site",
        "no AUROC: every sample is of one class",
        "always ill",
    ):
        assert words in said
    assert "The model is worse than always answering 'ill' (100.0 %): accuracy 0.0 % [0.0–1.5]." in said
