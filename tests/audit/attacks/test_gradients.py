from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedveil import models
from fedveil.audit.attack import OnProgress
from fedveil.audit.attacks.gradients import (
    Problem,
    Reconstruction,
    best,
    boxed,
    client_gradient,
    cosine_distance,
    first_guess,
    gradient_at,
    matching_loss,
    normalised,
    squared_distance,
)
from fedveil.errors import ConfigError, NumericError
from fedveil.work.losses import CrossEntropy, SquareLoss


def linear_problem(gradient: Tensor, **known: object) -> Problem:
    return Problem(nn.Linear(2, 3), CrossEntropy(), gradient, (2,), 3, **known)  # type: ignore[arg-type]


def test_distances_are_zero_at_the_truth_and_known_elsewhere() -> None:
    observed = torch.tensor([3.0, 4.0])
    assert float(squared_distance(observed, observed)) == 0.0
    assert float(squared_distance(torch.zeros(2), observed)) == 1.0
    assert float(cosine_distance(2 * observed, observed)) == pytest.approx(0.0, abs=1e-6)
    assert float(cosine_distance(torch.tensor([-4.0, 3.0]), observed)) == pytest.approx(1.0)
    assert float(cosine_distance(-observed, observed)) == pytest.approx(2.0)


def test_a_zero_gradient_gives_finite_distances() -> None:
    zero = torch.zeros(4)
    for distance in (squared_distance, cosine_distance):
        assert math.isfinite(float(distance(zero, zero)))
    assert torch.equal(normalised(zero), zero)


def test_the_client_gradient_is_what_backpropagation_leaves_in_the_parameters() -> None:
    module = models.build("cnn", input_shape=(1, 8, 8), outputs=10)
    x, y = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 2, 3])
    ours = client_gradient(module, CrossEntropy(), x, y)
    assert all(parameter.grad is None for parameter in module.parameters())
    CrossEntropy().mean(module(x), y).backward()
    theirs = torch.cat([parameter.grad.reshape(-1) for _, parameter in module.named_parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(ours, theirs)


def test_a_parameter_the_loss_does_not_use_counts_as_zero() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    found = gradient_at(module, module["used"](torch.ones(1, 2)).sum())
    assert found.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss", [CrossEntropy(), SquareLoss(target_scale=2.0, true_weight=3.0)])
def test_the_matching_loss_vanishes_at_the_truth_only(loss: CrossEntropy | SquareLoss) -> None:
    module = models.build("mlp", input_shape=(4,), outputs=3, width=8)
    x, y = torch.rand(2, 4, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 2])
    problem = Problem(module, loss, client_gradient(module, loss, x, y), (4,), 3, batch=2)
    assert matching_loss(problem, x, y) < 1e-10
    assert matching_loss(problem, x, y.flip(0)) > 1e-3
    assert matching_loss(problem, 1 - x, y) > 1e-3


def test_guesses_lie_in_the_box_and_depend_on_the_generator_alone() -> None:
    problem = linear_problem(torch.zeros(9), batch=4, box=(-1.0, 3.0))
    one, two = (first_guess(problem, generator=torch.Generator().manual_seed(3), dtype=torch.float32) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (4, 2)
    assert -1 <= float(one.min()) < 0 < 2 < float(one.max()) <= 3
    assert boxed(problem, torch.tensor([math.nan, 9.0, -9.0])).tolist() == [1.0, 3.0, -1.0]


def attempt(loss: float) -> Reconstruction:
    return Reconstruction(inputs=torch.zeros(1, 1), labels=torch.zeros(1), loss=loss)


def test_the_best_attempt_wins_and_none_follows_a_good_enough_one() -> None:
    losses = iter([math.nan, 0.5, 0.1, 0.3, 0.01, 0.001])
    told: list[float] = []

    def tried(progress: OnProgress) -> Reconstruction:
        progress(0.5)
        return attempt(next(losses))

    assert best(tried, times=6, good_enough=0.05, progress=told.append).loss == 0.01
    assert next(losses) == 0.001
    assert told == [0.5 / 6, 1.5 / 6, 2.5 / 6, 3.5 / 6, 4.5 / 6, 1.0]
    with pytest.raises(ConfigError, match="at least one attempt"):
        best(tried, times=0, good_enough=1.0, progress=told.append)


@pytest.mark.parametrize(
    ("gradient", "known", "error", "text"),
    [
        (torch.zeros(8), {}, ConfigError, "9 parameters"),
        (torch.full((9,), math.inf), {}, NumericError, "infinity"),
        (torch.zeros(9), {"batch": 65}, ConfigError, "1 to 64"),
        (torch.zeros(9), {"batch": 0}, ConfigError, "1 to 64"),
        (torch.zeros(9), {"labels": torch.tensor([1, 2])}, ConfigError, "2 labels for a batch of 1"),
        (torch.zeros(9), {"box": (1.0, 1.0)}, ConfigError, "empty"),
    ],
)
def test_problems_that_make_no_sense_are_refused(
    gradient: Tensor, known: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        linear_problem(gradient, **known)
