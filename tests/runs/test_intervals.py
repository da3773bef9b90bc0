"""Intervals hold the truth as often as they say, also with few positives and few groups. All seeds are fixed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.runs import intervals, metrics
from fedveil.runs.intervals import Codes, Measured

TRIES = 300
# A rate of 2.5 % gives more than 15 of 300 with a chance of 0.003, one of 5 % more than 26 with a chance of 0.003.
FALSE_ALARMS = 15
MISSES = 26


def groups_of(count: int, *, uneven: bool, generator: np.random.Generator) -> Codes:
    sizes = np.maximum(1, generator.geometric(0.1, count)) if uneven else np.full(count, 10)
    return np.repeat(np.arange(count), sizes)


def above(figure: Measured, chance: float) -> bool:
    return figure.low is not None and figure.low > chance


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("count", [2, 3, 5, 10, 29])
def test_guesses_group_by_group_are_rarely_taken_for_more(count: int, uneven: bool) -> None:
    """Every group is of one class and gets one guess: with samples taken one by one, a quarter to a half would be."""
    generator = np.random.default_rng(count)
    right = ranked = 0
    for _ in range(TRIES):
        who = groups_of(count, uneven=uneven, generator=generator)
        guesses = generator.normal(size=count)[who] + 0.1 * generator.normal(size=len(who))
        true = who % 2 == 0
        right += above(intervals.share_of((guesses > 0) == true, who), 0.5)
        ranked += above(metrics.ranked(true[:, None], guesses[:, None], who, kind="auroc")[0], 0.5)
    assert (right <= FALSE_ALARMS, ranked <= FALSE_ALARMS) == (True, True), (right, ranked)


def test_a_regression_that_guesses_group_by_group_is_rarely_taken_for_more() -> None:
    generator = np.random.default_rng(1)
    explained = 0
    for _ in range(60):
        who = groups_of(8, uneven=False, generator=generator)
        truth, guess = (generator.normal(size=8)[who, None] for _ in range(2))
        constant = metrics.error_columns(truth, np.broadcast_to(truth.mean(0), truth.shape))
        columns = metrics.error_columns(truth, 0.3 * guess)
        figures = metrics.counted(columns, metrics.error_figures, constant=constant, clusters=who, undefined={})
        explained += above(figures["r2"][0], 0.0)
    assert explained <= 5  # more, at 2.5 %: a chance of 0.003


@pytest.mark.parametrize(("positive", "recall"), [(3, 0.7), (3, 0.5), (12, 0.9)])
def test_balanced_accuracy_with_few_positives_holds_the_truth(positive: int, recall: float) -> None:
    generator = np.random.default_rng(positive)
    members = np.stack([np.arange(100) < positive, np.arange(100) >= positive], 1)
    missed, widths = 0, []
    for _ in range(TRIES):
        hits = generator.random(100) < np.where(members[:, 0], recall, 0.9)
        figure = intervals.mean_of_shares(members & hits[:, None], members, None)
        assert figure.low is not None
        assert figure.high is not None
        missed += not figure.low <= (recall + 0.9) / 2 <= figure.high
        widths.append(figure.high - figure.low)
    assert missed <= MISSES
    assert max(widths) < 2 * (1.96 * math.sqrt(0.25 / positive) / 2 + 0.1)


def test_shares_that_go_together_are_not_taken_for_independent() -> None:
    """Two labels that are always right or wrong together tell as much as one."""
    hits = np.arange(60) % 3 > 0
    twice = np.stack([hits, hits], 1)
    mean = intervals.mean_of_shares(twice, np.ones_like(twice), None)
    alone = intervals.share_of(hits, None)
    assert (mean.low, mean.high) == pytest.approx((alone.low, alone.high))


@pytest.mark.parametrize("positive", [1, 2, 3, 10])
def test_few_positives_in_any_order_are_rarely_taken_for_a_ranking(positive: int) -> None:
    generator = np.random.default_rng(positive)
    true = (np.arange(60) < positive)[:, None]
    figures = [metrics.ranked(true, generator.normal(size=(60, 1)), None, kind="auroc")[0] for _ in range(TRIES)]
    assert sum(above(figure, 0.5) for figure in figures) <= FALSE_ALARMS


def test_no_calibration_error_is_above_1() -> None:
    """All answers wrong, and more sure or less: the spread alone reaches further."""
    sure = np.array([0.95, 0.55] * 4)
    columns = metrics._binned(sure, np.zeros(8))
    drawn = np.linspace(0.2, 1.0, 50)
    figure = intervals.calibration(columns, 8, drawn, None)
    assert (figure.value, figure.high) == (pytest.approx(0.75), 1.0)


@pytest.mark.parametrize("sharper", [1.0, 2.0])
def test_a_calibration_error_lies_in_its_interval_and_so_does_the_truth(sharper: float) -> None:
    """Chance makes it larger: that of a calibrated model is 0.09 on 100 samples, and bootstrap percentiles hold neither
    0 nor, now and then, the figure itself."""

    def sure(margin: metrics.Array) -> metrics.Array:
        return 1 / (1 + np.exp(-np.abs(margin)))

    many = 1.5 * np.random.default_rng(0).normal(size=200_000)
    gaps = metrics._binned(sure(sharper * many), sure(many))
    true = float(np.abs(gaps.sum(0)).sum()) / len(many)
    generator, missed = np.random.default_rng(1), 0
    for _ in range(60):
        margin = 1.5 * generator.normal(size=100)
        hits = (generator.random(100) < sure(margin)).astype(np.float64)
        columns = metrics._binned(sure(sharper * margin), hits)
        figures = metrics.counted(
            columns, lambda sums: {"ece": np.abs(sums).sum(1) / 100}, constant=columns, clusters=None, undefined={}
        )
        figure = figures["ece"][0]
        assert figure.value is not None
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
        missed += not figure.low <= true <= figure.high
    assert missed <= 8  # more, at 5 %: a chance of 0.003
