"""Norms that a guarantee rests on, and what is cut to a bound by them.

A norm here is never below the true one by more than a few roundings, whatever the magnitudes: what squares lose by
underflow is added back as the most that it can be, and where they overflow, norms are taken again of scaled numbers.
Each is a function of its own sample: one that overflows changes nobody else's.
What rounding may add on the way from the norm to the sum is taken off the bound beforehand (`safe_bound`), so that a
sum, as it is computed, moves no further than the bound says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

SAMPLES_ADDED = 128
"""So many samples are added by one product of matrices; their sums, pairwise."""

_SPAN = 1024
_NORM_ROUNDINGS = 2048
_COMFORTABLE = 2.0**128


def working(dtype: torch.dtype) -> torch.dtype:
    """The precision to multiply and add in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def safe_bound(clip: float, dtype: torch.dtype, samples: int) -> float:
    """The bound to clip each of `samples` gradients to, so that their sum keeps `clip` in spite of rounding.

    In units of the rounding error u of `dtype` (2⁻²⁴ in single precision): a norm of up to 2³⁰ numbers, its weight and
    the product are off by at most 2048. A sum of B ≤ 128 gradients is off by at most (B + 2)·B times the bound, sums of
    those that are added pairwise by 2·`samples`, and rounding the whole by `samples`. That counts twice, since a sum
    with a record and one without it may be off in opposite directions. For a batch of 64 in single precision it takes
    6·10⁻⁴ off the bound, for one of 600 2.3·10⁻³; in double precision less than 10⁻¹¹.
    """
    block = min(samples, SAMPLES_ADDED)
    roundings = _NORM_ROUNDINGS + 2 * ((block + 2) * block + 3 * samples)
    return clip / (1.0 + roundings * torch.finfo(working(dtype)).eps / 2)


def squares(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """‖row‖² of matrices with B rows each, (parts, B) in float64, and the rows (B,) of which no norm is above 2⁶⁴."""
    lost = 2.0 * max(one.shape[1] for one in parts) * torch.finfo(working(parts[0].dtype)).tiny
    found = torch.stack([_norm(one) for one in parts]).double().square_().add_(lost)
    return found, (found < _COMFORTABLE).all(0)


def _norm(rows: Tensor) -> Tensor:
    """‖row‖ by spans: no square is negative, so that adding few of them, in any order, is off by few roundings."""
    rows = rows.to(working(rows.dtype))
    while rows.shape[1] > _SPAN:
        whole = rows.shape[1] - rows.shape[1] % _SPAN
        spans = torch.linalg.vector_norm(rows[:, :whole].reshape(len(rows), -1, _SPAN), dim=2)
        if whole < rows.shape[1]:
            spans = torch.cat([spans, torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)], 1)
        rows = spans
    return torch.linalg.vector_norm(rows, dim=1)  # type: ignore[no-any-return]


def scaled_norms(rows: Tensor) -> Tensor:
    """‖row‖ in float64, of numbers scaled by the largest; not finite where a row is not, or its norm no such number."""
    wide = rows.double()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    scale = torch.where(largest == 0, 1.0, largest)
    return scale * (wide / scale[:, None]).square().sum(1).sqrt()


def clip_weights(norms: Tensor, bound: float, dtype: torch.dtype) -> Tensor:
    """min(1, bound/‖g‖) in `dtype`; 0 where a norm is not finite, for that is over every bound.

    Zero, too, where a weight has no full precision in `dtype`: rounded up it could double.
    """
    weights = (bound / norms).clamp_(max=1.0).nan_to_num_(0.0).to(dtype)
    return torch.nn.functional.threshold(weights, torch.finfo(dtype).tiny, 0.0)


def clipped(vector: Tensor, bound: float) -> Tensor:
    """vector·min(1, bound/‖vector‖), no longer than `bound` as rounded; zero for what is not finite."""
    norm, dtype = scaled_norms(vector[None]), working(vector.dtype)
    if not bool(norm.isfinite()):
        return torch.zeros_like(vector, dtype=dtype)
    weight = clip_weights(norm, safe_bound(bound, dtype, 1), torch.float64)
    return (vector.double() * weight).to(dtype)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of matrices without the short cuts (TF32, bfloat16) that PyTorch can be set to take."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
