"""One real picture on the model an attack is known to break, as plain federated averaging uploads its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil import data, models
from fedveil.audit.attacks.gradients import Problem, Reconstruction, client_gradient
from fedveil.audit.metrics import psnr
from fedveil.work.losses import CrossEntropy


@dataclass(frozen=True, eq=False)
class Reference:
    psnr: float
    loss: float
    original: Tensor
    found: Tensor
    label_found: bool

    @property
    def effective(self) -> bool:
        return self.psnr > 20.0


def unprotected(model: str, x: Tensor, y: Tensor, *, outputs: int = 10, seed: int = 0) -> Problem:
    """The gradient of a freshly built model on (x, y); labels unknown."""
    module = models.build(model, input_shape=tuple(x.shape[1:]), outputs=outputs, seed=seed)
    loss = CrossEntropy()
    return Problem(module, loss, client_gradient(module, loss, x, y), tuple(x.shape[1:]), outputs, batch=len(x))


def on_reference(
    attack: Callable[..., Reconstruction],
    *,
    model: str,
    picture: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    quick: bool = False,
) -> Reference:
    """An attack on one picture; the first digit of a seed's by default."""
    digits = data.load("digits", seed=seed).train
    x, y = (digits.x[:1], digits.y[:1]) if picture is None else picture
    more = {"quick": True} if quick else {}
    problem = unprotected(model, x, y, seed=seed)
    found = attack(problem, generator=torch.Generator().manual_seed(seed), **more)
    score = float(psnr(found.inputs, x))
    return Reference(score, found.loss, x[0], found.inputs[0], found.labels.tolist() == y.tolist())
