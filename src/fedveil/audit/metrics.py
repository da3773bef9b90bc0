"""How close a reconstruction came to the truth, and how sure we are: pure functions on tensors.

Pictures are (batch, channels, height, width); every figure is one number for each sample unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedveil.audit.intervals import exact_interval
from fedveil.errors import ConfigError, DataError

Extractor = Callable[[Tensor], Tensor]

WINDOW = 11
BLUR = 1.5
K1, K2 = 0.01, 0.03


def mse(found: Tensor, original: Tensor) -> Tensor:
    """The mean squared difference, sample by sample."""
    _check_alike(found, original)
    return (found - original).square().flatten(1).mean(1)


def psnr(found: Tensor, original: Tensor, *, peak: float = 1.0) -> Tensor:
    """10·log₁₀(peak²/MSE) in decibels; infinite where the two are equal."""
    if not peak > 0:
        raise ConfigError(f"peak is the width of the inputs' range and must be positive, not {peak}.")
    return 10.0 * torch.log10(peak**2 / mse(found, original))


def ssim(found: Tensor, original: Tensor, *, peak: float = 1.0, window: int = WINDOW, blur: float = BLUR) -> Tensor:
    """Structural similarity (Wang et al. 2004), averaged over windows and channels.

    (2·μ_x·μ_y + c₁)(2·σ_xy + c₂) / ((μ_x² + μ_y² + c₁)(σ_x² + σ_y² + c₂)), c = (K·peak)², with Gaussian
    windows that lie within the picture. A picture smaller than the window gets the largest odd one that fits.
    """
    _check_alike(found, original)
    if found.dim() != 4:
        raise DataError(f"SSIM compares pictures (batch, channels, height, width), not {tuple(found.shape)}.")
    side = min(window, *found.shape[-2:])
    side -= 1 - side % 2
    offsets = torch.arange(side, dtype=torch.float64, device=found.device) - (side - 1) / 2
    line = torch.exp(-offsets.square() / (2 * blur**2))
    line = line / line.sum()
    channels = found.shape[1]
    kernel = (line[:, None] * line[None]).expand(channels, 1, side, side)

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, kernel, groups=channels)

    x, y = found.double(), original.double()
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    quotient = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    quotient = quotient / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return quotient.flatten(1).mean(1).to(found.dtype)


def assignment(found: Tensor, originals: Tensor) -> Tensor:
    """For each original the index of the reconstruction it is compared with: the matching of least total MSE.

    A gradient says nothing about the order of a batch, so neither does a reconstruction.
    """
    _check_alike(found, originals)
    cost = torch.cdist(originals.double().flatten(1), found.double().flatten(1)).square()
    if not bool(cost.isfinite().all()):
        raise DataError("A reconstruction holds NaN or infinity, so it can be matched with nothing.")
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(np.asarray(columns)).to(found.device)


def feature_mse(found: Tensor, original: Tensor, *, extractor: Extractor) -> Tensor:
    """The mean squared difference of the features an extractor sees: likeness in meaning rather than in pixels."""
    with torch.no_grad():
        return mse(extractor(found), extractor(original))


def knn_distance(found: Tensor, private: Tensor, *, extractor: Extractor | None = None, k: int = 1) -> Tensor:
    """The mean Euclidean distance to the k nearest private samples, in pixels or in an extractor's features."""
    if not 1 <= k <= len(private):
        raise ConfigError(f"k = {k} neighbours asked of {len(private)} samples: choose 1 to {len(private)}.")
    with torch.no_grad():
        ours, theirs = (found, private) if extractor is None else (extractor(found), extractor(private))
        return torch.cdist(ours.flatten(1), theirs.flatten(1)).topk(k, dim=1, largest=False).values.mean(1)


@dataclass(frozen=True)
class Rate:
    """A share of trials and the interval that holds the true rate with the stated confidence."""

    successes: int
    trials: int
    low: float
    high: float
    confidence: float

    @property
    def value(self) -> float:
        """successes / trials."""
        return self.successes / self.trials


def clopper_pearson(successes: int, trials: int, *, confidence: float = 0.95) -> Rate:
    """The exact two-sided binomial interval: it covers the true rate at least as often as stated."""
    _check_confidence(confidence)
    if not 0 <= successes <= trials or trials < 1:
        raise ConfigError(f"{successes} successes in {trials} trials: give 1 trial or more and 0 to all successes.")
    low, high = exact_interval(successes, trials, confidence=confidence)
    return Rate(successes=successes, trials=trials, low=low, high=high, confidence=confidence)


def attack_success(found: Tensor, labels: Tensor, *, classifier: Extractor, confidence: float = 0.95) -> Rate:
    """How often an independent classifier gives a reconstruction the label it was meant to have."""
    if len(found) != len(labels):
        raise DataError(f"{len(found)} reconstructions but {len(labels)} labels: give one label for each.")
    with torch.no_grad():
        hits = classifier(found).argmax(1).cpu() == labels.cpu()
    return clopper_pearson(int(hits.sum()), len(found), confidence=confidence)


def bootstrap_mean(
    values: Tensor, *, generator: torch.Generator, confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of independent values; too narrow below ten or so of them."""
    _check_confidence(confidence)
    if values.dim() != 1 or len(values) < 2 or resamples < 1:
        raise ConfigError(
            f"A bootstrap needs a vector of two values or more and at least one resample, not shape "
            f"{tuple(values.shape)} and {resamples} resamples."
        )
    size = (resamples, len(values))
    rows = torch.randint(len(values), size, generator=generator, device=generator.device).to(values.device)
    means = values.double()[rows].mean(1)
    tail = (1 - confidence) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64, device=means.device)).tolist()
    return float(low), float(high)


def random_level(original: Tensor, *, generator: torch.Generator, draws: int = 64) -> float:
    """The mean PSNR of uniform noise on [0, 1] against each original: what a failed attack comes to."""
    noise = torch.rand((draws, *original.shape), generator=generator, device=generator.device).to(original)
    return float(psnr(noise.flatten(0, 1), original.expand_as(noise).flatten(0, 1)).mean())


def _check_alike(found: Tensor, original: Tensor) -> None:
    if found.shape != original.shape or found.dim() < 2 or math.prod(found.shape) == 0:
        raise DataError(
            f"Reconstructions of shape {tuple(found.shape)} and originals of shape {tuple(original.shape)} cannot be "
            "compared sample by sample: both must be (batch, ...), equal and not empty."
        )


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"A confidence lies strictly between 0 and 1; {confidence} does not.")
