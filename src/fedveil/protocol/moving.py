"""Moving a model by what a round has brought: the same step wherever the model lives."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Recovered
from fedveil.downlink.norms import batch_norms
from fedveil.protocol.optimiser import Optimiser


class Mover:
    """Steps parameters by the optimiser and running statistics by their momenta."""

    def __init__(self, blueprint: Blueprint, optimiser: Optimiser) -> None:
        self._blueprint = blueprint
        self._optimiser = optimiser
        self._momenta = _statistics_momenta(blueprint)

    def move(self, weights: Weights, velocity: Tensor, recovered: Recovered, *, round: int) -> None:
        """Change `weights` and `velocity` in place; frozen parameters stay."""
        before = weights.parameters.to(torch.float64)
        moved = self._optimiser.step(before, recovered.gradient * self._blueprint.trainable, velocity, round=round)
        weights.parameters.copy_(torch.where(self._blueprint.trainable, moved, before))
        if recovered.statistics.numel():
            running = weights.statistics.to(torch.float64)
            running += self._momenta * (recovered.statistics - running)
            weights.statistics.copy_(running)


def _statistics_momenta(blueprint: Blueprint) -> Tensor:
    parts = [
        torch.full((2 * len(norm.running_mean),), norm.momentum if norm.training else 0.0, dtype=torch.float64)
        for _, norm in batch_norms(blueprint.skeleton)
    ]
    device = blueprint.trainable.device
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.float64, device=device)
