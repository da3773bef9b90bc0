from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.attacks.unprotected import on_reference, unprotected
from fedveil import data
from fedveil.audit.attacks.deep_leakage import Descent, inverting, total_variation
from fedveil.audit.metrics import assignment, psnr, random_level, ssim

DIGITS = data.load("digits", seed=0).train
MODEL = "lenet-sigmoid"
ONE_TRY = Descent(steps=150, restarts=1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_reference_digits_are_reconstructed(seed: int) -> None:
    result = on_reference(inverting, model=MODEL, seed=seed, quick=True)
    assert result.effective, result.psnr
    assert result.label_found
    assert float(ssim(result.found[None], result.original[None])) > 0.9


def test_a_batch_of_two_is_reconstructed_with_its_labels() -> None:
    x, y = DIGITS.x[:2], DIGITS.y[:2]
    result = inverting(unprotected(MODEL, x, y), generator=generator(), quick=True)
    order = assignment(result.inputs, x)
    assert float(psnr(result.inputs[order], x).mean()) > 20
    assert result.labels[order].tolist() == y.tolist()


@pytest.mark.parametrize("hiding", ["noise", "mask"])
def test_noise_and_a_uniform_mask_leave_the_level_of_a_random_picture(hiding: str) -> None:
    x, y = DIGITS.x[:1], DIGITS.y[:1]
    problem = unprotected(MODEL, x, y)
    size = problem.gradient.shape
    if hiding == "noise":
        hidden = torch.randn(size, generator=generator(1)) * problem.gradient.std()
    else:
        hidden = problem.gradient + (torch.rand(size, generator=generator(2)) - 0.5) * 2.0**32
    result = inverting(replace(problem, gradient=hidden), generator=generator(), descent=ONE_TRY)
    assert float(psnr(result.inputs, x)) < random_level(x, generator=generator()) + 3
    assert result.loss > 0.1


def test_another_digits_gradient_gives_the_other_digit() -> None:
    x, other = DIGITS.x[:1], DIGITS.x[1:2]
    result = inverting(unprotected(MODEL, other, DIGITS.y[1:2]), generator=generator(), descent=ONE_TRY)
    assert float(psnr(result.inputs, other)) > 20
    assert float(psnr(result.inputs, x)) < float(psnr(other, x)) + 1


def test_the_scale_of_the_gradient_does_not_matter() -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    scaled = replace(problem, gradient=problem.gradient * 2.0**40)
    short = Descent(steps=20, restarts=1)
    one, two = (inverting(p, generator=generator(), descent=short) for p in (problem, scaled))
    torch.testing.assert_close(one.inputs, two.inputs)


def test_the_box_is_kept_and_known_labels_too() -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    narrow = replace(problem, box=(0.4, 0.6), labels=torch.tensor([7]))
    result = inverting(narrow, generator=generator(), descent=Descent(steps=20, restarts=1))
    assert 0.4 <= float(result.inputs.min()) < float(result.inputs.max()) <= 0.6 + 1e-6
    assert result.labels.tolist() == [7]


def test_a_zero_gradient_gives_a_picture_in_the_box() -> None:
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    result = inverting(
        replace(problem, gradient=torch.zeros_like(problem.gradient)),
        generator=generator(),
        descent=Descent(steps=10, restarts=1),
    )
    assert 0 <= float(result.inputs.min()) <= float(result.inputs.max()) <= 1


def test_total_variation_is_the_mean_step_between_neighbours() -> None:
    stripes = torch.tensor([0.0, 1.0, 0.0, 1.0]).expand(1, 1, 4, 4)
    assert float(total_variation(stripes)) == 1.0
    assert float(total_variation(torch.ones(2, 1, 4, 4))) == 0.0
    assert float(total_variation(torch.rand(3, 5))) == 0.0


def test_progress_rises_to_one() -> None:
    seen: list[float] = []
    problem = unprotected(MODEL, DIGITS.x[:1], DIGITS.y[:1])
    inverting(problem, generator=generator(), descent=Descent(steps=8, restarts=2), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="FEDVEIL_DATA names no folder of data sets")
def test_a_larger_real_picture_is_reconstructed() -> None:
    clothes = data.load(Path(os.environ["FEDVEIL_DATA"]) / "fashion-mnist", normalise=False).train
    result = on_reference(inverting, model=MODEL, picture=(clothes.x[2:3], clothes.y[2:3]), quick=True)
    assert result.effective, result.psnr
