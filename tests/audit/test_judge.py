from __future__ import annotations

import pytest
import torch

from audit.learned import DIGITS, accuracy, digits_judge, generator
from fedveil.audit.measures import Study, train_judge
from fedveil.audit.metrics import attack_success, feature_mse, knn_distance
from fedveil.errors import DataError

BRIEF = Study(steps=60)
X, Y = DIGITS.test.x, DIGITS.test.y


def test_the_judge_knows_digits_it_never_saw_and_says_how_well() -> None:
    judge = digits_judge()
    right = accuracy(judge.scores(X), Y)
    assert right > 0.9
    assert judge.accuracy == pytest.approx(right, abs=0.1)


def test_scores_and_features_serve_as_classifier_and_extractor() -> None:
    judge = digits_judge()
    assert attack_success(X, Y, classifier=judge.scores).value > 0.9
    assert attack_success(X, (Y + 1) % 10, classifier=judge.scores).value < 0.05
    assert judge.features(X).shape[0] == len(X)
    one, another = X[Y == 0][:8], X[Y == 1][:8]
    alike = feature_mse(one, one.roll(1, 0), extractor=judge.features).mean()
    assert alike < feature_mse(one, another, extractor=judge.features).mean()
    own_kind = knn_distance(one, X[Y == 0][8:], extractor=judge.features).mean()
    assert own_kind < knn_distance(one, X[Y == 1], extractor=judge.features).mean()


def test_noise_is_no_digit_the_judge_agrees_on() -> None:
    """A chance of 10 %: 200 pictures of noise with random labels go past 22 % once in a million times."""
    noise = torch.rand(200, 1, 8, 8, generator=generator(1))
    labels = torch.randint(10, (200,), generator=generator(2))
    assert attack_success(noise, labels, classifier=digits_judge().scores).value < 0.22


@pytest.mark.parametrize(("scale", "shift"), [(5.0, -3.0), (0.01, 100.0)])
def test_inputs_may_come_in_any_scale(scale: float, shift: float) -> None:
    judge = train_judge(scale * X + shift, Y, outputs=10, generator=generator(), study=Study(steps=150))
    assert judge.accuracy > 0.8


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((5,), 1), ((3, 4, 9), 1), ((2, 3, 3), 1), ((1, 17, 33), 1), ((1, 17, 33), 2), ((1, 7, 8), 2), ((1, 9, 224), 2)],
)
def test_vectors_and_pictures_of_any_size_are_judged(shape: tuple[int, ...], stride: int) -> None:
    x = torch.rand(60, *shape, generator=generator())
    y = torch.arange(60) % 3
    x += y.reshape(-1, *[1] * len(shape))
    study = Study(steps=40, batch=32, stride=stride)
    judge = train_judge(x.double(), y, outputs=3, generator=generator(), study=study)
    assert judge.accuracy > 0.8
    assert judge.scores(x).shape == (60, 3)


def test_equal_generators_give_equal_judges_and_leave_global_randomness_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, two = (train_judge(X[:60], Y[:60], outputs=10, generator=generator(4), study=BRIEF) for _ in range(2))
    assert torch.equal(one.scores(X), two.scores(X))
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_cannot_be_learned_from_or_judged_is_refused() -> None:
    with pytest.raises(DataError, match="20 labelled samples"):
        train_judge(X[:5], Y[:5], outputs=10, generator=generator())
    with pytest.raises(DataError, match="20 labelled samples"):
        train_judge(X, Y.float(), outputs=10, generator=generator())
    with pytest.raises(DataError, match="0…4"):
        train_judge(X, Y, outputs=5, generator=generator())
    with pytest.raises(DataError, match="shape"):
        digits_judge().scores(torch.zeros(2, 1, 9, 9))
