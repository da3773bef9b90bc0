"""Extraction by linear probe: a client fits a head of its own on the features of the model it received.

A veil multiplies every feature by a secret positive number and covers the head. The features themselves stay
in the open up to those numbers, and a regression on standardised features does not see them: ĥ_j = h_j/r_j
has the same standardised value as h_j. So whatever the head hides can be learned again from a few labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink import Blueprint, Broadcast
from fedveil.downlink.architecture import VectorBatchNorm
from fedveil.errors import DataError, NotApplicableError, unknown_name
from fedveil.work.gradients import prepare

Fit = Literal["ridge", "logistic"]
FITS = ("ridge", "logistic")
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class Readings:
    """What the last linear layer of a received model reads (ĥ, samples × features) and gives (ŷ), in float64."""

    features: Tensor
    outputs: Tensor
    bias: bool

    @property
    def alpha(self) -> Tensor:
        """α = Σ_j ĥ_j, + 1 if the last layer has a bias: the size of the head noise on each sample."""
        return self.features.sum(1) + (1.0 if self.bias else 0.0)

    def rows(self, count: int) -> Readings:
        """The first `count` samples."""
        return Readings(self.features[:count], self.outputs[:count], self.bias)

    def to(self, device: torch.device) -> Readings:
        """The same on another device."""
        return Readings(self.features.to(device), self.outputs.to(device), self.bias)


def received(blueprint: Blueprint, broadcast: Broadcast) -> nn.Module:
    """The model as a client holds it; batch norms use the batch where no running statistics were sent."""
    module = blueprint.new_skeleton().to(broadcast.parameters.device, broadcast.parameters.dtype)
    prepare(blueprint, module, broadcast)
    module.eval()
    for one in module.modules():
        if isinstance(one, VectorBatchNorm) and not broadcast.statistics.numel():
            one.train()
    return module


def head_path(blueprint: Blueprint) -> str:
    """Where the last linear layer is: as traced, or the last one of the architecture."""
    if blueprint.table is not None and blueprint.table.head is not None:
        return blueprint.table.head.path
    linear: list[str] = [path for path, one in blueprint.skeleton.named_modules() if isinstance(one, nn.Linear)]
    if not linear:
        raise NotApplicableError("no nn.Linear layer in the model: there is no head to probe or to calibrate")
    return linear[-1]


def read_head(blueprint: Blueprint, module: nn.Module, x: Tensor) -> Readings:
    """Run inputs through a received model and keep what its last linear layer reads and gives."""
    layer = module.get_submodule(head_path(blueprint))
    assert isinstance(layer, nn.Linear)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((args[0].double(), output.double()))

    # A hook on the call itself sees the input past transitional multipliers, as the layer does.
    handle = layer.register_forward_hook(keep)
    try:
        with torch.no_grad():
            for part in torch.split(x, _CHUNK):
                module(part)
    finally:
        handle.remove()
    features = torch.cat([one.flatten(1) for one, _ in seen])
    return Readings(features, torch.cat([one for _, one in seen]), layer.bias is not None)


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear head on standardised features: scores = ((ĥ − mean)/scale)·weight + offset."""

    mean: Tensor
    scale: Tensor
    weight: Tensor
    offset: Tensor
    penalty: float

    def __call__(self, features: Tensor) -> Tensor:
        """Class scores of features, samples × outputs."""
        return _standard(features, self.mean, self.scale) @ self.weight + self.offset


def fit_probe(features: Tensor, labels: Tensor, *, outputs: int, fit: Fit = "ridge") -> Probe:
    """A probe from labelled features; the ridge penalty is chosen by the leave-one-out error.

    Ridge: min ‖Z·w + b − onehot‖² + λ‖w‖² over Z, the standardised features. Logistic: cross-entropy with the
    same penalty, by L-BFGS.
    """
    if fit not in FITS:
        raise unknown_name("probe", fit, FITS)
    if len(features) != len(labels) or not len(labels):
        raise DataError(f"A probe needs as many labels as samples, and at least one: {len(features)}, {len(labels)}.")
    features = features.double()
    mean = features.mean(0)
    spread = features.std(0, unbiased=False)
    # A feature that is constant on the labelled samples says nothing; one would divide by nothing.
    scale = torch.where(spread > 1e-9 * spread.max().clamp_min(1e-300), spread, torch.inf)
    inputs = _standard(features, mean, scale)
    targets = F.one_hot(labels, outputs).double()
    penalty = _best_penalty(inputs, targets)
    weight, offset = _ridge(inputs, targets, penalty)
    if fit == "logistic":
        weight, offset = _logistic(inputs, labels, weight, offset, penalty=penalty)
    return Probe(mean, scale, weight, offset, penalty)


def linear_probe(
    blueprint: Blueprint,
    broadcast: Broadcast,
    *,
    inputs: Tensor,
    labels: Tensor,
    queries: Tensor,
    fit: Fit = "ridge",
) -> Tensor:
    """Scores (queries × outputs) of a head fitted to a client's own labelled inputs on the received features."""
    module = received(blueprint, broadcast)
    own = read_head(blueprint, module, inputs)
    probe = fit_probe(own.features, labels, outputs=own.outputs.shape[1], fit=fit)
    return probe(read_head(blueprint, module, queries).features)


def _standard(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (features.double() - mean) / scale


def _ridge(inputs: Tensor, targets: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    offset = targets.mean(0)
    gram = inputs @ inputs.T + penalty * len(inputs) * torch.eye(len(inputs)).to(inputs)
    return inputs.T @ torch.linalg.solve(gram, targets - offset), offset


def _best_penalty(inputs: Tensor, targets: Tensor) -> float:
    """The λ of the least leave-one-out error, e_i/(1 − H_ii) with H the hat matrix."""
    values, vectors = torch.linalg.eigh(inputs @ inputs.T)
    centred = targets - targets.mean(0)
    turned = vectors.T @ centred
    errors = []
    for penalty in PENALTIES:
        shrunk = values.clamp_min(0.0) / (values.clamp_min(0.0) + penalty * len(inputs))
        left = 1.0 - (vectors.square() @ shrunk) - 1.0 / len(inputs)
        residual = centred - vectors @ (shrunk[:, None] * turned)
        errors.append(float((residual / left.clamp_min(1e-6)[:, None]).square().sum()))
    return PENALTIES[min(range(len(PENALTIES)), key=lambda k: errors[k])]


def _logistic(
    inputs: Tensor, labels: Tensor, weight: Tensor, offset: Tensor, *, penalty: float
) -> tuple[Tensor, Tensor]:
    weight, offset = weight.clone().requires_grad_(), offset.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([weight, offset], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(inputs @ weight + offset, labels) + 0.5 * penalty * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), offset.detach()
