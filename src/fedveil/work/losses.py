"""Losses, per sample and averaged, and the functions φ whose gradients undo head noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.downlink.messages import PublicHead
from fedveil.errors import ConfigError, DataError

LOSSES = ("square", "cross-entropy")


class Loss(Protocol):
    """A training objective."""

    @property
    def name(self) -> str:
        """Its name in configurations."""

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss over a batch."""


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy on class numbers."""

    name = "cross-entropy"

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """−log softmax(output)[target], averaged."""
        return F.cross_entropy(output, target)


@dataclass(frozen=True)
class SquareLoss:
    """½·Σ_i w_i·(y_i − ȳ_i)², averaged over the batch.

    For classes, ȳ is `target_scale` (M) at the true class and 0 elsewhere, and w is `true_weight` (k)
    at the true class and 1 elsewhere (Hui and Belkin 2021, who found that many classes need both).
    For regression, w = 1 and ȳ is the target.
    """

    target_scale: float = 1.0
    true_weight: float = 1.0

    name = "square"

    def __post_init__(self) -> None:
        if not (self.target_scale > 0 and self.true_weight > 0):
            raise ConfigError("target_scale and true_weight must be positive numbers.")

    def residual(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """(e, w): output − ȳ, and the output weights (None where all are 1)."""
        if target.is_floating_point():
            if target.shape != output.shape:  # they might broadcast to something else
                raise DataError(
                    f"Regression targets have shape {tuple(target.shape)}, the model's output {tuple(output.shape)}; "
                    "they must be equal."
                )
            return output - target, None
        classes = torch.arange(output.shape[-1], device=output.device)
        onehot = (target[..., None] == classes).to(output.dtype)
        weights = None if self.true_weight == 1.0 else 1.0 + (self.true_weight - 1.0) * onehot
        return output - self.target_scale * onehot, weights

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """½·Σ_i w_i·e_i², averaged over the batch."""
        error, weights = self.residual(output, target)
        square = error.square() if weights is None else weights * error.square()
        return 0.5 * square.sum(-1).mean()

    def basis(self, output: Tensor, alpha: Tensor, target: Tensor, head: PublicHead) -> Tensor:
        """φ₀, φ_1 … φ_m and φ_β (or φ_{β,1} … φ_{β,m}), averaged over the batch.

        φ₀ = ½Σ w·e²     φ_s = α·Σ_{i∈s} w_i·a_i·e_i     φ_β = ½α²     φ_{β,s} = ½α²·Σ_{i∈s} w_i·a_i²
        """
        error, weights = self.residual(output, target)
        if weights is not None and not head.per_group:
            raise ConfigError(
                f"Outputs weighted by true_weight = {self.true_weight} need a head noise with weighted outputs: one "
                "φ_β per group, since Σ w·r² then differs from sample to sample."
            )
        weighted = error if weights is None else weights * error
        vector = head.vector.to(output.dtype)
        member = F.one_hot(head.groups, head.count).to(output.dtype)
        phi_zero = 0.5 * (weighted * error).sum(-1).mean()
        phi_groups = (alpha[:, None] * ((weighted * vector) @ member)).mean(0)
        if not head.per_group:
            phi_beta = 0.5 * alpha.square().mean().reshape(1)
        else:
            spread = vector.square() if weights is None else weights * vector.square()
            phi_beta = 0.5 * (alpha.square()[:, None] * (spread @ member)).mean(0)
        return torch.cat([phi_zero.reshape(1), phi_groups, phi_beta])


def make_loss(name: str, *, target_scale: float = 1.0, true_weight: float = 1.0) -> Loss:
    """A loss by name."""
    if name == "square":
        return SquareLoss(target_scale, true_weight)
    if name == "cross-entropy":
        if (target_scale, true_weight) != (1.0, 1.0):
            raise ConfigError("target_scale and true_weight belong to the square loss; leave them at 1.")
        return CrossEntropy()
    raise ConfigError(f"Unknown loss {name!r}. Known: {', '.join(LOSSES)}.")


def refuse_head_noise(loss: Loss) -> None:
    """Head noise is exact for the square loss only; anything else is refused with the two ways out."""
    if not isinstance(loss, SquareLoss):
        raise ConfigError(
            f"Head noise with the {loss.name} loss cannot be undone: the recovery identity "
            "L = φ₀ − Σ γ_s·φ_s + v·φ_β holds because the square loss is quadratic in the output, and "
            f"{loss.name} is not. Two ways out: train with --loss square (for classes with --target-scale and "
            "--true-weight if needed), or keep the loss and drop the head noise (--no-head-noise); the "
            "hidden layers stay rescaled, but clients then see the model's true outputs."
        )
