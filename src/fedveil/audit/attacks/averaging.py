"""Averaging: many rounds' uploads of one client, while the model barely moves.

Every round covers the same contribution c with fresh noise: u_t = c + n_t, variance v_t by the ledger. The mean
weighted by 1/v_t is the best linear estimate of c, with variance

    1 / Σ_t 1/v_t        (v/T where all are alike)

so noise falls as 1/√T and no faster: what composition charges for. Whether noise is fresh and as large as stated
shows in how the uploads scatter (`excess`), without knowing c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import DataError


@dataclass(frozen=True, eq=False)
class Averaged:
    """An estimate of one client's contribution, the variance per coordinate that it should have by the ledger, and
    the share of each round in it."""

    estimate: Tensor
    variance: float
    weights: Tensor

    @property
    def deviation(self) -> float:
        """The standard deviation that remains on every coordinate."""
        return math.sqrt(self.variance)


def averaged(uploads: Sequence[Tensor] | Tensor, *, variances: Sequence[float]) -> Averaged:
    """Σ_t u_t/v_t / Σ_t 1/v_t over the rounds in which one client took part.

    `uploads` are the same section of one client's payloads, a flat vector for each round; `variances` are the noise
    that the ledger states for each (`collusion.remaining_variance`).
    """
    rows = _rows(uploads)
    if rows.dim() != 2 or len(rows) != len(variances) or not len(rows):
        raise DataError(
            f"Averaging takes one flat upload and one variance for each round: got uploads of shape "
            f"{tuple(rows.shape)} and {len(variances)} variances."
        )
    if not all(math.isfinite(one) and one > 0 for one in variances):
        raise DataError("Averaging needs variances that are positive numbers; an upload without noise needs no mean.")
    precision = torch.tensor([1.0 / one for one in variances], dtype=torch.float64, device=rows.device)
    weights = precision / precision.sum()
    return Averaged(weights @ rows, 1.0 / math.fsum(1.0 / one for one in variances), weights)


def excess(uploads: Sequence[Tensor] | Tensor, *, variances: Sequence[float]) -> float:
    """(observed scatter of the uploads about their weighted mean) / (what the ledger states); needs no truth.

    Σ_t ‖u_t − û‖²/v_t over (T − 1)·d: about 1 where noise is fresh every round and as large as stated, near 0
    where it repeats, above 1 where the model moves. Its standard deviation is √(2/((T − 1)·d)).
    """
    rows = _rows(uploads)
    found = averaged(rows, variances=variances)
    if len(rows) < 2:
        raise DataError("The scatter of a single upload says nothing: give at least two rounds.")
    stated = torch.tensor(list(variances), dtype=torch.float64, device=rows.device)
    scatter = ((rows - found.estimate).square().sum(1) / stated).sum()
    return float(scatter) / ((len(rows) - 1) * rows.shape[1])


def _rows(uploads: Sequence[Tensor] | Tensor) -> Tensor:
    return uploads.double() if isinstance(uploads, Tensor) else torch.stack(list(uploads)).double()
