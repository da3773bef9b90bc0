"""Head calibration: taking the head noise off a received model.

A client sees ŷ = y + α·r with r_i = γ_{s(i)}·a_i; α, a and the groups s are known to it, γ is not. Whatever
tells it something about y tells it γ, by least squares over samples k and the outputs i of each group:

    γ̂_s = Σ_k Σ_{i∈s} α_k·a_i·(ŷ_ki − expected_ki) / Σ_k Σ_{i∈s} (α_k·a_i)²

`expected` is the target of a labelled sample, or the classes' share in unlabelled ones. Two ways need less still:
the sum of the outputs (one γ), and the weights alone (no data at all).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.attacks.probe import Readings, head_path, read_head, received
from fedveil.downlink import Blueprint, Broadcast, PublicHead
from fedveil.errors import ConfigError, DataError

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def targets_of(labels: Tensor, *, outputs: int, target_scale: float = 1.0) -> Tensor:
    """What a perfectly trained model would say: M at the true class, 0 elsewhere; regression targets as they are."""
    if labels.is_floating_point():
        return labels.double()
    return target_scale * F.one_hot(labels, outputs).double()


def uncovered(readings: Readings, noise: Tensor) -> Tensor:
    """ŷ − α·r̂."""
    return readings.outputs - readings.alpha[:, None] * noise


def from_expected(readings: Readings, expected: Tensor, head: PublicHead) -> Tensor:
    """r̂ by least squares from what the outputs are expected to be (it broadcasts to samples × outputs)."""
    if not len(readings.outputs):
        raise DataError("Calibration needs at least one sample; it was given none.")
    vector = head.vector.double()
    factor = readings.alpha[:, None] * vector
    error = readings.outputs - expected
    zeros = vector.new_zeros(head.count)
    above = zeros.index_add(0, head.groups, (factor * error).sum(0))
    below = zeros.index_add(0, head.groups, factor.square().sum(0))
    gamma = above / below.clamp_min(1e-300)
    return gamma[head.groups] * vector


def from_balance(readings: Readings, head: PublicHead, *, shares: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Without a label: on average an output is its class's share of the data (all alike, unless told)."""
    outputs = readings.outputs.shape[1]
    share = torch.full((outputs,), 1.0 / outputs).to(readings.outputs) if shares is None else shares.double()
    return from_expected(readings, scale * share, head)


def from_total(readings: Readings, head: PublicHead, *, total: float = 1.0) -> Tensor:
    """Without a label, one γ: the outputs of a model trained on one-hot targets sum to M, so Σŷ = M + α·γ·Σa.

    One input is enough. With more than one γ this is one equation for several unknowns, and refused.
    """
    if head.count != 1:
        raise ConfigError(
            f"The sum of the outputs gives one secret number away, and this head noise has {head.count}: use "
            "from_balance or from_expected."
        )
    vector = head.vector.double()
    factor = readings.alpha * vector.sum()
    left = readings.outputs.sum(1) - total
    return (factor @ left) / factor.square().sum().clamp_min(1e-300) * vector


def from_weights(weight: Tensor, bias: Tensor | None, head: PublicHead) -> Tensor:
    """Without any data: r is added to a whole row of weights whose own values scatter about zero.

    Ŵ_ij = W_ij/r_j + r_i, so the median of a row is about r_i; rows of one group are weighted by a.
    """
    rows = weight.double() if bias is None else torch.cat([weight, bias[:, None]], 1).double()
    middle = rows.median(1).values
    vector = head.vector.double()
    zeros = vector.new_zeros(head.count)
    above = zeros.index_add(0, head.groups, vector * middle)
    below = zeros.index_add(0, head.groups, vector.square())
    return (above / below)[head.groups] * vector


def without_noise(blueprint: Blueprint, module: nn.Module, noise: Tensor) -> nn.Module:
    """A copy of a received model with r̂ off its last layer: (Ŵ − r̂·1ᵀ)·ĥ + b̂ − r̂ = ŷ − α·r̂, as a model."""
    twin = copy.deepcopy(module)
    layer = twin.get_submodule(head_path(blueprint))
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.sub_(noise.to(layer.weight)[:, None])
        if layer.bias is not None:
            layer.bias.sub_(noise.to(layer.bias))
    return twin


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What a client makes of a model under head noise: outputs for its queries, by how it came to them.

    `labelled[n]` used n labelled samples, `unlabelled[n]` the same n inputs without their labels by the balance of
    classes, `total[n]` by the sum of the outputs (one γ only); `weights` used no data. `received` are the outputs
    as they are.
    """

    received: Tensor
    weights: Tensor
    labelled: Mapping[int, Tensor]
    unlabelled: Mapping[int, Tensor]
    total: Mapping[int, Tensor]


def head_calibration(
    blueprint: Blueprint,
    broadcast: Broadcast,
    *,
    inputs: Tensor,
    labels: Tensor | None,
    queries: Tensor,
    counts: Sequence[int] = COUNTS,
    target_scale: float = 1.0,
    module: nn.Module | None = None,
) -> Calibrated:
    """Outputs for `queries` after calibration on the first n of a client's own samples, for every n there is.

    `target_scale` is the square loss's M, which every client is told; `labels` may be missing. `module` is the
    received model where the client has prepared it already.
    """
    head = broadcast.head
    if head is None:
        raise ConfigError("This broadcast has no head noise: its outputs are the true ones, and nothing is left to do.")
    module = received(blueprint, broadcast) if module is None else module
    readings = (read_head(blueprint, module, one) for one in (inputs, queries))
    own, asked = (one.to(head.vector.device) for one in readings)
    layer = module.get_submodule(head_path(blueprint))
    assert isinstance(layer, nn.Linear)
    rows = [None if one is None else one.detach().to(head.vector.device) for one in (layer.weight, layer.bias)]
    assert rows[0] is not None
    ways = _ways(head, labels, outputs=own.outputs.shape[1], target_scale=target_scale)
    found: dict[str, dict[int, Tensor]] = {"labelled": {}, "unlabelled": {}, "total": {}}
    for count in sorted({min(one, len(inputs)) for one in counts}):
        for name, noise in ways.items():
            found[name][count] = uncovered(asked, noise(own.rows(count)))
    return Calibrated(asked.outputs, uncovered(asked, from_weights(rows[0], rows[1], head)), **found)


def _ways(
    head: PublicHead, labels: Tensor | None, *, outputs: int, target_scale: float
) -> dict[str, Callable[[Readings], Tensor]]:
    """How r̂ can be found from the first samples, by name."""
    ways: dict[str, Callable[[Readings], Tensor]] = {}
    if labels is not None:
        targets = targets_of(labels, outputs=outputs, target_scale=target_scale).to(head.vector.device)
        ways["labelled"] = lambda part: from_expected(part, targets[: len(part.outputs)], head)
    if labels is None or not labels.is_floating_point():
        ways["unlabelled"] = lambda part: from_balance(part, head, scale=target_scale)
        if head.count == 1:
            ways["total"] = lambda part: from_total(part, head, total=target_scale)
    return ways
