"""Scores: perfect ones, blind ones, batches in another order, and results that are no numbers."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.small_runs import scene, subject_of
from fedveil.audit.findings import Score, judged
from fedveil.audit.measures import Accuracy, ClassMeasure, Fit, Labels, Likeness, Members, Numbers, blind_labels

GENERATOR = torch.Generator().manual_seed(5)
PICTURES = torch.rand((6, 1, 8, 8), generator=GENERATOR)
LABELS = torch.tensor([3, 1, 4, 1, 5, 9])
TRUTH = [{"x": PICTURES, "y": LABELS}]


def likeness(**more: Any) -> Likeness:
    return Likeness(peak=1.0, chance=10.0, random=7.0, **more)


def test_a_perfect_reconstruction_is_a_hundred_decibels_in_any_order() -> None:
    for order in (torch.arange(6), torch.tensor([5, 3, 1, 0, 2, 4])):
        score = likeness().score([{"inputs": PICTURES[order]}], TRUTH)
        assert score.value == 100.0
        assert score.more["mse"] == 0.0
        assert score.more["recognisable"] == 1.0
        assert score.more["ssim"] == pytest.approx(1.0)


def test_one_picture_rebuilt_of_six_is_said_to_be_one() -> None:
    guess = torch.full_like(PICTURES, 0.5)
    guess[2] = PICTURES[4] + 0.01
    score = likeness().score([{"inputs": guess}], TRUTH)
    assert score.more["recognisable"] == pytest.approx(1 / 6)
    assert score.more["best psnr"] == pytest.approx(40.0, abs=1e-3)


def test_the_width_of_the_range_sets_the_scale_of_decibels() -> None:
    narrow = likeness().score([{"inputs": PICTURES + 0.1}], TRUTH)
    wide = Likeness(peak=10.0, chance=0.0, random=0.0).score(
        [{"inputs": 10 * PICTURES + 1.0}], [{"x": 10 * PICTURES, "y": LABELS}]
    )
    assert narrow.value == pytest.approx(20.0, abs=1e-3)
    assert wide.value == pytest.approx(narrow.value, abs=1e-3)


def test_attempts_are_judged_together_and_flat_results_as_the_pictures_they_are() -> None:
    halves = [{"x": PICTURES[:3], "y": LABELS[:3]}, {"x": PICTURES[3:], "y": LABELS[3:]}]
    score = likeness().score([{"inputs": PICTURES[:3].flatten(1)}, {"inputs": PICTURES[3:] + 0.1}], halves)
    assert score.value == pytest.approx((100 + 20) / 2, abs=1e-3)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_no_picture_is_a_bad_one(odd: float) -> None:
    guess = PICTURES.double().clone()
    guess[0, 0, 0, 0] = odd
    score = likeness().score([{"inputs": guess}], TRUTH)
    assert math.isfinite(score.value)
    assert all(math.isfinite(one) for one in score.more.values())
    everywhere = likeness().score([{"inputs": torch.full_like(guess, odd)}], TRUTH)
    assert everywhere.value < 10.0


def test_chance_is_what_the_mean_public_picture_gets() -> None:
    found = scene()
    measure = found.likeness
    public, _ = found.run.halves()
    victims = found.run.own(0)[0][:200]
    mean = public.x.mean(0, keepdim=True).expand_as(victims)
    score = Likeness(peak=measure.peak, chance=0, random=0).score([{"inputs": mean}], [{"x": victims, "y": victims}])
    assert measure.chance == pytest.approx(score.value, abs=1e-6)
    noise = torch.rand(victims.shape, generator=GENERATOR)
    bad = Likeness(peak=measure.peak, chance=0, random=0).score([{"inputs": noise}], [{"x": victims, "y": victims}])
    # A random picture is worse than the mean; noise is matched with the nearest original, which lifts it a little.
    assert measure.random < measure.chance
    assert bad.value == pytest.approx(measure.random, abs=1.0)


def test_the_judge_tells_meaning_apart_from_pixels() -> None:
    class OneThing:
        def features(self, x: Tensor) -> Tensor:
            return x.flatten(1)

        def scores(self, x: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full((len(x),), 1), 10).float()

    measure = likeness(judge=OneThing, private=PICTURES)
    score = measure.score([{"inputs": PICTURES}], TRUTH)
    assert score.more["feature mse"] == 0.0
    assert score.more["success rate"] == pytest.approx(2 / 6)
    assert score.more["knn distance"] == pytest.approx(0.0, abs=1e-3)


def test_labels_count_as_often_as_they_are() -> None:
    measure = Labels(torch.full((10,), 0.1), len(LABELS))

    def share(*guess: int) -> float:
        return measure.score([{"labels": torch.tensor(guess)}], TRUTH).value

    assert share(9, 5, 4, 3, 1, 1) == 1.0
    assert share(1, 1, 1, 1, 1, 1) == pytest.approx(2 / 6)
    assert share(0, 2, 6, 7, 8, 8) == 0.0
    assert share(1, 3, 4, 5, 9, 0) == pytest.approx(5 / 6)


def read(measure: Labels, right: int, attempts: int) -> Score:
    """So many attempts of one label each, of which some are right."""
    truths = [{"y": torch.tensor([number % 3 == 0]).long()} for number in range(attempts)]
    guesses = [{"labels": truth["y"] if number < right else 1 - truth["y"]} for number, truth in enumerate(truths)]
    return measure.score(guesses, truths)


def test_all_labels_read_where_two_thirds_are_one_class_is_a_finding() -> None:
    """Fourteen in a row are luck once in 272 times; ten are once in 55, and then nothing is said either way."""
    measure = Labels(torch.tensor([0.67, 0.33]), 1)
    assert measure.chance == pytest.approx(0.67)
    every = read(measure, 14, 14)
    assert every.more["by luck"] == pytest.approx(0.67**14, rel=1e-4)
    assert judged(measure, every, every)[0] == "as if unprotected"
    ten = read(measure, 10, 10)
    verdict, reason = judged(measure, ten, ten)
    assert verdict == "not decided"
    assert "blind guessing gets 67.0 %" in reason
    blind = read(measure, 10, 14)
    assert judged(measure, blind, blind)[0] == "not effective"


@pytest.mark.parametrize(("frequent", "wanted"), [(0.12, 7), (0.5, 13), (0.67, 23), (0.8, 38)])
def test_as_many_labels_are_read_as_tell_a_reader_from_a_blind_guess_either_way(frequent: float, wanted: int) -> None:
    measure = Labels(torch.tensor([frequent, *[(1 - frequent) / 9] * 9]), 1)
    assert measure.attempts == wanted
    every, blind = read(measure, wanted, wanted), read(measure, round(wanted * frequent), wanted)
    assert judged(measure, every, every)[0] == "as if unprotected"
    assert judged(measure, blind, every)[0] == "nothing"


@pytest.mark.parametrize(
    ("shares", "batch", "attempts"), [((0.67, 0.33), 1, 14), ((0.9, 0.1), 1, 60), ((0.67, 0.33), 10, 4)]
)
def test_who_guesses_blindly_is_rarely_taken_for_a_reader(shares: tuple[float, ...], batch: int, attempts: int) -> None:
    """The stated rate of false alarms is 0.5 %: 10 in 2,000 blind audits; 25 or more come once in 10,000 times."""
    generator = torch.Generator().manual_seed(4)
    measure = Labels(torch.tensor(shares), batch)
    frequent = round(batch * shares[0])
    drawn = torch.multinomial(torch.tensor(shares), 2000 * attempts * batch, replacement=True, generator=generator)
    found = batch - ((drawn.reshape(-1, batch) == 0).sum(1) - frequent).abs()
    totals = found.reshape(2000, attempts).sum(1)
    alarms = {total: _alarm(measure, total, batch, attempts) for total in totals.unique().tolist()}
    assert sum(alarms[total] for total in totals.tolist()) < 25
    assert _alarm(measure, batch * attempts, batch, attempts)


def _alarm(measure: Labels, total: int, batch: int, attempts: int) -> bool:
    """Whether so many labels of all attempts count as more than chance."""
    truths = [{"y": torch.zeros(batch).long()}] * attempts
    left, guesses = total, []
    for _ in range(attempts):
        right = min(left, batch)
        guesses.append({"labels": torch.tensor([0] * right + [1] * (batch - right))})
        left -= right
    return measure.score(guesses, truths).above(measure)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_blind_guess_at_labels_is_the_best_there_is(batch: int) -> None:
    """Every guess is tried against every batch."""
    shares = [0.5, 0.3, 0.2]

    def worth(guess: tuple[int, ...]) -> float:
        total = 0.0
        for labels in product(range(3), repeat=batch):
            chance = math.prod(shares[one] for one in labels)
            both = sum(min(guess.count(one), labels.count(one)) for one in range(3))
            total += chance * both / batch
        return total

    best = max(worth(guess) for guess in product(range(3), repeat=batch))
    assert blind_labels(torch.tensor(shares, dtype=torch.float64), batch=batch) == pytest.approx(best, abs=1e-12)


def test_naming_every_class_is_a_good_blind_guess_at_eight_labels() -> None:
    """So a share of a tenth is not what chance comes to."""
    assert blind_labels(torch.full((10,), 0.1), batch=1) == pytest.approx(0.1)
    assert 0.55 < blind_labels(torch.full((10,), 0.1), batch=8) < 0.6


def outputs(right: int) -> Tensor:
    """Class scores of which the first `right` of six are right."""
    guess = LABELS.clone()
    guess[right:] = (guess[right:] + 1) % 10
    return torch.nn.functional.one_hot(guess, 10).double()


def test_accuracy_is_that_of_the_way_with_most_labels_not_of_the_luckiest() -> None:
    found = [{"weights": outputs(6), "labelled.10": outputs(5), "labelled.50": outputs(2), "unlabelled.50": outputs(6)}]
    score = Accuracy("accuracy", chance=0.1).score(found, TRUTH)
    assert score.value == pytest.approx(2 / 6)
    assert score.more["labelled.10"] == pytest.approx(5 / 6)
    assert score.more["weights"] == 1.0
    assert score.low is not None
    assert score.high is not None
    assert score.low < score.value < score.high
    for way in ("received", "probe.6"):
        assert Accuracy("accuracy", chance=0.1).score([{way: outputs(3)}], TRUTH).value == 0.5


def test_fit_is_the_variance_explained_and_never_below_nothing() -> None:
    y = torch.tensor([[1.0], [2.0], [4.0]])
    truth = [{"y": y}]
    assert Fit().score([{"received": y}], truth).value == 1.0
    assert Fit().score([{"received": y.mean().expand(3, 1)}], truth).value == pytest.approx(0.0)
    assert Fit().score([{"received": -y}], truth).value == 0.0


def test_members_told_for_sure_by_chance_and_the_wrong_way_round() -> None:
    member = torch.arange(400) < 200
    truth = [{"member": member.long()}]
    zero = torch.tensor(0.0)
    sure = Members().score([{"scores": member.double() - 0.5, "threshold": zero}], truth)
    assert (sure.value, sure.more["auc"], sure.more["tpr at 1 % fpr"]) == (1.0, 1.0, 1.0)
    blind = Members().score(
        [{"scores": torch.rand(400, generator=GENERATOR).double(), "threshold": torch.tensor(0.5)}], truth
    )
    assert blind.low is not None
    assert blind.low < 0.5 < (blind.high or 0)
    moved = Members().score([{"scores": member.double() + 6.5, "threshold": torch.tensor(7.0)}], truth)
    assert moved.value == 1.0
    wrong = Members().score([{"scores": 0.5 - member.double(), "threshold": zero}], truth)
    assert wrong.value == 0.0


def test_parameters_are_known_exactly_up_to_scales_or_not_at_all() -> None:
    subject = subject_of()
    architecture = subject.record.facts.architecture()
    true = torch.cat([one.detach().double().reshape(-1) for one in subject.model.parameters()])
    truth = [{"parameters": true}]
    same = Numbers(architecture).score([{"parameters": true}], truth)
    assert (same.value, same.more["exact"]) == (1.0, 1.0)
    other = torch.randn(true.shape, generator=GENERATOR).double()
    assert Numbers(architecture).score([{"parameters": other}], truth).value < 0.05


def test_classes_are_recognised_by_the_judge_alone() -> None:
    judge = SimpleNamespace(scores=lambda x: outputs(3), features=lambda x: x.flatten(1))
    measure = ClassMeasure("recognised", chance=0.1, judge=lambda: judge)  # type: ignore[arg-type,return-value]
    assert measure.score([{"inputs": PICTURES, "labels": LABELS}], [{}]).value == 0.5


MEASURE = likeness()


@pytest.mark.parametrize(
    ("value", "twin", "verdict"),
    [
        (40.0, 40.0, "as if unprotected"),
        (42.0, 100.0, "as if unprotected"),
        (33.0, 100.0, "in part"),
        (34.0, 40.0, "as if unprotected"),
        (33.9, 40.0, "in part"),
        (13.1, 40.0, "in part"),
        (12.9, 40.0, "nothing"),
        (2.0, 40.0, "nothing"),
        (12.9, 12.9, "not effective"),
        (12.0, 12.0, "not effective"),
    ],
)
def test_a_figure_is_read_between_chance_and_no_protection(value: float, twin: float, verdict: str) -> None:
    found, reason = judged(MEASURE, Score(value), Score(twin))
    assert found == verdict
    assert bool(reason) is (verdict == "not effective")


def test_shares_have_to_be_above_chance_for_sure() -> None:
    members = Members()
    sure, unsure = Score(0.55, 0.51, 0.6), Score(0.55, 0.49, 0.6)
    assert judged(members, sure, Score(0.9, 0.85, 0.95))[0] == "in part"
    assert judged(members, unsure, Score(0.9, 0.85, 0.95))[0] == "nothing"
    assert judged(members, unsure, unsure)[0] == "not effective"
    found, reason = judged(members, sure, unsure)  # a leak must not hide behind a weak twin
    assert found == "in part"
    assert "perhaps luck" in reason
