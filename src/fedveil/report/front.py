"""The Pareto front: what nothing else beats in both respects."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points (cost, worth) no other beats: none costs no more, is worth no less, and is better in one.

    By rising cost.
    """
    kept = [
        index
        for index, (cost, worth) in enumerate(points)
        if not any(other <= cost and value >= worth and (other < cost or value > worth) for other, value in points)
    ]
    return sorted(kept, key=lambda index: points[index])
