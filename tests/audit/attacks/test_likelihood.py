from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from fedveil import data, models
from fedveil.audit.attacks.likelihood import (
    OWN_SPREAD_FROM,
    Shadows,
    best_threshold,
    likelihood,
    strangers_to,
    tail_scores,
)
from fedveil.audit.attacks.membership import UNKNOWN, Candidates, Criterion, Guess
from fedveil.audit.metrics import CHANCE, Estimate, area_under_curve, success_rate
from fedveil.errors import ConfigError, DataError, NotApplicableError, NumericError

SAMPLES = 40
TARGETS = 4
FEW = Shadows(count=6, epochs=60, batch=40)


def fresh(seed: int) -> nn.Module:
    return models.build("mlp", input_shape=(1, 8, 8), outputs=10, width=128, seed=seed)


@cache
def guessed(seed: int, *, seen: bool) -> tuple[Guess, Tensor]:
    """The attack on a model fitted to 40 digits: the members, or others that are no candidates."""
    digits = data.load("digits", seed=1).train
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(digits), generator=generator)
    candidates, strangers, public = rows[: 2 * SAMPLES], rows[2 * SAMPLES : 3 * SAMPLES], rows[3 * SAMPLES :][:80]
    fitted = candidates[:SAMPLES] if seen else strangers
    model = fresh(seed)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(150):
        adam.zero_grad()
        nn.functional.cross_entropy(model(digits.x[fitted]), digits.y[fitted]).backward()
        adam.step()
    member = torch.arange(2 * SAMPLES) < SAMPLES
    # Rows are in random order already: every second is known.
    shown = torch.where(torch.arange(2 * SAMPLES) % 2 == 0, member.long(), UNKNOWN)
    asked = Candidates(digits.x[candidates], digits.y[candidates], shown)
    return likelihood(model, asked, shadowed(asked, (digits.x[public], digits.y[public]), FEW, generator)), member


def shadowed(
    candidates: Candidates, public: tuple[Tensor, Tensor], shadows: Shadows, generator: torch.Generator
) -> Tensor:
    criterion = Criterion()
    return strangers_to(
        candidates, public=public, fresh=fresh, shadows=shadows, generator=generator, criterion=criterion
    )


def pooled(*, seen: bool, shuffled: bool = False) -> tuple[Estimate, Estimate]:
    guesses = [guessed(seed, seen=seen) for seed in range(TARGETS)]
    scores = torch.cat([guess.scores - guess.threshold for guess, _ in guesses])
    member = torch.cat([truth[guess.rows] for guess, truth in guesses])
    if shuffled:
        member = member[torch.randperm(len(member), generator=torch.Generator().manual_seed(0))]
    return (
        success_rate(scores, member=member, threshold=0.0, confidence=0.999),
        area_under_curve(scores, member=member, confidence=0.999),
    )


def test_an_overfitted_model_gives_its_members_away() -> None:
    success, area = pooled(seen=True)
    assert success.value > 0.6
    assert min(success.low, area.low) > CHANCE


@pytest.mark.parametrize(("seen", "shuffled"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_a_model_that_never_saw_the_members_or_shuffled_memberships_give_chance(seen: bool, shuffled: bool) -> None:
    """Four figures at 99.9 %: a false alarm in at most 0.4 % of seeds."""
    success, area = pooled(seen=seen, shuffled=shuffled)
    assert success.covers(CHANCE)
    assert area.covers(CHANCE)


def test_the_score_is_the_tail_of_the_strangers_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    target = torch.tensor([-1.0, 0.5, 30.0], dtype=torch.float64)
    spread = few.var(0).mean().sqrt()
    expected = [-norm.logsf(float(t), float(m), float(spread)) for t, m in zip(target, few.mean(0), strict=True)]
    assert tail_scores(target, few).tolist() == pytest.approx(expected)
    many = torch.randn(OWN_SPREAD_FROM, 3, generator=generator) * torch.tensor([1.0, 2.0, 4.0])
    own = tail_scores(torch.full((3,), 4.0), many)
    assert own[0] > own[1] > own[2]


def test_the_threshold_parts_what_is_known_best() -> None:
    scores = torch.tensor([5.0, 4.0, 0.2, 2.0, 0.0, 0.5])
    inside, outside = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    assert 2 < best_threshold(scores, inside=inside, outside=outside) < 4
    assert best_threshold(scores, inside=inside, outside=outside[:0]) == math.log(2)


def test_calibrated_outputs_take_the_place_of_the_model_and_the_model_stays_as_it_was() -> None:
    digits = data.load("digits", seed=1).train
    shown = torch.tensor([1, 0, UNKNOWN, UNKNOWN])
    candidates = Candidates(digits.x[:4], digits.y[:4], shown)
    model, veiled = fresh(1), fresh(2).train()

    def scores(held: nn.Module, outputs: nn.Module | None = None) -> Tensor:
        public, shadows = (digits.x[4:40], digits.y[4:40]), Shadows(count=2, epochs=2)
        strangers = shadowed(candidates, public, shadows, torch.Generator().manual_seed(0))
        return likelihood(held, candidates, strangers, outputs=outputs).scores

    assert torch.equal(scores(veiled, model), scores(model))
    assert not torch.equal(scores(veiled), scores(model))
    assert veiled.training
    assert all(one.grad is None for one in veiled.parameters())


def test_closeness_is_the_logit_of_the_confidence() -> None:
    scores, y = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 4
    confidence = scores.softmax(1)[torch.arange(7), y]
    assert torch.allclose(Criterion().closeness(scores, y), confidence.logit())
    square = Criterion("square", target_scale=2.0)
    assert torch.allclose((-square.closeness(scores, y)).exp(), (scores - 2 * torch.eye(4)[y]).square().sum(1))


def test_what_cannot_be_attacked_is_refused() -> None:
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8)
    candidates = Candidates(x[:4], y[:4], torch.tensor([1, 0, UNKNOWN, UNKNOWN]))

    def attack(public: tuple[Tensor, Tensor], shadows: Shadows = FEW) -> None:
        shadowed(candidates, public, shadows, torch.Generator())

    with pytest.raises(DataError, match="shaped like the candidates"):
        attack((x[4:, :, :4], y[4:]))
    for few in (slice(4, 7), slice(0, 7)):  # candidates among the public data do not count
        with pytest.raises(NotApplicableError, match="fewer than 4 public samples"):
            attack((x[few], y[few]))
    with pytest.raises(NumericError, match="lower the shadow models' rate"):
        attack((x[4:], y[4:]), Shadows(count=2, epochs=9, rate=1e30))
    with pytest.raises(ConfigError, match="count ≥ 2"):
        Shadows(count=1)
    with pytest.raises(NumericError, match="NaN or infinity"):
        tail_scores(torch.tensor([math.nan]), torch.zeros(3, 1))
