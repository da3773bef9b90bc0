"""Ψ/Φ inversion: reading a client's data off the tensors that travel bare beside a noised gradient.

Under head noise a client uploads, besides the gradient of φ₀, those of φ_s = α·Σ_{i∈s} a_i·e_i (Ψ) and of
φ_β = ½α² (Φ). MP-DP's noise covers the first tensor alone. Every gradient with respect to a linear layer with a
bias is a sum over samples of (∂φ/∂output)·(input, 1)ᵀ, so for a batch of one its two parts have the ratio x:

    G[W₁]_i / G[b₁]_i = x        for every unit i that the sample activates

Φ does not even depend on the label. Where the first layer is no linear one, x is searched for by matching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.probe import head_path, received
from fedveil.downlink import Blueprint, Broadcast, PublicHead
from fedveil.errors import ConfigError, NumericError
from fedveil.tensors import Layout, flatten
from fedveil.work.gradients import head_alpha
from fedveil.work.losses import SquareLoss

Match = Callable[[Tensor, Tensor], Tensor]
"""How far a found gradient is from the observed one: a scalar that can be differentiated."""

Progress = Callable[[float], None]

_CERTAIN = 1e3
_ONE_SAMPLE = 1e-3


@dataclass(frozen=True, eq=False)
class BareTensors:
    """What one upload carries bare, divided by the client's weight: Ψ and Φ, a gradient in each row, and the φ values.

    `first` is the tensor beside them, which noise may cover; `values` are φ₀, φ_s and φ_β.
    """

    first: Tensor
    psi: Tensor
    phi: Tensor
    values: Tensor


def bare_tensors(payload: Tensor, layout: Layout, head: PublicHead) -> BareTensors:
    """Cut an upload that was not masked; `layout` is the run's contribution layout."""
    parts = layout.split(payload.double())
    if len(parts["gradients"]) != head.tensors:
        raise ConfigError(
            f"The upload has {len(parts['gradients'])} gradients where this head noise makes {head.tensors}: pass the "
            "broadcast that the upload answers."
        )
    gradients, values = parts["gradients"] / parts["weight"], parts["values"] / parts["weight"]
    return BareTensors(gradients[0], gradients[1 : 1 + head.count], gradients[1 + head.count :], values)


@dataclass(frozen=True, eq=False)
class Reading:
    """What one linear layer read, and `misfit` = ‖G[W] − G[b]·xᵀ‖/‖G[W]‖.

    A misfit of 0 tells the attacker that one sample made the gradient and x is what the layer read of it; with
    several samples, or noise, it is not small, and x is a mixture.
    """

    x: Tensor
    misfit: float


def read_layer(blueprint: Blueprint, gradients: Tensor, *, path: str) -> Reading:
    """x = Σ G[b]·G[W] / Σ G[b]², the least-squares ratio over all units of a layer and all rows of `gradients`."""
    prefix = f"{path}." if path else ""
    parts = blueprint.parameters.split(gradients.double())
    weight = parts[f"{prefix}weight"]
    weight, bias = weight.reshape(-1, weight.shape[-1]), parts[f"{prefix}bias"].reshape(-1)
    largest = bias.abs().max()
    if not bool(largest > 0):  # no unit is active: nothing was given away
        return Reading(bias.new_zeros(weight.shape[1]), 1.0)
    bias, weight = bias / largest, weight / largest
    x = (bias @ weight) / bias.square().sum()
    misfit = (weight - bias[:, None] * x).norm() / weight.norm().clamp_min(1e-300)
    return Reading(x, float(misfit))


def read_first_layer(blueprint: Blueprint, gradients: Tensor) -> Reading:
    """The input itself, where the first layer is linear, has a bias and reads all of it; refused elsewhere."""
    path, layer = _first_layer(blueprint)
    if not isinstance(layer, nn.Linear) or layer.bias is None or layer.in_features != math.prod(blueprint.input_shape):
        raise ConfigError(
            f"The first layer ({path or 'the model itself'}, {type(layer).__name__}) is no linear layer with a bias "
            "that reads the whole input: there is no closed form. Use invert_bare."
        )
    found = read_layer(blueprint, gradients, path=path)
    return Reading(found.x.reshape(blueprint.input_shape), found.misfit)


def read_label(blueprint: Blueprint, broadcast: Broadcast, bare: BareTensors, *, loss: SquareLoss) -> int:
    """The class of a batch of one, for any architecture, from Ψ and its values alone.

    Ψ gives away what the head read, G_s[W_L]_i / G_s[b_L]_i = ĥ; so ŷ and α are known, and the class is the one
    for which φ_s = α·Σ_{i∈s} a_i·e_i has the values that were uploaded. The entries of a differ, so one s will do.
    """
    head, path = broadcast.head, head_path(blueprint)
    assert head is not None
    parts = blueprint.parameters.split(broadcast.parameters.double())
    prefix = f"{path}." if path else ""
    if f"{prefix}bias" not in parts:
        raise ConfigError("The last layer has no bias, by which Ψ would give away what it reads.")
    features = read_layer(blueprint, bare.psi, path=path).x
    output = parts[f"{prefix}weight"] @ features + parts[f"{prefix}bias"]
    classes = torch.arange(len(output), device=output.device)
    alpha = (features.sum() + 1.0).reshape(1)
    found = torch.stack([loss.basis(output[None], alpha, one.reshape(1), head) for one in classes])
    last = 1 + head.count
    return int((found[:, 1:last] - bare.values[1:last]).square().sum(1).argmin())


@dataclass(frozen=True, eq=False)
class Inverted:
    """The inputs found, soft labels (each row sums to one), and the matching loss that was reached."""

    inputs: Tensor
    labels: Tensor
    loss: float


def squared(found: Tensor, observed: Tensor) -> Tensor:
    """‖g − ĝ‖²/‖ĝ‖², the match of deep leakage from gradients."""
    return (found - observed).square().sum() / observed.square().sum().clamp_min(1e-300)


def invert_bare(
    blueprint: Blueprint,
    broadcast: Broadcast,
    bare: BareTensors,
    *,
    loss: SquareLoss,
    generator: torch.Generator,
    match: Match = squared,
    batch: int = 1,
    restarts: int = 3,
    steps: int = 300,
    rate: float = 0.1,
    good_enough: float = 1e-9,
    box: tuple[float, float] | None = (0.0, 1.0),
    progress: Progress = lambda done: None,
) -> Inverted:
    """Inputs and labels whose G_β and Σ_s G_s are the uploaded ones, by Adam; the best of `restarts` attempts.

    `match` compares found and observed gradients. Ψ is linear in e, so its rows are matched by their sum: one
    more backward pass, however many groups there are. A batch of one has its label read off, and what the linear
    layers read of it is matched too. `box` bounds the inputs' values.
    """
    if broadcast.head is None:
        raise ConfigError("This broadcast has no head noise, so there is no Ψ and no Φ: match the gradient itself.")
    if batch < 1 or restarts < 1 or steps < 1:
        raise ConfigError(f"batch, restarts and steps must be at least 1 (got {batch}, {restarts}, {steps}).")
    if not (bool(bare.psi.isfinite().all()) and bool(bare.phi.isfinite().all())):
        raise NumericError("Ψ or Φ holds NaN or infinity; there is nothing to match.")
    module = received(blueprint, broadcast).double().requires_grad_(True)
    label, readings = None, {}
    if batch == 1:
        label = read_label(blueprint, broadcast, bare, loss=loss)
        readings = _linear_readings(blueprint, torch.cat([bare.phi, bare.psi]))
    search = _Search(blueprint, module, broadcast.head, bare, loss, match, box, label, readings)
    best: Inverted | None = None
    for attempt in range(restarts):
        watched = _part_of(progress, attempt, restarts)
        found = search.attempt(batch, generator, steps, rate, watched)
        if best is None or found.loss < best.loss or math.isnan(best.loss):
            best = found
        if best.loss <= good_enough:
            break
    assert best is not None
    return best


@dataclass(frozen=True, eq=False)
class _Search:
    blueprint: Blueprint
    module: nn.Module
    head: PublicHead
    bare: BareTensors
    loss: SquareLoss
    match: Match
    box: tuple[float, float] | None
    label: int | None
    readings: Mapping[str, Tensor]

    def attempt(self, batch: int, generator: torch.Generator, steps: int, rate: float, progress: Progress) -> Inverted:
        shape, device = (batch, *self.blueprint.input_shape), self.bare.phi.device
        low, high = self.box if self.box is not None else (-1.0, 1.0)
        start = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        x = (low + (high - low) * start).requires_grad_()
        logits = torch.zeros(batch, len(self.head.vector), dtype=torch.float64, device=device)
        if self.label is not None:
            logits[0, self.label] = _CERTAIN
        logits.requires_grad_(self.label is None)
        searched = [x] if self.label is not None else [x, logits]
        optimiser = torch.optim.Adam(searched, lr=rate * (high - low))
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=1e-3 * rate)
        kept = Inverted(x.detach().clone(), logits.detach().softmax(1), math.inf)
        for step in range(steps):
            value = self.distance(x, logits.softmax(1))
            reached = float(value.detach())
            if reached < kept.loss:
                kept = Inverted(x.detach().clone(), logits.detach().softmax(1), reached)
            for one, slope in zip(searched, torch.autograd.grad(value, searched), strict=True):
                one.grad = slope
            optimiser.step()
            slower.step()
            if self.box is not None:
                with torch.no_grad():
                    x.clamp_(low, high)
            progress((step + 1) / steps)
        return kept

    def distance(self, x: Tensor, labels: Tensor) -> Tensor:
        output, read = self._run(x)
        # Soft targets go in as numbers; unequal output weights would need the class itself and count as 1.
        target = self.loss.target_scale * labels
        basis = self.loss.basis(output, head_alpha(self.blueprint, self.module), target, self.head)
        psi, phi = basis[1 : 1 + self.head.count].sum(), basis[1 + self.head.count :].sum()
        gradients = self.match(self._gradient(phi), self.bare.phi.sum(0)) + self.match(
            self._gradient(psi), self.bare.psi.sum(0)
        )
        return sum((squared(read[path], known) for path, known in self.readings.items()), gradients)

    def _run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and what the layers of `readings` read on the way."""
        read: dict[str, Tensor] = {}
        handles = [self.module.get_submodule(path).register_forward_hook(_keeper(read, path)) for path in self.readings]
        try:
            return self.module(x), read
        finally:
            for one in handles:
                one.remove()

    def _gradient(self, value: Tensor) -> Tensor:
        parameters = list(self.module.parameters())
        found = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
        return flatten(found)


def _keeper(read: dict[str, Tensor], path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def keep(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
        read[path] = args[0].reshape(-1)

    return keep


def _linear_readings(blueprint: Blueprint, gradients: Tensor) -> dict[str, Tensor]:
    """What every linear layer with a bias read, as far as the gradients are those of one sample."""
    found = {}
    for path, layer in blueprint.skeleton.named_modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            reading = read_layer(blueprint, gradients, path=path)
            if reading.misfit < _ONE_SAMPLE:
                found[path] = reading.x
    return found


def _part_of(progress: Progress, attempt: int, attempts: int) -> Progress:
    return lambda done: progress((attempt + done) / attempts)


def _first_layer(blueprint: Blueprint) -> tuple[str, nn.Module]:
    """The first module with parameters of its own."""
    for path, one in blueprint.skeleton.named_modules():
        if any(True for _ in one.parameters(recurse=False)):
            return path, one
    raise ConfigError("This model has no parameters: nothing can be read off its gradients.")
