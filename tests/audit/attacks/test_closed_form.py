from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from audit.attacks.unprotected import on_reference, unprotected
from fedveil import data, models
from fedveil.audit.attacks.closed_form import closed_form, inferred_labels
from fedveil.audit.attacks.gradients import Problem, client_gradient
from fedveil.audit.metrics import assignment, psnr, random_level
from fedveil.errors import ConfigError
from fedveil.work.losses import CrossEntropy, Loss, SquareLoss

DIGITS = data.load("digits", seed=0).train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem_with(gradient: Tensor, like: Problem) -> Problem:
    return Problem(like.module, like.loss, gradient, like.input_shape, like.outputs, batch=like.batch)


def test_the_reference_digit_is_read_off_the_gradient() -> None:
    result = on_reference(closed_form, model="mlp")
    assert result.psnr > 100
    assert result.label_found
    assert result.loss < 1e-10


@pytest.mark.parametrize("batch", [4, 8])
def test_samples_that_alone_activate_a_unit_are_found_in_a_batch(batch: int) -> None:
    x, y = DIGITS.x[:batch], DIGITS.y[:batch]
    result = closed_form(unprotected("mlp", x, y), generator=generator())
    scores = psnr(result.inputs[assignment(result.inputs, x)], x)
    assert int((scores > 40).sum()) >= batch // 2
    assert sorted(result.labels.tolist()) == sorted(y.tolist())


def test_labels_go_with_the_inputs_they_belong_to() -> None:
    x, y = DIGITS.x[:2], DIGITS.y[:2]
    result = closed_form(unprotected("mlp", x, y), generator=generator())
    order = assignment(result.inputs, x)
    assert float(psnr(result.inputs[order], x).min()) > 40
    assert result.labels[order].tolist() == y.tolist()


def test_noise_a_uniform_mask_and_another_digit_give_nothing_of_the_original() -> None:
    x, y = DIGITS.x[:1], DIGITS.y[:1]
    problem = unprotected("mlp", x, y)
    chance = random_level(x, generator=generator())
    size = problem.gradient.shape
    noise = torch.randn(size, generator=generator(1))
    mask = (torch.rand(size, generator=generator(2)) - 0.5) * 2.0**32
    for hidden in (noise, problem.gradient + mask):
        result = closed_form(problem_with(hidden, problem), generator=generator())
        assert float(psnr(result.inputs, x)) < chance + 3
        assert result.loss > 0.1
    other = unprotected("mlp", DIGITS.x[1:2], DIGITS.y[1:2]).gradient
    result = closed_form(problem_with(other, problem), generator=generator())
    assert float(psnr(result.inputs, x)) == pytest.approx(float(psnr(DIGITS.x[1:2], x)), abs=0.01)


def test_a_gradient_of_zeros_gives_a_random_guess() -> None:
    problem = unprotected("mlp", DIGITS.x[:1], DIGITS.y[:1])
    result = closed_form(problem_with(torch.zeros_like(problem.gradient), problem), generator=generator())
    assert float(psnr(result.inputs, DIGITS.x[:1])) < 12


def test_batch_normalisation_which_needs_the_batch_together_is_no_obstacle_to_an_answer() -> None:
    module = models.build("mlp", input_shape=(1, 8, 8), outputs=10, norm="batch").train()
    x, y = DIGITS.x[:4], DIGITS.y[:4]
    problem = Problem(module, CrossEntropy(), client_gradient(module, CrossEntropy(), x, y), (1, 8, 8), 10, batch=4)
    result = closed_form(problem, generator=generator())
    assert result.inputs.shape == x.shape
    assert sorted(result.labels.tolist()) == sorted(y.tolist())


def test_models_that_do_not_begin_with_a_linear_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="Conv2d"):
        closed_form(unprotected("cnn", DIGITS.x[:1], DIGITS.y[:1]), generator=generator())


def test_a_linear_layer_that_reads_something_else_than_the_input_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Linear(64, 10))
    gradient = client_gradient(module, CrossEntropy(), DIGITS.x[:1], DIGITS.y[:1])
    with pytest.raises(ConfigError, match="raw input"):
        closed_form(Problem(module, CrossEntropy(), gradient, (1, 8, 8), 10), generator=generator())


LABELS = [[3], [7, 7], [0, 1, 1, 5], [2, 2, 2, 2, 4, 4, 9, 9]]


def labels_found(loss: Loss, labels: list[int], *, seed: int) -> list[int]:
    rows = torch.cat([torch.nonzero(DIGITS.y == c).flatten()[k : k + 1] for k, c in enumerate(labels)])
    module = models.build("cnn", input_shape=(1, 8, 8), outputs=10, seed=seed)
    gradient = client_gradient(module, loss, DIGITS.x[rows], DIGITS.y[rows])
    problem = Problem(module, loss, gradient, (1, 8, 8), 10, batch=len(labels))
    return [int(c) for c in inferred_labels(problem, generator=generator())]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("labels", LABELS)
def test_labels_are_counted_from_the_last_bias(labels: list[int], seed: int) -> None:
    assert labels_found(CrossEntropy(), labels, seed=seed) == labels


@pytest.mark.parametrize(("loss", "share"), [(SquareLoss(), 0.5), (SquareLoss(target_scale=3.0, true_weight=2.0), 0.9)])
def test_under_the_square_loss_most_labels_are_found_and_a_single_one_always(loss: Loss, share: float) -> None:
    """Chance would find about one label in four here."""
    hits = total = 0
    for seed in range(4):
        assert labels_found(loss, LABELS[0], seed=seed) == LABELS[0]
        for labels in LABELS[1:]:
            found = labels_found(loss, labels, seed=seed)
            assert len(found) == len(labels)
            hits += sum((Counter(found) & Counter(labels)).values())
            total += len(labels)
    assert hits / total > share


def test_labels_are_found_without_a_bias_from_the_row_sums() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10, bias=False))
    for row in range(5):
        x, y = DIGITS.x[row : row + 1], DIGITS.y[row : row + 1]
        gradient = client_gradient(module, CrossEntropy(), x, y)
        problem = Problem(module, CrossEntropy(), gradient, (1, 8, 8), 10)
        assert inferred_labels(problem, generator=generator()).tolist() == y.tolist()


def test_labels_cannot_be_inferred_without_a_linear_head() -> None:
    module = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    gradient = client_gradient(module, CrossEntropy(), DIGITS.x[:1], DIGITS.y[:1])
    with pytest.raises(ConfigError, match="Pass the labels"):
        inferred_labels(Problem(module, CrossEntropy(), gradient, (1, 8, 8), 10), generator=generator())
