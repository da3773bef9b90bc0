"""Losses, per sample and averaged, and the functions φ whose gradients undo head noise."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.downlink.messages import PublicHead
from fedveil.errors import ConfigError, DataError, spelled
from fedveil.tensors import under_vmap

LOSSES = ("square", "cross-entropy", "binary-cross-entropy")


class Loss(Protocol):
    """A training objective."""

    @property
    def name(self) -> str:
        """Its name in configurations."""

    @property
    def separable(self) -> bool:
        """Whether a batch's loss is the mean of its samples' losses, as clipping sample by sample needs it."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether every batch of a shape takes the same kernels, so that a GPU may replay them."""
        ...

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss over a batch."""


@functools.lru_cache(maxsize=64)
def _vector(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of a setting as a tensor, made once: a copy from the host cannot be part of a captured step."""
    return torch.tensor(values, dtype=dtype, device=device)


def _check_weights(weights: tuple[float, ...]) -> None:
    if weights and not (all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)):
        raise ConfigError("Class weights must be numbers of at least 0, and not all of them 0.")


def check_smoothing(smoothing: float, *, classes: bool = True) -> None:
    """Refuse a smoothing that is no share, or any where a sample has not one class."""
    if smoothing and not classes:
        raise ConfigError("label_smoothing is for classes, of which a sample has one: leave it out.")
    if not 0 <= smoothing < 1:
        raise ConfigError(f"label_smoothing must lie in [0, 1) (got {smoothing}).")


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy on class numbers.

    A sample's loss is multiplied by its class's weight, and the mean is over samples: it is not divided by the weights'
    sum, as PyTorch divides a batch's, so that every sample has a loss of its own whoever else is in its batch.
    """

    class_weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    name = "cross-entropy"
    separable = True
    capturable = True

    def __post_init__(self) -> None:
        _check_weights(self.class_weights)
        check_smoothing(self.smoothing)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """−log softmax(output)[target], averaged."""
        if output.dim() == 2 and not (self.class_weights or self.smoothing) and under_vmap(output):
            return -torch.log_softmax(output, 1).gather(1, target[:, None]).mean()
        if not self.class_weights:
            return F.cross_entropy(output, target, label_smoothing=self.smoothing)
        weights = _vector(self.class_weights, output.dtype, output.device)
        return F.cross_entropy(output, target, weights, reduction="none", label_smoothing=self.smoothing).mean()


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Sigmoid cross-entropy on several labels, each 0 or 1, averaged over labels and samples.

    What is lost on a label that holds is multiplied by the label's weight.
    """

    class_weights: tuple[float, ...] = ()

    name = "binary-cross-entropy"
    separable = True
    capturable = True

    def __post_init__(self) -> None:
        _check_weights(self.class_weights)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """−w·y·log σ(output) − (1 − y)·log(1 − σ(output)), averaged."""
        weights = _vector(self.class_weights, output.dtype, output.device) if self.class_weights else None
        return F.binary_cross_entropy_with_logits(output, target, pos_weight=weights)


@dataclass(frozen=True)
class SquareLoss:
    """½·Σ_i w_i·(y_i − ȳ_i)², averaged over the batch.

    For classes, ȳ is `target_scale` (M) at the true class and 0 elsewhere, and w is `true_weight` (k)
    at the true class and 1 elsewhere (Hui and Belkin 2021, who found that many classes need both).
    For regression, w = 1 and ȳ is the target. `smoothing` s mixes M/classes into ȳ; a sample of class c counts
    `class_weights`[c] times. Both leave the loss quadratic in the output, and so are exact under head noise.
    """

    target_scale: float = 1.0
    true_weight: float = 1.0
    class_weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    name = "square"
    separable = True
    capturable = True

    def __post_init__(self) -> None:
        if not (self.target_scale > 0 and self.true_weight > 0):
            raise ConfigError("target_scale and true_weight must be positive numbers.")
        _check_weights(self.class_weights)
        check_smoothing(self.smoothing)

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
        wanted = onehot
        if self.smoothing:
            wanted = (1.0 - self.smoothing) * onehot + self.smoothing / output.shape[-1]
        return output - self.target_scale * wanted, weights

    def _of_samples(self, values: Tensor, target: Tensor) -> Tensor:
        """Every sample's row, as often as its class counts."""
        if not self.class_weights or target.is_floating_point():
            return values
        counted = _vector(self.class_weights, values.dtype, values.device)[target]
        return values * counted.reshape(-1, *([1] * (values.dim() - 1)))

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """½·Σ_i w_i·e_i², averaged over the batch."""
        error, weights = self.residual(output, target)
        square = error.square() if weights is None else weights * error.square()
        return 0.5 * self._of_samples(square.sum(-1), target).mean()

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
        phi_zero = 0.5 * self._of_samples((weighted * error).sum(-1), target).mean()
        phi_groups = self._of_samples(alpha[:, None] * ((weighted * vector) @ member), target).mean(0)
        if not head.per_group:
            phi_beta = 0.5 * self._of_samples(alpha.square(), target).mean().reshape(1)
        else:
            spread = vector.square() if weights is None else weights * vector.square()
            phi_beta = 0.5 * self._of_samples(alpha.square()[:, None] * (spread @ member), target).mean(0)
        return torch.cat([phi_zero.reshape(1), phi_groups, phi_beta])


def make_loss(
    name: str,
    *,
    target_scale: float = 1.0,
    true_weight: float = 1.0,
    class_weights: tuple[float, ...] = (),
    smoothing: float = 0.0,
) -> Loss:
    """A loss by name."""
    if name == "square":
        return SquareLoss(target_scale, true_weight, class_weights, smoothing)
    if name not in LOSSES:
        raise ConfigError(f"Unknown loss {name!r}. Known: {', '.join(LOSSES)}.")
    if (target_scale, true_weight) != (1.0, 1.0):
        raise ConfigError("target_scale and true_weight belong to the square loss; leave them at 1.")
    if name == "cross-entropy":
        return CrossEntropy(class_weights, smoothing)
    check_smoothing(smoothing, classes=False)
    return BinaryCrossEntropy(class_weights)


def refuse_head_noise(loss: Loss) -> None:
    """Head noise is exact for the square loss only; anything else is refused with the two ways out."""
    if not isinstance(loss, SquareLoss):
        raise ConfigError(
            f"Head noise with the {loss.name} loss cannot be undone: the recovery identity L = φ₀ − Σ γ_s·φ_s + v·φ_β "
            f"holds because the square loss is quadratic in the output, and {loss.name} is not. Two ways out: train "
            f"with {spelled('loss', 'square')} (for classes with {spelled('target_scale')} and "
            f"{spelled('true_weight')} if needed), or keep the loss and drop the head noise "
            f"({spelled('head_noise', False)}); the hidden layers stay rescaled, but clients then see the model's true "
            "outputs."
        )
