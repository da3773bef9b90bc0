"""Losses of the caller's own: PyTorch's modules and any function of outputs and targets, tried out before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError

Objective = Callable[[Tensor, Tensor], Tensor]
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-7}


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A function of a batch's outputs and targets that gives their mean loss, or each sample's.

    Whether it is `separable` is found out by trying (`tried`).
    """

    name: str
    compute: Objective
    separable: bool = False
    capturable: bool = False

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """What the function gives, averaged."""
        return self.compute(output, target).mean()


@dataclass(frozen=True, eq=False)
class _ByParts:
    """A module of PyTorch's that leaves its loss unreduced: of a sample, parts are averaged, or added up."""

    module: nn.Module
    added: bool

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.module(output, target)
        if value.dim() < 2:
            return value
        return value.flatten(1).sum(1) if self.added else value.flatten(1).mean(1)


def own_loss(given: Callable[..., Any], *, dtype: torch.dtype, device: torch.device) -> OwnLoss:
    """A module or function as a loss; a module is copied, and its tensors are put where the model's are.

    A module that can leave its loss unreduced does: a mean over samples is then what it is for every batch, whatever
    else the module would have divided by (PyTorch divides a batch's weighted loss by the sum of its weights).
    """
    if not isinstance(given, nn.Module):
        said = getattr(given, "__name__", type(given).__name__)
        return OwnLoss("own function" if said == "<lambda>" else str(said), given)
    name = type(given).__name__
    if any(parameter.requires_grad for parameter in given.parameters()):
        raise ConfigError(
            f"The loss {name} has parameters of its own to train, and what travels is the model's: make them part of "
            "the model, or freeze them (requires_grad_(False))."
        )
    try:
        module = copy.deepcopy(given).to(device, dtype)
    except (RuntimeError, TypeError) as reason:
        raise ConfigError(f"The loss {name} cannot be copied: {reason}") from reason
    known = type(given).__module__ == "torch.nn.modules.loss"
    how = getattr(given, "reduction", None)
    if how == "sum":
        raise ConfigError(
            f"The loss {name} adds up a batch (reduction='sum'), and clients' losses are averaged over samples: use "
            "reduction='mean', and multiply the learning rate."
        )
    if how not in ("mean", "none", "batchmean"):
        return OwnLoss(name, module, capturable=known)
    vars(module)["reduction"] = "none"
    return OwnLoss(name, _ByParts(module, added=how == "batchmean"), capturable=known)


def tried(loss: OwnLoss, output: Tensor, target: Tensor) -> OwnLoss:
    """The loss after it was tried on some outputs and targets, knowing whether it is a mean of its samples' losses.

    Raises:
        ConfigError: It fails, gives something else than one number or one per sample, or has no gradient.
    """
    output = output.detach().clone().requires_grad_()
    whole = _value(loss, output, target)
    if not whole.requires_grad:
        raise ConfigError(
            f"The loss {loss.name} has no gradient in the model's outputs: compute it with operations of PyTorch on "
            "the tensors it is given."
        )
    apart = torch.stack([_value(loss, output[k : k + 1], target[k : k + 1]).mean() for k in range(len(target))])
    allowed = _TOLERANCE.get(output.dtype, 1e-3) * (1.0 + apart.detach().abs())
    given = whole if whole.dim() else apart.mean()
    difference = (apart - given if whole.dim() else whole - given).detach().abs()
    return replace(loss, separable=bool((difference <= allowed).all()))


def _value(loss: OwnLoss, output: Tensor, target: Tensor) -> Tensor:
    try:
        with torch.enable_grad():
            value = loss.compute(output, target)
    except Exception as reason:
        named = "" if target.is_floating_point() else " For classes there are loss='square' and loss='cross-entropy'."
        raise ConfigError(
            f"The loss {loss.name} does not take outputs of shape {tuple(output.shape)} and targets of shape "
            f"{tuple(target.shape)} and type {str(target.dtype).removeprefix('torch.')}: "
            f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}.{named}"
        ) from reason
    if not isinstance(value, Tensor) or not value.is_floating_point() or tuple(value.shape) not in ((), (len(target),)):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"The loss {loss.name} gives {given} for {len(target)} samples: it must give one number, their mean, or "
            "one number per sample."
        )
    return value
