from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import binom

from fedveil.audit.metrics import (
    CHANCE,
    Estimate,
    Rates,
    area_under_curve,
    proportion,
    rates,
    success_rate,
    true_positives_at,
)
from fedveil.errors import ConfigError, DataError, NumericError


def drawn(members: int, others: int, *, shift: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(members + others, generator=generator, dtype=torch.float64)
    member = torch.arange(members + others) < members
    return scores + shift * member, member


def area_of(members: int, others: int, *, shift: float, seed: int) -> Estimate:
    scores, member = drawn(members, others, shift=shift, seed=seed)
    return area_under_curve(scores, member=member)


def judged(*, shift: float, threshold: float) -> Rates:
    scores, member = drawn(200, 200, shift=shift, seed=3)
    return rates(scores, member=member, threshold=threshold, confidence=0.999)


@pytest.mark.parametrize(("total", "confidence"), [(1, 0.95), (7, 0.9), (20, 0.95), (53, 0.99)])
def test_the_interval_of_a_proportion_misses_no_more_often_than_it_says(total: int, confidence: float) -> None:
    """Exact: the probability of every count is summed, nothing is drawn."""
    found = [proportion(k, total, confidence=confidence) for k in range(total + 1)]
    for truth in np.linspace(0.01, 0.99, 33):
        covered = sum(binom.pmf(k, total, truth) for k in range(total + 1) if found[k].covers(truth))
        assert covered >= confidence


def test_the_interval_of_a_proportion_is_the_textbook_one() -> None:
    """No successes in n tries: high = 1 − (α/2)^(1/n)."""
    assert proportion(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert proportion(0, 10).low == 0.0
    assert proportion(10, 10).high == 1.0


def test_the_success_rate_weighs_both_classes_the_same() -> None:
    scores = torch.tensor([1.0, 1.0, -1.0, -1.0] + [1.0] * 8)
    member = torch.tensor([True] * 4 + [False] * 8)
    assert success_rate(scores, member=member, threshold=0.0).value == 0.25


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_interval_of_the_success_rate_covers_the_truth(shift: float) -> None:
    """Exact binomial sums over both counts, at a size where all pairs can be listed."""
    m, n, t, s = 12, 17, 0.5 + 0.3 * shift, 0.5
    covered = 0.0
    for k, j in itertools.product(range(m + 1), range(n + 1)):
        scores = torch.tensor([1.0] * k + [-1.0] * (m - k) + [-1.0] * j + [1.0] * (n - j))
        found = success_rate(scores, member=torch.arange(m + n) < m, threshold=0.0)
        covered += binom.pmf(k, m, t) * binom.pmf(j, n, s) * found.covers((t + s) / 2)
    assert covered >= 0.95


def test_the_area_agrees_with_an_independent_implementation() -> None:
    from sklearn.metrics import roc_auc_score

    for seed in range(5):
        scores, member = drawn(40, 61, shift=0.5, seed=seed)
        scores = scores.mul(4).round()  # ties count half
        assert area_under_curve(scores, member=member).value == pytest.approx(roc_auc_score(member, scores))


def test_the_interval_of_the_area_covers_the_truth() -> None:
    """400 draws at 95 %: fewer than 360 covered has a probability below 1e-4 when the interval is right."""
    truth = 0.5 * (1 + torch.erf(torch.tensor(0.5)).item())  # Φ(shift/√2) for shift 1
    tries = [area_of(40, 60, shift=1.0, seed=seed) for seed in range(400)]
    assert sum(one.covers(truth) for one in tries) >= 360
    # And it is no wider than it must be: always covering would be as wrong.
    assert sum(one.covers(truth) for one in tries) <= 396


def test_perfect_separation_does_not_claim_certainty() -> None:
    scores, member = torch.arange(20.0), torch.arange(20) >= 10
    found = area_under_curve(scores, member=member)
    assert found.value == found.high == 1.0
    assert found.low == proportion(10, 10).low < 0.75


def test_the_true_positive_rate_is_read_at_the_allowed_false_positives() -> None:
    others = torch.arange(300.0)
    inside = torch.tensor([295.5, 296.5, 297.5, 500.0])
    scores, member = torch.cat([inside, others]), torch.arange(304) < 4
    true, false = true_positives_at(scores, member=member, rate=0.01)
    assert (true.value, false.value) == (0.75, 0.01)


def test_too_few_non_members_allow_no_false_positive_at_all() -> None:
    scores, member = torch.tensor([9.0, 5.0, 9.0, 1.0]), torch.tensor([True, True, False, False])
    true, false = true_positives_at(scores, member=member, rate=0.01)
    assert (true.value, false.value) == (0.0, 0.0)
    assert false.high > 0.5


def test_blind_scores_are_found_blind_and_good_ones_good() -> None:
    """Confidence 99.9 % in success rate and AUC: a false alarm in at most 0.2 % of seeds.

    The two rates at one threshold come apart by chance far more rarely.
    """
    blind = judged(shift=0.0, threshold=0.0)
    assert blind.success.covers(CHANCE)
    assert blind.auc.covers(CHANCE)
    assert blind.true_positives.low < blind.false_positives.high
    good = judged(shift=3.0, threshold=1.5)
    assert min(good.success.low, good.auc.low) > 0.8
    assert good.true_positives.low > 0.4 > good.false_positives.high
    assert (good.members, good.others) == (200, 200)


def test_what_cannot_be_judged_is_refused() -> None:
    scores, member = torch.zeros(4), torch.tensor([True, True, False, False])
    with pytest.raises(DataError, match="both members and non-members"):
        rates(scores, member=torch.ones(4, dtype=torch.bool), threshold=0.0)
    with pytest.raises(NumericError, match="not a finite number"):
        rates(scores / 0, member=member, threshold=0.0)
    with pytest.raises(DataError, match="one length"):
        rates(scores, member=member[:3], threshold=0.0)
    with pytest.raises(ConfigError, match="confidence"):
        rates(scores, member=member, threshold=0.0, confidence=1.0)
    with pytest.raises(ConfigError, match="false positive rate"):
        rates(scores, member=member, threshold=0.0, false_positive_rate=1.0)
    with pytest.raises(DataError, match="proportion"):
        proportion(3, 2)
