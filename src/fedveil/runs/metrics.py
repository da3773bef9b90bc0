"""How good outputs are, figure by figure, each with its 95 % interval (`fedveil.runs.intervals`).

What is counted (accuracy, F1, kappa, calibration, errors) is a formula over sums of columns, a row a sample. So one
formula gives the figure, what a constant answer would get, every resample of the bootstrap, and what is left without
a group. What is ranked (AUROC, average precision) is no sum; there the interval follows from each sample's influence,
which for two classes is DeLong's variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from fedveil.errors import ConfigError
from fedveil.runs.intervals import (
    AGREEMENT,
    ERROR,
    EXPLAINED,
    SHARE,
    Array,
    Bits,
    Codes,
    Measured,
    Scale,
    Z,
    by_influence,
    calibration,
    freedom,
    group_sums,
    jackknifed,
    missing,
    newcombe,
    percentiles,
    quantile,
    resamples,
    too_few,
    wilson,
    worth,
)

BINS = 15


@dataclass(frozen=True)
class Kind:
    """What is known of a figure before it is measured."""

    title: str
    higher_is_better: bool = True
    share: bool = False
    """Whether people read it in per cent."""


KINDS = {
    "accuracy": Kind("accuracy", share=True),
    "balanced_accuracy": Kind("balanced accuracy", share=True),
    "auroc": Kind("AUROC"),
    "average_precision": Kind("average precision"),
    "f1": Kind("F1"),
    "kappa": Kind("Cohen's kappa"),
    "ece": Kind("calibration error", higher_is_better=False),
    "exact_match": Kind("all labels right", share=True),
    "recall": Kind("recall", share=True),
    "precision": Kind("precision", share=True),
    "mae": Kind("MAE", higher_is_better=False),
    "rmse": Kind("RMSE", higher_is_better=False),
    "mse": Kind("MSE", higher_is_better=False),
    "r2": Kind("R²"),
}

Formula = Callable[[Array], dict[str, Array]]
"""Figures of each row of sums: a number, or one per class; NaN where one is not defined."""

_SCALES: dict[str, Scale] = {
    "kappa": AGREEMENT,
    "r2": EXPLAINED,
    "mae": ERROR,
    "rmse": ERROR,
    "mse": ERROR,
}


def counted(
    columns: Any, formula: Formula, *, constant: Any, clusters: Codes | None, undefined: Mapping[str, str]
) -> dict[str, list[Measured]]:
    """Figures of columns with intervals: by resampling samples, or by leaving out groups where samples have any.

    `constant` are the columns of the constant answer; `undefined` says why a figure may not be there.
    """
    figures, beside = formula(total(columns)), formula(total(constant))
    units = group_sums(columns, clusters)
    degrees = None if clusters is None else freedom(clusters)
    drawn = _joined([formula(weights @ units) for weights in resamples(units.shape[0])])
    left_out = formula(total(columns) - _dense(units)) if degrees else {}
    made: dict[str, list[Measured]] = {name: [] for name in figures}
    for name, values in figures.items():
        for at, (value, baseline) in enumerate(zip(values.ravel().tolist(), beside[name].ravel(), strict=True)):
            if not math.isfinite(value):
                made[name].append(missing(undefined.get(name, "it is not defined for these samples")))
                continue
            if clusters is not None and not degrees:
                spread = Measured(value, reason=too_few(clusters))
            elif name == "ece":
                spread = calibration(units[:, -BINS:], columns.shape[0], drawn[name][:, at], degrees)
            elif degrees is None:
                spread = percentiles(value, drawn[name][:, at])
            else:
                others = left_out[name].reshape(units.shape[0], -1)[:, at]
                spread = jackknifed(value, others, degrees, _SCALES.get(name, SHARE))
            made[name].append(replace(spread, baseline=_known(baseline)))
    return made


def _joined(drawn: list[dict[str, Array]]) -> dict[str, Array]:
    """The figures of all resamples, a row each."""
    return {name: np.concatenate([each[name].reshape(len(each[name]), -1) for each in drawn]) for name in drawn[0]}


def _dense(sums: Any) -> Array:
    dense: Array = sums.toarray() if sparse.issparse(sums) else np.asarray(sums)
    return dense


def total(columns: Any) -> Array:
    """The sums of all samples, a single row."""
    return np.asarray(columns.sum(0), dtype=np.float64).reshape(1, -1)


def _known(value: float) -> float | None:
    """JSON has no NaN."""
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


@dataclass(frozen=True)
class _Ranking:
    """A figure of a ranking: its value and influences, its chance level, and its interval where it is perfect."""

    measure: Callable[[Bits, Array], tuple[float, Array]]
    interval: str
    chance: Callable[[float], float]
    bound: Callable[[float, float, float, float], tuple[float, float]]
    bound_interval: str


_RANKED = {
    "auroc": _Ranking(auroc, "DeLong", lambda share: 0.5, newcombe, "Newcombe"),
    "average_precision": _Ranking(
        average_precision,
        "delta method",
        lambda share: share,
        lambda value, positive, negative, z: wilson(value * positive, positive, z),
        "Wilson",
    ),
}


def ranked(truth: Bits, score: Array, clusters: Codes | None, *, kind: str) -> tuple[Measured, list[Measured]]:
    """AUROC (`kind` "auroc") or average precision of every column, and the mean of those that are defined."""
    ranking = _RANKED[kind]
    each: list[Measured] = []
    measured: list[tuple[float, Array, float, float, float]] = []
    parts: list[Codes] = []
    for true, own in zip(truth.T, score.T, strict=True):
        count, samples = int(true.sum()), len(true)
        if count in (0, samples):
            each.append(missing("every sample is of this class" if count else "no sample is of this class"))
            continue
        value, influence = ranking.measure(true, own)
        baseline = ranking.chance(count / samples)
        places = np.arange(samples) if clusters is None else clusters
        sides = (places[true], places[~true])
        parts += sides
        degrees = freedom(*sides)
        if clusters is None:
            ends = ranking.bound(value, count, samples - count, Z)
        else:
            influence = influence * _own_share(true, clusters)
            ends = ranking.bound(value, worth(sides[0]), worth(sides[1]), quantile(degrees) if degrees else Z)
        each.append(replace(_interval(ranking, value, influence, clusters, sides, ends), baseline=baseline))
        measured.append((value, influence, *ends, baseline))
    if not measured:
        return missing("every sample is of one class"), each
    values, influences, low, high, baselines = (np.mean(part, axis=0) for part in zip(*measured, strict=True))
    ends = (float(low), float(high))
    mean = _interval(ranking, float(values), influences, clusters, parts, ends)
    return replace(mean, baseline=float(baselines)), each


def _own_share(true: Bits, clusters: Codes) -> Array:
    """What influences are multiplied by, since a value is made of each group's samples too: 1/√(1 − w), by class."""
    factor = np.ones(len(true))
    for side in (true, ~true):
        shares = np.bincount(clusters[side], minlength=int(clusters.max()) + 1) / side.sum()
        factor[side] = 1 / np.sqrt(np.maximum(1 - shares, 1e-12))[clusters[side]]
    return factor


def _interval(
    ranking: _Ranking,
    value: float,
    influence: Array,
    clusters: Codes | None,
    parts: Sequence[Codes],
    ends: tuple[float, float],
) -> Measured:
    spread = by_influence(value, influence, clusters, parts)
    if spread is None:
        return Measured(value, *ends, ranking.bound_interval)
    return replace(spread, interval=ranking.interval if spread.low is not None else "")


# --- metrics of the user's own: functions of outputs and targets, or objects with update, compute and reset

OwnFigure = float | list[float | None] | None

# What rows and summaries have names for already.
RESERVED = frozenset(
    "round loss clients seconds bytes_down bytes_up failed refused engine scheme holder dataset model rounds seed "
    "simulation train_loss parameters device dtype fedveil torch python warning coverage visible stopped "
    "failed_rounds ledger judged data client_names class_weights best loss_because diverged recovered "
    "failed_metrics code suspects bad_rounds clip lr family levels secret_bits secret_reals".split()
)
_PREFIXES = ("test_", "validation_", "client_view_", "client_test_")


@runtime_checkable
class Updated(Protocol):
    """A metric that keeps count, as those of torchmetrics do."""

    def update(self, outputs: Tensor, targets: Tensor) -> object:
        """Take samples in."""

    def compute(self) -> object:
        """The figure of all samples since the last reset."""

    def reset(self) -> object:
        """Forget them."""


Metric = Updated | Callable[[Tensor, Tensor], object]


class OwnMetrics:
    """Metrics by name; each gets the model's outputs (logits, unless the loss is the square loss) and the targets.

    Raises:
        ConfigError: A name is taken, or something is no metric.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"metrics: {name!r} is no name; use letters, digits and underscores.")
            if name in RESERVED or name.startswith(_PREFIXES):
                raise ConfigError(f"metrics: rows have a figure called {name!r} already; give yours another name.")
            if isinstance(metric, type) or not (isinstance(metric, Updated) or callable(metric)):
                raise ConfigError(
                    f"metrics: {name!r} is {metric!r}; give a function (outputs, targets) that returns a number, or an "
                    "object with update(outputs, targets), compute() and reset()."
                )
        self._metrics = dict(metrics)

    @property
    def names(self) -> frozenset[str]:
        """What the metrics are called."""
        return frozenset(self._metrics)

    def behind(self, figure: str) -> str | None:
        """The metric that a figure of a row is of: its own name, or the beginning of name_figure."""
        known = [name for name in self._metrics if figure == name or figure.startswith(f"{name}_")]
        return max(known, key=len, default=None)

    def higher_is_better(self, name: str) -> bool | None:
        """Whether more of a metric is better, by its attribute of that name; None where it does not say."""
        direction = getattr(self._metrics[name], "higher_is_better", None)
        return direction if isinstance(direction, bool) else None

    def figures(self, outputs: Tensor, targets: Tensor) -> tuple[dict[str, OwnFigure], dict[str, str]]:
        """Every metric of these samples, on the CPU, and why metrics that have failed did.

        A metric that gives several figures by name gives name_figure; one that fails has the figure None.
        """
        # Copies: what a metric does to its arguments is its own affair.
        outputs, targets = outputs.detach().cpu().clone(), targets.detach().cpu().clone()
        made: dict[str, OwnFigure] = {}
        failed: dict[str, str] = {}
        for name, metric in self._metrics.items():
            try:
                made |= _plain(name, _value(metric, outputs, targets))
            except Exception as reason:
                made[name] = None
                failed[name] = (
                    f"on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}: "
                    f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
                )
        return made, failed


def _value(metric: Metric, outputs: Tensor, targets: Tensor) -> object:
    if not isinstance(metric, Updated):
        with torch.no_grad():
            return metric(outputs, targets)
    metric.reset()
    metric.update(outputs, targets)
    value = metric.compute()
    metric.reset()
    return value


def _plain(name: str, value: Any) -> dict[str, OwnFigure]:
    if isinstance(value, Mapping):
        return {key: part for own, each in value.items() for key, part in _plain(f"{name}_{own}", each).items()}
    tensor = torch.as_tensor(value).detach().double().cpu()
    if tensor.dim() > 1:
        raise ValueError(f"it gives {tuple(tensor.shape)} numbers; a number, a vector or numbers by name are stored")
    return {name: [_known(part) for part in tensor.tolist()] if tensor.dim() else _known(float(tensor))}
