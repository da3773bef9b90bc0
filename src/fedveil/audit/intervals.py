"""How sure a finite number of trials makes us of a rate."""

from __future__ import annotations

from scipy.stats import beta


def exact_interval(count: int, total: int, *, confidence: float) -> tuple[float, float]:
    """The two-sided binomial interval of Clopper and Pearson: it covers the true rate at least as often as stated.

    With α = 1 − confidence: low = B(α/2; k, n−k+1) and high = B(1−α/2; k+1, n−k), B the Beta quantile.
    """
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return low, high
