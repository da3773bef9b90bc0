"""What a client learns of the parameters themselves, as numbers: a yardstick, not an attack.

A veil of secret positive scales multiplies row i and column j of every weight by numbers of their own. The function the
network computes stays as it is, and so does most of what its weights say: their signs, and every ratio
W_ij·W_kl / (W_il·W_kj). Numbers that are hidden are not a model that is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink import Blueprint
from fedveil.errors import DataError

EXACT = 1e-6
DETERMINED = 1e-3
_SWEEPS = 50
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ParameterKnowledge:
    """Shares of all parameters that are not zero, from 0 to 1.

    `exact`: received as they are, to one millionth. `signs`: received with their sign (chance: one half).
    `determined`: known to a thousandth once every row and column may be rescaled; parameters that no other one
    shares a row or column with are not counted. `residuals`, by layer: ‖Ŵ − e^{a_i + b_j}·W‖ / ‖Ŵ‖ with the best
    a and b; 0 means that only the scales are unknown, about 1 or more that the layer says nothing.
    """

    exact: float
    signs: float
    determined: float
    residuals: Mapping[str, float]


def parameter_knowledge(received: Tensor, true: Tensor, blueprint: Blueprint) -> ParameterKnowledge:
    """Compare flat parameters as a client received them (or made of them) with the true ones.

    a and b are the least-squares fit of log|Ŵ_ij| − log|W_ij| ≈ a_i + b_j, a bias being one more column.
    """
    if received.shape != true.shape or len(true) != blueprint.size:
        raise DataError(
            f"{tuple(received.shape)} received and {tuple(true.shape)} true parameters do not fit a model of "
            f"{blueprint.size}."
        )
    got, truth = received.double().cpu(), true.double().cpu()
    close = (got - truth).abs() <= EXACT * truth.abs()
    there = truth != 0
    residuals, known, counted = {}, 0, 0
    for name, ours, theirs in _tables(blueprint, got, truth):
        error = (ours - _rescaled(theirs, ours)).abs()
        residuals[name] = float(error.norm() / ours.norm().clamp_min(1e-300))
        numbers = (ours != 0) | (theirs != 0)
        known += int((error <= DETERMINED * ours.abs())[numbers].sum())
        counted += int(numbers.sum())
    return ParameterKnowledge(
        exact=float(close[there].double().mean()),
        signs=float((got.sign() == truth.sign())[there].double().mean()),
        determined=known / max(1, counted),
        residuals=residuals,
    )


def _tables(blueprint: Blueprint, got: Tensor, truth: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every weight with its bias as rows × columns × kernel, received and true; lone vectors are left out."""
    ours, theirs = blueprint.parameters.split(got), blueprint.parameters.split(truth)
    for name, one in ours.items():
        path, _, own = name.rpartition(".")
        bias = f"{path}.{own.replace('weight', 'bias')}" if path else own.replace("weight", "bias")
        if "weight" not in own or (one.dim() < 2 and bias not in ours):
            continue
        transposed = isinstance(blueprint.skeleton.get_submodule(path), _TRANSPOSED)
        tables = [_table(side[name], side.get(bias), transposed=transposed) for side in (ours, theirs)]
        yield name, tables[0], tables[1]


def _table(weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    rows = weight.transpose(0, 1) if transposed else weight
    rows = rows[:, None, None] if rows.dim() == 1 else rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    if bias is None or len(bias) != len(rows):
        return rows
    # A kernel has several numbers in a cell and a bias has one: the others are absent.
    column = rows.new_zeros(len(rows), 1, rows.shape[2])
    column[:, 0, 0] = bias
    return torch.cat([rows, column], 1)


def _rescaled(truth: Tensor, received: Tensor) -> Tensor:
    """e^{a_i + b_j}·W with the best a and b, by alternating means over numbers that are not zero."""
    there = (truth != 0) & (received != 0)
    ratio = torch.where(there, (received / torch.where(there, truth, 1.0)).abs().log(), 0.0)
    rows, columns = (there.sum((1 - side, 2)).clamp_min(1) for side in (0, 1))
    a, b = ratio.new_zeros(ratio.shape[0]), ratio.new_zeros(ratio.shape[1])
    for _ in range(_SWEEPS):
        a = torch.where(there, ratio - b[None, :, None], 0.0).sum((1, 2)) / rows
        b = torch.where(there, ratio - a[:, None, None], 0.0).sum((0, 2)) / columns
    return (a[:, None] + b).exp()[:, :, None] * truth
