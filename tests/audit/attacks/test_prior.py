from __future__ import annotations

import pytest
import torch
from torch import Tensor

from audit.learned import DIGITS, digits_judge, digits_prior, generator
from fedveil.audit.attacks.generative import Lessons, Prior, train_prior
from fedveil.audit.metrics import psnr
from fedveil.errors import DataError

BRIEF = Lessons(steps=3, batch=4, latent=5, width=4)


def fitted(prior: Prior, pictures: Tensor) -> float:
    """The mean PSNR of the nearest pictures that the prior can make."""
    code = torch.zeros(len(pictures), prior.latent, requires_grad=True)
    adam = torch.optim.Adam([code], lr=0.05)
    for _ in range(200):
        adam.zero_grad()
        torch.autograd.backward((prior.decode(code) - pictures).square().sum())
        adam.step()
    return float(psnr(prior.decode(code).detach(), pictures).mean())


def test_it_can_make_digits_it_never_saw_and_hardly_anything_else() -> None:
    noise = torch.rand(40, 1, 8, 8, generator=generator(1))
    assert fitted(digits_prior(), DIGITS.test.x[:40]) > 22
    assert fitted(digits_prior(), noise) < 14


def test_what_it_draws_at_random_looks_like_digits_to_a_judge() -> None:
    """The judge is sure of random pictures of the prior about as it is of digits, and not so of noise."""

    def sureness(pictures: Tensor) -> float:
        return float(digits_judge().scores(pictures).softmax(1).amax(1).median())

    drawn = digits_prior().decode(digits_prior().sample(200, generator=generator(2)))
    assert sureness(drawn) > 0.8
    assert sureness(DIGITS.test.x) > 0.95


def test_held_out_error_is_small_against_the_pictures_own_variance() -> None:
    assert digits_prior().held_out < 0.2 * float(DIGITS.train.x.var(0).mean())


def test_codes_are_spread_as_those_of_pictures() -> None:
    """The mean of what is drawn is the mean of the pictures."""
    drawn = digits_prior().decode(digits_prior().sample(1000, generator=generator(3))).mean(0)
    assert float((drawn - DIGITS.train.x.mean(0)).abs().mean()) < 0.05


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (3, 9, 14), (3, 32, 32), (2, 17, 64), (1, 28, 28), (3, 8, 90), (1, 224, 120)]
)
def test_any_picture_of_eight_pixels_a_side_or_more_will_do(shape: tuple[int, int, int]) -> None:
    x = 4.0 * torch.rand(20, *shape, generator=generator(), dtype=torch.float64) - 2.0
    prior = train_prior(x, generator=generator(), lessons=BRIEF)
    code = prior.sample(3, generator=generator())
    made = prior.decode(code)
    assert made.shape == (3, *shape)
    assert -2 <= float(made.min()) <= float(made.max()) <= 2
    assert prior.places >= 3
    for place in range(prior.places):
        torch.testing.assert_close(prior.finish(prior.features(code, place=place), since=place), made)


def test_equal_generators_give_equal_priors_and_leave_global_randomness_alone() -> None:
    before = torch.random.get_rng_state()
    x = DIGITS.train.x[:50]
    one, two = (train_prior(x, generator=generator(1), lessons=BRIEF) for _ in range(2))
    code = torch.ones(1, 5)
    assert torch.equal(one.decode(code), two.decode(code))
    assert torch.equal(before, torch.random.get_rng_state())


def test_progress_rises_to_one_and_the_box_is_the_one_given() -> None:
    seen: list[float] = []
    prior = train_prior(
        DIGITS.train.x[:50], generator=generator(), box=(-1.0, 3.0), lessons=BRIEF, progress=seen.append
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert prior.box == (-1.0, 3.0)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.rand(5, 1, 8, 8), "16 pictures"),
        (torch.rand(50, 64), "16 pictures"),
        (torch.rand(50, 1, 7, 8), "sides of at least 8"),
        (torch.zeros(50, 1, 8, 8, dtype=torch.int64), "int64"),
        (torch.full((50, 1, 8, 8), torch.nan), "finite"),
        (torch.full((50, 1, 8, 8), 0.5), "nothing to learn"),
    ],
)
def test_what_is_no_picture_is_refused(x: Tensor, text: str) -> None:
    with pytest.raises(DataError, match=text):
        train_prior(x, generator=generator(), lessons=BRIEF)
