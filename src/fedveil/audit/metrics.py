"""Figures: how alike reconstructions are, how sure a finite number of trials makes us, what is known of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedveil.downlink import Architecture
from fedveil.errors import ConfigError, DataError, NumericError


def exact_interval(count: int, total: int, *, confidence: float) -> tuple[float, float]:
    """The two-sided binomial interval of Clopper and Pearson: it covers the true rate at least as often as stated.

    With α = 1 − confidence: low = B(α/2; k, n−k+1) and high = B(1−α/2; k+1, n−k), B the Beta quantile.
    """
    from scipy.stats import beta  # slow to import, and few attacks need it

    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return low, high


Extractor = Callable[[Tensor], Tensor]

_AT_ONCE = 64
WINDOW = 11
BLUR = 1.5
K1, K2 = 0.01, 0.03


def mse(rebuilt: Tensor, original: Tensor) -> Tensor:
    """The mean squared difference, sample by sample."""
    _check_alike(rebuilt, original)
    return (rebuilt - original).square().flatten(1).mean(1)


def psnr(rebuilt: Tensor, original: Tensor, *, peak: float = 1.0) -> Tensor:
    """10·log₁₀(peak²/MSE) in decibels; infinite where the two are equal."""
    if not peak > 0:
        raise ConfigError(f"peak is the width of the inputs' range and must be positive, not {peak}.")
    return 10.0 * torch.log10(peak**2 / mse(rebuilt, original))


def ssim(rebuilt: Tensor, original: Tensor, *, peak: float = 1.0) -> Tensor:
    """Structural similarity (Wang et al. 2004), averaged over windows and channels.

    (2·μ_x·μ_y + c₁)(2·σ_xy + c₂) / ((μ_x² + μ_y² + c₁)(σ_x² + σ_y² + c₂)), c = (K·peak)², with Gaussian
    windows that lie within the picture. A picture smaller than the window gets the largest odd one that fits.
    """
    _check_alike(rebuilt, original)
    if rebuilt.dim() != 4:
        raise DataError(f"SSIM compares pictures (batch, channels, height, width), not {tuple(rebuilt.shape)}.")
    side = min(WINDOW, *rebuilt.shape[-2:])
    side -= 1 - side % 2
    offsets = torch.arange(side, dtype=torch.float64, device=rebuilt.device) - (side - 1) / 2
    line = torch.exp(-offsets.square() / (2 * BLUR**2))
    line = line / line.sum()
    channels = rebuilt.shape[1]
    kernel = (line[:, None] * line[None]).expand(channels, 1, side, side)

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values, kernel, groups=channels)

    x, y = rebuilt.double(), original.double()
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    quotient = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    quotient = quotient / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return quotient.flatten(1).mean(1).to(rebuilt.dtype)


def reduced(pictures: Tensor, *, side: int) -> Tensor:
    """Pictures (count, channels, height, width) of at most `side` pixels a side, by the mean over areas."""
    height, breadth = (min(length, side) for length in pictures.shape[-2:])
    if pictures.shape[-2:] == (height, breadth):
        return pictures
    return torch.cat([F.adaptive_avg_pool2d(part, (height, breadth)) for part in torch.split(pictures, _AT_ONCE)])


def assignment(rebuilt: Tensor, originals: Tensor) -> Tensor:
    """For each original the index of the reconstruction it is compared with: the matching of least total MSE.

    A gradient says nothing about the order of a batch, so neither does a reconstruction.
    """
    _check_alike(rebuilt, originals)
    cost = torch.cdist(originals.double().flatten(1), rebuilt.double().flatten(1)).square()
    if not bool(cost.isfinite().all()):
        raise DataError("A reconstruction holds NaN or infinity, so it can be matched with nothing.")
    _, columns = linear_sum_assignment(cost.cpu().numpy())
    return torch.from_numpy(np.asarray(columns)).to(rebuilt.device)


def feature_mse(rebuilt: Tensor, original: Tensor, *, extractor: Extractor) -> Tensor:
    """The mean squared difference of the features an extractor sees: likeness in meaning rather than in pixels."""
    with torch.no_grad():
        return mse(extractor(rebuilt), extractor(original))


def knn_distance(rebuilt: Tensor, private: Tensor, *, extractor: Extractor | None = None, k: int = 1) -> Tensor:
    """The mean Euclidean distance to the k nearest private samples, in pixels or in an extractor's features."""
    if not 1 <= k <= len(private):
        raise ConfigError(f"k = {k} neighbours asked of {len(private)} samples: choose 1 to {len(private)}.")
    with torch.no_grad():
        ours, theirs = (rebuilt, private) if extractor is None else (extractor(rebuilt), extractor(private))
        return torch.cdist(ours.flatten(1), theirs.flatten(1)).topk(k, dim=1, largest=False).values.mean(1)


def attack_success(rebuilt: Tensor, labels: Tensor, *, classifier: Extractor, confidence: float = 0.95) -> Estimate:
    """How often an independent classifier gives a reconstruction the label it was meant to have."""
    if len(rebuilt) != len(labels):
        raise DataError(f"{len(rebuilt)} reconstructions but {len(labels)} labels: give one label for each.")
    with torch.no_grad():
        hits = classifier(rebuilt).argmax(1).cpu() == labels.cpu()
    return proportion(int(hits.sum()), len(rebuilt), confidence=confidence)


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


def _check_alike(rebuilt: Tensor, original: Tensor) -> None:
    if rebuilt.shape != original.shape or rebuilt.dim() < 2 or math.prod(rebuilt.shape) == 0:
        raise DataError(
            f"Reconstructions of shape {tuple(rebuilt.shape)} and originals of shape {tuple(original.shape)} cannot be "
            "compared sample by sample: both must be (batch, ...), equal and not empty."
        )


CHANCE = 0.5
"""Success rate and AUC of a blind guess."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the true one with the stated confidence."""

    value: float
    low: float
    high: float

    def covers(self, figure: float) -> bool:
        """Whether ``figure`` lies in the interval."""
        return self.low <= figure <= self.high


@dataclass(frozen=True)
class Rates:
    """What an attack's scores are worth.

    ``false_positives`` is the rate the threshold had on this sample; with fewer than 1/rate non-members it is zero,
    stricter than what was asked.
    """

    success: Estimate
    auc: Estimate
    true_positives: Estimate
    false_positives: Estimate
    members: int
    others: int


def rates(
    scores: Tensor,
    *,
    member: Tensor,
    threshold: float,
    false_positive_rate: float = 0.01,
    confidence: float = 0.95,
) -> Rates:
    """Judge ``scores`` (high: member) against the truth; ``threshold`` is the attacker's own choice.

    A threshold chosen with the truth in hand would flatter the attack, so it must come from what the
    attacker knew.
    """
    inside, outside = _split(scores, member)
    true, false = true_positives_at(scores, member=member, rate=false_positive_rate, confidence=confidence)
    return Rates(
        success=success_rate(scores, member=member, threshold=threshold, confidence=confidence),
        auc=area_under_curve(scores, member=member, confidence=confidence),
        true_positives=true,
        false_positives=false,
        members=len(inside),
        others=len(outside),
    )


def proportion(count: int, total: int, *, confidence: float = 0.95) -> Estimate:
    """count/total with the exact interval of Clopper and Pearson."""
    _check_confidence(confidence)
    if not 0 <= count <= total or total < 1:
        raise DataError(f"A proportion needs 0 ≤ count ≤ total and a total of at least 1, not {count} of {total}.")
    return Estimate(count / total, *exact_interval(count, total, confidence=confidence))


def success_rate(scores: Tensor, *, member: Tensor, threshold: float, confidence: float = 0.95) -> Estimate:
    """Balanced accuracy ½(TPR + TNR) of the guess "member" where score > threshold.

    The interval joins the two Clopper–Pearson intervals by the distances of their ends (MOVER):
    b − ½√((t−l_t)² + (s−l_s)²) and b + ½√((u_t−t)² + (u_s−s)²).
    """
    inside, outside = _split(scores, member)
    t = proportion(int((inside > threshold).sum()), len(inside), confidence=confidence)
    s = proportion(int((outside <= threshold).sum()), len(outside), confidence=confidence)
    middle = (t.value + s.value) / 2
    below = math.hypot(t.value - t.low, s.value - s.low) / 2
    above = math.hypot(t.high - t.value, s.high - s.value) / 2
    return Estimate(middle, max(0.0, middle - below), min(1.0, middle + above))


def area_under_curve(scores: Tensor, *, member: Tensor, confidence: float = 0.95) -> Estimate:
    """P(member's score > other's) + ½P(equal), with the interval of DeLong on the logit scale.

    With V_i the share of non-members below member i and W_j the share of members above non-member j:
    var = var(V)/m + var(W)/n. The interval is symmetric in logit(AUC), so it stays inside (0, 1). A
    perfect separation has var = 0; there the interval is that of min(m, n) successes in as many tries.
    """
    from scipy.stats import norm, rankdata

    _check_confidence(confidence)
    inside, outside = _split(scores, member)
    m, n = len(inside), len(outside)
    if min(m, n) < 2:
        raise DataError(f"An AUC with its interval needs two members and two others, not {m} and {n}.")
    together = rankdata(np.concatenate([inside, outside]))
    v = (together[:m] - rankdata(inside)) / n
    w = 1 - (together[m:] - rankdata(outside)) / m
    area = float(v.mean())
    if area in (0.0, 1.0):
        pairs = min(m, n)
        return proportion(round(area * pairs), pairs, confidence=confidence)
    deviation = math.sqrt(v.var(ddof=1) / m + w.var(ddof=1) / n)
    middle = math.log(area / (1 - area))
    reach = float(norm.ppf(0.5 + confidence / 2)) * deviation / (area * (1 - area))
    return Estimate(area, _logistic(middle - reach), _logistic(middle + reach))


def true_positives_at(
    scores: Tensor, *, member: Tensor, rate: float = 0.01, confidence: float = 0.95
) -> tuple[Estimate, Estimate]:
    """The true positive rate where at most ``rate`` of the non-members are taken for members, and that share.

    The threshold is the (⌊rate·n⌋+1)-th largest score of the n non-members. Both intervals are those
    of Clopper and Pearson at this threshold; that the threshold is itself estimated shows in the second:
    an attack beats a blind guess for sure only where the two intervals do not meet.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"The false positive rate must be at least 0 and below 1, not {rate}.")
    inside, outside = _split(scores, member)
    # 0.01·300 is 2.9999…: without the nudge three allowed mistakes would become two.
    allowed = math.floor(rate * len(outside) + 1e-9)
    threshold = np.sort(outside)[::-1][allowed]
    true = proportion(int((inside > threshold).sum()), len(inside), confidence=confidence)
    false = proportion(int((outside > threshold).sum()), len(outside), confidence=confidence)
    return true, false


def _split(scores: Tensor, member: Tensor) -> tuple[Floats, Floats]:
    """The scores of members and of the others."""
    if scores.ndim != 1 or scores.shape != member.shape:
        raise DataError(
            f"Scores and memberships must be two vectors of one length, not {tuple(scores.shape)} "
            f"and {tuple(member.shape)}."
        )
    values = scores.detach().cpu().double().numpy()
    truth = member.detach().cpu().bool().numpy()
    if not np.isfinite(values).all():
        raise NumericError("A membership score is not a finite number: look at the attack that gave it.")
    if truth.all() or not truth.any():
        raise DataError("Rates need both members and non-members among the judged samples.")
    return values[truth], values[~truth]


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"The confidence must lie between 0 and 1, not {confidence}.")


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


EXACT = 1e-6
DETERMINED = 1e-3
_SWEEPS = 50
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class ParameterKnowledge:
    """What a client learns of the parameters as numbers: shares of all that are not zero, from 0 to 1.

    A veil of secret positive scales multiplies row i and column j of every weight by numbers of their own. The
    function the network computes stays as it is, and so does most of what its weights say: their signs, and every
    ratio W_ij·W_kl / (W_il·W_kj). Numbers that are hidden are not a model that is hidden.

    `exact`: received as they are, to one millionth. `signs`: received with their sign (chance: one half).
    `determined`: known to a thousandth once every row and column may be rescaled; parameters that no other one
    shares a row or column with are not counted. `residuals`, by layer: ‖Ŵ − e^{a_i + b_j}·W‖ / ‖Ŵ‖ with the best
    a and b; 0 means that only the scales are unknown, about 1 or more that the layer says nothing.
    """

    exact: float
    signs: float
    determined: float
    residuals: Mapping[str, float]


def parameter_knowledge(received: Tensor, true: Tensor, architecture: Architecture) -> ParameterKnowledge:
    """Compare flat parameters as a client received them (or made of them) with the true ones.

    a and b are the least-squares fit of log|Ŵ_ij| − log|W_ij| ≈ a_i + b_j, a bias being one more column.
    """
    if received.shape != true.shape or len(true) != architecture.size:
        raise DataError(
            f"{tuple(received.shape)} received and {tuple(true.shape)} true parameters do not fit a model of "
            f"{architecture.size}."
        )
    got, truth = received.double().cpu(), true.double().cpu()
    close = (got - truth).abs() <= EXACT * truth.abs()
    there = truth != 0
    residuals, known, counted = {}, 0, 0
    for name, ours, theirs in _tables(architecture, got, truth):
        error = (ours - _rescaled(theirs, ours)).abs()
        residuals[name] = float(error.norm() / ours.norm().clamp_min(1e-300))
        numbers = (ours != 0) | (theirs != 0)
        known += int((error <= DETERMINED * ours.abs())[numbers].sum())
        counted += int(numbers.sum())
    return ParameterKnowledge(
        exact=float(close[there].double().mean()),
        signs=float((got.sign() == truth.sign())[there].double().mean()),
        determined=known / max(1, counted),
        residuals=residuals,
    )


def _tables(architecture: Architecture, got: Tensor, truth: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every weight with its bias as rows × columns × kernel, received and true; lone vectors are left out."""
    ours, theirs = architecture.parameters.split(got), architecture.parameters.split(truth)
    for name, table in ours.items():
        path, _, own = name.rpartition(".")
        bias = f"{path}.{own.replace('weight', 'bias')}" if path else own.replace("weight", "bias")
        if "weight" not in own or (table.dim() < 2 and bias not in ours):
            continue
        transposed = isinstance(architecture.skeleton.get_submodule(path), _TRANSPOSED)
        tables = [_table(side[name], side.get(bias), transposed=transposed) for side in (ours, theirs)]
        yield name, tables[0], tables[1]


def _table(weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    rows = weight.transpose(0, 1) if transposed else weight
    rows = rows[:, None, None] if rows.dim() == 1 else rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    if bias is None or len(bias) != len(rows):
        return rows
    # A kernel has several numbers in a cell and a bias has one: the others are absent.
    column = rows.new_zeros(len(rows), 1, rows.shape[2])
    column[:, 0, 0] = bias
    return torch.cat([rows, column], 1)


def _rescaled(truth: Tensor, received: Tensor) -> Tensor:
    """e^{a_i + b_j}·W with the best a and b, by alternating means over numbers that are not zero."""
    there = (truth != 0) & (received != 0)
    ratio = torch.where(there, (received / torch.where(there, truth, 1.0)).abs().log(), 0.0)
    rows, columns = (there.sum((1 - side, 2)).clamp_min(1) for side in (0, 1))
    a, b = ratio.new_zeros(ratio.shape[0]), ratio.new_zeros(ratio.shape[1])
    for _ in range(_SWEEPS):
        a = torch.where(there, ratio - b[None, :, None], 0.0).sum((1, 2)) / rows
        b = torch.where(there, ratio - a[:, None, None], 0.0).sum((0, 2)) / columns
    return (a[:, None] + b).exp()[:, :, None] * truth
