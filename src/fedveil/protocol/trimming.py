"""The mean of groups' means without the extremes: what one group says alone moves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.downlink.messages import Recovered

FEWEST_GROUPS = 3
"""Of two, nobody can tell which is bad."""


def trimmed_off(groups: int) -> int:
    """How many groups count as possibly bad: a quarter, and at least one."""
    return max(1, groups // 4)


def trimmed_mean(rows: Tensor) -> Tensor:
    """Of every column, the mean without the largest and the smallest quarter; what is no number is largest."""
    off = trimmed_off(len(rows))
    ordered = rows.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(dim=0).values
    return ordered[off : len(rows) - off].mean(dim=0)


def outvoted(groups: Sequence[Recovered]) -> Recovered:
    """What is recovered from a round's groups, number by number; each group counts alike."""

    def scalar(values: Sequence[float | None]) -> float | None:
        told = [value for value in values if value is not None]
        return float(trimmed_mean(torch.tensor(told, dtype=torch.float64))) if len(told) == len(groups) else None

    return Recovered(
        trimmed_mean(torch.stack([group.gradient for group in groups])),
        scalar([group.loss for group in groups]),
        trimmed_mean(torch.stack([group.statistics for group in groups])),
        scalar([group.head_level for group in groups]),
    )
