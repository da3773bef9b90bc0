"""Clipped sums of per-sample gradients: Σ_i min(1, C/‖g_i‖)·g_i, a bounded number of samples at a time.

A sample whose gradient is not finite counts as zero.

Every sample goes through the network as a batch of its own, under vmap or in a loop, so that a network
that mixes the samples of a batch cannot carry one sample's influence past another's clipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import Blueprint
from fedveil.work.bounds import clip_weights, full_precision, working
from fedveil.work.dropout import has_random_layers
from fedveil.work.factors import Dense, Factor, measured
from fedveil.work.losses import Loss
from fedveil.work.recorded import Recorded, Recorder, install, restore

CPU_BYTES = 64 << 20
GPU_BYTES = 4 << 30


@dataclass(frozen=True, eq=False)
class Sums:
    """Clipped sums (clients, parameters), and every sample's gradient norm and loss (clients, samples)."""

    sums: Tensor
    norms: Tensor
    losses: Tensor


def joined(parts: Sequence[Sums]) -> Sums:
    """Several groups of clients with equally many samples, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Sums(*(torch.cat([getattr(part, one) for part in parts]) for one in ("sums", "norms", "losses")))


def _summed(parts: Iterator[Sums]) -> Sums:
    """Several parts of the same clients' samples, in order; the sums of one part are held at a time."""
    first = next(parts)
    sums, norms, losses = first.sums, [first.norms], [first.losses]
    for part in parts:
        sums = sums.double().add_(part.sums)  # so that many parts round no more than one does
        norms.append(part.norms)
        losses.append(part.losses)
    return Sums(sums, torch.cat(norms, 1), torch.cat(losses, 1))


def looped(module: nn.Module, trained: list[str], loss: Loss, x: Tensor, y: Tensor, clip: float) -> Sums:
    """One client's clipped sum, a backward pass per sample: for models vmap cannot run, and to compare with."""
    named = dict(module.named_parameters())
    moving = [named[name] for name in trained]
    total = [one.new_zeros(1, one.numel(), dtype=torch.float64) for one in moving]
    norms, losses = [], []
    for number in range(len(y)):
        with torch.enable_grad():
            value = loss.mean(module(x[number : number + 1]), y[number : number + 1])
            grads = torch.autograd.grad(value, moving, allow_unused=True, materialize_grads=True)
        kept, norm = measured({name: Dense(one.reshape(1, -1)) for name, one in zip(trained, grads, strict=True)})
        weights = clip_weights(norm, clip, working(grads[0].dtype))[:, None]
        for sum, factor in zip(total, kept.values(), strict=True):
            sum += factor.total(weights)
        norms.append(norm)
        losses.append(value.detach())
    sums = dict(zip(trained, total, strict=True))
    return Sums(_placed(named, sums, 1), torch.stack(norms, 1), torch.stack(losses)[None])


def trained_names(blueprint: Blueprint) -> list[str]:
    """The parameters the model's author did not freeze."""
    masks = blueprint.parameters.split(blueprint.trainable.cpu())
    return [name for name, mask in masks.items() if bool(mask.any())]


def _placed(named: dict[str, nn.Parameter], sums: dict[str, Tensor], clients: int) -> Tensor:
    """All parameters' sums side by side, zero where nothing is trained."""
    parts = [sums[name] if name in sums else one.new_zeros(clients, one.numel()) for name, one in named.items()]
    return torch.cat(parts, 1)


class _Kept:
    """Counts what a forward pass keeps for its backward pass, the parameters (shared by all samples) aside."""

    def __init__(self, shared: set[int]) -> None:
        self._shared = shared
        self.numbers = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor on its way in."""
        if tensor.untyped_storage().data_ptr() not in self._shared:
            self.numbers += tensor.numel()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Hand it out again."""
        return tensor


@dataclass(frozen=True, eq=False)
class _Plan:
    """The recorded calls of one pass over one sample, and the memory such a pass takes."""

    layers: list[Recorded]
    taps: list[Tensor]
    numbers: int


class PerSample:
    """A network whose per-sample gradients are taken under vmap, in factors where a layer allows it."""

    def __init__(self, blueprint: Blueprint, loss: Loss) -> None:
        self.module = blueprint.new_skeleton(fused=False).requires_grad_(False)
        self._loss = loss
        self._trained = set(trained_names(blueprint))
        self._slot = install(self.module)
        self._random = "different" if has_random_layers(self.module) else "error"
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __call__(self, x: Tensor, y: Tensor, *, clients: int, clip: float, budget: int | None = None) -> Sums:
        """The clipped sums of `clients` clients with equally many samples, those of a client in a row."""
        plan = self._plan(x[:1], y[:1])
        each = len(y) // clients
        at_once = max(1, (budget or _budget(x)) // (plan.numbers * self._element_size))
        whole = max(1, at_once // each)
        parts = []
        for start in range(0, clients, whole):
            count = min(whole, clients - start)
            spans = _spans(start * each, count * each, at_once if whole == 1 else count * each)
            parts.append(_summed(self._chunk(plan, x[one], y[one], count, clip) for one in spans))
        return joined(parts)

    @property
    def _element_size(self) -> int:
        return next((one.element_size() for one in self.module.parameters()), 4)

    def _chunk(self, plan: _Plan, x: Tensor, y: Tensor, clients: int, clip: float) -> Sums:
        factors, losses = self._factors(plan, x, y)
        if factors:
            factors, norms = measured(factors)
        else:
            norms = torch.zeros_like(losses, dtype=torch.float64)
        weights = clip_weights(norms, clip, working(losses.dtype)).reshape(clients, -1)
        with full_precision():
            sums = {name: factor.total(weights) for name, factor in factors.items()}
        placed = _placed(dict(self.module.named_parameters()), sums, clients)
        return Sums(placed, norms.reshape(clients, -1), losses.reshape(clients, -1))

    def _factors(self, plan: _Plan, x: Tensor, y: Tensor) -> tuple[dict[str, Factor], Tensor]:
        """Every trained parameter's gradients of every sample, and the losses."""
        recorded = self._recorded(plan)
        named: dict[str, Tensor] = dict(self.module.named_parameters())
        rest = {name: one for name, one in named.items() if name in self._trained and name not in recorded}

        def one_sample(
            taps: list[Tensor], values: dict[str, Tensor], sample: Tensor, target: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            recorder = self._slot.recorder = Recorder(taps, plan.layers)
            output = torch.func.functional_call(self.module, values, (sample[None],))
            if len(recorder.inputs) != len(taps):
                raise RuntimeError("The model calls fewer layers than when it was probed.")
            return self._loss.mean(output, target[None]), recorder.inputs

        derived = torch.func.grad_and_value(one_sample, argnums=(0, 1), has_aux=True)
        mapped = torch.vmap(derived, in_dims=(None, None, 0, 0), randomness=self._random)
        try:
            (deltas, dense), (losses, inputs) = mapped(plan.taps, rest, x, y)
        finally:
            self._slot.recorder = Recorder()
        factors: dict[str, Factor] = {name: Dense(grads.flatten(1)) for name, grads in dense.items()}
        for layer in dict.fromkeys(plan.layers):
            calls = [number for number, one in enumerate(plan.layers) if one is layer]
            found = layer.factors([inputs[number] for number in calls], [deltas[number] for number in calls])
            names = {id(parameter): name for name, parameter in recorded.items()}
            for name, factor in found.items():
                parameter = layer._parameters[name]
                if parameter is not None and names[id(parameter)] in self._trained:
                    factors[names[id(parameter)]] = factor
        return factors, losses

    def _recorded(self, plan: _Plan) -> dict[str, nn.Parameter]:
        owned = {id(p) for layer in plan.layers for p in layer._parameters.values()}
        return {name: p for name, p in self.module.named_parameters() if id(p) in owned}

    def _plan(self, x: Tensor, y: Tensor) -> _Plan:
        key = (tuple(x.shape), x.dtype, tuple(y.shape), y.dtype)
        if key not in self._plans:
            with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
                while (plan := self._probe(x, y)) is None:
                    pass
            self._plans[key] = plan
        return self._plans[key]

    def _probe(self, x: Tensor, y: Tensor) -> _Plan | None:
        """Run one sample and see which layers are called; None if some had to be given up.

        A recorded layer whose parameters are read elsewhere too, or whose input is changed later, has
        gradients that its own calls do not tell.
        """
        recorder = self._slot.recorder = Recorder()
        values = {name: one.detach().clone().requires_grad_() for name, one in self.module.named_parameters()}
        kept = _Kept({one.untyped_storage().data_ptr() for one in values.values()})
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            loss = self._loss.mean(torch.func.functional_call(self.module, values, (x.clone(),)), y)
            names = list(values)
            found = torch.autograd.grad(loss, [values[name] for name in names], allow_unused=True)
        used = {name for name, grad in zip(names, found, strict=True) if grad is not None}
        named = {id(one): name for name, one in self.module.named_parameters()}
        changed = {
            id(layer)
            for layer, given, version in zip(recorder.layers, recorder.inputs, recorder.versions, strict=True)
            if given._version != version
        }
        layers = [layer for layer in recorder.layers if isinstance(layer, Recorded)]
        doubtful = [
            layer
            for layer in dict.fromkeys(layers)
            if id(layer) in changed or used & {named[id(one)] for one in layer.parameters(recurse=False)}
        ]
        for layer in doubtful:
            restore(layer)
        if doubtful:
            return None
        numbers = kept.numbers + sum(one.numel() for one in (*recorder.inputs, *recorder.made))
        for layer in dict.fromkeys(layers):
            numbers += layer.numbers([i for i, one in zip(recorder.inputs, layers, strict=True) if one is layer])
        recorded = {named[id(one)] for layer in layers for one in layer.parameters(recurse=False)}
        numbers += sum(one.numel() for n, one in values.items() if n in self._trained and n not in recorded)
        return _Plan(layers, [torch.zeros_like(one) for one in recorder.made], max(1, numbers))


def _budget(x: Tensor) -> int:
    return GPU_BYTES if x.device.type == "cuda" else CPU_BYTES


def _spans(start: int, count: int, size: int) -> Iterator[slice]:
    """Consecutive spans of at most `size`."""
    for first in range(start, start + count, size):
        yield slice(first, min(first + size, start + count))
