from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audit.attacks.unprotected import on_reference, unprotected
from audit.learned import DIGITS, accuracy, blind_level, digits_judge, digits_model, digits_prior, generator
from fedveil import data
from fedveil.audit.attacks.generative import (
    Inversion,
    LatentSearch,
    class_inversion,
    generative,
    train_prior,
)
from fedveil.audit.attacks.membership import Criterion
from fedveil.audit.metrics import Estimate, assignment, attack_success, knn_distance, psnr, random_level
from fedveil.errors import ConfigError, DataError

CROSS_ENTROPY = Criterion()
TEST = DIGITS.test
SHORT = LatentSearch(draws=4, steps=5, feature_steps=4, restarts=2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_reference_digit_is_reconstructed_with_a_prior_of_other_digits() -> None:
    others = data.load("digits", seed=0).train.x[1:501]
    prior = train_prior(others, generator=generator(), box=(0.0, 1.0), quick=True)
    result = on_reference(partial(generative, prior=prior), model="lenet-sigmoid", quick=True)
    assert result.effective, result.psnr
    assert result.label_found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "lenet-sigmoid", "cnn"])
def test_digits_are_found_on_every_small_model(model: str) -> None:
    found = []
    for i in range(1 if model == "lenet-sigmoid" else 3):
        x, y = TEST.x[i : i + 1], TEST.y[i : i + 1]
        result = generative(unprotected(model, x, y), digits_prior(), generator=generator(), quick=True)
        assert result.labels.tolist() == y.tolist()
        found.append(float(psnr(result.inputs, x)))
    assert sorted(found)[len(found) // 2] > 20, found


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_batches_are_reconstructed(count: int) -> None:
    x, y = TEST.x[:count], TEST.y[:count]
    result = generative(unprotected("lenet-sigmoid", x, y), digits_prior(), generator=generator(), quick=True)
    order = assignment(result.inputs, x)
    assert float(psnr(result.inputs[order], x).min()) > 20
    assert sorted(result.labels.tolist()) == sorted(y.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("hiding", ["noise", "mask"])
def test_noise_and_a_mask_leave_no_more_than_a_blind_guess(hiding: str) -> None:
    x, y = TEST.x[:1], TEST.y[:1]
    problem = unprotected("lenet-sigmoid", x, y)
    size, found = problem.gradient.shape, []
    for seed in range(2):
        if hiding == "noise":
            hidden = torch.randn(size, generator=generator(seed)) * problem.gradient.std()
        else:
            hidden = problem.gradient + (torch.rand(size, generator=generator(seed)) - 0.5) * 2.0**32
        result = generative(replace(problem, gradient=hidden), digits_prior(), generator=generator(seed), quick=True)
        assert result.loss > 0.1
        found.append(float(psnr(result.inputs, x)))
    blind = max(blind_level(digits_prior(), x, generator=generator()), random_level(x, generator=generator()))
    assert sum(found) / 2 < blind + 2, found


def test_another_digits_gradient_gives_the_other_digit() -> None:
    x, other = TEST.x[:1], TEST.x[1:2]
    problem = unprotected("lenet-sigmoid", other, TEST.y[1:2])
    result = generative(problem, digits_prior(), generator=generator(), quick=True)
    assert float(psnr(result.inputs, other)) > 20
    assert float(psnr(result.inputs, x)) < float(psnr(other, x)) + 1


def test_searching_features_beyond_the_latent_code_improves_the_match() -> None:
    """The prior cannot make an unseen digit exactly; its features can."""
    x, y = TEST.x[:1], TEST.y[:1]
    problem = unprotected("lenet-sigmoid", x, y)
    latent_only = LatentSearch(steps=150, feature_steps=0, restarts=1)
    both = replace(latent_only, feature_steps=100)
    one, two = (generative(problem, digits_prior(), generator=generator(), search=how) for how in (latent_only, both))
    assert two.loss < one.loss
    assert float(psnr(two.inputs, x)) > float(psnr(one.inputs, x)) + 3


def test_the_box_known_labels_and_progress_are_kept() -> None:
    seen: list[float] = []
    problem = unprotected("mlp", TEST.x[:1], TEST.y[:1])
    narrow = replace(problem, box=(0.4, 0.6), labels=torch.tensor([7]))
    result = generative(narrow, digits_prior(), generator=generator(), search=SHORT, progress=seen.append)
    assert 0.4 <= float(result.inputs.min()) <= float(result.inputs.max()) <= 0.6 + 1e-6
    assert result.labels.tolist() == [7]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_zero_gradient_gives_finite_pictures_and_another_shape_is_refused() -> None:
    problem = unprotected("mlp", TEST.x[:1], TEST.y[:1])
    nothing = replace(problem, gradient=torch.zeros_like(problem.gradient))
    assert bool(generative(nothing, digits_prior(), generator=generator(), search=SHORT).inputs.isfinite().all())
    larger = unprotected("mlp", torch.zeros(1, 1, 9, 9), TEST.y[:1])
    with pytest.raises(ConfigError, match=r"\(1, 9, 9\)"):
        generative(larger, digits_prior(), generator=generator(), search=SHORT)


@cache
def inverted(steps: int) -> tuple[Tensor, Tensor]:
    """Ten pictures of each digit, made from a model after that many training steps."""
    return class_inversion(
        digits_model(steps=steps),
        digits_prior(),
        classes=range(10),
        per_class=10,
        criterion=CROSS_ENTROPY,
        generator=generator(),
        quick=True,
    )


def recognised(steps: int) -> Estimate:
    pictures, labels = inverted(steps)
    return attack_success(pictures, labels, classifier=digits_judge().scores)


@pytest.mark.slow
def test_class_inversion_of_a_trained_model_is_recognised_and_of_an_untrained_one_is_not() -> None:
    """Chance is 10 %. An untrained model is as easily made sure of a class, but not of the right one."""
    assert accuracy(digits_model()(TEST.x), TEST.y) > 0.85
    trained, control = recognised(400), recognised(0)
    assert trained.value > 0.85
    assert control.value < 0.35
    assert trained.low > control.high + 0.2


@pytest.mark.slow
def test_inverted_pictures_lie_near_the_private_ones_of_their_class() -> None:
    pictures, labels = inverted(400)
    private, of = DIGITS.train.x[450:900], DIGITS.train.y[450:900]
    own, wrong = [], []
    for one in range(10):
        mine = pictures[labels == one]
        own.append(knn_distance(mine, private[of == one], extractor=digits_judge().features).mean())
        wrong.append(knn_distance(mine, private[of == (one + 1) % 10], extractor=digits_judge().features).mean())
    assert float(torch.stack(own).mean()) < 0.7 * float(torch.stack(wrong).mean())


@pytest.mark.slow
def test_classes_that_the_prior_never_saw_are_recognised_too() -> None:
    """Public pictures of 0 to 4, private classes 5 to 9, as in the literature."""
    public = DIGITS.train.x[:450][DIGITS.train.y[:450] < 5]
    prior = train_prior(public, generator=generator(), quick=True)
    pictures, labels = class_inversion(
        digits_model(),
        prior,
        classes=range(5, 10),
        per_class=10,
        criterion=CROSS_ENTROPY,
        generator=generator(),
        quick=True,
    )
    assert attack_success(pictures, labels, classifier=digits_judge().scores).value > 0.5


def test_the_square_loss_is_inverted_at_its_own_scale() -> None:
    """Outputs M·onehot of an oracle that knows the classes: the criterion must aim at M."""
    judge, prior = digits_judge(), digits_prior()

    def scaled(x: Tensor) -> Tensor:
        return 5.0 * judge.head(judge.body((x - judge.mean) / judge.spread)).softmax(1)

    pictures, labels = class_inversion(
        scaled,
        prior,
        classes=[3, 8],
        per_class=5,
        criterion=Criterion("square", 5.0),
        generator=generator(),
        quick=True,
    )
    assert labels.tolist() == [3] * 5 + [8] * 5
    assert accuracy(scaled(pictures), labels) > 0.9


def test_class_inversion_without_anything_to_go_by_still_makes_pictures() -> None:
    """Constant, infinite or undefined scores give no direction, and no NaN either."""
    for value in (0.0, torch.inf, torch.nan):
        pictures, _ = class_inversion(
            lambda x, value=value: value + 0.0 * x.flatten(1)[:, :3],
            digits_prior(),
            classes=[0, 2],
            per_class=2,
            criterion=CROSS_ENTROPY,
            generator=generator(),
            inversion=Inversion(draws=20, steps=3),
        )
        assert bool(pictures.isfinite().all())


def test_what_cannot_be_inverted_is_refused() -> None:
    given = {"criterion": CROSS_ENTROPY, "generator": generator(), "inversion": Inversion(draws=20, steps=1)}
    with pytest.raises(ConfigError, match="a class and a picture"):
        class_inversion(digits_model(steps=0), digits_prior(), classes=[], per_class=1, **given)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="0…9"):
        class_inversion(digits_model(steps=0), digits_prior(), classes=[10], per_class=1, **given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("FEDVEIL_DATA" not in os.environ, reason="FEDVEIL_DATA names no folder of data sets")
def test_a_larger_real_picture_is_reconstructed() -> None:
    clothes = data.load(Path(os.environ["FEDVEIL_DATA"]) / "fashion-mnist", normalise=False)
    prior = train_prior(clothes.train.x[:5000], generator=generator(), quick=True)
    result = on_reference(
        partial(generative, prior=prior),
        model="lenet-sigmoid",
        picture=(clothes.test.x[:1], clothes.test.y[:1]),
        quick=True,
    )
    assert result.effective, result.psnr
