"""Group normalisation under vmap in one pass over memory each way.

With an ε of its own for every group there is no operation that vmap has a rule for, and taken apart it is a dozen
passes there and two dozen back. Here the rule is written down: samples under vmap are samples of one batch, and the
gradients of weight and bias come out one by one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import VectorGroupNorm, group_normalised

_Dims = tuple[int | None, ...]


def install(module: nn.Module) -> None:
    """Give group normalisations the faster class, in place; subclasses stay as they are."""
    for layer in module.modules():
        if type(layer) is VectorGroupNorm and layer.weight is not None and layer.bias is not None:
            layer.__class__ = _GroupNorm


def flat(value: Tensor, dim: int | None, size: int) -> Tensor:
    """The samples of a batched tensor (batch first, then what each sees as its own batch) in a row."""
    whole = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
    return whole.flatten(0, 1)


def split(value: Tensor, size: int) -> Tensor:
    """The samples' own batches back."""
    return value.reshape(size, -1, *value.shape[1:])


def _shared(*dims: int | None) -> None:
    """Refuse parameters that differ between samples: nothing here is computed for those."""
    if any(dim is not None for dim in dims):
        raise RuntimeError("These kernels take one network for all samples.")


class _GroupNorm(VectorGroupNorm):
    """The same layer on kernels for the whole of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over each group's channels and space."""
        fits = x.dim() > 2 and x.shape[1] == self.channels and x.dtype in (torch.float32, torch.float64)
        if not fits:
            return super().forward(x)
        return cast(Tensor, _Normalise.apply(x, self.weight, self.bias, self.epsilon)[0])  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    """The normalised tensor, and the means and 1/√(v + ε) it was normalised by."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return group_normalised(x.contiguous(), weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:2], *output[1:])

    @staticmethod
    def vmap(info: Any, dims: _Dims, x: Tensor, *parameters: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        _shared(*dims[1:])
        size = info.batch_size
        made = _Normalise.apply(flat(x, dims[0], size), *parameters)  # type: ignore[no-untyped-call]
        return tuple(split(part, size) for part in made), (0, 0, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_NormaliseBack.apply(grads[0], *ctx.saved_tensors), None)  # type: ignore[no-untyped-call]


class _NormaliseBack(torch.autograd.Function):
    """Gradients of input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, ...]:
        return _normalised_back(grad, x, weight, mean, invstd, each=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)  # nobody differentiates a gradient

    @staticmethod
    def vmap(
        info: Any, dims: _Dims, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        _shared(dims[2])
        size = info.batch_size
        rows, inputs, means, factors = (
            flat(value, dim, size) for value, dim in zip((grad, x, mean, invstd), (*dims[:2], *dims[3:]), strict=True)
        )
        gx, gw, gb = _normalised_back(rows, inputs, weight, means, factors, each=True)
        sums = (split(part, size).sum(1) for part in (gw, gb))
        return (split(gx, size), *sums), (0, 0, 0)


def _normalised_back(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, *, each: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; with `each`, the last two of every sample, (samples, channels)."""
    samples, channels = x.shape[:2]
    grad, x = grad.contiguous(), x.contiguous()
    size, groups = x[0, 0].numel(), mean.shape[1]
    given = (weight, samples, channels, size, groups, [True, not each, not each])
    gx, gw, gb = torch.ops.aten.native_group_norm_backward(grad, x, mean.contiguous(), invstd.contiguous(), *given)
    if each:
        rows, inputs = (value.reshape(samples * channels, size) for value in (grad, x))
        gb = rows.sum(1).reshape(samples, channels)
        products = torch.bmm(rows[:, None], inputs[:, :, None]).reshape(samples, channels)
        means, factors = (value.repeat_interleave(channels // groups, 1) for value in (mean, invstd))
        gw = (products - means * gb) * factors
    return gx, gw, gb
