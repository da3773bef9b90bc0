"""One client step: a forward pass, and one backward pass per objective."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import (
    Blueprint,
    TappedLinear,
    load_epsilon,
    load_parameters,
    load_statistics,
)
from fedveil.downlink.decomposed import load_multipliers
from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.downlink.norms import batch_norms
from fedveil.flat import Layout, flatten
from fedveil.work.losses import Loss, SquareLoss


def contribution_layout(blueprint: Blueprint, *, tensors: int) -> Layout:
    """gradients (tensors × parameters), values, batch statistics, weight."""
    statistics = blueprint.statistics_size if _gathers_statistics(blueprint.skeleton) else 0
    return Layout(
        (
            ("gradients", (tensors, blueprint.size)),
            ("values", (tensors,)),
            ("statistics", (statistics,)),
            ("weight", (1,)),
        )
    )


def prepare(blueprint: Blueprint, module: nn.Module, broadcast: Broadcast) -> None:
    """Fill a skeleton with a broadcast."""
    load_parameters(module, broadcast.parameters)
    load_epsilon(blueprint, module, broadcast.epsilon)
    load_multipliers(blueprint, module, broadcast.multipliers)
    if broadcast.statistics.numel():
        load_statistics(module, broadcast.statistics)
    for _, norm in batch_norms(module):
        norm.statistics.clear()  # a step that was interrupted may have left some


def head_alpha(blueprint: Blueprint, module: nn.Module) -> Tensor:
    """α = Σ_j ĥ_j, + 1 if the last layer has a bias; ĥ is what the layer reads, past its multiplier."""
    assert blueprint.table is not None
    assert blueprint.table.head is not None
    layer = module.get_submodule(blueprint.table.head.path)
    assert isinstance(layer, TappedLinear)
    alpha = layer.tap.sum(1)
    return alpha if layer.bias is None else alpha + 1.0


def objectives(
    blueprint: Blueprint, module: nn.Module, loss: Loss, output: Tensor, target: Tensor, head: PublicHead | None
) -> Tensor:
    """The functions to differentiate, as one vector: the loss, or φ₀, φ_s, φ_β under head noise."""
    if head is None:
        return loss.mean(output, target).reshape(1)
    assert isinstance(loss, SquareLoss)
    return loss.basis(output, head_alpha(blueprint, module), target, head)


def collect_statistics(module: nn.Module, like: Tensor) -> Tensor:
    """Mean and variance of every batch norm, flat; nothing if all are frozen.

    Where only some are frozen, those repeat the running statistics they were sent.
    """
    if not _gathers_statistics(module):
        return like.new_empty(0)
    return flatten([part for _, norm in batch_norms(module) for part in norm.take_statistics()])


def _gathers_statistics(module: nn.Module) -> bool:
    return any(norm.training for _, norm in batch_norms(module))


def step(blueprint: Blueprint, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
    """gradients, values and statistics of one batch, in one flat vector (without the weight).

    The forward pass is shared; each objective costs one backward pass.
    """
    with torch.enable_grad():
        phi = objectives(blueprint, module, loss, module(x), y, head)
        parameters = list(module.parameters())
        rows = []
        for number in range(len(phi)):
            grads = torch.autograd.grad(
                phi[number],
                parameters,
                retain_graph=number + 1 < len(phi),
                allow_unused=True,
                materialize_grads=True,
            )
            rows.append(flatten(grads))
    return torch.cat([*rows, phi.detach(), collect_statistics(module, phi)])


def weighted(vector: Tensor, samples: int, *, share: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """n_k × `share` × everything, rounded once, and n_k itself at the end: what a client contributes to a sum."""
    result = vector.new_empty(len(vector) + 1, dtype=dtype)
    torch.mul(vector, samples * share, out=result[:-1])
    result[-1] = float(samples)
    return result
