"""Figures agree with scikit-learn's, their intervals with theory, with brute force, and with how often they hold."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm
from sklearn import metrics as reference

from fedveil.runs import intervals, metrics
from fedveil.runs.intervals import Array, Codes, Measured


def classes(samples: int, count: int, *, seed: int = 1, skill: float = 1.0) -> tuple[Codes, Array]:
    """True classes, unevenly frequent, and outputs with ties that know something of them."""
    generator = np.random.default_rng(seed)
    truth = generator.choice(count, size=samples, p=np.arange(1, count + 1) / np.arange(1, count + 1).sum())
    outputs = generator.normal(size=(samples, count)).round(1)
    outputs[np.arange(samples), truth] += skill
    return truth, outputs


def figures_of(truth: Codes, answer: Codes, confidence: Array, count: int) -> dict[str, list[Measured]]:
    columns = metrics.class_columns(truth, answer, confidence, classes=count)
    return metrics.counted(columns, metrics.class_figures, constant=columns, clusters=None, undefined={})


@pytest.mark.parametrize("count", [2, 5])
def test_counted_figures_are_those_of_scikit_learn(count: int) -> None:
    truth, outputs = classes(150, count)
    answer = outputs.argmax(1)
    figures = figures_of(truth, answer, np.ones(len(truth)), count)
    average = "binary" if count == 2 else "macro"
    assert figures["balanced_accuracy"][0].value == pytest.approx(reference.balanced_accuracy_score(truth, answer))
    assert figures["f1"][0].value == pytest.approx(reference.f1_score(truth, answer, average=average))
    assert figures["kappa"][0].value == pytest.approx(reference.cohen_kappa_score(truth, answer))
    each = reference.f1_score(truth, answer, average=None)
    assert [figure.value for figure in figures["each f1"]] == pytest.approx(each.tolist())


def test_the_calibration_error_is_that_of_its_definition() -> None:
    truth, outputs = classes(400, 3)
    chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    confidence, hits = chances.max(1), chances.argmax(1) == truth
    edges = np.linspace(0, 1, metrics.BINS + 1)
    gaps = [
        here.sum() / len(truth) * abs(confidence[here].mean() - hits[here].mean())
        for low, high in itertools.pairwise(edges)
        if (here := (confidence >= low) & (confidence < high)).any()
    ]
    figures = figures_of(truth, chances.argmax(1), confidence, 3)
    assert figures["ece"][0].value == pytest.approx(sum(gaps))


@pytest.mark.parametrize("outputs", [1, 3])
def test_errors_are_those_of_scikit_learn(outputs: int) -> None:
    generator = np.random.default_rng(1)
    truth = 100 + generator.normal(size=(80, outputs))
    guess = truth + generator.normal(size=truth.shape) / 2
    columns = metrics.error_columns(truth, guess)
    constant = metrics.error_columns(truth, np.broadcast_to(truth.mean(0), truth.shape))
    figures = metrics.counted(columns, metrics.error_figures, constant=constant, clusters=None, undefined={})
    assert figures["mae"][0].value == pytest.approx(reference.mean_absolute_error(truth, guess))
    assert figures["mse"][0].value == pytest.approx(reference.mean_squared_error(truth, guess))
    assert figures["rmse"][0].value == pytest.approx(reference.mean_squared_error(truth, guess) ** 0.5)
    assert figures["r2"][0].value == pytest.approx(reference.r2_score(truth, guess))
    assert figures["r2"][0].baseline == pytest.approx(0, abs=1e-12)
    assert figures["mse"][0].baseline == pytest.approx(truth.var(0).mean())


def test_labels_are_counted_as_scikit_learn_counts_them() -> None:
    generator = np.random.default_rng(1)
    truth = generator.random((120, 4)) < 0.3
    answer = truth ^ (generator.random(truth.shape) < 0.2)
    columns = metrics.label_columns(truth, answer, np.ones(truth.shape))
    figures = metrics.label_figures(metrics.total(columns))
    assert figures["accuracy"][0] == pytest.approx(1 - reference.hamming_loss(truth, answer))
    assert figures["f1"][0] == pytest.approx(reference.f1_score(truth, answer, average="macro"))
    balanced = [reference.balanced_accuracy_score(truth[:, at], answer[:, at]) for at in range(4)]
    assert figures["balanced_accuracy"][0] == pytest.approx(np.mean(balanced))


@pytest.mark.parametrize("count", [2, 6])
def test_rankings_are_those_of_scikit_learn_also_with_ties(count: int) -> None:
    truth, outputs = classes(200, count)
    members = truth[:, None] == np.arange(count)
    auroc, _ = metrics.ranked(members, outputs, None, kind="auroc")
    precision, _ = metrics.ranked(members, outputs, None, kind="average_precision")
    wanted = np.mean([reference.roc_auc_score(members[:, at], outputs[:, at]) for at in range(count)])
    assert auroc.value == pytest.approx(wanted)
    assert precision.value == pytest.approx(reference.average_precision_score(members, outputs))
    assert (auroc.baseline, precision.baseline) == (0.5, pytest.approx(members.mean()))


def test_the_interval_of_a_share_is_wilsons() -> None:
    for right, total in ((0, 5), (3, 7), (95, 100), (40, 40)):
        known = binomtest(right, total).proportion_ci(method="wilson")
        assert intervals.wilson(right, total) == pytest.approx((known.low, known.high), abs=1e-12)


def test_the_variance_of_an_auroc_is_delongs() -> None:
    """Against the published formula, pair by pair."""
    truth, outputs = classes(60, 2)
    positive, score = truth == 1, outputs[:, 1]
    higher, lower = score[positive][:, None], score[~positive][None]
    pairs = (higher > lower) + 0.5 * (higher == lower)
    variance = pairs.mean(1).var(ddof=1) / positive.sum() + pairs.mean(0).var(ddof=1) / (~positive).sum()
    value, influence = metrics.auroc(positive, score)
    assert value == pytest.approx(pairs.mean())
    assert np.square(influence).sum() / len(score) ** 2 == pytest.approx(variance)


def test_influences_are_what_one_samples_weight_changes() -> None:
    """The derivative of average precision by a sample's weight, against a finite difference of scikit-learn's."""
    truth, outputs = classes(40, 2)
    positive, score = truth == 1, outputs[:, 1]
    _, influence = metrics.average_precision(positive, score)
    step = 1e-6
    for sample in range(0, 40, 3):
        weights = np.full(40, 1.0)
        ends = []
        for sign in (1, -1):
            weights[sample] = 1 + sign * step
            ends.append(reference.average_precision_score(positive, score, sample_weight=weights))
        assert 40 * (ends[0] - ends[1]) / (2 * step) == pytest.approx(influence[sample], abs=1e-5)


def test_a_perfect_ranking_has_an_interval_all_the_same() -> None:
    truth = np.arange(20) >= 10
    auroc, _ = metrics.ranked(truth[:, None], np.arange(20.0)[:, None], None, kind="auroc")
    precision, _ = metrics.ranked(truth[:, None], np.arange(20.0)[:, None], None, kind="average_precision")
    assert (auroc.value, auroc.high, auroc.interval) == (1.0, 1.0, "Newcombe")
    assert auroc.low is not None
    assert 0.7 < auroc.low < 0.95
    assert precision.low == pytest.approx(intervals.wilson(10, 10)[0])
    low, high = intervals.newcombe(0.8, 50, 50)
    assert low < 0.8 < high
    assert high - low == pytest.approx(2 * 0.0855, abs=0.02)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Two normal classes, three of four of which are told apart: of 100 intervals of 95 % at least 86 hold.

    If intervals hold in 95 %, fewer of 100 do with a chance of 0.0003, 0.001 for four figures; the seed is fixed.
    """
    distance = 2 * norm.ppf(0.75)
    ranked = float(norm.cdf(distance / 2**0.5))
    truths = {"accuracy": 0.75, "balanced_accuracy": 0.75, "kappa": 0.5, "auroc": ranked}
    held = dict.fromkeys(truths, 0)
    generator = np.random.default_rng(5)
    for _ in range(100):
        truth = generator.integers(2, size=120)
        score = generator.normal(size=120) + distance * truth
        answer = (score > distance / 2).astype(np.int64)
        figures = {name: each[0] for name, each in figures_of(truth, answer, np.ones(120), 2).items()}
        figures["accuracy"] = intervals.share_of(truth == answer, None)
        members = truth[:, None] == np.arange(2)
        figures["balanced_accuracy"] = intervals.mean_of_shares(members & (truth == answer)[:, None], members, None)
        figures["auroc"], _ = metrics.ranked((truth == 1)[:, None], score[:, None], None, kind="auroc")
        for name, value in truths.items():
            low, high = figures[name].low, figures[name].high
            held[name] += low is not None and high is not None and low <= value <= high
    assert min(held.values()) >= 86, held


def test_samples_of_one_cluster_count_as_one() -> None:
    """Four copies of every sample tell nothing new: intervals are those of the originals, not half as wide."""
    truth, outputs = classes(100, 2)
    positive, hits = (truth == 1)[:, None], outputs.argmax(1) == truth
    copies = np.arange(100).repeat(4)
    for kind in ("auroc", "average_precision"):
        alone, _ = metrics.ranked(positive, outputs[:, 1:], None, kind=kind)
        copied, _ = metrics.ranked(positive[copies], outputs[copies, 1:], copies, kind=kind)
        naive, _ = metrics.ranked(positive[copies], outputs[copies, 1:], None, kind=kind)
        assert _width(copied) == pytest.approx(_width(alone), rel=0.03)
        assert _width(naive) < 0.6 * _width(alone)
    assert _width(intervals.share_of(hits[copies], copies)) == pytest.approx(
        _width(intervals.share_of(hits, None)), rel=0.03
    )
    columns: Any = metrics.class_columns(truth, outputs.argmax(1), np.ones(100), classes=2)
    drawn = [
        metrics.counted(part, metrics.class_figures, constant=part, clusters=clusters, undefined={})["kappa"][0]
        for part, clusters in ((columns, None), (columns[copies], copies))
    ]
    assert [figure.interval for figure in drawn] == ["bootstrap", "jackknife"]
    assert (drawn[0].low, drawn[0].high) == pytest.approx((drawn[1].low, drawn[1].high), abs=0.04)


def _width(figure: Measured) -> float:
    assert figure.low is not None
    assert figure.high is not None
    return figure.high - figure.low


def test_what_is_not_defined_has_a_reason_and_no_number() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = np.zeros(10, dtype=np.int64)
        figures = figures_of(same, same, np.ones(10), 2)
        assert figures["kappa"][0].value is None
        assert figures["kappa"][0].reason
        assert figures["f1"][0].value is None
        auroc, each = metrics.ranked(same[:, None] == np.arange(2), np.zeros((10, 2)), None, kind="auroc")
    assert auroc.value is None
    assert auroc.reason == "every sample is of one class"
    assert [figure.reason for figure in each] == ["every sample is of this class", "no sample is of this class"]
    with pytest.raises(ValueError, match="nan"):
        Measured(float("nan"))


def test_resampling_a_large_set_stays_cheap_and_always_the_same() -> None:
    rows = sum(len(weights) for weights in intervals.resamples(30_000))
    assert rows == intervals.FEWEST_RESAMPLES
    first = next(intervals.resamples(50))
    intervals._few_resamples.cache_clear()
    again = next(intervals.resamples(50))
    assert first is not again
    assert np.array_equal(first, again)
    assert (first.sum(1) == 50).all()
