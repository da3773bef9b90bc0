"""The blueprint: what both sides know about an architecture, and nothing about its values.

The server keeps a model's values in `Weights`; a client keeps a *skeleton*, the same network with
every value zeroed, and fills it from what is broadcast.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink.norms import VectorBatchNorm, VectorNorm, with_vector_norms
from fedveil.downlink.table import ScaleTable, trace
from fedveil.secrets import SecretStream
from fedveil.tensors import Layout, flatten


class TappedLinear(nn.Linear):
    """A linear layer that remembers its last input, from which a client computes α."""

    tap: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Wx + b, remembering x."""
        self.tap = input
        return F.linear(input, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's values: flat parameters, ε per normalisation group, running statistics, other buffers."""

    parameters: Tensor
    epsilon: Tensor
    statistics: Tensor
    buffers: Mapping[str, Tensor]

    def clone(self) -> Weights:
        """An independent copy."""
        return Weights(
            self.parameters.clone(),
            self.epsilon.clone(),
            self.statistics.clone(),
            {name: value.clone() for name, value in self.buffers.items()},
        )

    def to(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Weights:
        """The same values elsewhere or in another type; other buffers keep their type."""
        parts = (self.parameters, self.epsilon, self.statistics)
        parameters, epsilon, statistics = (one.to(device=device, dtype=dtype) for one in parts)
        buffers = {name: value.to(device=device) for name, value in self.buffers.items()}
        return Weights(parameters, epsilon, statistics, buffers)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """An architecture: skeleton, parameter order, normalisation layers, and, if traced, the scale table."""

    skeleton: nn.Module
    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    parameters: Layout
    trainable: Tensor
    norms: tuple[str, ...]
    table: ScaleTable | None

    @property
    def size(self) -> int:
        """Number of scalar parameters."""
        return self.parameters.length

    @property
    def statistics_sizes(self) -> list[tuple[str, int]]:
        """Channels of every batch norm with running statistics, by path."""
        return [(path, len(norm.running_mean)) for path, norm in batch_norms(self.skeleton)]

    @property
    def statistics_size(self) -> int:
        """How many numbers a mean and a variance for each of those channels take."""
        return sum(2 * size for _, size in self.statistics_sizes)

    @property
    def frozen_statistics(self) -> bool:
        """Whether some batch norm runs in evaluation mode, so that clients need running statistics."""
        return any(not norm.training for _, norm in batch_norms(self.skeleton))

    def new_skeleton(self, *, fused: bool = True) -> nn.Module:
        """A fresh skeleton; `fused` picks kernels that autograd can run but torch.func cannot."""
        twin = copy.deepcopy(self.skeleton)
        for module in twin.modules():
            if isinstance(module, VectorBatchNorm):
                module.fused = fused
        return twin

    def epsilon_norms(self, module: nn.Module) -> list[VectorNorm]:
        """The normalisation layers of `module` in the blueprint's order."""
        return [norm for path in self.norms if isinstance(norm := module.get_submodule(path), VectorNorm)]

    def to(self, *, device: torch.device) -> Blueprint:
        """The same blueprint on another device."""
        return Blueprint(
            copy.deepcopy(self.skeleton).to(device),
            self.input_shape,
            self.input_dtype,
            self.parameters,
            self.trainable.to(device),
            self.norms,
            None if self.table is None else self.table.to(device),
        )


def draw(model: nn.Module, example: Tensor, *, traced: bool) -> tuple[Blueprint, Weights]:
    """Separate `model` into its blueprint (public) and its weights (the server's).

    `example` is a batch of inputs of the right shape; only its shape and type matter.
    """
    table = trace(model, example) if traced else None
    prepared = with_vector_norms(model)
    if table is not None and table.head is not None:
        _tap(prepared, table.head.path)
    named = dict(prepared.named_parameters())
    norms = tuple(path for path, norm in prepared.named_modules() if isinstance(norm, VectorNorm))
    blueprint = Blueprint(
        skeleton=_emptied(prepared),
        input_shape=tuple(example.shape[1:]),
        input_dtype=example.dtype,
        parameters=Layout(tuple((name, tuple(value.shape)) for name, value in named.items())),
        trainable=torch.cat(
            [torch.full((value.numel(),), value.requires_grad) for value in named.values()]
            or [torch.empty(0, dtype=torch.bool)]
        ),
        norms=norms,
        table=table,
    )
    return blueprint, weights_of(prepared, blueprint)


def weights_of(prepared: nn.Module, blueprint: Blueprint) -> Weights:
    """Read a prepared module's values."""
    statistics = [part for _, norm in batch_norms(prepared) for part in (norm.running_mean, norm.running_var)]
    own = _norm_buffers(prepared)
    return Weights(
        parameters=flatten([value.detach() for value in prepared.parameters()]),
        epsilon=flatten([norm.epsilon for norm in blueprint.epsilon_norms(prepared)]),
        statistics=flatten(statistics),
        buffers={n: b.detach().clone() for n, b in prepared.named_buffers() if n not in own},
    )


def _norm_buffers(module: nn.Module) -> set[str]:
    names = ("epsilon", "running_mean", "running_var")
    return {
        f"{path}.{name}" if path else name
        for path, norm in module.named_modules()
        if isinstance(norm, VectorNorm)
        for name in names
    }


def load_parameters(module: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector into a module's parameters, in order."""
    with torch.no_grad():
        targets: list[Tensor] = list(module.parameters())
        if targets:
            parts = torch.split(flat, [one.numel() for one in targets])
            torch._foreach_copy_(targets, [p.view(t.shape) for t, p in zip(targets, parts, strict=True)])


def load_epsilon(blueprint: Blueprint, module: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector of ε into a module's normalisation layers."""
    start = 0
    for norm in blueprint.epsilon_norms(module):
        size = len(norm.epsilon)
        norm.epsilon.copy_(flat[start : start + size])
        start += size


def load_statistics(module: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector of running means and variances into a module's batch norms."""
    start = 0
    for _, norm in batch_norms(module):
        size = len(norm.running_mean)
        norm.running_mean.copy_(flat[start : start + size])
        norm.running_var.copy_(flat[start + size : start + 2 * size])
        start += 2 * size


def assemble(blueprint: Blueprint, weights: Weights) -> nn.Module:
    """A working model from blueprint and weights."""
    module = blueprint.new_skeleton().to(weights.parameters.device, weights.parameters.dtype)
    load_parameters(module, weights.parameters)
    load_epsilon(blueprint, module, weights.epsilon)
    load_statistics(module, weights.statistics)
    for name, value in weights.buffers.items():
        module.get_buffer(name).copy_(value)
    return module


def _tap(module: nn.Module, path: str) -> None:
    # The class changes, parameters and names stay: every holder of the layer keeps its reference.
    module.get_submodule(path).__class__ = TappedLinear


def _emptied(prepared: nn.Module) -> nn.Module:
    twin = copy.deepcopy(prepared)
    own = _norm_buffers(twin)
    with torch.no_grad():
        for tensors in (twin.parameters(), (b for n, b in twin.named_buffers() if n in own)):
            for one in tensors:
                one.zero_()
    for parameter in twin.parameters():
        parameter.requires_grad_(True)
    return twin


def flat_views(blueprint: Blueprint, flat: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Views of named parameters inside a flat vector."""
    parts = blueprint.parameters.split(flat)
    return [parts[name] for name in names]


LOWEST, HIGHEST = 1e-6, 1e-4


def draw_secret_epsilon(weights: Weights, stream: SecretStream) -> None:
    """Give every normalisation group its own ε, log-uniform on [1e-6, 1e-4]; once per model."""
    logs = math.log(LOWEST) + stream.uniform(weights.epsilon.numel()) * math.log(HIGHEST / LOWEST)
    weights.epsilon.copy_(torch.exp(logs))


def batch_norms(model: nn.Module) -> list[tuple[str, VectorBatchNorm]]:
    """Every batch normalisation that tracks statistics, by path."""
    return [(p, m) for p, m in model.named_modules() if isinstance(m, VectorBatchNorm) and m.track]
