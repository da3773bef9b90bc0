"""Which samples a client trains on in a round: a function of seed, client and round alone.

Nothing is remembered between rounds, so a resumed run draws the same batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import TappedLinear, VectorBatchNorm, VectorGroupNorm, VectorLayerNorm
from fedveil.errors import ConfigError, unknown_name

_MASK = (1 << 63) - 1


def mixed_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers (splitmix64 over each)."""
    state = 0
    for part in parts:
        state = (state ^ (part & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


@functools.lru_cache(maxsize=2)
def _shuffled(samples: int, seed: int) -> Tensor:
    """The numbers below `samples` in an order; kept, since every step of an epoch asks for it."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Batches:
    """Batches of `size` samples (0: all), without replacement within a local epoch.

    A tail smaller than `size` is left out of its epoch; the next epoch shuffles anew.
    """

    size: int = 0
    seed: int = 0

    def batch_size(self, samples: int) -> int:
        """The batch size of a client with `samples` samples."""
        return samples if self.size == 0 else min(self.size, samples)

    def indices(self, *, client: int, samples: int, step: int) -> Tensor:
        """The sample numbers of local step `step`."""
        size = self.batch_size(samples)
        if size == samples:
            return torch.arange(samples)
        epoch, position = divmod(step, samples // size)
        return self.order(client=client, samples=samples, epoch=epoch)[position * size : (position + 1) * size]

    def steps(self, *, client: int, samples: int, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """`count` local steps from `first` on, each with its `indices`."""
        size, epoch, order = self.batch_size(samples), -1, torch.empty(0)
        for step in range(first, first + count):
            now, position = divmod(step, samples // size)
            if now != epoch:
                epoch, order = now, self.order(client=client, samples=samples, epoch=now)
            yield step, order[position * size : (position + 1) * size]

    def order(self, *, client: int, samples: int, epoch: int) -> Tensor:
        """All sample numbers in the order in which a local epoch takes them."""
        if self.batch_size(samples) == samples:
            return torch.arange(samples)
        return _shuffled(samples, mixed_seed(self.seed, client, epoch))


def has_random_layers(module: nn.Module) -> bool:
    """Whether a layer of it draws random numbers in a training pass (dropout, also inside torch's own layers)."""
    return any(_drops(layer) for layer in module.modules())


def convolves(module: nn.Module) -> bool:
    """Whether a layer of it is a convolution."""
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules())


_APART = (
    *(nn.Sequential, nn.ModuleList, nn.Identity, nn.Linear, TappedLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(VectorGroupNorm, VectorLayerNorm),
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh, nn.Sigmoid),
    *(nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d, nn.Upsample),
)


def takes_samples_apart(module: nn.Module) -> bool:
    """Whether it is known that no layer's output for a sample depends on the others of its batch.

    Known of layers of PyTorch that are named here, and of classes that say so themselves (`samples_apart = True`).
    """
    return all(_is_apart(layer) for layer in module.modules())


_PART_PIXELS = 1 << 16
_LEAST_PART = 32
"""Beyond so many pixels, or samples, a pass of a convolving network leaves the processor's caches."""


def samples_at_once(module: nn.Module, input_shape: tuple[int, ...]) -> int | None:
    """How many samples of a batch a CPU had better take at a time; None where parts of it may not give the same."""
    if has_random_layers(module) or not (convolves(module) and takes_samples_apart(module)):
        return None
    return max(_LEAST_PART, _PART_PIXELS // max(1, math.prod(input_shape[1:])))


def _is_apart(layer: nn.Module) -> bool:
    kind = type(layer)
    if hooked(layer) or "forward" in vars(layer):
        return False
    if kind is nn.Flatten and isinstance(layer, nn.Flatten):
        return layer.start_dim == 1
    if isinstance(layer, VectorBatchNorm):
        return bool(layer.track and not layer.training)
    return kind in _APART or bool(vars(kind).get("samples_apart"))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(layer: nn.Module) -> bool:
    """Whether somebody's own code runs before or after the layer's."""
    return any(getattr(layer, hooks) for hooks in _HOOKS)


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """torch's global generators seeded inside, the CPU's and a GPU's `device`, and afterwards as they were."""
    gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if gpu else []), torch.cuda.device(device) if gpu else nullcontext():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU for good
        if gpu:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def seeded_dropout(module: nn.Module, *parts: int) -> Iterator[None]:
    """Seed whatever is drawn inside, and leave the global generators as they were.

    On a CPU this also covers dropout that no layer shows (`F.dropout`); on a GPU, where saving a
    generator's state waits for the device, only models with random layers are seeded.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "cuda" and not has_random_layers(module):
        yield
        return
    with seeded(device, mixed_seed(*parts)):
        yield


Factor = Callable[[int, int], float]
"""What a rate is multiplied by in a round (counted from 0) of a run of so many rounds."""


SHAPES = ("constant", "cosine", "step", "polynomial")


@dataclass(frozen=True)
class Schedule:
    """lr·decay^round·shape·warm-up: how the learning rate goes over a run of `rounds` rounds.

    `shape` is constant; cosine, half a one from 1 to 0; step, `drop` to the power of how many of `steps`, shares of the
    run, are over; polynomial, (1 − round/rounds)^`power`; or a function of the round and the rounds. `warm_up` is the
    share of the run in which the rate grows linearly to that: a loss with a steep start explodes under the full one.
    """

    lr: float
    decay: float = 1.0
    shape: str | Factor = "constant"
    rounds: int = 1
    warm_up: float = 0.0
    steps: tuple[float, ...] = (0.5, 0.75)
    drop: float = 0.1
    power: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.shape) and self.shape not in SHAPES:
            raise unknown_name("lr_schedule", str(self.shape), SHAPES)

    def at(self, round: int) -> float:
        """The learning rate of a round."""
        rate = self.lr * self.decay**round
        if self.shape != "constant":
            rate *= self._shape(round)
        if self.warm_up:
            rate *= min(1.0, (round + 1) / (self.warm_up * self.rounds + 1))
        return rate

    def _shape(self, round: int) -> float:
        done = round / self.rounds
        if callable(self.shape):
            return self._own(self.shape, round)
        if self.shape == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        if self.shape == "step":
            return math.prod(self.drop for step in self.steps if step <= done)
        return math.pow(max(0.0, 1.0 - done), self.power)

    def _own(self, shape: Factor, round: int) -> float:
        try:
            factor = float(shape(round, self.rounds))
        except Exception as reason:  # whatever somebody's own code runs into
            said = f"{type(reason).__name__}: {reason}"
            raise ConfigError(f"lr_schedule raised in round {round + 1} of {self.rounds}: {said}") from reason
        if not (math.isfinite(factor) and factor >= 0):
            raise ConfigError(
                f"lr_schedule gave {factor} for round {round + 1} of {self.rounds}: give a number that is 0 or more, "
                "by which the rate is multiplied."
            )
        return factor


OptimiserName = Literal["sgd", "adam"]
Many = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class LocalOptimiser:
    """How a client steps by itself. What it remembers is 0 when a round begins: it knows nothing of the last one.

    sgd   v ← μ·v + g + λ·w;  w ← w − lr·v
    adam  m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²
          w ← (1 − lr·λ)·w − lr·m/(1 − β₁ᵗ)/(√(v/(1 − β₂ᵗ)) + τ)    torch's Adam, and with λ its AdamW
    """

    kind: OptimiserName = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    tau: float = 1e-8

    def start(self, moving: Sequence[Tensor]) -> list[Tensor]:
        """What is remembered before the first step, all 0: v of sgd with momentum; m, v and t of adam."""
        if self.kind == "adam":
            taken = torch.zeros((), dtype=torch.float64, device=moving[0].device)
            return [*(torch.zeros_like(value) for value in (*moving, *moving)), taken]
        return [torch.zeros_like(value) for value in moving] if self.momentum else []

    def step(self, moving: list[Tensor], grads: Many, memory: list[Tensor], rate: float | Tensor) -> None:
        """Change `moving` and `memory` in place; the rate is a tensor where a captured step reads it anew each time."""
        if self.kind == "adam":
            self._adapted(moving, grads, memory, rate)
            return
        if self.weight_decay:
            grads = torch._foreach_add(grads, moving, alpha=self.weight_decay)
        if memory:
            torch._foreach_mul_(memory, self.momentum)
            torch._foreach_add_(memory, grads)
            grads = memory
        if isinstance(rate, Tensor):
            torch._foreach_sub_(moving, torch._foreach_mul(grads, rate))
        else:
            torch._foreach_add_(moving, grads, alpha=-rate)

    def _adapted(self, moving: list[Tensor], grads: Many, memory: list[Tensor], rate: float | Tensor) -> None:
        first, second, taken = memory[: len(moving)], memory[len(moving) : -1], memory[-1]
        taken += 1.0  # on the device, and what follows from it too, so that a captured step counts by itself
        torch._foreach_lerp_(first, grads, 1.0 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - self.beta2)
        below = torch._foreach_sqrt(second)
        torch._foreach_mul_(below, (1.0 - torch.pow(self.beta2, taken)).rsqrt().to(moving[0].dtype))
        torch._foreach_add_(below, self.tau)
        if self.weight_decay:
            torch._foreach_mul_(moving, 1.0 - rate * self.weight_decay)
        length = (rate / (1.0 - torch.pow(self.beta1, taken))).to(moving[0].dtype)
        torch._foreach_sub_(moving, torch._foreach_mul(torch._foreach_div(first, below), length))


# --- pictures drawn anew each time they are trained on: a crop, a flip, a hole
#
# What is drawn follows from the run's seed, the client, the local step and the sample's number alone: a resumed run,
# another scheme, another engine, and clients in groups of another size see the same pictures. `draw` gives it as a few
# whole numbers per sample; `apply` is a pure function of pictures and those numbers, with shapes that do not depend on
# them, so that it runs on any device and inside a captured graph.

_PURPOSE = 0xA06
_DRAWS = 5
_TOP, _LEFT, _FLIP, _ROW, _COLUMN = range(_DRAWS)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_STEP, _FIRST, _SECOND = (_signed(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _words(places: Tensor, key: int | Tensor) -> Tensor:
    """63 random bits for each place under a key: splitmix64, whose products are taken modulo 2⁶⁴."""
    state = (places + 1) * _STEP + key
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 1)


def _shifted(words: Tensor, count: int) -> Tensor:
    """To the right, with zeros coming in: of negative numbers PyTorch shifts the sign in."""
    return (words >> count) & ((1 << 64 - count) - 1)


@dataclass(frozen=True)
class PictureAugmentation:
    """Random crops, flips and holes for pictures (channels, height, width) of one `size`.

    Args:
        seed: The run's.
        size: Height and width.
        crop: So many pixels are mirrored around a picture, of which a part of its own size is then cut out.
        flip: Whether half of the pictures are turned left to right.
        cutout: The side of a square, its centre anywhere in the picture, that is set to 0, the mean of standardised
            pictures (DeVries and Taylor 2017).
    """

    seed: int
    size: tuple[int, int]
    crop: int = 0
    flip: bool = False
    cutout: int = 0

    def __call__(self, x: Tensor, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """The pictures `x` of a client's samples with these numbers, as they are in a step."""
        return self.apply(x, self.draw(numbers, client=client, step=step).to(x.device, non_blocking=True))

    def draw(self, numbers: Tensor, *, client: int, step: int) -> Tensor:
        """Five whole numbers for each sample: top and left of the crop, flip, row and column of the hole's centre."""
        return self.drawn(numbers, self.key(client, step))

    def key(self, client: int, step: int) -> int:
        """What a client's draws in a step depend on, beside the samples' numbers."""
        return mixed_seed(self.seed, _PURPOSE, client, step)

    def drawn(self, numbers: Tensor, keys: int | Tensor) -> Tensor:
        """What is drawn for samples with these numbers under one key, or under a key each (B, 1)."""
        places = numbers.to(torch.int64)[:, None] * _DRAWS + torch.arange(_DRAWS, device=numbers.device)
        limits = (2 * self.crop + 1, 2 * self.crop + 1, 1 + self.flip, *self.size)
        words = _words(places, keys).unbind(1)
        return torch.stack([word % limit for word, limit in zip(words, limits, strict=True)], 1)

    def apply(self, pictures: Tensor, drawn: Tensor) -> Tensor:
        """(B, channels, height, width) with what was `drawn` for each (B, 5), on the same device."""
        (height, width), drawn = self.size, drawn[:, :, None]
        rows = torch.arange(height, device=pictures.device)
        columns = torch.arange(width, device=pictures.device)
        if self.crop or self.flip:
            across = torch.where(drawn[:, _FLIP] > 0, columns.flip(0), columns)
            down = _mirrored(rows + drawn[:, _TOP] - self.crop, height)
            across = _mirrored(across + drawn[:, _LEFT] - self.crop, width)
            places = (down[:, :, None] * width + across[:, None]).flatten(1)
            every = places[:, None].expand(-1, pictures.shape[1], -1)
            pictures = pictures.flatten(2).gather(2, every).view_as(pictures)
        if self.cutout:
            inside = [
                (place >= centre - self.cutout // 2) & (place < centre - self.cutout // 2 + self.cutout)
                for place, centre in ((rows, drawn[:, _ROW]), (columns, drawn[:, _COLUMN]))
            ]
            pictures = pictures.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0.0)
        return pictures


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond an edge, mirrored at the last pixel before it."""
    return (size - 1) - (size - 1 - places.abs()).abs()
