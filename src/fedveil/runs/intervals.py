"""How far a figure can be trusted: its 95 % interval, for samples that stand alone and for samples of groups.

Pictures of one patient are not several patients. Where samples come in groups, spreads are those of the groups' sums,
and quantiles are Student's with as many degrees of freedom as the groups are worth: ν = (Σ w²)²/Σ w⁴ − 1, w being the
groups' shares of the samples, which is G − 1 for G groups of equal size (Satterthwaite's rule, samples of a group taken
for copies of each other). Below one degree of freedom nothing is known of how groups differ, and there is no interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.special import ndtr, ndtri, stdtrit

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

Z = 1.959963984540054
RESAMPLES = 1000
FEWEST_RESAMPLES = 200
_MOST_DRAWS = 5_000_000
_AT_ONCE = 2_000_000
_SEED = 0
_NO_SPREAD = "no interval: every resample gives the same"


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


def _weights(clusters: Codes) -> Array:
    """Each group's share of the samples, for groups that have any."""
    sizes = np.bincount(clusters)
    return sizes[sizes > 0] / len(clusters)


def worth(clusters: Codes) -> float:
    """As many groups of equal size as these are worth: 1/Σ w²."""
    return float(1 / np.square(_weights(clusters)).sum())


def freedom(*parts: Codes) -> float:
    """Degrees of freedom of what is measured on samples of these groups; 0 where there is less than one.

    Of several parts (positive and negative samples) the spreads are added, so Satterthwaite's rule joins them.
    """
    spreads, squares = 0.0, 0.0
    for clusters in parts:
        weights = _weights(clusters)
        spread = float(np.square(weights).sum())
        own = spread**2 / float(np.power(weights, 4).sum()) - 1
        if own < 1 - 1e-9:
            return 0.0
        spreads, squares = spreads + spread, squares + spread**2 / own
    return spreads**2 / squares


def too_few(*parts: Codes) -> str:
    """Why there is no interval where `freedom` is 0."""
    least = next(clusters for clusters in parts if not freedom(clusters))
    count = len(_weights(least))
    if count == 1:
        return "no interval: it stands on one group, or one sample, alone"
    return f"no interval: {count} groups of such uneven sizes are worth less than two"


def quantile(degrees: float) -> float:
    """How many deviations a 95 % interval reaches to either side."""
    return float(stdtrit(degrees, 0.975))


def wilson(right: float, total: float, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a share: p with |p̂ − p| = z·√(p·(1−p)/n)."""
    share, square = right / total, z * z
    centre = (share + square / (2 * total)) / (1 + square / total)
    half = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def share_of(hits: Bits | Array, clusters: Codes | None) -> Measured:
    """A share of samples, with Wilson's interval for as many samples as they are worth.

    Within groups samples are alike: n is divided by how much larger the variance of the groups' sums is than that of
    independent samples. Each group's square is divided by 1 − w: the share was made of its samples too.
    """
    total, share = len(hits), float(hits.mean())
    if clusters is None:
        return Measured(share, *wilson(share * total, total), "Wilson")
    degrees = freedom(clusters)
    if not degrees:
        return Measured(share, reason=too_few(clusters))
    shares = np.bincount(clusters) / total
    spread = float((np.square(np.bincount(clusters, weights=hits - share)) / (1 - shares)).sum())
    alone = total * share * (1 - share)
    count = min(float(total), total * alone / spread) if spread > 0 else worth(clusters)
    return Measured(share, *wilson(share * count, count, quantile(degrees)), "Wilson")


def mean_of_shares(hits: Bits, members: Bits, clusters: Codes | None) -> Measured:
    """The mean of shares, a column each: of the samples that are `members`, those that are `hits`.

    Its ends are √(Σᵢⱼ rᵢⱼ·dᵢ·dⱼ)/K away, with d the distances of the shares from the ends of their own intervals
    (Zou and Donner's recovery of variances) and r the correlations of the shares, none of which is taken for negative.
    A share that is known of one group alone may be anything.
    """
    counts = members.sum(0)
    shares = hits.sum(0) / counts
    value = float(shares.mean())
    each = [
        share_of(column[member], None if clusters is None else recoded(clusters[member]))
        for column, member in zip(hits.T, members.T, strict=True)
    ]
    if all(own.low is None for own in each):
        return Measured(value, reason=each[0].reason)
    related: Any = np.eye(len(counts))
    if clusters is not None or bool((members.sum(1) > 1).any()):
        moved = group_sums(np.where(members, hits - shares, 0.0) / counts, clusters)
        gram = moved.T @ moved
        scale = np.sqrt(np.diag(gram))
        product = scale[:, None] * scale
        related = np.divide(gram, product, out=np.zeros_like(gram), where=product > 0).clip(0.0, 1.0)
        np.fill_diagonal(related, 1.0)
    low, high = np.array([(0.0, 1.0) if own.low is None else (own.low, own.high) for own in each]).T
    down, up = (math.sqrt(float(off @ related @ off)) / len(counts) for off in (shares - low, high - shares))
    return Measured(value, max(0.0, value - down), min(1.0, value + up), "MOVER")


def recoded(clusters: Codes) -> Codes:
    """The same groups, numbered without gaps."""
    return np.unique(clusters, return_inverse=True)[1].astype(np.int64)


def group_sums(columns: Any, clusters: Codes | None) -> Any:
    """The sums of columns over each group; each sample by itself where there are no groups."""
    if clusters is None:
        return columns
    count = len(clusters)
    member = sparse.csr_array((np.ones(count), (clusters, np.arange(count))), shape=(int(clusters.max()) + 1, count))
    return member @ columns


def by_influence(value: float, influence: Array, clusters: Codes | None, parts: Sequence[Codes]) -> Measured | None:
    """The interval of a ranking by each sample's influence on it; None where nothing varies, as in a perfect ranking.

    It is taken on the logit scale, where no interval leaves 0 … 1. Groups are never taken for less varied than their
    samples would be if they stood alone. `parts` are the groups of its positive and its negative samples.
    """
    degrees = freedom(*parts)
    if not degrees:
        return None if clusters is None else Measured(value, reason=too_few(*parts))
    squares = float(np.square(influence).sum())
    if clusters is not None:
        squares = max(squares, float(np.square(np.bincount(clusters, weights=influence)).sum()))
    error = math.sqrt(squares) / len(influence)
    if error < 1e-12 or not 1e-12 < value < 1 - 1e-12:
        return None
    half = quantile(degrees) * error / (value * (1 - value))
    centre = math.log(value / (1 - value))
    low, high = (1 / (1 + math.exp(-min(max(end, -700.0), 700.0))) for end in (centre - half, centre + half))
    return Measured(value, low, high)


def newcombe(value: float, positive: float, negative: float, z: float = Z) -> tuple[float, float]:
    """Newcombe's interval of an AUROC (2006, method 5), Wilson's idea with the variance of Hanley and McNeil.

    It has a width also where the ranking is perfect.
    """
    from scipy.optimize import brentq  # slow to import, and few runs have two classes

    pairs = (positive + negative) / 2 - 1

    def off(truth: float) -> float:
        spread = 1 + pairs * (1 - truth) / (2 - truth) + pairs * truth / (1 + truth)
        return (value - truth) ** 2 - z * z * truth * (1 - truth) * spread / (positive * negative)

    tiny = 1e-9
    low = brentq(off, tiny, value - tiny) if value > 2 * tiny and off(tiny) > 0 else 0.0
    high = brentq(off, value + tiny, 1 - tiny) if value < 1 - 2 * tiny and off(1 - tiny) > 0 else 1.0
    return float(low), float(high)


def resamples(units: int) -> Iterator[Array]:
    """How often each unit is drawn, a row a resample, some rows at a time; always the same draws."""
    count = min(RESAMPLES, max(FEWEST_RESAMPLES, _MOST_DRAWS // units))
    step = max(1, _AT_ONCE // units)
    if count <= step:
        yield _few_resamples(units, count)
        return
    generator = np.random.default_rng(_SEED)
    for first in range(0, count, step):
        yield _drawn(generator, units, min(step, count - first))


@functools.lru_cache(maxsize=1)
def _few_resamples(units: int, count: int) -> Array:
    """All of them, for nobody to change: whoever judges once mostly judges again, on as many samples."""
    drawn = _drawn(np.random.default_rng(_SEED), units, count)
    drawn.flags.writeable = False
    return drawn


def _drawn(generator: np.random.Generator, units: int, rows: int) -> Array:
    places = generator.integers(units, size=(rows, units)) + units * np.arange(rows)[:, None]
    return np.bincount(places.ravel(), minlength=rows * units).reshape(rows, units).astype(np.float64)


def percentiles(value: float, drawn: Array) -> Measured:
    """Efron's bias-corrected percentiles of a figure's resamples."""
    drawn = np.sort(drawn[np.isfinite(drawn)])
    if not len(drawn) or drawn[-1] - drawn[0] < 1e-12 * max(1.0, abs(value)):
        return Measured(value, reason=_NO_SPREAD)
    below, above = np.searchsorted(drawn, value, "left"), np.searchsorted(drawn, value, "right")
    shift = 2 * ndtri(((below + above) / 2 + 0.5) / (len(drawn) + 1))
    low, high = np.quantile(drawn, ndtr([shift - Z, shift + Z]))
    return Measured(value, min(float(low), value), max(float(high), value), "bootstrap")


def calibration(gaps: Any, samples: int, drawn: Array, degrees: float | None) -> Measured:
    """The interval of an expected calibration error, by the gaps of each unit in each bin, and by its resamples.

    It is a sum of absolute values, which chance makes larger: a bin's gap g with deviation s by E|N(g, s)| − |g|, at
    most by s·√(2/π), where the truth is 0. The lower end has the most that the data allow taken off (a bin may be
    calibrated where g is within its own interval), the upper end what resampling adds. The interval holds the figure
    all the same.
    """
    squares = np.asarray((gaps.power(2) if sparse.issparse(gaps) else np.square(gaps)).sum(0), dtype=np.float64).ravel()
    gap, deviation = np.abs(np.asarray(gaps.sum(0), dtype=np.float64).ravel()), np.sqrt(squares)
    value = float(gap.sum()) / samples
    spread = float(drawn.std())
    if spread < 1e-12:
        return Measured(value, reason=_NO_SPREAD)
    reach = Z if degrees is None else quantile(degrees)
    ratio = np.divide(gap, deviation, out=np.zeros_like(gap), where=deviation > 0)
    folded = deviation * (math.sqrt(2 / math.pi) * np.exp(-np.square(ratio) / 2) - 2 * ratio * ndtr(-ratio))
    most = float(np.where(ratio <= reach, deviation * math.sqrt(2 / math.pi), folded).sum()) / samples
    low, high = value - most - reach * spread, 2 * value - float(drawn.mean()) + reach * spread
    return Measured(value, max(0.0, min(low, value)), max(min(high, 1.0), value), "bootstrap")


@dataclass(frozen=True)
class Scale:
    """A scale on which a figure's deviations are about alike to both sides, and the way back."""

    onto: Callable[[Array], Array]
    back: Callable[[float], float]


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-min(max(value, -700.0), 700.0)))


def _exponential(value: float) -> float:
    return math.exp(min(max(value, -700.0), 700.0))


SHARE = Scale(lambda values: np.log(values) - np.log1p(-values), _logistic)
AGREEMENT = Scale(np.arctanh, math.tanh)
ERROR = Scale(np.log, _exponential)
EXPLAINED = Scale(lambda values: -np.log1p(-values), lambda value: 1 - _exponential(-value))


def jackknifed(value: float, left_out: Array, degrees: float, scale: Scale) -> Measured:
    """The interval of a figure by what it is with each group left out."""
    with np.errstate(divide="ignore", invalid="ignore"):
        moved, centre = scale.onto(left_out), float(scale.onto(np.array([value]))[0])
    if not math.isfinite(centre) or not np.isfinite(moved).all():
        return Measured(value, reason="no interval: without one group or another it is perfect, or not defined")
    error = math.sqrt((len(moved) - 1) / len(moved) * float(np.square(moved - moved.mean()).sum()))
    if error < 1e-12:
        return Measured(value, reason=_NO_SPREAD)
    half = quantile(degrees) * error
    ends = sorted((scale.back(centre - half), scale.back(centre + half)))
    return Measured(value, ends[0], ends[1], "jackknife")
