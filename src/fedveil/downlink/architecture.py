"""An architecture: what both sides know about a network, and nothing about its values.

The server keeps a model's values in `Weights`; a client keeps a *skeleton*, the same network with
every value zeroed, and fills it from what is broadcast.

In a skeleton the ε of normalisation layers is a tensor, one number per normalisation group: a veil multiplies the in
edge by k and must multiply ε by k², which differs between channels; torch's own layers take one number. The layers
here are drop-in replacements that keep parameter and buffer names, and remember their batch statistics so that a
client can send them up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink.scales import ScaleTable
from fedveil.downlink.symmetry import Sources, following
from fedveil.downlink.trace import NORM_KINDS, norm_paths, trace
from fedveil.errors import DataError, TraceError
from fedveil.secrets import SecretStream
from fedveil.tensors import Layout, flatten, twin_of


@functools.lru_cache(maxsize=1024)
def _number(count: int, device: torch.device) -> Tensor:
    """A whole number on a device, put there once."""
    return torch.tensor([count], dtype=torch.int32, device=device)


def _channels_last_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor
) -> tuple[Tensor | None, ...]:
    """On kernels made for batches that are spread over devices: four times as fast as the other, of a few channels."""
    grad = grad.contiguous(memory_format=torch.channels_last)
    count = _number(x.numel() // x.shape[1], x.device)
    sums, products, gw, gb = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, True, True)
    gx = torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, sums, products, count)
    return gx, gw, gb, None, None, None


class _FusedTrainingNorm(torch.autograd.Function):
    """Batch normalisation with vector ε on torch's own kernels.

    y = (x − μ)/√(v + ε)·w + b. The backward kernel reads 1/√(v + ε) from what the forward saved, so a
    vector ε costs nothing there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: Tensor) -> Tensor:
        invstd = torch.rsqrt(var + eps)
        if x.is_cuda:
            out = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
        else:
            # In evaluation mode the kernel computes (x − mean)/√(var + 0)·w + b in one pass.
            out, _, _ = torch.ops.aten.native_batch_norm(x, weight, bias, mean, invstd**-2, False, 0.0, 0.0)
        ctx.save_for_backward(x, weight, mean, invstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        if x.is_cuda and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return _channels_last_backward(grads[0], x, weight, mean, invstd)
        gx, gw, gb = torch.ops.aten.native_batch_norm_backward(
            grads[0].contiguous(), x, weight, None, None, mean, invstd, True, 0.0, [True, True, True]
        )
        return gx, gw, gb, None, None, None


def group_normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x − μ)/√(v + ε)·w + b by groups, with one ε for each, and μ and 1/√(v + ε), both (samples, groups).

    Groups of samples are taken for the channels of one batch, whose mean and variance and whose normalisation by given
    ones torch does fast.
    """
    samples, channels, groups = x.shape[0], x.shape[1], len(eps)
    mean, var = torch.batch_norm_update_stats(x.reshape(1, samples * groups, -1), None, None, 0.0)
    invstd = torch.rsqrt(var.reshape(samples, groups) + eps)
    means, factors = (part.reshape(-1).repeat_interleave(channels // groups) for part in (mean, invstd))
    given = (weight.repeat(samples), bias.repeat(samples), means)
    rows = x.reshape(1, samples * channels, -1)
    if x.is_cuda:
        out = torch.batch_norm_elemt(rows, *given, factors, 0.0)
    else:
        out, _, _ = torch.ops.aten.native_batch_norm(rows, *given, factors**-2, False, 0.0, 0.0)
    # Not a view of `out`: autograd lets nobody change a view in place that a function of ours has made.
    return torch.ops.aten._unsafe_view(out, x.shape), mean.reshape(samples, groups), invstd


class _FusedGroupNorm(torch.autograd.Function):
    """Group normalisation with vector ε; torch's own way back reads 1/√(v + ε) from what the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Tensor:
        x = x.contiguous()
        out, mean, invstd = group_normalised(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, invstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        samples, channels = x.shape[:2]
        size = x[0, 0].numel()
        given = (mean, invstd, weight, samples, channels, size, mean.shape[1], [True, True, True])
        gx, gw, gb = torch.ops.aten.native_group_norm_backward(grads[0].contiguous(), x, *given)
        return gx, gw, gb, None


def _channelwise(vector: Tensor, rank: int) -> Tensor:
    return vector.reshape((1, -1) + (1,) * (rank - 2))


class VectorNorm(nn.Module):
    """Base: the affine parameters and a buffer `epsilon` with one number per normalisation group."""

    epsilon: Tensor

    def __init__(self, original: nn.Module, groups: int, like: Tensor) -> None:
        super().__init__()
        self.weight = getattr(original, "weight", None)
        self.bias = getattr(original, "bias", None)
        eps = float(original.eps)  # type: ignore[arg-type]
        self.register_buffer("epsilon", torch.full((groups,), eps, dtype=like.dtype, device=like.device))
        self.training = original.training


class VectorBatchNorm(VectorNorm):
    """BatchNorm1d/2d/3d with one ε per channel; `statistics` holds the last batch's mean and variance."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, like: Tensor) -> None:
        super().__init__(original, original.num_features, like)
        self.momentum = 0.1 if original.momentum is None else float(original.momentum)
        self.track = original.running_mean is not None
        if self.track:
            assert original.running_mean is not None
            assert original.running_var is not None
            self.register_buffer("running_mean", original.running_mean.clone())
            self.register_buffer("running_var", original.running_var.clone())
        self.fused = True
        self.statistics: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over batch and space."""
        if not self.training and self.track:
            return self._plain(x, self.running_mean, self.running_var)
        dims = [0, *range(2, x.dim())]
        if x.numel() == x.shape[1]:
            raise DataError(
                "A batch normalisation was given a single value per channel, which has no variance: give every "
                "client at least two samples and batches of two or more, or use GroupNorm."
            )
        if self.fused and self.weight is not None and self.bias is not None and torch.is_grad_enabled():
            with torch.no_grad():
                # Three times faster than torch.var_mean on a CPU, and the same bits.
                mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
            out = _FusedTrainingNorm.apply(x, self.weight, self.bias, mean, var, self.epsilon)  # type: ignore[no-untyped-call]
        else:
            var, mean = torch.var_mean(x, dims, correction=0)
            out = self._plain(x, mean, var)
        if self.training and self.track:
            count = x.numel() // x.shape[1]
            unbiased = var.detach() * (count / max(count - 1, 1))
            self.statistics.append((mean.detach(), unbiased))
        return out  # type: ignore[no-any-return]

    def _plain(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        factor = torch.rsqrt(var + self.epsilon)
        if self.weight is not None:
            factor = factor * self.weight
        shift = -mean * factor
        if self.bias is not None:
            shift = shift + self.bias
        return x * _channelwise(factor, x.dim()) + _channelwise(shift, x.dim())

    def take_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased variance over the calls since the last time, and forget them.

        A layer that ran in evaluation mode answers with its running statistics, one that was not called
        with those of a fresh layer.
        """
        if not self.training:
            self.statistics.clear()
            return self.running_mean.clone(), self.running_var.clone()
        if not self.statistics:
            return torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
        means, variances = zip(*self.statistics, strict=True)
        self.statistics.clear()
        if len(means) == 1:
            return means[0], variances[0]
        return torch.stack(means).mean(0), torch.stack(variances).mean(0)


class VectorGroupNorm(VectorNorm):
    """GroupNorm and InstanceNorm with one ε per group."""

    def __init__(self, original: nn.Module, groups: int, like: Tensor, *, channels: int) -> None:
        super().__init__(original, groups, like)
        self.groups = groups
        self.channels = channels
        self.fused = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over each group's channels and space."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise TraceError(
                f"A normalisation of {self.channels} channels was given a tensor of shape {tuple(x.shape)}; "
                "it takes (batch, channels, …)."
            )
        if self.fused and self.weight is not None and self.bias is not None and torch.is_grad_enabled():
            # Where no veil gives each group an ε of its own, torch's own is the same function, and faster. (To look at
            # them would have a GPU wait.)
            if not x.is_cuda and len(alike := set(self.epsilon.tolist())) == 1:
                return torch.group_norm(x, self.groups, self.weight, self.bias, alike.pop())
            return _FusedGroupNorm.apply(x, self.weight, self.bias, self.epsilon)  # type: ignore[no-any-return,no-untyped-call]
        grouped = x.reshape(x.shape[0], self.groups, -1)
        var, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        out = ((grouped - mean) * torch.rsqrt(var + self.epsilon[None, :, None])).reshape(x.shape)
        if self.weight is not None:
            out = out * _channelwise(self.weight, x.dim())
        return out if self.bias is None else out + _channelwise(self.bias, x.dim())


class VectorLayerNorm(VectorNorm):
    """LayerNorm with its ε as a tensor."""

    def __init__(self, original: nn.LayerNorm, like: Tensor) -> None:
        super().__init__(original, 1, like)
        self.dims = tuple(range(-len(original.normalized_shape), 0))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimensions."""
        var, mean = torch.var_mean(x, self.dims, correction=0, keepdim=True)
        out = (x - mean) * torch.rsqrt(var + self.epsilon)
        if self.weight is not None:
            out = out * self.weight
        return out if self.bias is None else out + self.bias


def _replacement(module: nn.Module, like: Tensor) -> VectorNorm | None:
    kind = NORM_KINDS.get(type(module))  # a subclass may compute anything and stays as it is
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and kind == "batch":
        return VectorBatchNorm(module, like)
    if isinstance(module, nn.GroupNorm) and kind == "group":
        return VectorGroupNorm(module, module.num_groups, like, channels=module.num_channels)
    if isinstance(module, nn.LayerNorm) and kind == "layer":
        return VectorLayerNorm(module, like)
    if kind == "instance" and not getattr(module, "track_running_stats", False):
        features = int(module.num_features)  # type: ignore[arg-type]
        return VectorGroupNorm(module, features, like, channels=features)
    return None


def with_vector_norms(model: nn.Module) -> nn.Module:
    """A copy of `model` whose normalisation layers take a vector ε (the value stays the same)."""
    twin = twin_of(model)
    floating = (tensor for tensor in (*twin.parameters(), *twin.buffers()) if tensor.is_floating_point())
    like = next(floating, torch.empty(0))
    made: dict[int, VectorNorm] = {}
    norms = [(path, twin.get_submodule(path)) for path in norm_paths(twin)]
    for path, module in norms:
        if id(module) not in made:
            replacement = _replacement(module, like)
            if replacement is None:
                continue
            made[id(module)] = replacement
        parent, _, attribute = path.rpartition(".")
        if not path:
            return made[id(module)]
        setattr(twin.get_submodule(parent), attribute, made[id(module)])
    return twin


def batch_norms(model: nn.Module) -> list[tuple[str, VectorBatchNorm]]:
    """Every batch normalisation that tracks statistics, by path."""
    return [(p, m) for p, m in model.named_modules() if isinstance(m, VectorBatchNorm) and m.track]


class TappedLinear(nn.Linear):
    """A linear layer that remembers its last input, from which a client computes α."""

    tap: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Wx + b, remembering x."""
        self.tap = input
        return F.linear(input, self.weight, self.bias)


_BUFFER = "buffer."


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
        parameters, epsilon, statistics = (part.to(device=device, dtype=dtype) for part in parts)
        buffers = {name: value.to(device=device) for name, value in self.buffers.items()}
        return Weights(parameters, epsilon, statistics, buffers)

    def named(self, prefix: str = "") -> dict[str, Tensor]:
        """All values by the names under which they are stored, behind a prefix."""
        own = {"parameters": self.parameters, "epsilon": self.epsilon, "statistics": self.statistics}
        own |= {f"{_BUFFER}{name}": value for name, value in self.buffers.items()}
        return {f"{prefix}{name}": value for name, value in own.items()}

    @staticmethod
    def from_named(tensors: Mapping[str, Tensor], prefix: str = "") -> Weights:
        """The values that were stored by name."""
        parameters, epsilon, statistics = (tensors[f"{prefix}{one}"] for one in ("parameters", "epsilon", "statistics"))
        start = f"{prefix}{_BUFFER}"
        buffers = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        return Weights(parameters, epsilon, statistics, buffers)


@dataclass(frozen=True, eq=False)
class Architecture:
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

    @functools.cached_property
    def frozen(self) -> frozenset[str]:
        """The parameters that the model's author froze."""
        masks = self.parameters.split(self.trainable.cpu())
        return frozenset(name for name, mask in masks.items() if not bool(mask.any()))

    @functools.cached_property
    def statistics_sizes(self) -> list[tuple[str, int]]:
        """Channels of every batch norm with running statistics, by path."""
        return [(path, len(norm.running_mean)) for path, norm in batch_norms(self.skeleton)]

    @functools.cached_property
    def norm_reads(self) -> Tensor:
        """For every ε of a normalisation layer, the class that it reads; class 0, which is 1, where it reads none."""
        return flatten(
            [self._read(path, len(norm.epsilon)) for path, norm in self._epsilon_norms(self.skeleton)],
            like=self._read("", 0),
        )

    @functools.cached_property
    def statistics_reads(self) -> tuple[Tensor, Tensor]:
        """The same for every running mean and variance; and which of them are variances."""
        reads = [self._read(path, size) for path, size in self.statistics_sizes]
        marks = [part for read in reads for part in (torch.zeros_like(read), torch.ones_like(read))]
        both = [part for read in reads for part in (read, read)]
        nothing = self._read("", 0)
        return flatten(both, like=nothing), flatten(marks, like=nothing).bool()

    @functools.cached_property
    def followed(self) -> tuple[Sources, Sources]:
        """Where every ε, and every running mean and variance, comes from under a secret order."""
        assert self.table is not None
        assert self.table.symmetry is not None
        epsilon = [self._read(path, len(norm.epsilon)) for path, norm in self._epsilon_norms(self.skeleton)]
        statistics = [self._read(path, size) for path, size in self.statistics_sizes for _ in range(2)]
        symmetry, device = self.table.symmetry, self.trainable.device
        return following(epsilon, symmetry, device), following(statistics, symmetry, device)

    def _read(self, path: str, size: int) -> Tensor:
        assert self.table is not None
        read = next((norm.read for norm in self.table.norms if norm.path == path), None)
        return torch.zeros(size, dtype=torch.int64, device=self.trainable.device) if read is None else read

    @property
    def statistics_size(self) -> int:
        """How many numbers a mean and a variance for each of those channels take."""
        return sum(2 * size for _, size in self.statistics_sizes)

    @functools.cached_property
    def frozen_statistics(self) -> bool:
        """Whether some batch norm runs in evaluation mode, so that clients need running statistics."""
        return any(not norm.training for _, norm in batch_norms(self.skeleton))

    def new_skeleton(self, *, fused: bool = True) -> nn.Module:
        """A fresh skeleton; `fused` picks kernels that autograd can run but torch.func cannot."""
        twin = twin_of(self.skeleton)
        for module in twin.modules():
            if isinstance(module, (VectorBatchNorm, VectorGroupNorm)):
                module.fused = fused
        return twin

    def epsilon_norms(self, module: nn.Module) -> list[VectorNorm]:
        """The normalisation layers of `module` in the architecture's order."""
        return [norm for _, norm in self._epsilon_norms(module)]

    def _epsilon_norms(self, module: nn.Module) -> list[tuple[str, VectorNorm]]:
        return [(path, norm) for path in self.norms if isinstance(norm := module.get_submodule(path), VectorNorm)]

    def to(self, *, device: torch.device) -> Architecture:
        """The same architecture on another device."""
        skeleton, trainable = twin_of(self.skeleton).to(device), self.trainable.to(device)
        table = None if self.table is None else self.table.to(device)
        return replace(self, skeleton=skeleton, trainable=trainable, table=table)


def draw(
    model: nn.Module, example: Tensor, *, traced: bool, family: str = "scale", streams: bool = False
) -> tuple[Architecture, Weights]:
    """Separate `model` into its architecture (public) and its weights (the server's).

    `example` is a batch of inputs of the right shape; only its shape and type matter. `family`: the symmetries for
    which it is traced; `streams`: with rotations of residual streams.
    """
    # A copy: a network may keep something of what it is shown first, and nothing has been shown to this one.
    table = trace(twin_of(model), example, family=family, streams=streams) if traced else None
    prepared = with_vector_norms(model)
    if table is not None and table.head is not None:
        # The class changes, parameters and names stay: every holder of the layer keeps its reference.
        prepared.get_submodule(table.head.path).__class__ = TappedLinear
    named = dict(prepared.named_parameters())
    architecture = Architecture(
        skeleton=_emptied(prepared),
        input_shape=tuple(example.shape[1:]),
        input_dtype=example.dtype,
        parameters=Layout(tuple((name, tuple(value.shape)) for name, value in named.items())),
        trainable=torch.cat(
            [torch.full((value.numel(),), value.requires_grad) for value in named.values()]
            or [torch.empty(0, dtype=torch.bool)]
        ),
        norms=tuple(path for path, norm in prepared.named_modules() if isinstance(norm, VectorNorm)),
        table=table,
    )
    return architecture, weights_of(prepared, architecture)


def weights_of(prepared: nn.Module, architecture: Architecture) -> Weights:
    """Read a prepared module's values."""
    statistics = [part for _, norm in batch_norms(prepared) for part in (norm.running_mean, norm.running_var)]
    own = _norm_buffers(prepared)
    return Weights(
        parameters=flatten([value.detach() for value in prepared.parameters()]),
        epsilon=flatten([norm.epsilon for norm in architecture.epsilon_norms(prepared)]),
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
    _load(list(module.parameters()), flat)


def load_epsilon(architecture: Architecture, module: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector of ε into a module's normalisation layers."""
    _load([norm.epsilon for norm in architecture.epsilon_norms(module)], flat)


def load_statistics(module: nn.Module, flat: Tensor) -> None:
    """Copy a flat vector of running means and variances into a module's batch norms."""
    _load([part for _, norm in batch_norms(module) for part in (norm.running_mean, norm.running_var)], flat)


def _load(targets: list[Tensor], flat: Tensor) -> None:
    if targets:
        parts = torch.split(flat, [target.numel() for target in targets])
        with torch.no_grad():
            torch._foreach_copy_(targets, [p.view(t.shape) for t, p in zip(targets, parts, strict=True)])


def assemble(architecture: Architecture, weights: Weights) -> nn.Module:
    """A working model from architecture and weights."""
    module = architecture.new_skeleton().to(weights.parameters.device, weights.parameters.dtype)
    load_parameters(module, weights.parameters)
    load_epsilon(architecture, module, weights.epsilon)
    load_statistics(module, weights.statistics)
    for name, value in weights.buffers.items():
        module.get_buffer(name).copy_(value)
    return module


def _emptied(prepared: nn.Module) -> nn.Module:
    twin = twin_of(prepared)
    own = _norm_buffers(twin)
    with torch.no_grad():
        for tensors in (twin.parameters(), (b for n, b in twin.named_buffers() if n in own)):
            for tensor in tensors:
                tensor.zero_()
    for parameter in twin.parameters():
        parameter.requires_grad_(True)
    return twin


LOWEST, HIGHEST = 1e-6, 1e-4


def draw_secret_epsilon(weights: Weights, stream: SecretStream) -> None:
    """Give every normalisation group its own ε, log-uniform on [1e-6, 1e-4]; once per model."""
    logs = math.log(LOWEST) + stream.uniform(weights.epsilon.numel()) * math.log(HIGHEST / LOWEST)
    weights.epsilon.copy_(torch.exp(logs))
