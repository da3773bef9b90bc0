"""The closed form for a batch of one under noise: the first layer's gradient is then a matrix of rank one.

    [∂L/∂W, ∂L/∂b] = δ·(x, 1)ᵀ

With Gaussian noise of one size on every entry, the likeliest (x, 1) is the first right singular vector of what was
observed: every unit adds its part, where a single row's ratio would use one unit and its noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.audit.attacks.closed_form import closed_form, first_linear_gradients
from fedveil.audit.attacks.matching import (
    FULL_BUDGET,
    Budget,
    Problem,
    Progress,
    Reconstruction,
    boxed,
    client_gradient,
    cosine_distance,
    private_copy,
    silent,
)


def rank_one(
    problem: Problem, *, generator: torch.Generator, budget: Budget = FULL_BUDGET, progress: Progress = silent
) -> Reconstruction:
    """`closed_form`, and for a batch of one the best fit over all units, with the class that explains it best.

    The loss is then 1 − cos between the gradient at what was found and the observed one: clipping and weights
    change the size of a gradient, but not its direction.
    """
    if problem.batch > 1:
        return closed_form(problem, generator=generator, budget=budget, progress=progress)
    weight, bias = first_linear_gradients(problem)
    _, _, rows = torch.linalg.svd(torch.cat([weight, bias[:, None]], dim=1).double(), full_matrices=False)
    inputs = boxed(problem, rows[0, :-1] / rows[0, -1]).reshape(1, *problem.input_shape)
    progress(0.5)
    label, loss = _likeliest_class(problem, inputs)
    progress(1.0)
    return Reconstruction(inputs=inputs.to(problem.gradient.dtype), labels=label, loss=loss)


def _likeliest_class(problem: Problem, inputs: Tensor) -> tuple[Tensor, float]:
    module, observed = private_copy(problem, dtype=torch.float64), problem.gradient.double()
    classes = torch.arange(problem.outputs, device=observed.device) if problem.labels is None else problem.labels
    apart = torch.stack(
        [
            cosine_distance(client_gradient(module, problem.loss, inputs, one.reshape(1)), observed)
            for one in classes.to(observed.device)
        ]
    )
    best = int(apart.argmin())
    return classes[best].reshape(1), float(apart[best])
