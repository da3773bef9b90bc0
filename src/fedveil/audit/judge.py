"""A judge of reconstructions: a classifier of its own that no attack ever sees.

It says which class a picture shows and how alike two pictures are in meaning. It is trained on data the audit holds,
apart from the model under audit, so that a picture which merely fools that model does not fool the judge as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.metrics import reduced
from fedveil.errors import DataError, NumericError

FEWEST_SAMPLES = 20
MOST_HELD_OUT = 2000
_SMALL_INPUT = 256
_SMALLEST_PICTURE_SIDE = 4
_LARGEST_SEED = 2**31
_AT_ONCE = 512


@dataclass(frozen=True)
class Study:
    """How a judge is trained: Adam with weight decay, the rate falling to zero along a cosine.

    `stride` is that of the first convolution: 2 reads a large picture at half its size, at a quarter of the cost.
    """

    steps: int
    batch: int = 64
    rate: float = 2e-3
    width: int = 16
    stride: int = 1
    blur: float = 0.1


SMALL, SMALL_QUICK = Study(steps=1000), Study(steps=400)
LARGE, LARGE_QUICK = Study(steps=6000, batch=128, width=48), Study(steps=600, stride=2)
LARGEST = Study(steps=3000, width=32, stride=2)
LARGEST_SIDE = 64
"""Pictures with longer sides are looked at in this size."""
_LARGE_SIDE = 32


@dataclass(frozen=True, eq=False)
class Judge:
    """A trained classifier; `accuracy` is on samples kept from its training. Inputs come in the run's own scale."""

    body: nn.Module
    head: nn.Module
    mean: Tensor
    spread: Tensor
    shape: tuple[int, ...]
    accuracy: float

    def features(self, x: Tensor) -> Tensor:
        """What the last layer reads, samples × features."""
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"The judge knows inputs of shape {self.shape}, not of {tuple(x.shape[1:])}.")
        with torch.no_grad():
            parts = torch.split(_looked_at(x.to(self.mean.device, torch.float32)), _AT_ONCE)
            return torch.cat([self.body((part - self.mean) / self.spread) for part in parts])

    def scores(self, x: Tensor) -> Tensor:
        """Class scores, samples × classes."""
        with torch.no_grad():
            scores: Tensor = self.head(self.features(x))
            return scores


def train_judge(
    x: Tensor,
    y: Tensor,
    *,
    outputs: int,
    generator: torch.Generator,
    quick: bool = False,
    study: Study | None = None,
    device: str | torch.device = "cpu",
) -> Judge:
    """A convolutional network for pictures, a perceptron for other numbers, by cross-entropy."""
    if len(x) != len(y) or len(x) < FEWEST_SAMPLES or y.dtype is not torch.int64 or x.dim() < 2:
        raise DataError(
            f"A judge learns from {FEWEST_SAMPLES} labelled samples or more, with a class number each, not from "
            f"{len(x)} samples and {len(y)} labels of {y.dtype}."
        )
    if int(y.min()) < 0 or int(y.max()) >= outputs:
        raise DataError(f"Labels must lie in 0…{outputs - 1}, and go from {int(y.min())} to {int(y.max())}.")
    full = tuple(x.shape[1:])
    x, y = _looked_at(x.detach().float()).to(device), y.to(device)
    shape = tuple(x.shape[1:])
    study = study or _study(shape, quick=quick)
    order = torch.randperm(len(x), generator=generator, device=generator.device).to(device)
    held = min(len(x) // 5, MOST_HELD_OUT)
    kept, shown = order[:held], order[held:]
    mean, spread = _standard(x[shown])
    seed = int(torch.randint(_LARGEST_SEED, (), generator=generator, device=generator.device))
    body, head = _network(shape, outputs, study=study, seed=seed)
    body, head = body.to(device), head.to(device)
    _train(body, head, (x[shown] - mean) / spread, y[shown], study=study, generator=generator)
    with torch.no_grad():
        scores = torch.cat([head(body(part)) for part in torch.split((x[kept] - mean) / spread, _AT_ONCE)])
    if not bool(scores.isfinite().all()):
        raise NumericError("The judge's training ended in NaN or infinity: check the data it was given.")
    return Judge(body, head, mean, spread, full, float((scores.argmax(1) == y[kept]).float().mean()))


def _looked_at(x: Tensor) -> Tensor:
    return reduced(x, side=LARGEST_SIDE) if x.dim() == 4 else x


def _study(shape: tuple[int, ...], *, quick: bool) -> Study:
    if math.prod(shape) <= _SMALL_INPUT:
        return SMALL_QUICK if quick else SMALL
    if quick:
        return LARGE_QUICK
    return LARGEST if len(shape) == 3 and max(shape[1:]) > _LARGE_SIDE else LARGE


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread, of each channel of pictures and of each number of a vector; constant ones are left alone."""
    over = [0, *range(2, x.dim())] if x.dim() > 2 else [0]
    spread, mean = torch.std_mean(x, dim=over, keepdim=True)
    return mean, torch.where(spread > 1e-6, spread, torch.ones_like(spread))


def _network(shape: tuple[int, ...], outputs: int, *, study: Study, seed: int) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if len(shape) == 3 and min(shape[1:]) >= _SMALLEST_PICTURE_SIDE:
            body, features = _convolutions(shape, width=study.width, stride=study.stride)
        else:
            features = 8 * study.width
            numbers = math.prod(shape)
            body = nn.Sequential(
                nn.Flatten(), nn.Linear(numbers, features), nn.SiLU(), nn.Linear(features, features), nn.SiLU()
            )
        return body, nn.Linear(features, outputs)


def _convolutions(shape: tuple[int, ...], *, width: int, stride: int) -> tuple[nn.Module, int]:
    """Pairs of convolutions, halving until a side is below 8; then the coarse map is read by a linear layer."""
    channels, height, breadth = shape
    height, breadth = -(-height // stride), -(-breadth // stride)
    layers: list[nn.Module] = []
    while True:
        for _ in range(2):
            layers.append(nn.Conv2d(channels, width, 3, stride=stride, padding=1))
            layers += [nn.GroupNorm(math.gcd(8, width), width), nn.SiLU()]
            channels, stride = width, 1
        layers.append(nn.MaxPool2d(2))
        height, breadth = height // 2, breadth // 2
        if min(height, breadth) < 8:
            break
        width *= 2
    features = 8 * width
    layers += [nn.Flatten(), nn.Linear(channels * height * breadth, features), nn.SiLU()]
    return nn.Sequential(*layers), features


def _train(body: nn.Module, head: nn.Module, x: Tensor, y: Tensor, *, study: Study, generator: torch.Generator) -> None:
    parameters = [*body.parameters(), *head.parameters()]
    adam = torch.optim.AdamW(parameters, lr=study.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, study.steps)
    for _ in range(study.steps):
        rows = torch.randint(len(x), (study.batch,), generator=generator, device=generator.device).to(x.device)
        # Reconstructions are never quite clean; the judge must not stumble over a little noise.
        noise = torch.randn(x[rows].shape, generator=generator, device=generator.device).to(x)
        loss = F.cross_entropy(head(body(x[rows] + study.blur * noise)), y[rows])
        adam.zero_grad()
        torch.autograd.backward(loss)
        adam.step()
        schedule.step()
    body.eval().requires_grad_(False)
    head.requires_grad_(False)
