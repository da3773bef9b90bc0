"""How good outputs are, figure by figure, each with its 95 % interval.

What is counted (accuracy, F1, kappa, calibration, errors) is a formula over sums of columns, a row a sample. So one
formula gives the figure, what a constant answer would get, and every resample of the bootstrap. What is ranked (AUROC,
average precision) is no sum; there the interval follows from each sample's influence, which for two classes is DeLong's
variance. Samples of one cluster (a patient's pictures) are resampled, and their influences added, as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import ndtr, ndtri

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

Z = 1.959963984540054
BINS = 15
RESAMPLES = 1000
FEWEST_RESAMPLES = 200
_MOST_DRAWS = 5_000_000
_AT_ONCE = 2_000_000
_SEED = 0


@dataclass(frozen=True)
class Measured:
    """A figure, its 95 % interval and how that was found, and what a constant answer gets; or why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    baseline: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high, self.baseline):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{number} is no figure")


Figures = dict[str, Measured]


def missing(reason: str) -> Measured:
    """A figure that is not defined."""
    return Measured(None, reason=reason)


def wilson(right: float, total: float) -> tuple[float, float]:
    """Wilson's interval of a share: p with |p̂ − p| = z·√(p·(1−p)/n)."""
    share, square = right / total, Z * Z
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_of(hits: Bits | Array, clusters: Codes | None) -> Measured:
    """A share of samples, with Wilson's interval for as many samples as they are worth.

    Within clusters samples are alike: n is divided by how much larger the variance of the clusters' sums is than that
    of independent samples.
    """
    total, share = len(hits), float(hits.mean())
    worth = float(total)
    if clusters is not None:
        spread = float(np.square(np.bincount(clusters, weights=hits - share)).sum())
        alone = total * share * (1 - share)
        worth = min(worth, total * alone / spread) if spread > 0 else float(len(np.unique(clusters)))
    return Measured(share, *wilson(share * worth, worth), "Wilson")


def resamples(samples: int, clusters: Codes | None = None) -> Iterator[Array]:
    """How often each sample is drawn, a row a resample, some rows at a time; always the same draws."""
    units = samples if clusters is None else int(clusters.max()) + 1
    count = min(RESAMPLES, max(FEWEST_RESAMPLES, _MOST_DRAWS // samples))
    step = max(1, _AT_ONCE // samples)
    generator = np.random.default_rng(_SEED)
    for first in range(0, count, step):
        rows = min(step, count - first)
        drawn = generator.integers(units, size=(rows, units)) + units * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * units).reshape(rows, units).astype(np.float64)
        yield weights if clusters is None else weights[:, clusters]


Formula = Callable[[Array], dict[str, Array]]
"""Figures of each row of sums: a number, or one per class; NaN where one is not defined."""


def bootstrapped(
    columns: Any, formula: Formula, *, constant: Any, clusters: Codes | None, undefined: Mapping[str, str]
) -> dict[str, list[Measured]]:
    """Figures of columns with percentile intervals; `constant` are the columns of the constant answer.

    `undefined` says why a figure may not be there.
    """
    figures, beside = formula(total(columns)), formula(total(constant))
    drawn = [formula(weights @ columns) for weights in resamples(columns.shape[0], clusters)]
    made = {}
    for name, values in figures.items():
        spread = np.concatenate([each[name] for each in drawn]).reshape(-1, values.size)
        made[name] = [
            replace(_percentiles(float(value), spread[:, at]), baseline=_known(baseline))
            if math.isfinite(value)
            else missing(undefined.get(name, "it is not defined for these samples"))
            for at, (value, baseline) in enumerate(zip(values.ravel(), beside[name].ravel(), strict=True))
        ]
    return made


def total(columns: Any) -> Array:
    """The sums of all samples, a single row."""
    return np.asarray(columns.sum(0), dtype=np.float64).reshape(1, -1)


def _percentiles(value: float, drawn: Array) -> Measured:
    """Efron's bias-corrected percentiles: an ECE, which resampling only makes larger, needs the correction."""
    drawn = np.sort(drawn[np.isfinite(drawn)])
    if not len(drawn) or drawn[-1] - drawn[0] < 1e-12 * max(1.0, abs(value)):
        return Measured(value, reason="no interval: every resample gives the same")
    below, above = np.searchsorted(drawn, value, "left"), np.searchsorted(drawn, value, "right")
    shift = 2 * ndtri(((below + above) / 2 + 0.5) / (len(drawn) + 1))
    low, high = np.quantile(drawn, ndtr([shift - Z, shift + Z]))
    return Measured(value, float(low), float(high), "bootstrap")


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _over(above: Array, below: Array) -> Array:
    """A quotient that is NaN where nothing is below."""
    quotient: Array = np.full(np.broadcast_shapes(above.shape, below.shape), np.nan)
    np.divide(above, below, out=quotient, where=below != 0)
    return quotient


def _mean(values: Array) -> Array:
    """The mean over the last axis of what is defined."""
    there = np.isfinite(values)
    return _over(np.where(there, values, 0.0).sum(-1), there.sum(-1).astype(np.float64))


def _binned(confidence: Array, hits: Array) -> Any:
    """Confidence less success, in the column of its bin; ECE is the sum of their absolute sums over n."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return sparse.csr_array((confidence - hits, (np.arange(len(bins)), bins)), shape=(len(bins), BINS))


def _chosen(codes: Codes, count: int, where: Bits | None = None) -> Any:
    """A one in the column that each sample's code names."""
    rows = np.arange(len(codes)) if where is None else np.flatnonzero(where)
    return sparse.csr_array((np.ones(len(rows)), (rows, codes[rows])), shape=(len(codes), count))


def class_columns(truth: Codes, answer: Codes, confidence: Array, *, classes: int) -> Any:
    """What classes are counted by: samples of each, answers of each, right ones of each, and calibration by bin."""
    hits = truth == answer
    parts = [_chosen(truth, classes), _chosen(answer, classes), _chosen(truth, classes, hits)]
    return sparse.hstack([*parts, _binned(confidence, hits.astype(np.float64))], format="csr")


def class_figures(sums: Array) -> dict[str, Array]:
    """Figures of `class_columns`; F1 is that of the second of two classes, else the mean of all that occur."""
    classes = (sums.shape[1] - BINS) // 3
    true, answered, right, gaps = np.split(sums, (classes, 2 * classes, 3 * classes), axis=1)
    samples = true.sum(1)
    accuracy = right.sum(1) / samples
    by_chance = (true * answered).sum(1) / samples**2
    f1 = _over(2 * right, true + answered)
    return {
        "balanced_accuracy": _mean(_over(right, true)),
        "f1": f1[:, 1] if classes == 2 else _mean(f1),
        "kappa": _over(accuracy - by_chance, 1 - by_chance),
        "ece": np.abs(gaps).sum(1) / samples,
        "each f1": f1,
    }


def label_columns(truth: Bits, answer: Bits, confidence: Array) -> Any:
    """What labels are counted by: one, truths, answers and right answers of each, decisions right, calibration."""
    samples, labels = truth.shape
    hits = truth == answer
    gaps = (_binned(confidence[:, at], hits[:, at].astype(np.float64)) for at in range(labels))
    dense = np.hstack([np.ones((samples, 1)), truth, answer, truth & answer, hits.mean(1, keepdims=True)])
    return np.hstack([dense, sum(part.toarray() for part in gaps) / labels])


def label_figures(sums: Array) -> dict[str, Array]:
    """Figures of `label_columns`: means over labels."""
    labels = (sums.shape[1] - BINS - 2) // 3
    samples, true, answered, right, decided, gaps = np.split(
        sums, (1, 1 + labels, 1 + 2 * labels, 1 + 3 * labels, 2 + 3 * labels), axis=1
    )
    rejected = samples - true - answered + right
    balanced = (_over(right, true) + _over(rejected, samples - true)) / 2
    f1 = _over(2 * right, true + answered)
    return {
        "accuracy": decided[:, 0] / samples[:, 0],
        "balanced_accuracy": _mean(balanced),
        "f1": _mean(f1),
        "ece": np.abs(gaps).sum(1) / samples[:, 0],
        "each f1": f1,
    }


def error_columns(truth: Array, output: Array) -> Array:
    """What errors are counted by: one, |e| (mean over outputs), and e², y and y² of each output, y about its mean."""
    errors, centred = output - truth, truth - truth.mean(0)
    ones = np.ones((len(truth), 1))
    return np.hstack([ones, np.abs(errors).mean(1, keepdims=True), errors**2, centred, centred**2])


def error_figures(sums: Array) -> dict[str, Array]:
    """Figures of `error_columns`; R² is the mean over outputs whose targets vary."""
    outputs = (sums.shape[1] - 2) // 3
    samples, absolute, squares, first, second = np.split(sums, (1, 2, 2 + outputs, 2 + 2 * outputs), axis=1)
    mse = (squares / samples).mean(1)
    return {
        "mae": absolute[:, 0] / samples[:, 0],
        "rmse": np.sqrt(mse),
        "mse": mse,
        "r2": _mean(1 - _over(squares, second - first**2 / samples)),
    }


def _ranks(score: Array) -> Array:
    """From 1 on; equal scores share the mean of their ranks. SciPy has it in a package that is slow to import."""
    _, places, times = np.unique(score, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(times) - (times - 1) / 2)[places]
    return ranks


def auroc(truth: Bits, score: Array) -> tuple[float, Array]:
    """The chance that a positive sample scores above a negative one (half where equal), and each sample's influence.

    DeLong's placements: the sum of squared influences over n² is his variance.
    """
    positive, negative = int(truth.sum()), int((~truth).sum())
    ranks = _ranks(score)
    placed = np.empty(len(score))
    placed[truth] = (ranks[truth] - _ranks(score[truth])) / negative
    placed[~truth] = 1 - (ranks[~truth] - _ranks(score[~truth])) / positive
    value = float(placed[truth].mean())
    fewer = np.sqrt(np.where(truth, _fewer(positive), _fewer(negative)))
    shares = np.where(truth, positive, negative) / len(score)
    return value, (placed - value) * fewer / shares


def _fewer(count: int) -> float:
    return count / max(count - 1, 1)


def average_precision(truth: Bits, score: Array) -> tuple[float, Array]:
    """Σ (R_t − R_{t−1})·P_t over thresholds t, and each sample's influence on it.

    With A(t) and T(t) the shares of samples, and of positives, that score t or more, AP = E[1₊·T/A]/p; the derivative
    of that by the weight of sample j is (1₊·T/A(s_j) + Σ_{i: s_i ≤ s_j} 1₊ᵢ·(1₊ⱼ − T/A(s_i))/A(s_i)/n − p·AP − AP·(1₊ⱼ
    − p))/p.
    """
    total, positive = len(score), int(truth.sum())
    order = np.argsort(-score, kind="stable")
    falling, hits = score[order], truth[order].astype(np.float64)
    last = np.searchsorted(-falling, -falling, side="right") - 1  # equal scores share a threshold
    above = (last + 1) / total
    precision = np.cumsum(hits)[last] / (last + 1)
    value = float((hits * precision).sum() / positive)
    first = np.searchsorted(-falling, -falling, side="left")
    share = positive / total
    # Sums over positives that score no more than a sample: from its first equal to the end.
    behind, weighed = (np.cumsum((hits * part)[::-1])[::-1][first] / total for part in (1 / above, precision / above))
    moved = hits * precision + hits * behind - weighed - share * value - value * (hits - share)
    influence = np.empty(total)
    influence[order] = moved / share
    return value, influence


def ranked(truth: Bits, score: Array, clusters: Codes | None, *, kind: str) -> tuple[Measured, list[Measured]]:
    """AUROC (`kind` "auroc") or average precision of every column, and the mean of those that are defined."""
    measure, method, chance, bound, otherwise = _RANKED[kind]
    each: list[Measured] = []
    measured: list[tuple[float, Array, float, float, float]] = []
    for true, own in zip(truth.T, score.T, strict=True):
        count, samples = int(true.sum()), len(true)
        if count in (0, samples):
            each.append(missing("every sample is of this class" if count else "no sample is of this class"))
            continue
        value, influence = measure(true, own)
        ends, baseline = bound(value, count, samples - count), chance(count / samples)
        spread = _by_influence(value, influence, clusters, method, Measured(value, *ends, otherwise))
        each.append(replace(spread, baseline=baseline))
        measured.append((value, influence, *ends, baseline))
    if not measured:
        return missing("every sample is of one class"), each
    values, influences, lows, highs, baselines = (np.mean(part, axis=0) for part in zip(*measured, strict=True))
    perfect = Measured(float(values), float(lows), float(highs), otherwise)
    mean = _by_influence(float(values), influences, clusters, method, perfect)
    return replace(mean, baseline=float(baselines)), each


def _by_influence(value: float, influence: Array, clusters: Codes | None, method: str, otherwise: Measured) -> Measured:
    """On the logit scale, where no interval leaves 0 … 1; `otherwise` where nothing varies: a perfect ranking."""
    parts = influence if clusters is None else np.bincount(clusters, weights=influence)
    error = math.sqrt(float(np.square(parts).sum())) / len(influence)
    if error < 1e-12 or not 1e-12 < value < 1 - 1e-12:
        return otherwise
    centre, half = math.log(value / (1 - value)), Z * error / (value * (1 - value))
    low, high = (1 / (1 + math.exp(-min(max(end, -700.0), 700.0))) for end in (centre - half, centre + half))
    return Measured(value, low, high, method)


def newcombe(value: float, positive: int, negative: int) -> tuple[float, float]:
    """Newcombe's interval of an AUROC (2006, method 5), Wilson's idea with the variance of Hanley and McNeil.

    It has a width also where the ranking is perfect.
    """
    from scipy.optimize import brentq  # slow to import, and few runs have two classes

    pairs = (positive + negative) / 2 - 1

    def off(truth: float) -> float:
        spread = 1 + pairs * (1 - truth) / (2 - truth) + pairs * truth / (1 + truth)
        return (value - truth) ** 2 - Z * Z * truth * (1 - truth) * spread / (positive * negative)

    tiny = 1e-9
    low = brentq(off, tiny, value - tiny) if value > 2 * tiny and off(tiny) > 0 else 0.0
    high = brentq(off, value + tiny, 1 - tiny) if value < 1 - 2 * tiny and off(1 - tiny) > 0 else 1.0
    return float(low), float(high)


_Measure = Callable[[Bits, Array], tuple[float, Array]]
_Bound = Callable[[float, int, int], tuple[float, float]]
_RANKED: dict[str, tuple[_Measure, str, Callable[[float], float], _Bound, str]] = {
    "auroc": (auroc, "DeLong", lambda share: 0.5, newcombe, "Newcombe"),
    "average_precision": (
        average_precision,
        "delta method",
        lambda share: share,
        lambda value, positive, negative: wilson(value * positive, positive),
        "Wilson",
    ),
}
