from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from fedveil.audit.metrics import (
    WINDOW,
    assignment,
    attack_success,
    bootstrap_mean,
    feature_mse,
    knn_distance,
    mse,
    proportion,
    psnr,
    random_level,
    ssim,
)
from fedveil.errors import ConfigError, DataError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, *, seed: int = 0, side: int = 16, channels: int = 1) -> Tensor:
    return torch.rand(count, channels, side, side, generator=generator(seed))


def test_mse_and_psnr_of_a_known_difference() -> None:
    original = torch.zeros(2, 1, 4, 4)
    found = original.clone()
    found[0] += 0.1
    found[1, 0, 0, 0] = 1.0
    torch.testing.assert_close(mse(found, original), torch.tensor([0.01, 1 / 16]))
    torch.testing.assert_close(psnr(found, original), torch.tensor([20.0, 10 * math.log10(16)]))
    torch.testing.assert_close(psnr(2 * found, 2 * original, peak=2.0), psnr(found, original))


def test_equal_pictures_have_infinite_psnr_and_ssim_one() -> None:
    x = pictures(3)
    assert psnr(x, x).tolist() == [math.inf] * 3
    torch.testing.assert_close(ssim(x, x), torch.ones(3))


def ssim_by_hand(x: Tensor, y: Tensor, *, side: int, blur: float) -> float:
    """Window by window, straight from the definition, in loops."""
    middle = (side - 1) / 2
    weights = torch.tensor(
        [
            [math.exp(-((i - middle) ** 2 + (j - middle) ** 2) / (2 * blur**2)) for j in range(side)]
            for i in range(side)
        ],
        dtype=torch.float64,
    )
    weights /= weights.sum()
    values = []
    for top, left in itertools.product(range(x.shape[0] - side + 1), range(x.shape[1] - side + 1)):
        a, b = (z[top : top + side, left : left + side].double() for z in (x, y))
        ma, mb = (weights * a).sum(), (weights * b).sum()
        va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
        cov = (weights * (a - ma) * (b - mb)).sum()
        values.append((2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4)))
    return float(torch.stack(values).mean())


@pytest.mark.parametrize(("picture_side", "window"), [(16, 11), (8, 7)])
def test_ssim_is_its_definition_and_small_pictures_get_a_smaller_window(picture_side: int, window: int) -> None:
    x, y = pictures(1, side=picture_side), pictures(1, seed=1, side=picture_side)
    y = 0.5 * x + 0.5 * y
    assert float(ssim(x, y)) == pytest.approx(ssim_by_hand(x[0, 0], y[0, 0], side=window, blur=1.5), abs=1e-6)


def test_ssim_agrees_with_torchmetrics() -> None:
    """Which also counts windows that reach over the picture's rim, where it mirrors: they are cut off here."""
    functional = pytest.importorskip("torchmetrics.functional.image")
    x, y = pictures(4, channels=3, side=28), pictures(4, seed=1, channels=3, side=28)
    mixed, rim = 0.7 * x + 0.3 * y, WINDOW // 2
    _, everywhere = functional.structural_similarity_index_measure(
        x, mixed, data_range=1.0, reduction="none", return_full_image=True
    )
    within = everywhere[..., rim:-rim, rim:-rim].flatten(1).mean(1)
    torch.testing.assert_close(ssim(x, mixed), within, atol=1e-5, rtol=0)


def test_ssim_falls_with_noise_and_is_symmetric() -> None:
    x, noise = pictures(4), pictures(4, seed=2) - 0.5
    near, far = x + 0.1 * noise, x + noise
    assert bool((ssim(near, x) > ssim(far, x)).all())
    torch.testing.assert_close(ssim(far, x), ssim(x, far))


def test_the_assignment_undoes_a_shuffle_of_a_noisy_batch() -> None:
    originals = pictures(8)
    order = torch.randperm(8, generator=generator(5))
    found = (originals + 0.05 * torch.randn(originals.shape, generator=generator(6)))[order]
    torch.testing.assert_close(found[assignment(found, originals)], found[order.argsort()])


def test_the_assignment_is_the_best_of_all_permutations_not_the_greedy_one() -> None:
    originals, found = pictures(5, seed=7), pictures(5, seed=8)
    ours = float(mse(found[assignment(found, originals)], originals).sum())
    every = [float(mse(found[list(order)], originals).sum()) for order in itertools.permutations(range(5))]
    assert ours == pytest.approx(min(every))


def test_one_good_reconstruction_is_not_counted_for_two_originals() -> None:
    originals = pictures(3)
    found = originals[[0, 0, 0]]
    assert sorted(assignment(found, originals).tolist()) == [0, 1, 2]


def test_feature_distances_are_taken_in_the_features() -> None:
    def brightness(x: Tensor) -> Tensor:
        return x.flatten(1).mean(1, keepdim=True)

    x = pictures(4)
    turned = x.flip(-1)
    torch.testing.assert_close(feature_mse(turned, x, extractor=brightness), torch.zeros(4))
    assert bool((mse(turned, x) > 0.01).all())
    torch.testing.assert_close(knn_distance(turned, x, extractor=brightness), torch.zeros(4), atol=1e-6, rtol=0)
    assert bool((knn_distance(turned, x) > 0.1).all())


def test_knn_distance_averages_the_nearest_k() -> None:
    private = torch.tensor([[0.0], [1.0], [5.0]])
    found = torch.tensor([[0.5], [4.0]])
    torch.testing.assert_close(knn_distance(found, private), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(knn_distance(found, private, k=2), torch.tensor([0.5, 2.0]))
    with pytest.raises(ConfigError, match="choose 1 to 3"):
        knn_distance(found, private, k=4)


def test_attack_success_counts_what_the_classifier_recognises() -> None:
    outputs = torch.eye(4)[[0, 1, 2, 2]]
    rate = attack_success(outputs, torch.arange(4), classifier=lambda x: x)
    assert rate.value == 0.75
    assert rate.low < 0.75 < rate.high


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (57, 100)])
def test_clopper_pearson_bounds_are_where_the_binomial_tails_reach_half_of_alpha(successes: int, trials: int) -> None:
    rate = proportion(successes, trials, confidence=0.9)
    if successes > 0:
        assert binom.sf(successes - 1, trials, rate.low) == pytest.approx(0.05)
    else:
        assert rate.low == 0.0
    if successes < trials:
        assert binom.cdf(successes, trials, rate.high) == pytest.approx(0.05)
    else:
        assert rate.high == 1.0


@pytest.mark.parametrize(("successes", "trials", "confidence"), [(1, 0, 0.9), (3, 2, 0.9), (-1, 2, 0.9), (1, 2, 1.0)])
def test_impossible_counts_and_confidences_are_refused(successes: int, trials: int, confidence: float) -> None:
    with pytest.raises((ConfigError, DataError)):
        proportion(successes, trials, confidence=confidence)


def test_bootstrap_intervals_of_normal_values_cover_the_mean_about_as_often_as_stated() -> None:
    """200 samples of 40 values at 90 %: Binomial(200, 0.9) is below 160 with probability 2·10⁻⁵; seed fixed."""
    source = generator(11)
    values = torch.randn(200, 40, generator=source)
    intervals = [bootstrap_mean(row, generator=source, confidence=0.9, resamples=400) for row in values]
    assert 160 <= sum(low <= 0.0 <= high for low, high in intervals) <= 198


def test_a_bootstrap_of_equal_values_has_no_width_and_one_value_is_refused() -> None:
    assert bootstrap_mean(torch.full((5,), 2.0), generator=generator()) == (2.0, 2.0)
    with pytest.raises(ConfigError, match="two values"):
        bootstrap_mean(torch.ones(1), generator=generator())


def test_the_random_level_of_a_black_picture_is_that_of_uniform_noise() -> None:
    """E[u²] = 1/3 for uniform u, so the level is about 10·log₁₀ 3."""
    level = random_level(torch.zeros(1, 1, 32, 32), generator=generator())
    assert level == pytest.approx(10 * math.log10(3), abs=0.05)


def test_shapes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="sample by sample"):
        mse(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(DataError, match="pictures"):
        ssim(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(DataError, match="NaN"):
        assignment(torch.full((2, 3), math.nan), torch.zeros(2, 3))
    with pytest.raises(DataError, match="labels"):
        attack_success(torch.eye(3), torch.arange(2), classifier=lambda x: x)
