"""How well scores tell members from non-members, and how sure a finite sample makes us of it.

A blind guess has a success rate of 0.5, an AUC of 0.5, and a true positive rate equal to the false
positive rate it is read at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedveil.audit.intervals import exact_interval
from fedveil.errors import ConfigError, DataError, NumericError

CHANCE = 0.5
"""Success rate and AUC of a blind guess."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the true one with the stated confidence."""

    value: float
    low: float
    high: float

    def covers(self, figure: float) -> bool:
        """Whether ``figure`` lies in the interval."""
        return self.low <= figure <= self.high


@dataclass(frozen=True)
class Rates:
    """What an attack's scores are worth.

    ``chance_true_positives`` is what a blind guess gets in place of ``true_positives``: the false
    positive rate asked for. ``false_positives`` is the rate the threshold had on this sample; with fewer
    than 1/rate non-members it is zero, stricter than what was asked.
    """

    success: Estimate
    auc: Estimate
    true_positives: Estimate
    false_positives: Estimate
    chance_true_positives: float
    members: int
    others: int
    confidence: float


def rates(
    scores: Tensor,
    *,
    member: Tensor,
    threshold: float,
    false_positive_rate: float = 0.01,
    confidence: float = 0.95,
) -> Rates:
    """Judge ``scores`` (high: member) against the truth; ``threshold`` is the attacker's own choice.

    A threshold chosen with the truth in hand would flatter the attack, so it must come from what the
    attacker knew.
    """
    inside, outside = _split(scores, member)
    true, false = true_positives_at(scores, member=member, rate=false_positive_rate, confidence=confidence)
    return Rates(
        success=success_rate(scores, member=member, threshold=threshold, confidence=confidence),
        auc=area_under_curve(scores, member=member, confidence=confidence),
        true_positives=true,
        false_positives=false,
        chance_true_positives=false_positive_rate,
        members=len(inside),
        others=len(outside),
        confidence=confidence,
    )


def proportion(count: int, total: int, *, confidence: float = 0.95) -> Estimate:
    """count/total with the exact interval of Clopper and Pearson."""
    _check_confidence(confidence)
    if not 0 <= count <= total or total < 1:
        raise DataError(f"A proportion needs 0 ≤ count ≤ total and a total of at least 1, not {count} of {total}.")
    return Estimate(count / total, *exact_interval(count, total, confidence=confidence))


def success_rate(scores: Tensor, *, member: Tensor, threshold: float, confidence: float = 0.95) -> Estimate:
    """Balanced accuracy ½(TPR + TNR) of the guess "member" where score > threshold.

    The interval joins the two Clopper–Pearson intervals by the distances of their ends (MOVER):
    b − ½√((t−l_t)² + (s−l_s)²) and b + ½√((u_t−t)² + (u_s−s)²).
    """
    inside, outside = _split(scores, member)
    t = proportion(int((inside > threshold).sum()), len(inside), confidence=confidence)
    s = proportion(int((outside <= threshold).sum()), len(outside), confidence=confidence)
    middle = (t.value + s.value) / 2
    below = math.hypot(t.value - t.low, s.value - s.low) / 2
    above = math.hypot(t.high - t.value, s.high - s.value) / 2
    return Estimate(middle, max(0.0, middle - below), min(1.0, middle + above))


def area_under_curve(scores: Tensor, *, member: Tensor, confidence: float = 0.95) -> Estimate:
    """P(member's score > other's) + ½P(equal), with the interval of DeLong on the logit scale.

    With V_i the share of non-members below member i and W_j the share of members above non-member j:
    var = var(V)/m + var(W)/n. The interval is symmetric in logit(AUC), so it stays inside (0, 1). A
    perfect separation has var = 0; there the interval is that of min(m, n) successes in as many tries.
    """
    from scipy.stats import norm, rankdata

    _check_confidence(confidence)
    inside, outside = _split(scores, member)
    m, n = len(inside), len(outside)
    if min(m, n) < 2:
        raise DataError(f"An AUC with its interval needs two members and two others, not {m} and {n}.")
    together = rankdata(np.concatenate([inside, outside]))
    v = (together[:m] - rankdata(inside)) / n
    w = 1 - (together[m:] - rankdata(outside)) / m
    area = float(v.mean())
    if area in (0.0, 1.0):
        pairs = min(m, n)
        return proportion(round(area * pairs), pairs, confidence=confidence)
    deviation = math.sqrt(v.var(ddof=1) / m + w.var(ddof=1) / n)
    middle = math.log(area / (1 - area))
    reach = float(norm.ppf(0.5 + confidence / 2)) * deviation / (area * (1 - area))
    return Estimate(area, _logistic(middle - reach), _logistic(middle + reach))


def true_positives_at(
    scores: Tensor, *, member: Tensor, rate: float = 0.01, confidence: float = 0.95
) -> tuple[Estimate, Estimate]:
    """The true positive rate where at most ``rate`` of the non-members are taken for members, and that share.

    The threshold is the (⌊rate·n⌋+1)-th largest score of the n non-members. Both intervals are those
    of Clopper and Pearson at this threshold; that the threshold is itself estimated shows in the second:
    an attack beats a blind guess for sure only where the two intervals do not meet.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"The false positive rate must be at least 0 and below 1, not {rate}.")
    inside, outside = _split(scores, member)
    # 0.01·300 is 2.9999…: without the nudge three allowed mistakes would become two.
    allowed = math.floor(rate * len(outside) + 1e-9)
    threshold = np.sort(outside)[::-1][allowed]
    true = proportion(int((inside > threshold).sum()), len(inside), confidence=confidence)
    false = proportion(int((outside > threshold).sum()), len(outside), confidence=confidence)
    return true, false


def _split(scores: Tensor, member: Tensor) -> tuple[Floats, Floats]:
    """The scores of members and of the others."""
    if scores.ndim != 1 or scores.shape != member.shape:
        raise DataError(
            f"Scores and memberships must be two vectors of one length, not {tuple(scores.shape)} "
            f"and {tuple(member.shape)}."
        )
    values = scores.detach().cpu().double().numpy()
    truth = member.detach().cpu().bool().numpy()
    if not np.isfinite(values).all():
        raise NumericError("A membership score is not a finite number: look at the attack that gave it.")
    if truth.all() or not truth.any():
        raise DataError("Rates need both members and non-members among the judged samples.")
    return values[truth], values[~truth]


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"The confidence must lie between 0 and 1, not {confidence}.")


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
