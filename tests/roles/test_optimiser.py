"""The server's SGD against torch's own."""

from __future__ import annotations

import pytest
import torch

from fedveil.roles.server import Optimiser
from fedveil.work import Schedule


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_steps_equal_torch_sgd(momentum: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(7, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    torch_sgd = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=decay)
    optimiser = Optimiser(Schedule(0.1), momentum, decay)
    velocity = torch.zeros_like(ours)
    for number in range(20):
        gradient = torch.randn(7, generator=generator, dtype=torch.float64)
        ours = optimiser.step(ours, gradient, velocity, round=number)
        theirs.grad = gradient
        torch_sgd.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_the_learning_rate_is_the_rounds() -> None:
    optimiser = Optimiser(Schedule(1.0, decay=0.5))
    moved = optimiser.step(torch.zeros(1), torch.ones(1), torch.zeros(1), round=3)
    assert float(moved) == -0.125
