"""What is said of a model: against the best constant answer, by intervals, and never a NaN."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedveil
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.errors import CheckpointError, DataError
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.judgement import Judgement, judge, judgement_from, probabilities, quick_figures

Small = Callable[..., RunConfig]


@dataclass(frozen=True, eq=False)
class Known:
    """Samples with their targets."""

    task: str
    y: Tensor
    labels: tuple[str, ...] = ()
    groups: Tensor | None = None
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()


def binary(*, samples: int = 200, positive: float = 0.5, labels: tuple[str, ...] = ("no", "yes")) -> Known:
    return Known("classification", (torch.arange(samples) < positive * samples).long(), labels)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(data: Known, skill: float, seed: int = 1) -> Tensor:
    """Outputs for two classes whose difference knows the truth to that degree."""
    margin = noise(len(data.y), seed=seed) + skill * (2 * data.y.double() - 1)
    return torch.stack([-margin / 2, margin / 2], 1)


def stored(judged: Judgement) -> Judgement:
    """Through JSON that has no NaN, and back."""
    return judgement_from(json.loads(json.dumps(judged.as_data(), allow_nan=False)), where="test")


def test_a_good_model_beats_the_constant_answer() -> None:
    data = binary(positive=0.3)
    judged = judge(logits(data, 2.0), data)
    assert judged.beats_baseline is True
    assert judged.verdict.startswith("The model beats always answering 'no' (70.0 %): accuracy 9")
    assert (judged.positive, judged.baseline, judged.imbalanced) == ("yes", "no", True)
    assert all(
        figure.low is not None and figure.low < figure.value for figure in judged.figures.values() if figure.value
    )  # type: ignore[operator]
    assert stored(judged) == judged


def test_five_models_at_the_majority_rate_are_not_passed_over() -> None:
    data = binary(positive=0.512, samples=500)
    judged = judge(torch.tensor([[-1.0, 1.0]]).repeat(500, 1), data)
    assert judged.figures["accuracy"].value == judged.figures["accuracy"].baseline == 0.512
    assert judged.beats_baseline is False
    assert judged.verdict == (
        "The model does not beat always answering 'yes' (51.2 %): accuracy 51.2 % [46.8–55.6]. It gives every sample "
        "the same answer. It ranks samples no better than chance either (AUROC 0.500 [0.450–0.550])."
    )


def test_a_ranking_that_works_under_a_threshold_that_does_not_is_told_apart() -> None:
    data = binary(positive=0.1, samples=300)
    judged = judge(logits(data, 1.5) + torch.tensor([20.0, 0.0]), data)
    assert judged.beats_baseline is False
    assert "It does rank samples better than chance" in judged.verdict
    assert "what fails is the threshold" in judged.verdict


@pytest.mark.parametrize(
    ("skill", "words"), [(0.05, "is not shown to beat"), (-2.0, "is worse than"), (2.0, "The model beats")]
)
def test_the_wording_follows_from_the_interval(skill: float, words: str) -> None:
    data = binary()
    assert words in judge(logits(data, skill), data).verdict


def test_classes_that_are_absent_are_left_out_of_means_and_named() -> None:
    data = Known("classification", torch.arange(60) % 2, ("a", "b", "c"))
    outputs = noise(60, 3)
    outputs[range(60), data.y] += 2
    judged = stored(judge(outputs, data))
    absent = judged.classes[2]
    assert (absent.samples, absent.figures["auroc"].value) == (0, None)
    assert absent.figures["recall"].reason == "no sample is of this class"
    assert judged.notes == ("No sample is of c: means are over the other classes.",)
    assert judged.figures["auroc"].value is not None
    assert sum(map(sum, judged.confusion)) == 60


def test_one_class_has_no_auroc_and_says_why() -> None:
    data = binary(positive=0.0)
    judged = stored(judge(logits(data, 1.0), data))
    assert judged.figures["auroc"].value is None
    assert judged.figures["auroc"].reason == "every sample is of one class"
    assert judged.figures["accuracy"].baseline == 1.0
    assert judged.beats_baseline is False


def test_constant_targets_have_no_r2_and_nothing_is_told() -> None:
    data = Known("regression", torch.full((20, 1), 3.0))
    judged = stored(judge(3 + noise(20, 1), data))
    assert judged.figures["r2"].value is None
    assert judged.figures["mae"].value is not None
    assert judged.beats_baseline is None
    assert judged.verdict == "Whether the model beats a constant answer cannot be told: the targets do not vary."


@pytest.mark.parametrize(("part", "beaten"), [(0.9, True), (0.0, False)])
def test_a_regression_is_held_to_the_mean(part: float, beaten: bool) -> None:
    data = Known("regression", noise(120, 2))
    judged = judge(part * data.y + 0.4 * noise(120, 2, seed=2), data)
    assert judged.beats_baseline is beaten
    assert "always answering the mean (0.000)" in judged.verdict
    assert judged.figures["rmse"].baseline == pytest.approx(float(data.y.var(0, correction=0).mean() ** 0.5))


def test_several_labels_are_judged_label_by_label() -> None:
    data = Known("multilabel", (noise(150, 3, seed=3) > 0.7).double(), ("x", "y", "z"))
    judged = stored(judge(noise(150, 3) + 3 * data.y - 1.5, data))
    assert [part.name for part in judged.classes] == ["x", "y", "z"]
    assert all(part.figures["auroc"].value is not None for part in judged.classes)
    assert set(judged.figures) >= {"accuracy", "exact_match", "auroc", "average_precision", "f1", "ece"}
    assert judged.beats_baseline is True
    assert judged.probabilities == "sigmoid of the outputs"
    assert judged.title("f1") == "F1 (mean of labels)"
    # The square loss has learned 0 and 1 themselves.
    assert quick_figures(data.y, data, "square")["f1"] == 1.0
    assert quick_figures(2 * data.y - 1, data)["f1"] == 1.0


def test_outputs_that_are_no_numbers_are_no_figures() -> None:
    data = binary()
    outputs = logits(data, 1.0)
    outputs[:3, 0] = float("nan")
    judged = stored(judge(outputs, data))
    assert judged.figures["accuracy"].reason == "the model's outputs are not numbers for 3 of 200 samples"
    assert judged.beats_baseline is None
    assert "cannot be told" in judged.verdict
    assert quick_figures(outputs, data) == {}


def test_sites_are_judged_one_by_one() -> None:
    data = binary(samples=120)
    sites = torch.arange(120) % 3
    outputs = logits(data, 2.0)
    outputs[sites == 2] *= -1  # whose labels are the other way round
    known = Known("classification", data.y, data.labels, None, sites, ("Mainz", "Trier", "Bonn"))
    judged = stored(judge(outputs, known))
    assert [(part.name, part.samples) for part in judged.parts] == [("Mainz", 40), ("Trier", 40), ("Bonn", 40)]
    assert judged.parted_by == "site"
    first, last = judged.parts[0].figures["accuracy"], judged.parts[2].figures["accuracy"]
    assert first.low is not None
    assert first.low > 0.8
    assert last.high is not None
    assert last.high < 0.2
    assert judged.clusters is None  # three sites are no sample of sites


def test_samples_of_many_patients_are_taken_patient_by_patient() -> None:
    data = binary(samples=150)
    outputs, patients = logits(data, 1.0), torch.arange(150).repeat_interleave(4)
    fourfold = Known("classification", data.y[patients], data.labels, patients)
    judged, alone = judge(outputs[patients], fourfold), judge(outputs, data)
    assert judged.clusters == 150
    for name, figure in judged.figures.items():
        assert figure.value == pytest.approx(alone.figures[name].value)
        assert (figure.low, figure.high) == pytest.approx((alone.figures[name].low, alone.figures[name].high), abs=0.02)


def patients(skills: Tensor, *, pictures: int = 20) -> tuple[Tensor, Known]:
    """Outputs for the pictures of some patients, every other one ill; each patient's are as good as its skill."""
    who = torch.arange(len(skills)).repeat_interleave(pictures)
    y = who % 2
    margin = skills[who] * (2 * y - 1) + 0.1 * noise(len(who))
    return torch.stack([-margin / 2, margin / 2], 1), Known("classification", y, ("no", "yes"), who)


def test_ten_patients_can_show_that_a_model_is_good_and_do_not_show_it_by_chance() -> None:
    """Of models that guess patient by patient a third used to beat the baseline; at 2.5 % more than 2 of 20 do with a
    chance of 0.01, and the seeds are fixed. tests/runs/test_intervals.py has the rates."""
    beating = sum(bool(judge(*patients(noise(10, seed=seed), pictures=8)).beats_baseline) for seed in range(20))
    assert beating <= 2
    good = judge(*patients(torch.ones(10)))
    assert (good.clusters, good.beats_baseline) == (10, True)
    alone = judge(*patients(torch.ones(2), pictures=200))
    assert alone.beats_baseline is False
    assert "is not shown to beat" in alone.verdict


def test_one_patient_shows_nothing_and_the_verdict_says_why() -> None:
    outputs, data = patients(torch.ones(2))
    one = Known("classification", data.y, data.labels, torch.zeros(len(data.y)).long())
    judged = stored(judge(outputs, one))
    assert all(figure.low is None for figure in judged.figures.values())
    assert judged.beats_baseline is False
    assert "100.0 %, with no interval: it stands on one group" in judged.verdict


def test_groups_that_are_too_uneven_are_not_said_to_be_one() -> None:
    data = binary(samples=600)
    groups = torch.cat([torch.zeros(200).long(), 1 + torch.arange(400) // 10])
    judged = stored(judge(logits(data, 2.0), Known("classification", data.y, (), groups)))
    assert judged.clusters == 41
    why = "no interval: 41 groups of such uneven sizes are worth less than two"
    assert {judged.figures[name].reason for name in ("accuracy", "f1", "kappa", "ece")} == {why}
    assert why in judged.verdict
    # The positive samples are of the large group and ten small ones.
    assert judged.figures["auroc"].reason == "no interval: 11 groups of such uneven sizes are worth less than two"


def test_groups_without_names_go_by_any_number() -> None:
    data = binary(samples=6)
    judged = judge(logits(data, 1.0), Known("classification", data.y, (), torch.tensor([-5, -5, 7, 7, 10**9, 3])))
    assert [part.name for part in judged.parts] == ["-5", "3", "7", "1000000000"]


@pytest.mark.parametrize(("samples", "words"), [(1, "does not beat"), (20, "is worse than")])
def test_few_missed_samples_do_not_show_that_a_constant_answer_is_better(samples: int, words: str) -> None:
    missed = judge(torch.tensor([[1.0, 0.0]] * samples), Known("classification", torch.ones(samples).long()))
    assert missed.verdict.startswith(f"The model {words} always answering '1' (100.0 %): accuracy 0.0 % [0.0–")


@pytest.mark.filterwarnings("error")
def test_errors_too_large_to_be_squared_are_not_blamed_on_the_targets() -> None:
    data = Known("regression", noise(6, 1))
    judged = stored(judge(1e200 * noise(6, 1, seed=2), data))
    assert judged.figures["r2"].reason == "the outputs, or the targets, are too large to be squared"
    assert judged.figures["mae"].value is not None
    assert set(quick_figures(1e200 * noise(6, 1, seed=2), data)) == {"mae"}


def test_patients_stay_patients_within_a_site() -> None:
    outputs, data = patients(noise(12))
    known = Known("classification", data.y, data.labels, data.groups, torch.arange(240) // 120)
    free = Known("classification", data.y, data.labels, None, torch.arange(240) // 120)
    ours, naive = (judge(outputs, each).parts[0].figures["accuracy"] for each in (known, free))
    assert ours.low is not None
    assert naive.low is not None
    assert ours.low < naive.low - 0.05


def test_no_samples_are_nothing_to_judge_by() -> None:
    with pytest.raises(DataError, match="nothing to judge"):
        judge(torch.zeros(0, 2), Known("classification", torch.zeros(0).long()))


def test_square_loss_scores_become_the_probabilities_they_estimate() -> None:
    """Outputs at the minimum of the weighted square loss for p = (0.5, 0.3, 0.2) give p back."""
    wanted = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    scale, weight = 10.0, 4.0
    outputs = (scale * weight * wanted / (weight * wanted + 1 - wanted)).requires_grad_()
    error = [outputs[0] - scale * torch.eye(3, dtype=torch.float64)[k] for k in range(3)]
    weights = [1 + (weight - 1) * torch.eye(3, dtype=torch.float64)[k] for k in range(3)]
    loss = sum(p * (w * e.square()).sum() for p, w, e in zip(wanted[0], weights, error, strict=True))
    assert torch.autograd.grad(loss, outputs)[0].abs().max() < 1e-9  # type: ignore[arg-type]
    given, _ = probabilities(outputs, task="classification", loss="square", target_scale=scale, true_weight=weight)
    torch.testing.assert_close(given, wanted)
    odd, _ = probabilities(torch.tensor([[-1.0, -2.0], [3.0, -1.0]]), task="classification", loss="square")
    assert odd.tolist() == [[0.5, 0.5], [1.0, 0.0]]


def test_answers_are_those_of_the_outputs_also_where_probabilities_are_cut() -> None:
    data = Known("classification", torch.tensor([1, 1, 0]))
    judged = judge(torch.tensor([[1.5, 1.8], [-0.3, -0.1], [2.0, 0.0]]), data, loss="square")
    assert judged.figures["accuracy"].value == 1.0


def test_a_run_keeps_its_judgement_and_its_rows_keep_the_cheap_figures(tmp_path: Path, small: Small) -> None:
    summary = session.run(
        small(scheme="fedavg", rounds=2, dataset="breast-cancer", evaluate_every=1), tmp_path / "run", quiet=True
    )
    file = tmp_path / "run" / "summary.json"
    written = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert written["judged"] == json.loads(json.dumps(summary["judged"]))
    judged = judgement_from(written["judged"], where="run")
    assert judged.figures["accuracy"].value == summary["test_accuracy"]
    row = RunFolder(tmp_path / "run").metrics()[-1]
    assert row["test_auroc"] == pytest.approx(judged.figures["auroc"].value)
    assert row["test_balanced_accuracy"] == pytest.approx(judged.figures["balanced_accuracy"].value)
    for damage in ({"figures": {"accuracy": {"value": "much"}}}, {"samples": None}, {"surprise": 1}):
        file.write_text(json.dumps({**written, "judged": {**written["judged"], **damage}}))
        with pytest.raises(CheckpointError, match="what is judged is damaged"):
            RunFolder(tmp_path / "run").summary()
    file.write_text(json.dumps({**written, "judged": {**written["judged"], "verdict": "The best of all models."}}))
    assert judgement_from(RunFolder(tmp_path / "run").summary()["judged"], where="run").verdict == judged.verdict  # type: ignore[index]


def test_outputs_for_other_samples_are_refused() -> None:
    with pytest.raises(DataError, match="3 outputs for 200 samples"):
        judge(torch.zeros(3, 2), binary())


class Share:
    """A metric in the manner of torchmetrics."""

    def __init__(self) -> None:
        self.right = self.total = self.resets = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.total += len(targets)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.total)

    def reset(self) -> None:
        self.right = self.total = 0
        self.resets += 1


def trained(**more: Any) -> fedveil.api.Trained:
    net = torch.nn.Linear(3, 2)
    x = noise(60, 3).float()
    pairs = [(part, (part[:, 0] > 0).long()) for part in x.split(20)]
    given = {"test": pairs[2], "scheme": "fedavg", "rounds": 2, "seed": 1, "lr": 0.1, "progress": False, **more}
    return fedveil.train(net, pairs[:2], **given)


def test_metrics_of_ones_own_stand_in_rows_and_summary_by_their_names(tmp_path: Path) -> None:
    share = Share()
    own = {
        "share": share,
        "largest": lambda outputs, targets: outputs.max(),
        "per_class": lambda outputs, targets: torch.bincount(targets, minlength=2) / len(targets),
        "named": lambda outputs, targets: {"low": 1, "none": float("nan")},
    }
    result = trained(metrics=own, out=tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["share"] == pytest.approx(row["test_accuracy"]) == pytest.approx(result.summary["share"])
    assert isinstance(result.summary["largest"], float)
    assert sum(result.summary["per_class"]) == pytest.approx(1)
    assert (result.summary["named_low"], result.summary["named_none"]) == (1.0, None)
    assert share.total == 0
    assert share.resets >= 6
    assert result.judged is not None
    assert result.judged.samples == 20
    assert result.judged.figures["accuracy"].value == result.summary["test_accuracy"]


def test_metrics_of_torchmetrics_work() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: it is no dependency")
    result = trained(metrics={"cohen": torchmetrics.CohenKappa(task="multiclass", num_classes=2)})
    assert result.judged is not None
    assert result.summary["cohen"] == pytest.approx(result.judged.figures["kappa"].value, abs=1e-6)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": Share()}, "rows have a figure called 'loss'"),
        ({"test_mine": Share()}, "rows have a figure called 'test_mine'"),
        ({"my metric": Share()}, "is no name"),
        ({"mine": 3}, "give a function"),
        ({"mine": Share}, "give a function"),
        ({"mine": lambda outputs: outputs}, "The metric 'mine' fails on outputs of shape"),
        ({"mine": lambda outputs, targets: outputs}, "a number, a vector or numbers by name"),
    ],
)
def test_a_metric_that_cannot_work_is_refused_before_the_first_round(metrics: Any, words: str) -> None:
    with pytest.raises(fedveil.errors.ConfigError, match=words):
        trained(metrics=metrics)


@pytest.mark.parametrize("stored_too", [False, True])
def test_a_metric_that_fails_late_is_named_and_training_goes_on(
    tmp_path: Path, stored_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fragile(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:  # the first is the trial before training
            raise ZeroDivisionError("nothing to divide by")
        return outputs.max()

    out = tmp_path / "run" if stored_too else None
    with caplog.at_level("WARNING"):
        result = trained(metrics={"fragile": fragile, "share": Share()}, rounds=3, out=out)
    first, second, third = result.metrics
    assert isinstance(first["fragile"], float)
    assert "failed_metrics" not in first
    assert second["fragile"] is None
    assert "ZeroDivisionError: nothing to divide by" in second["failed_metrics"]["fragile"]
    assert isinstance(second["share"], float)
    assert isinstance(third["fragile"], float)
    assert result.summary["rounds"] == 3
    assert sum("the metric 'fragile' has failed in round 2" in record.getMessage() for record in caplog.records) == 1


def test_metrics_without_test_samples_are_refused() -> None:
    with pytest.raises(fedveil.errors.ConfigError, match="give them too"):
        trained(metrics={"mine": Share()}, test=None)


def test_every_name_of_rows_and_summaries_is_taken(straight: Path) -> None:
    from fedveil.runs.metrics import RESERVED

    folder = RunFolder(straight)
    names = {*(folder.summary() or {}), *(name for row in folder.metrics() for name in row)}
    assert {name for name in names if not name.startswith(("test_", "validation_", "client_view_"))} <= RESERVED


def test_a_data_set_is_judged_as_it_is() -> None:
    data = Dataset("d", "classification", torch.zeros(4, 1), torch.tensor([0, 1, 1, 1]), outputs=2)
    assert judge(torch.eye(2)[data.y], data).baseline == "1"


def test_two_samples_show_nothing() -> None:
    truth = torch.tensor([[0.0], [1.0]])
    data = Known("regression", truth)
    assert judge(torch.tensor([[0.4], [0.6]]), data).beats_baseline is False
