"""A generative prior: what pictures of a kind look like, learned from public pictures without labels.

A variational autoencoder with convolutions. Its decoder maps z ~ N(0, I) to pictures in the box, and is made of
stages, so that a search may also enter it half-way, at the features between two stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.attack import OnProgress, silent
from fedveil.audit.metrics import reduced
from fedveil.errors import DataError, NumericError

SMALLEST_SIDE = 8
LARGEST_SIDE = 64
"""Pictures with longer sides are made in this size and enlarged: finer detail is no part of the prior."""
FEWEST_PICTURES = 16
_SMALL_PICTURE = 256
_LARGEST_SEED = 2**31
_AT_ONCE = 500


@dataclass(frozen=True)
class Lessons:
    """How a prior is trained: `steps` of Adam, the rate falling to zero along a cosine.

    The encoder sees pictures under noise of size `jitter`, so that a few hundred are not learned by heart. More
    `strictness`, the weight of KL, makes random pictures look more like real ones and keeps less of their detail.
    """

    steps: int
    batch: int = 64
    rate: float = 2e-3
    latent: int = 24
    width: int = 16
    jitter: float = 0.1
    strictness: float = 1.0


SMALL = Lessons(steps=3000)
SMALL_QUICK = Lessons(steps=600)
LARGE = Lessons(steps=12000, batch=128, rate=1e-3, latent=96, width=64, strictness=4.0)
LARGE_QUICK = Lessons(steps=1500, batch=32, latent=48, strictness=4.0)


@dataclass(frozen=True, eq=False)
class Prior:
    """The decoder of a trained autoencoder, its parameters fixed.

    `decode` is the composition of all stages. Place 0 is the latent z itself; place k the features behind the
    k-th stage, from which `finish` goes on. `held_out` is the autoencoder's mean squared error, in units of the
    box, on pictures kept from its training.
    """

    stages: tuple[nn.Module, ...]
    latent: int
    shape: tuple[int, int, int]
    box: tuple[float, float]
    held_out: float

    @property
    def places(self) -> int:
        """How many places a search may enter at: the latent, and behind every stage but the last."""
        return len(self.stages)

    @property
    def device(self) -> torch.device:
        """Where the decoder lies."""
        return next(self.stages[0].parameters()).device

    def sample(self, count: int, *, generator: torch.Generator) -> Tensor:
        """Latent codes z ~ N(0, I), one row each."""
        return torch.randn(count, self.latent, generator=generator, device=generator.device).to(self.device)

    def decode(self, z: Tensor) -> Tensor:
        """Pictures (count, *shape) of latent codes (count, latent)."""
        return self.finish(z, since=0)

    def features(self, z: Tensor, *, place: int) -> Tensor:
        """What the decoder makes of z up to a place."""
        for stage in self.stages[:place]:
            z = stage(z)
        return z

    def finish(self, features: Tensor, *, since: int) -> Tensor:
        """Pictures of what is at a place."""
        for stage in self.stages[since:]:
            features = stage(features)
        low, high = self.box
        return low + (high - low) * features.sigmoid()


def train_prior(
    x: Tensor,
    *,
    generator: torch.Generator,
    box: tuple[float, float] | None = None,
    quick: bool = False,
    lessons: Lessons | None = None,
    progress: OnProgress = silent,
    device: str | torch.device = "cpu",
) -> Prior:
    """Learn what pictures look like; the `box` is the range of the given ones unless it is known.

    min over decoder D and encoder (μ, σ) of  N/2·log mean‖x − D(μ + σ·ξ)‖² + β·KL(N(μ, σ²) ‖ N(0, I))  with N
    numbers in a picture: a Gaussian likelihood whose variance is the best one (Rybkin et al. 2021).
    """
    shape = _checked(x)
    low, high = box if box is not None else (float(x.min()), float(x.max()))
    if not low < high:
        raise DataError(f"All public pictures are the number {low}: there is nothing to learn from them.")
    small = reduced(x.detach().float(), side=LARGEST_SIDE).to(device)
    made = (shape[0], int(small.shape[2]), int(small.shape[3]))
    lessons = lessons or _lessons(made, quick=quick)
    scaled = ((small - low) / (high - low)).clamp(0.0, 1.0)
    order = torch.randperm(len(x), generator=generator, device=generator.device).to(device)
    kept = scaled[order[: max(2, min(len(x) // 10, 500))]]
    shown = scaled[order[len(kept) :]]
    seed = int(torch.randint(_LARGEST_SEED, (), generator=generator, device=generator.device))
    encoder, stages = _networks(made, lessons, seed=seed)
    encoder, stages = encoder.to(device), stages.to(device)
    _train(encoder, stages, shown, lessons=lessons, generator=generator, progress=progress)
    stages.requires_grad_(False).eval()
    encoder.requires_grad_(False).eval()
    error = float((_through(stages, _codes(encoder, kept)) - kept).square().mean())
    if not math.isfinite(error):
        raise NumericError("The generative prior's training ended in NaN or infinity: lower its rate.")
    first = nn.Sequential(_spread_as(_codes(encoder, shown)).to(device), stages[0])
    last = stages[-1] if made == shape else nn.Sequential(stages[-1], nn.Upsample(size=shape[1:], mode="bilinear"))
    return Prior((first, *stages[1:-1], last), lessons.latent, shape, (low, high), error)


def _checked(x: Tensor) -> tuple[int, int, int]:
    sides_fit = x.dim() == 4 and min(x.shape[2:]) >= SMALLEST_SIDE
    if not sides_fit or not x.is_floating_point() or len(x) < FEWEST_PICTURES or not bool(x.isfinite().all()):
        raise DataError(
            f"A generative prior learns from {FEWEST_PICTURES} pictures or more (count, channels, height, width) of "
            f"finite numbers with sides of at least {SMALLEST_SIDE}, not from {x.dtype} of {tuple(x.shape)}."
        )
    return int(x.shape[1]), int(x.shape[2]), int(x.shape[3])


def _lessons(shape: tuple[int, int, int], *, quick: bool) -> Lessons:
    if math.prod(shape) <= _SMALL_PICTURE:
        return SMALL_QUICK if quick else SMALL
    return LARGE_QUICK if quick else LARGE


def _sizes(height: int, breadth: int) -> list[tuple[int, int]]:
    """Heights and breadths from the finest that are convolved down to the coarsest, halved while 4 or more are left.

    Large pictures are first folded, 2×2 pixels into one: convolutions at full size are most of the cost.
    """
    sizes = [(height, breadth) if _fold(height, breadth) == 1 else _halved(height, breadth)]
    while min(sizes[-1]) >= 8:
        sizes.append(_halved(*sizes[-1]))
    return sizes


def _fold(height: int, breadth: int) -> int:
    return 1 if min(height, breadth) < 16 else 2


def _halved(height: int, breadth: int) -> tuple[int, int]:
    return -(-height // 2), -(-breadth // 2)


def _networks(shape: tuple[int, int, int], lessons: Lessons, *, seed: int) -> tuple[nn.Module, nn.ModuleList]:
    """The encoder, picture → (μ, log σ²), and the decoder's stages, z → logits of a picture."""
    sizes, width, fold = _sizes(*shape[1:]), lessons.width, _fold(*shape[1:])
    # Twice the channels at half the size, as far as it pays.
    wide = [width * min(2**level, 4) for level in range(len(sizes))]
    coarsest = (wide[-1], *sizes[-1])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        down: list[nn.Module] = [nn.Conv2d(shape[0], wide[0], 3, stride=fold, padding=1), nn.SiLU()]
        for before, after in itertools.pairwise(wide):
            down += [nn.Conv2d(before, after, 3, stride=2, padding=1), *_norm(after)]
        encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(math.prod(coarsest), 2 * lessons.latent))
        first = nn.Linear(lessons.latent, math.prod(coarsest))
        stages: list[nn.Module] = [nn.Sequential(first, nn.Unflatten(1, coarsest), *_norm(coarsest[0]))]
        for level in range(len(sizes) - 2, -1, -1):
            finer = nn.Conv2d(wide[level + 1], wide[level], 3, padding=1)
            stages.append(nn.Sequential(nn.Upsample(size=sizes[level]), finer, *_norm(wide[level])))
        last = nn.Conv2d(wide[0], shape[0] * fold**2, 3, padding=1)
        stages.append(nn.Sequential(last, nn.PixelShuffle(fold), _Cut(shape[1], shape[2])))
    return encoder, nn.ModuleList(stages)


class _Cut(nn.Module):
    """The upper left of a picture: folding rounds odd sides up."""

    def __init__(self, height: int, breadth: int) -> None:
        super().__init__()
        self.height, self.breadth = height, breadth

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.height, : self.breadth]


def _codes(encoder: nn.Module, pictures: Tensor) -> Tensor:
    """μ of every picture."""
    return torch.cat([encoder(part).chunk(2, dim=1)[0] for part in torch.split(pictures, _AT_ONCE)])


def _spread_as(codes: Tensor) -> nn.Linear:
    """The map z ↦ m + L·z under which N(0, I) has the mean and the covariance L·Lᵀ that codes of pictures have.

    Training pulls codes towards N(0, I) only so far; what is drawn should be what the decoder has learned to read.
    """
    values, vectors = torch.linalg.eigh(torch.cov(codes.double().T))
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(codes.shape[1], codes.shape[1])
    with torch.no_grad():
        layer.weight.copy_(vectors * values.clamp_min(0.0).sqrt())
        layer.bias.copy_(codes.mean(0))
    return layer.requires_grad_(False)


def _norm(channels: int) -> Sequence[nn.Module]:
    return nn.GroupNorm(math.gcd(8, channels), channels), nn.SiLU()


def _through(stages: nn.ModuleList, z: Tensor) -> Tensor:
    for stage in stages:
        z = stage(z)
    return z.sigmoid()


def _train(
    encoder: nn.Module,
    stages: nn.ModuleList,
    shown: Tensor,
    *,
    lessons: Lessons,
    generator: torch.Generator,
    progress: OnProgress,
) -> None:
    parameters = [*encoder.parameters(), *stages.parameters()]
    adam = torch.optim.Adam(parameters, lr=lessons.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, lessons.steps)
    numbers = shown[0].numel()
    for step in range(lessons.steps):
        picked = torch.randint(len(shown), (lessons.batch,), generator=generator, device=generator.device)
        x = shown[picked.to(shown.device)]
        seen = (x + lessons.jitter * _like(x, generator)).clamp(0.0, 1.0) if lessons.jitter else x
        mean, spread = encoder(seen).chunk(2, dim=1)
        spread = spread.clamp(-12.0, 6.0)
        rebuilt = _through(stages, mean + (0.5 * spread).exp() * _like(mean, generator))
        error = F.mse_loss(rebuilt, x).clamp_min(1e-6)
        apart = 0.5 * (mean.square() + spread.exp() - 1.0 - spread).sum(1).mean()
        loss = (0.5 * numbers * error.log() + lessons.strictness * apart) / numbers
        adam.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        schedule.step()
        progress((step + 1) / lessons.steps)


def _like(values: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(values.shape, generator=generator, device=generator.device).to(values)
