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
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedveil.audit.attack import AttackContext, OnProgress, applicable, attack, counted, require_numbers, silent
from fedveil.audit.attacks.closed_form import closed_form, has_closed_form
from fedveil.audit.attacks.deep_leakage import read_by
from fedveil.audit.attacks.extraction import head_path, received
from fedveil.audit.attacks.gradients import (
    MOST_SAMPLES,
    Problem,
    Reconstruction,
    as_result,
    batch_seen,
    best,
    exchange_in,
    gradient_at,
    observed_in,
    problem_from,
    squared_distance,
)
from fedveil.audit.views import Facts, ServerView, View
from fedveil.downlink import Architecture, Broadcast, PublicHead
from fedveil.errors import ConfigError, NotApplicableError, NumericError
from fedveil.tensors import Layout
from fedveil.work.gradients import head_alpha
from fedveil.work.losses import SquareLoss

UNREAD = -1
"""The label of a sample of which the label was not read."""
RESTARTS = 3
STEPS = 300
"""How long a search takes; larger pictures need more."""
_CERTAIN = 1e3
_ONE_SAMPLE = 1e-3


@attack(
    "phi",
    sees=("bare tensors", "bare tensors on the wire"),
    asset="data",
    reference="bare",
    adaptive=True,
    how="what travels bare beside a noised gradient, read or matched (ours)",
)
def phi_attack(
    view: View, context: AttackContext, *, restarts: int | None = None, steps: int | None = None
) -> dict[str, Tensor]:
    """A batch from Ψ and Φ alone, with the model as it was sent: the server needs none of its secrets for this.

    In closed form where a linear layer with a bias reads the whole input (`loss` is how badly one sample explains
    the gradients; labels of batches above one stay unread), otherwise by matching. Words under masks are read as
    numbers, for what that is worth. An upload that is nothing but a gradient, as plain averaging sends it, is read in
    the same way.
    """
    if isinstance(view, ServerView) and view.broadcast is None and view.recovered is not None:
        observed = observed_in(view, context)
        problem = problem_from(observed, context)
        return read_by("closed-form" if has_closed_form(problem) else "idlg", observed, context)
    seen = exchange_in(view, context)
    head, facts = seen.broadcast.head, seen.facts
    if head is None:
        raise NotApplicableError("there is no head noise, so neither Ψ nor Φ is sent")
    require_numbers(facts)
    batch = batch_seen(facts, seen.samples, context)
    if batch > MOST_SAMPLES:
        raise NotApplicableError(f"a gradient of {batch} samples: this attack takes up to {MOST_SAMPLES}")
    architecture, broadcast = facts.architecture().to(device=context.device), _placed(seen.broadcast, context.device)
    bare = bare_tensors(seen.numbers.to(context.device), Layout(facts.contribution), head)
    try:
        reading = read_first_layer(architecture, torch.cat([bare.phi, bare.psi]))
    except ConfigError:  # no closed form for this model
        if facts.task != "classification":
            raise NotApplicableError(
                f"a {facts.task} task, and no linear layer that reads the input: classes are needed"
            ) from None
        with applicable():
            found = invert_bare(
                architecture,
                broadcast,
                bare,
                loss=_objective(facts),
                generator=context.generator(),
                batch=batch,
                restarts=counted("restarts", restarts) or (1 if context.quick else RESTARTS),
                steps=counted("steps", steps) or STEPS,
                box=context.box,
                progress=context.progress,
            )
        return as_result(found)
    inputs, labels = reading.x[None], torch.full((batch,), UNREAD)
    if batch > 1:
        inputs = _rows(facts, architecture, broadcast, bare, batch, context)
    elif facts.task == "classification":
        with applicable():
            labels[0] = read_label(architecture, broadcast, bare, loss=_objective(facts))
    context.progress(1.0)
    inputs = inputs if context.box is None else inputs.clamp(*context.box)
    return as_result(Reconstruction(inputs, labels, reading.misfit))


def _rows(
    facts: Facts,
    architecture: Architecture,
    broadcast: Broadcast,
    bare: BareTensors,
    batch: int,
    context: AttackContext,
) -> Tensor:
    """Several samples from the first layer's gradient in Φ, row by row, as from any other gradient."""
    problem = Problem(
        module=received(architecture, broadcast),
        loss=facts.objective(),
        gradient=bare.phi.sum(0),
        input_shape=facts.input_shape,
        outputs=facts.outputs,
        batch=batch,
        # Φ knows no labels: equal ones keep the attack from looking for them.
        labels=torch.zeros(batch, dtype=torch.int64, device=bare.phi.device),
        box=context.box,
    )
    with applicable():
        return closed_form(problem, generator=context.generator()).inputs


def _objective(facts: Facts) -> SquareLoss:
    loss = facts.objective()
    if not isinstance(loss, SquareLoss):
        raise NotApplicableError(f"the loss {loss.name}: Ψ and Φ belong to the square loss")
    return loss


def _placed(broadcast: Broadcast, device: torch.device) -> Broadcast:
    head = broadcast.head
    moved = {name: getattr(broadcast, name).to(device) for name in ("parameters", "epsilon", "statistics")}
    if head is not None:
        head = replace(head, vector=head.vector.to(device), groups=head.groups.to(device))
    return replace(broadcast, **moved, multipliers=broadcast.multipliers.to(device), head=head)


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


def read_layer(architecture: Architecture, gradients: Tensor, *, path: str) -> Reading:
    """x = Σ G[b]·G[W] / Σ G[b]², the least-squares ratio over all units of a layer and all rows of `gradients`."""
    prefix = f"{path}." if path else ""
    parts = architecture.parameters.split(gradients.double())
    weight = parts[f"{prefix}weight"]
    weight, bias = weight.reshape(-1, weight.shape[-1]), parts[f"{prefix}bias"].reshape(-1)
    largest = bias.abs().max()
    if not bool(largest > 0):  # no unit is active: nothing was given away
        return Reading(bias.new_zeros(weight.shape[1]), 1.0)
    bias, weight = bias / largest, weight / largest
    x = (bias @ weight) / bias.square().sum()
    misfit = (weight - bias[:, None] * x).norm() / weight.norm().clamp_min(1e-300)
    return Reading(x, float(misfit))


def read_first_layer(architecture: Architecture, gradients: Tensor) -> Reading:
    """The input itself, where the first layer is linear, has a bias and reads all of it; refused elsewhere."""
    path, layer = _first_layer(architecture)
    if (
        not isinstance(layer, nn.Linear)
        or layer.bias is None
        or layer.in_features != math.prod(architecture.input_shape)
    ):
        raise ConfigError(
            f"The first layer ({path or 'the model itself'}, {type(layer).__name__}) is no linear layer with a bias "
            "that reads the whole input: there is no closed form. Use invert_bare."
        )
    reading = read_layer(architecture, gradients, path=path)
    return Reading(reading.x.reshape(architecture.input_shape), reading.misfit)


def read_label(architecture: Architecture, broadcast: Broadcast, bare: BareTensors, *, loss: SquareLoss) -> int:
    """The class of a batch of one, for any architecture, from Ψ and its values alone.

    Ψ gives away what the head read, G_s[W_L]_i / G_s[b_L]_i = ĥ; so ŷ and α are known, and the class is the one
    for which φ_s = α·Σ_{i∈s} a_i·e_i has the values that were uploaded. The entries of a differ, so one s will do.
    """
    head, path = broadcast.head, head_path(architecture)
    assert head is not None
    parts = architecture.parameters.split(broadcast.parameters.double())
    prefix = f"{path}." if path else ""
    if f"{prefix}bias" not in parts:
        raise ConfigError("The last layer has no bias, by which Ψ would give away what it reads.")
    features = read_layer(architecture, bare.psi, path=path).x
    output = parts[f"{prefix}weight"] @ features + parts[f"{prefix}bias"]
    classes = torch.arange(len(output), device=output.device)
    alpha = (features.sum() + 1.0).reshape(1)
    basis = torch.stack([loss.basis(output[None], alpha, label.reshape(1), head) for label in classes])
    last = 1 + head.count
    return int((basis[:, 1:last] - bare.values[1:last]).square().sum(1).argmin())


def invert_bare(
    architecture: Architecture,
    broadcast: Broadcast,
    bare: BareTensors,
    *,
    loss: SquareLoss,
    generator: torch.Generator,
    batch: int = 1,
    restarts: int = 3,
    steps: int = 300,
    rate: float = 0.1,
    good_enough: float = 1e-9,
    box: tuple[float, float] | None = (0.0, 1.0),
    progress: OnProgress = silent,
) -> Reconstruction:
    """Inputs and labels whose G_β and Σ_s G_s are the uploaded ones, by Adam; the best of `restarts` attempts.

    Ψ is linear in e, so its rows are matched by their sum: one more backward pass, however many groups there are. A
    batch of one has its label read off, and what the linear layers read of it is matched too. `box` bounds the
    inputs' values.
    """
    if broadcast.head is None:
        raise ConfigError("This broadcast has no head noise, so there is no Ψ and no Φ: match the gradient itself.")
    if batch < 1 or restarts < 1 or steps < 1:
        raise ConfigError(f"batch, restarts and steps must be at least 1 (got {batch}, {restarts}, {steps}).")
    if not (bool(bare.psi.isfinite().all()) and bool(bare.phi.isfinite().all())):
        raise NumericError("Ψ or Φ holds NaN or infinity; there is nothing to match.")
    module = received(architecture, broadcast).double().requires_grad_(True)
    label, readings = None, {}
    if batch == 1:
        label = read_label(architecture, broadcast, bare, loss=loss)
        readings = _linear_readings(architecture, torch.cat([bare.phi, bare.psi]))
    search = _Search(architecture, module, broadcast.head, bare, loss, box, label, readings)
    return best(
        lambda part: search.attempt(batch, generator, steps, rate, part),
        times=restarts,
        good_enough=good_enough,
        progress=progress,
    )


@dataclass(frozen=True, eq=False)
class _Search:
    architecture: Architecture
    module: nn.Module
    head: PublicHead
    bare: BareTensors
    loss: SquareLoss
    box: tuple[float, float] | None
    label: int | None
    readings: Mapping[str, Tensor]

    def attempt(
        self, batch: int, generator: torch.Generator, steps: int, rate: float, progress: OnProgress
    ) -> Reconstruction:
        shape, device = (batch, *self.architecture.input_shape), self.bare.phi.device
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
        kept = Reconstruction(x.detach().clone(), logits.argmax(1), math.inf)
        for step in range(steps):
            value = self.distance(x, logits.softmax(1))
            reached = float(value.detach())
            if reached < kept.loss:
                kept = Reconstruction(x.detach().clone(), logits.argmax(1), reached)
            for variable, slope in zip(searched, torch.autograd.grad(value, searched), strict=True):
                variable.grad = slope
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
        basis = self.loss.basis(output, head_alpha(self.architecture, self.module), target, self.head)
        psi, phi = basis[1 : 1 + self.head.count].sum(), basis[1 + self.head.count :].sum()
        gradients = squared_distance(gradient_at(self.module, phi), self.bare.phi.sum(0))
        gradients = gradients + squared_distance(gradient_at(self.module, psi), self.bare.psi.sum(0))
        return sum((squared_distance(read[path], known) for path, known in self.readings.items()), gradients)

    def _run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and what the layers of `readings` read on the way."""
        read: dict[str, Tensor] = {}
        handles = [self.module.get_submodule(path).register_forward_hook(_keeper(read, path)) for path in self.readings]
        try:
            return self.module(x), read
        finally:
            for handle in handles:
                handle.remove()


def _keeper(read: dict[str, Tensor], path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def keep(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
        read[path] = args[0].reshape(-1)

    return keep


def _linear_readings(architecture: Architecture, gradients: Tensor) -> dict[str, Tensor]:
    """What every linear layer with a bias read, as far as the gradients are those of one sample."""
    readings = {}
    for path, layer in architecture.skeleton.named_modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            reading = read_layer(architecture, gradients, path=path)
            if reading.misfit < _ONE_SAMPLE:
                readings[path] = reading.x
    return readings


def _first_layer(architecture: Architecture) -> tuple[str, nn.Module]:
    """The first module with parameters of its own."""
    for path, layer in architecture.skeleton.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            return path, layer
    raise ConfigError("This model has no parameters: nothing can be read off its gradients.")
