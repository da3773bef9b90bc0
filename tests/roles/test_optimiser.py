"""The server's steps against torch's own, and against the algorithm of Reddi et al. written out number by number."""

from __future__ import annotations

import math

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


def gradients(rounds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    scale = torch.tensor([1.0, 1e-3, 10.0, 0.0, 1.0], dtype=torch.float64)
    return [scale * torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(rounds)]


def written_out(kind: str, gradient: list[float], *, decay: float, beta1: float, beta2: float, tau: float) -> float:
    """One number's way from 0.5, as Algorithm 2 of the paper has it; its Δ is −g."""
    x, m, v = 0.5, 0.0, tau**2
    for g in gradient:
        delta = -(g + decay * x)
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * math.copysign(float(v != delta**2), v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + 0.1 * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "yogi"])
def test_adaptive_steps_are_those_of_the_paper(kind: str, decay: float) -> None:
    optimiser = Optimiser(Schedule(0.1), 0.0, decay, kind, beta1=0.8, beta2=0.95, tau=1e-2)
    ours = torch.full((5,), 0.5, dtype=torch.float64)
    memory, told = optimiser.start(ours), gradients(30)
    for number, gradient in enumerate(told):
        ours = optimiser.step(ours, gradient, memory, round=number)
    expected = [
        written_out(kind, one, decay=decay, beta1=0.8, beta2=0.95, tau=1e-2) for one in torch.stack(told, 1).tolist()
    ]
    assert ours.tolist() == pytest.approx(expected, rel=1e-12)


def test_adagrad_is_torchs() -> None:
    optimiser = Optimiser(Schedule(0.1), kind="adagrad", beta1=0.0, tau=1e-3)
    ours = torch.full((5,), 0.5, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    adagrad = torch.optim.Adagrad([theirs], lr=0.1, initial_accumulator_value=1e-6, eps=1e-3)
    memory = optimiser.start(ours)
    for number, gradient in enumerate(gradients(20)):
        ours = optimiser.step(ours, gradient, memory, round=number)
        theirs.grad = gradient
        adagrad.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-13, atol=1e-14)
