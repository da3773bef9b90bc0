"""What the last layers of a model make of samples: activations, and how well these fit the samples' classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.errors import DataError

LAST_LAYERS = 3
_AT_ONCE = 256
_PENALTY = 0.3


def parts_of(count: int) -> list[Tensor]:
    """Rows in equal parts of bounded size, mixed.

    A norm that takes its statistics from the batch would otherwise mark candidates listed side by side, and a list
    that begins with the members would give them away whatever the model had learned.
    """
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return list(mixed.tensor_split(-(-count // _AT_ONCE)))


def reordered(results: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """What was computed in parts, in the order of the candidates."""
    return torch.cat(list(results))[torch.cat(list(parts)).argsort().to(results[0].device)]


def last_layers(model: nn.Module, x: Tensor) -> list[nn.Module]:
    """The last layers with a weight matrix or kernel, in the order in which a sample passes them."""
    passed: dict[nn.Module, None] = {}

    def note(layer: nn.Module, _: object, __: object) -> None:
        passed.pop(layer, None)
        passed[layer] = None

    layers = [part for part in model.modules() if _weighted(part)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            model(x[:2])
    finally:
        for hook in hooks:
            hook.remove()
    if not passed:
        raise DataError("The model has no layer with a weight matrix to look into: use the features 'outputs'.")
    return list(passed)[-LAST_LAYERS:]


def _weighted(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    return weight is not None and weight.ndim >= 2 and not isinstance(part, nn.Embedding)


def activations(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the last layers give: each as the next one reads it, the last one's as it is.

    Those with an extent in space are averaged over it.
    """
    read: dict[nn.Module, Tensor] = {}
    given: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        read[layer] = _pooled(args[0])
        given[:] = [_pooled(output)]

    layers = last_layers(model, x)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    parts, found = parts_of(len(x)), []
    try:
        with torch.no_grad():
            for rows in parts:
                model(x[rows.to(x.device)])
                found.append([*(read[layer] for layer in layers[1:]), *given])
    finally:
        for hook in hooks:
            hook.remove()
    return [reordered(results, parts) for results in zip(*found, strict=True)]


def class_fit(activation: Tensor, y: Tensor, *, classes: int) -> Tensor:
    """How well a linear map from all other candidates' activations to their classes tells each candidate's own.

    Leave-one-out ridge regression on standardised activations Z, with K = ZZᵀ/width + λ·1 and one-hot targets T:
    the residual of candidate i is [K⁻¹(T − T̄)]_i / [K⁻¹]_ii. Columns: −log of its square, the margin of the own
    class over the next, whether it comes first. Positive scales on the activations change nothing; who is a member
    is not used, so members and others are treated alike.
    """
    values, y = activation.double(), y.to(activation.device)
    spread, middle = torch.std_mean(values, dim=0, correction=0)
    varied = spread > 1e-9 * spread.max().clamp_min(1e-300)
    standard = (values - middle)[:, varied] / spread[varied]
    kernel = standard @ standard.T / max(1, standard.shape[1])
    inverse = torch.linalg.inv(kernel + _PENALTY * torch.eye(len(y)).to(kernel))
    targets = F.one_hot(y, classes).double()
    residual = inverse @ (targets - targets.mean(0)) / inverse.diagonal()[:, None]
    told = targets - residual
    own = told.gather(1, y[:, None])[:, 0]
    margin = own - told.scatter(1, y[:, None], -torch.inf).amax(1)
    return torch.stack([-residual.square().sum(1).clamp_min(1e-30).log(), margin, (margin > 0).double()], 1)


def _pooled(values: Tensor) -> Tensor:
    return values.flatten(2).mean(2) if values.ndim > 2 else values
