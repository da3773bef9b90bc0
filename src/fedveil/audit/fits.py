"""Least squares within a veil's groups: the number, turn, rotation or matrix that takes one model's edge to another's.

Every fit is from sums alone, of what is changed by A (x ↦ y) and of what is changed by A⁻ᵀ (u ↦ v): Σ x·xᵀ and Σ y·xᵀ,
Σ u·uᵀ and Σ v·uᵀ.
"""

from __future__ import annotations

import torch
from scipy.linalg import solve_sylvester
from torch import Tensor

from fedveil.downlink.symmetry import ISOMETRY, POSITIVE

STILL = 1e-10
"""A step below this is none."""
_NEWTON = 12
_TINY = 1e-300


def numbers(sums: Tensor, limits: Tensor) -> Tensor:
    """The a with the least Σ(y − a·x)² + Σ(v − u/a)², from Σx², Σxy, Σu², Σuv; signs and scales as limits allow."""
    (xx, xy), (uu, uv) = sums
    sign = torch.where((xy + uv < 0) & (limits & POSITIVE != POSITIVE), -1.0, 1.0).double()
    xy, uv = sign * xy, sign * uv
    # Newton in log a from the side that has more to say; both minima are positive ones.
    start = torch.where(xx >= uu, xy / xx.clamp_min(_TINY), uu / uv.clamp_min(_TINY))
    log = start.clamp(1e-6, 1e6).log()
    for _ in range(_NEWTON):
        a = log.exp()
        slope = a * a * xx - a * xy - uu / (a * a) + uv / a
        bend = (2 * a * a * xx - a * xy + 2 * uu / (a * a) - uv / a).abs()
        log = log - (slope / bend.clamp_min(_TINY)).clamp(-0.5, 0.5)
    return torch.where(limits & ISOMETRY != 0, sign, sign * log.exp())


def rotation(sums: Tensor) -> Tensor:
    """Procrustes; an isometry is its own dual."""
    return _procrustes(sums[0, 1] + sums[1, 1])


def rotation_of_differences(sums: Tensor) -> Tensor:
    """The same among those with A·1 = 1: what is orthogonal to 1 is rotated."""
    cross = sums[0, 1] + sums[1, 1]
    ones = torch.full((len(cross), 1), len(cross) ** -0.5, dtype=cross.dtype)
    others = torch.linalg.qr(ones, mode="complete")[0][:, 1:]
    nearest: Tensor = ones @ ones.T + others @ _procrustes(others.T @ cross @ others) @ others.T
    return nearest


def _procrustes(cross: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(cross)
    nearest: Tensor = u @ v
    return nearest


def turning(cross: Tensor) -> Tensor:
    """Of Σ y·xᵀ, pairs in the last two dimensions, the complex Σ y·x̄: its angle is the best turn from x to y."""
    return torch.complex(cross[..., 0, 0] + cross[..., 1, 1], cross[..., 1, 0] - cross[..., 0, 1])


def scaled_turn(sums: Tensor, *, isometry: bool) -> Tensor:
    """The turn and scale of pairs with the least ‖Y − s·R·X‖² + ‖V − R·U/s‖²: angle and scale in turns."""
    (xx, yx), (uu, vu) = ((turning(part).real, turning(cross)) for part, cross in sums)
    scale = torch.ones((), dtype=torch.float64)
    angle = torch.zeros_like(scale)
    if bool(yx.abs() + vu.abs() > 0):
        for _ in range(1 if isometry else _NEWTON):
            angle = (scale * yx + vu / scale).angle()
            back = torch.polar(torch.ones_like(angle), -angle)
            if not isometry:
                told = torch.stack([torch.stack([xx, (yx * back).real]), torch.stack([uu, (vu * back).real])])
                scale = numbers(told[..., None], torch.tensor([POSITIVE]))[0]
    elif not isometry:  # without a target it is the shortest
        scale = (uu.clamp_min(_TINY) / xx.clamp_min(_TINY)) ** 0.25
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    return torch.stack([cosine, -sine, sine, cosine]).reshape(2, 2)


def invertible(sums: Tensor) -> Tensor:
    """The M with the least ‖Y − M·X‖² + ‖V − M⁻ᵀ·U‖²: M ← (1 + E)·M, E by least squares over both."""
    (xx, yx), (uu, vu) = sums
    if not bool(yx.any() | vu.any()):  # without a target it is the shortest: MᵀM is the geometric mean of X⁻¹ and U
        root, back = _powers(xx)
        shortest: Tensor = _powers(back @ _powers(root @ uu @ root)[0] @ back)[0]
        return shortest
    if float(xx.trace()) >= float(uu.trace()):
        m = yx @ torch.linalg.pinv(xx, hermitian=True)
    else:
        m = torch.linalg.pinv(vu @ torch.linalg.pinv(uu, hermitian=True)).T
    start = m
    for _ in range(_NEWTON):
        if not bool(m.isfinite().all()) or float(torch.linalg.cond(m)) > 1e8:
            return start if bool(start.isfinite().all()) else torch.eye(len(m), dtype=m.dtype)
        back = torch.linalg.inv(m)
        a, b = m @ xx @ m.T, back.T @ uu @ back
        right = yx @ m.T - a - (vu @ back).T + b
        step = torch.from_numpy(solve_sylvester(b.numpy(), a.numpy(), right.numpy()))
        size = float(step.norm())
        m = m + (step if size <= 0.5 else step * (0.5 / size)) @ m
        if size < STILL:
            break
    solved: Tensor = m
    return solved


def _powers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """S^½ and S^−½ of a symmetric matrix with positive eigenvalues, or with none that are much smaller than others."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.clamp_min(1e-10 * float(values.max().clamp_min(1e-10))).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
