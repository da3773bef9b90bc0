"""Inverting Gradients (Geiping et al. 2020): cosine distance, total variation, signed Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.closed_form import labels_of
from fedveil.audit.attacks.matching import (
    FULL_BUDGET,
    Budget,
    Problem,
    Progress,
    Reconstruction,
    best,
    boxed,
    cosine_distance,
    first_guess,
    gradient_at,
    normalised,
    private_copy,
    proven,
    restarted,
    silent,
)

REFERENCE_MODEL = "lenet-sigmoid"


@dataclass(frozen=True)
class Descent:
    """How signed Adam is run: the learning rate falls tenfold after 3/8, 5/8 and 7/8 of the steps."""

    steps: int = 600
    restarts: int = 3
    rate: float = 0.3
    variation: float = 1e-4
    good_enough: float = 1e-5


FULL = Descent()
QUICK = Descent(steps=400, restarts=2)
# Larger pictures need more and smaller steps; with these few, 28×28 pixels stay below 20 dB on the reference model.
LARGE = Descent(steps=3000, restarts=2, rate=0.05, variation=1e-6)
LARGE_QUICK = Descent(steps=3000, restarts=1, rate=0.05, variation=1e-6)
SMALL_PICTURE = 256


def inverting(
    problem: Problem,
    *,
    generator: torch.Generator,
    budget: Budget = FULL_BUDGET,
    descent: Descent | None = None,
    progress: Progress = silent,
) -> Reconstruction:
    """min over x in the box of 1 − cos(∇L(x, y), ĝ) + λ·TV(x); y is inferred where it is not known.

    The reported loss is the cosine distance alone.
    """
    descent = descent or _descent(problem, budget)
    labels = labels_of(problem, generator=generator)
    return best(
        _attempts(problem, labels, descent=descent, generator=generator, progress=progress),
        good_enough=descent.good_enough,
    )


inverting_reference = partial(proven, inverting, model=REFERENCE_MODEL)
"""`inverting` on the sigmoid LeNet."""


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbours along the last two dimensions; 0 for what is not a picture."""
    if x.dim() < 3:
        return x.new_zeros(())
    rows = (x[..., 1:, :] - x[..., :-1, :]).abs()
    columns = (x[..., :, 1:] - x[..., :, :-1]).abs()
    return sum((part.mean() for part in (rows, columns) if part.numel()), x.new_zeros(()))


def _descent(problem: Problem, budget: Budget) -> Descent:
    if math.prod(problem.input_shape) <= SMALL_PICTURE:
        return QUICK if budget.quick else FULL
    return LARGE_QUICK if budget.quick else LARGE


def _attempts(
    problem: Problem, labels: Tensor, *, descent: Descent, generator: torch.Generator, progress: Progress
) -> Iterator[Reconstruction]:
    module = private_copy(problem, dtype=torch.float32)
    observed = normalised(problem.gradient).float()
    return restarted(
        lambda part: _attempt(problem, module, observed, labels, descent=descent, generator=generator, progress=part),
        times=descent.restarts,
        progress=progress,
    )


def _attempt(
    problem: Problem,
    module: nn.Module,
    observed: Tensor,
    labels: Tensor,
    *,
    descent: Descent,
    generator: torch.Generator,
    progress: Progress,
) -> Reconstruction:
    x = first_guess(problem, generator=generator, dtype=torch.float32).requires_grad_(True)
    width = 1.0 if problem.box is None else problem.box[1] - problem.box[0]
    optimiser = torch.optim.Adam([x], lr=descent.rate * width)
    falls = [descent.steps * eighths // 8 for eighths in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=falls, gamma=0.1)

    def distance() -> Tensor:
        return cosine_distance(gradient_at(module, problem.loss.mean(module(x), labels)), observed)

    for step in range(descent.steps):
        objective = distance() + descent.variation / width * total_variation(x)
        (slope,) = torch.autograd.grad(objective, x)
        x.grad = slope.sign()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.copy_(boxed(problem, x))
        progress((step + 1) / descent.steps)
    return Reconstruction(inputs=x.detach().to(problem.gradient.dtype), labels=labels, loss=float(distance().detach()))
