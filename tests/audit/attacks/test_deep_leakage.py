from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from audit.attacks.unprotected import on_reference, unprotected
from fedveil import data, models
from fedveil.audit.attacks.deep_leakage import Search, dlg, idlg
from fedveil.audit.attacks.gradients import Problem, Reconstruction, client_gradient
from fedveil.audit.metrics import assignment, psnr, random_level
from fedveil.work.losses import SquareLoss

DIGITS = data.load("digits", seed=0).train
MODEL = "lenet-sigmoid"
ONE_TRY = Search(steps=6, restarts=1)

Attack = Callable[..., Reconstruction]
both = pytest.mark.parametrize("attack", [dlg, idlg])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@both
def test_the_reference_digits_are_reconstructed(attack: Attack, seed: int) -> None:
    result = on_reference(attack, model=MODEL, seed=seed, quick=True)
    assert result.effective, result.psnr
    assert result.label_found
    assert result.loss < 1e-6


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@both
def test_a_batch_is_reconstructed_with_its_labels(attack: Attack, count: int) -> None:
    x, y = DIGITS.x[:count], DIGITS.y[:count]
    result = attack(unprotected(MODEL, x, y), generator=generator(), quick=True)
    order = assignment(result.inputs, x)
    assert float(psnr(result.inputs[order], x).mean()) > 20
    assert result.labels[order].tolist() == y.tolist()


@both
@pytest.mark.parametrize("hiding", ["noise", "mask"])
def test_noise_and_a_uniform_mask_leave_the_level_of_a_random_picture(attack: Attack, hiding: str) -> None:
    x, y = DIGITS.x[:1], DIGITS.y[:1]
    problem = unprotected(MODEL, x, y)
    size = problem.gradient.shape
    if hiding == "noise":
        hidden = torch.randn(size, generator=generator(1)) * problem.gradient.std()
    else:
        hidden = problem.gradient + (torch.rand(size, generator=generator(2)) - 0.5) * 2.0**32
    result = attack(replace(problem, gradient=hidden), generator=generator(), search=ONE_TRY)
    assert float(psnr(result.inputs, x)) < random_level(x, generator=generator()) + 3
    assert result.loss > 0.1


@both
def test_another_digits_gradient_gives_the_other_digit(attack: Attack) -> None:
    x, other = DIGITS.x[:1], DIGITS.x[1:2]
    problem = unprotected(MODEL, other, DIGITS.y[1:2])
    result = attack(problem, generator=generator(), quick=True)
    assert float(psnr(result.inputs, other)) > 20
    assert float(psnr(result.inputs, x)) < float(psnr(other, x)) + 1


def test_soft_labels_serve_the_square_loss_too() -> None:
    loss = SquareLoss(target_scale=2.0, true_weight=3.0)
    module = models.build(MODEL, input_shape=(1, 8, 8), outputs=10)
    x, y = DIGITS.x[:1], DIGITS.y[:1]
    problem = Problem(module, loss, client_gradient(module, loss, x, y), (1, 8, 8), 10)
    result = dlg(problem, generator=generator(), quick=True)
    assert float(psnr(result.inputs, x)) > 20
    assert result.labels.tolist() == y.tolist()


def test_known_labels_are_kept_and_the_model_is_left_alone() -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    before = [parameter.clone() for parameter in problem.module.parameters()]
    result = dlg(replace(problem, labels=torch.tensor([5])), generator=generator(), search=ONE_TRY)
    assert result.labels.tolist() == [5]
    after = list(problem.module.parameters())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, after, strict=True))


def test_equal_seeds_give_equal_reconstructions_and_progress_rises_to_one() -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    seen: list[float] = []
    one = idlg(problem, generator=generator(4), search=replace(ONE_TRY, good_enough=0.0), progress=seen.append)
    two = idlg(problem, generator=generator(4), search=replace(ONE_TRY, good_enough=0.0))
    assert torch.equal(one.inputs, two.inputs)
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert seen[-1] == 1.0


@pytest.mark.parametrize("gradient_scale", [0.0, 1e30])
def test_degenerate_gradients_give_a_picture_in_the_box(gradient_scale: float) -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    hidden: Tensor = torch.full_like(problem.gradient, gradient_scale)
    result = idlg(replace(problem, gradient=hidden), generator=generator(), search=ONE_TRY)
    assert 0 <= float(result.inputs.min()) <= float(result.inputs.max()) <= 1
    assert not math.isnan(result.loss)
