"""The best fit over all units: as exact as a ratio without noise, and better under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedveil import data, models
from fedveil.audit.attacks.closed_form import closed_form, rank_one
from fedveil.audit.attacks.gradients import Problem, client_gradient
from fedveil.audit.metrics import psnr
from fedveil.errors import ConfigError
from fedveil.work.losses import CrossEntropy, Loss, SquareLoss


def observed(loss: Loss, *, model: str = "mlp", batch: int = 1) -> tuple[Problem, Tensor, Tensor]:
    digits = data.load("digits", seed=3).train
    x, y = digits.x[:batch].double(), digits.y[:batch]
    module = models.build(model, input_shape=tuple(x.shape[1:]), outputs=10, seed=2).double()
    gradient = client_gradient(module, loss, x, y)
    return Problem(module, loss, gradient, tuple(x.shape[1:]), 10, batch=batch), x, y


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("size", [1.0, 0.01, 1000.0])
@pytest.mark.parametrize("loss", [CrossEntropy(), SquareLoss()])
def test_without_noise_it_is_exact_at_any_size_of_the_gradient(loss: Loss, size: float) -> None:
    problem, x, y = observed(loss)
    found = rank_one(replace(problem, gradient=size * problem.gradient), generator=generator())
    assert float(psnr(found.inputs, x)) > 100
    assert found.labels.tolist() == y.tolist()
    assert found.loss < 1e-9


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_under_noise_it_beats_the_ratio_of_any_one_unit(noise: float) -> None:
    """Means over ten draws; both are given the same noisy gradients."""
    problem, x, y = observed(SquareLoss())
    scale = noise * problem.gradient.norm() / len(problem.gradient) ** 0.5
    draws, right = generator(), 0
    gained = []
    for _ in range(10):
        noisy = torch.randn(problem.gradient.shape, generator=draws, dtype=torch.float64) * scale
        seen = replace(problem, gradient=problem.gradient + noisy)
        ours, theirs = (attack(seen, generator=generator()) for attack in (rank_one, closed_form))
        gained.append(float(psnr(ours.inputs, x)) - float(psnr(theirs.inputs, x)))
        right += int(ours.labels.tolist() == y.tolist())
    assert sum(gained) / 10 > 2
    assert right >= 9


def test_known_labels_are_kept_and_larger_batches_are_left_to_the_ratio() -> None:
    problem, _, _ = observed(SquareLoss())
    assert rank_one(replace(problem, labels=torch.tensor([7])), generator=generator()).labels.tolist() == [7]
    several, _, _ = observed(SquareLoss(), batch=3)
    ours, theirs = (attack(several, generator=generator()) for attack in (rank_one, closed_form))
    assert torch.equal(ours.inputs, theirs.inputs)
    assert ours.loss == theirs.loss


def test_a_gradient_of_nothing_and_a_convolution_are_met() -> None:
    problem, _, _ = observed(SquareLoss())
    found = rank_one(replace(problem, gradient=torch.zeros_like(problem.gradient)), generator=generator())
    assert bool(found.inputs.isfinite().all())
    with pytest.raises(ConfigError, match="first layer is linear"):
        rank_one(observed(SquareLoss(), model="lenet-sigmoid")[0], generator=generator())
