"""A gradient's direction tells the label of one sample, whatever its size."""

from __future__ import annotations

import pytest
import torch

from fedveil import data, models
from fedveil.audit.attacks.closed_form import likeliest_label
from fedveil.audit.attacks.gradients import Problem, client_gradient
from fedveil.errors import ConfigError
from fedveil.work.losses import CrossEntropy, Loss, SquareLoss


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("loss", [CrossEntropy(), SquareLoss()])
@pytest.mark.parametrize("model", ["mlp", "lenet-sigmoid"])
def test_labels_of_a_fresh_model_are_found(model: str, loss: Loss, size: float) -> None:
    digits = data.load("digits", seed=3).train
    module = models.build(model, input_shape=tuple(digits.x.shape[1:]), outputs=10, seed=2).double()
    right = 0
    for x, y in zip(digits.x[:10].double(), digits.y[:10], strict=True):
        gradient = size * client_gradient(module, loss, x[None], y[None])
        problem = Problem(module, loss, gradient, tuple(x.shape), 10)
        right += int(likeliest_label(problem, generator=torch.Generator().manual_seed(0))) == int(y)
    assert right >= 9


def test_several_samples_and_models_without_a_head_are_refused() -> None:
    module = torch.nn.Conv2d(1, 10, 8)
    gradient = torch.zeros(650)
    with pytest.raises(ConfigError, match="not of 2"):
        likeliest_label(Problem(module, SquareLoss(), gradient, (1, 8, 8), 10, batch=2), generator=torch.Generator())
    with pytest.raises(ConfigError, match="last layer is linear"):
        likeliest_label(Problem(module, SquareLoss(), gradient, (1, 8, 8), 10), generator=torch.Generator())
