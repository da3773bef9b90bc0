"""Gradient matching: find inputs whose gradient is the observed one. The part all such attacks share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedveil import data, models
from fedveil.audit.metrics import psnr
from fedveil.errors import ConfigError, NumericError
from fedveil.tensors import flatten
from fedveil.work.losses import CrossEntropy, Loss

MOST_SAMPLES = 8
"""How many samples a search can tell apart."""

MOST_READ = 64
"""Of how many samples' gradient anything is read at all."""

EFFECTIVE_PSNR = 20.0

Progress = Callable[[float], None]
Distance = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Budget:
    """How much an attack may spend: `quick` is for an audit of minutes on two cores."""

    quick: bool = False


FULL_BUDGET = Budget()


# Tensors have no single truth value under ==, so equality is identity.
@dataclass(frozen=True, eq=False)
class Problem:
    """One observed gradient and what the attacker knows besides.

    `gradient` is the gradient of the mean loss over `batch` samples, flat, in the order of
    `module.named_parameters()`. `labels` is None where the attacker does not know them. `box` holds the
    least and the greatest value an input can have, or None. Of a `clipped` gradient only the direction counts. The
    module is in the mode (training or evaluation) in which the gradient was taken; attacks work on a copy of it.
    """

    module: nn.Module
    loss: Loss
    gradient: Tensor
    input_shape: tuple[int, ...]
    outputs: int
    batch: int = 1
    labels: Tensor | None = None
    box: tuple[float, float] | None = (0.0, 1.0)
    clipped: bool = False

    def __post_init__(self) -> None:
        size = sum(parameter.numel() for parameter in self.module.parameters())
        if self.gradient.shape != (size,):
            raise ConfigError(
                f"The observed gradient has shape {tuple(self.gradient.shape)}, but the model has {size} parameters: "
                "pass one flat vector with an entry for each."
            )
        if not bool(self.gradient.isfinite().all()):
            raise NumericError("The observed gradient holds NaN or infinity; there is nothing to match.")
        if not 1 <= self.batch <= MOST_READ:
            raise ConfigError(f"Reconstruction takes batches of 1 to {MOST_READ} samples, not {self.batch}.")
        if self.labels is not None and len(self.labels) != self.batch:
            raise ConfigError(f"{len(self.labels)} labels for a batch of {self.batch}: pass one for each sample.")
        if self.box is not None and not self.box[0] < self.box[1]:
            raise ConfigError(f"The box {self.box} is empty: its first number must be below its second.")


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found. `loss` is the matching loss it reached: the attack's own quality, not the truth's."""

    inputs: Tensor
    labels: Tensor
    loss: float


def silent(_: float) -> None:
    """Progress that nobody watches."""


def squared_distance(found: Tensor, observed: Tensor) -> Tensor:
    """‖g − ĝ‖² / ‖ĝ‖²: relative, so that 1 means nothing was explained, at whatever scale uploads come."""
    return (found - observed).square().sum() / observed.square().sum().clamp_min(_tiny(observed))


def cosine_distance(found: Tensor, observed: Tensor) -> Tensor:
    """1 − ⟨g, ĝ⟩ / (‖g‖·‖ĝ‖)."""
    lengths = (found.square().sum() * observed.square().sum()).clamp_min(_tiny(observed)).sqrt()
    return 1.0 - (found * observed).sum() / lengths


def normalised(gradient: Tensor) -> Tensor:
    """The gradient divided by its largest entry's size, against overflow of its square; zeros stay zeros."""
    largest = gradient.abs().max() if gradient.numel() else gradient.new_zeros(())
    return gradient / largest if largest > 0 else gradient


def private_copy(problem: Problem, *, dtype: torch.dtype) -> nn.Module:
    """The model on the gradient's device in `dtype`, every parameter differentiable, nobody else's."""
    module = copy.deepcopy(problem.module).to(device=problem.gradient.device, dtype=dtype)
    return module.requires_grad_(True)


def gradient_at(module: nn.Module, value: Tensor, *, differentiable: bool = True) -> Tensor:
    """The flat gradient of `value`; parameters it does not depend on get zeros."""
    parameters = list(module.parameters())
    found = torch.autograd.grad(
        value,
        parameters,
        create_graph=differentiable,
        retain_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return flatten(found)


def client_gradient(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """The upload of plain federated averaging after one step: the gradient of the mean loss on (x, y)."""
    module = copy.deepcopy(module).requires_grad_(True)
    return gradient_at(module, loss.mean(module(x), y), differentiable=False).detach()


def matching_loss(problem: Problem, inputs: Tensor, labels: Tensor, *, distance: Distance = squared_distance) -> float:
    """How far the gradient at a guess is from the observed one."""
    module = private_copy(problem, dtype=inputs.dtype)
    value = problem.loss.mean(module(inputs), labels)
    found = gradient_at(module, value, differentiable=False)
    return float(distance(found, problem.gradient.to(found.dtype)))


def first_guess(problem: Problem, *, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniform in the box, or standard normal where there is none."""
    shape = (problem.batch, *problem.input_shape)
    device = problem.gradient.device
    if problem.box is None:
        return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device).to(device)
    low, high = problem.box
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype, device=generator.device).to(device)


def boxed(problem: Problem, inputs: Tensor) -> Tensor:
    """The inputs, moved to the nearest point of the box; what is not a number goes to its middle."""
    if problem.box is None:
        return inputs.nan_to_num()
    low, high = problem.box
    return inputs.nan_to_num(nan=(low + high) / 2).clamp(low, high)


def best(attempts: Iterable[Reconstruction], *, good_enough: float) -> Reconstruction:
    """The attempt with the least matching loss; no more are made once one is at most `good_enough`."""
    winner: Reconstruction | None = None
    for attempt in attempts:
        if winner is None or _order(attempt.loss) < _order(winner.loss):
            winner = attempt
        if winner.loss <= good_enough:
            break
    if winner is None:
        raise ConfigError("An attack needs at least one attempt: set restarts to 1 or more.")
    return winner


@dataclass(frozen=True, eq=False)
class Reference:
    """How an attack does where nothing protects the data: one real picture on the model it is known to break."""

    model: str
    psnr: float
    loss: float
    original: Tensor
    found: Tensor
    label_found: bool

    @property
    def effective(self) -> bool:
        """Whether the attack may be believed when it fails elsewhere: PSNR above 20 dB here."""
        return self.psnr > EFFECTIVE_PSNR


def unprotected(model: str, x: Tensor, y: Tensor, *, outputs: int = 10, seed: int = 0) -> Problem:
    """The gradient of a freshly built model on (x, y) as plain federated averaging uploads it; labels unknown."""
    module = models.build(model, input_shape=tuple(x.shape[1:]), outputs=outputs, seed=seed)
    loss = CrossEntropy()
    gradient = client_gradient(module, loss, x, y)
    return Problem(module, loss, gradient, tuple(x.shape[1:]), outputs, batch=len(x))


def on_reference(
    attack: Callable[[Problem], Reconstruction],
    *,
    model: str,
    picture: Tensor | None = None,
    label: int | None = None,
    seed: int = 0,
) -> Reference:
    """Run an attack on one picture (channels, height, width) with values in [0, 1]; a handwritten digit by default."""
    if (picture is None) != (label is None):
        raise ConfigError("A reference picture and its label belong together: pass both or neither.")
    if picture is None or label is None:
        digits = data.load("digits", seed=seed).train
        picture, label = digits.x[0], int(digits.y[0])
    if float(picture.min()) < 0 or float(picture.max()) > 1:
        raise ConfigError("A reference picture has values in [0, 1]; load the data without normalisation.")
    problem = unprotected(model, picture[None], torch.tensor([label], device=picture.device), seed=seed)
    found = attack(problem)
    score = float(psnr(found.inputs, picture[None]))
    return Reference(
        model=model,
        psnr=score,
        loss=found.loss,
        original=picture,
        found=found.inputs[0],
        label_found=int(found.labels[0]) == label,
    )


class Attack(Protocol):
    """A reconstruction attack with its own default budget."""

    def __call__(
        self, problem: Problem, *, generator: torch.Generator, budget: Budget = ..., progress: Progress = ...
    ) -> Reconstruction:
        """Reconstruct."""
        ...


def proven(
    attack: Attack,
    *,
    model: str,
    picture: Tensor | None = None,
    label: int | None = None,
    seed: int = 0,
    budget: Budget = FULL_BUDGET,
    progress: Progress = silent,
) -> Reference:
    """An attack on its reference model, unprotected: it must come out effective, or the attack is broken."""
    generator = torch.Generator().manual_seed(seed)
    return on_reference(
        lambda problem: attack(problem, generator=generator, budget=budget, progress=progress),
        model=model,
        picture=picture,
        label=label,
        seed=seed,
    )


def restarted(
    attempt: Callable[[Progress], Reconstruction], *, times: int, progress: Progress
) -> Iterator[Reconstruction]:
    """The same attempt from several first guesses; each is given its part of the progress to report."""
    for done in range(times):
        yield attempt(lambda part, done=done: progress((done + part) / times))  # type: ignore[misc]
    progress(1.0)


def _order(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _tiny(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).tiny)
