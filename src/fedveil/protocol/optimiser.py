"""The server's optimiser: SGD on the recovered gradient, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.architecture import Blueprint, Weights, batch_norms
from fedveil.downlink.messages import Recovered
from fedveil.work.batches import Schedule


@dataclass(frozen=True)
class Optimiser:
    """v ← μ·v + g + λ·w;  w ← w − lr_t·v."""

    schedule: Schedule
    momentum: float = 0.0
    weight_decay: float = 0.0

    def step(self, parameters: Tensor, gradient: Tensor, velocity: Tensor, *, round: int) -> Tensor:
        """The moved parameters; `velocity` is updated in place."""
        velocity *= self.momentum
        velocity += gradient
        if self.weight_decay:
            velocity.add_(parameters, alpha=self.weight_decay)
        return parameters - self.schedule.at(round) * velocity


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
