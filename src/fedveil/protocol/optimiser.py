"""The server's optimiser: SGD on the recovered gradient, in float64."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.work.schedule import Schedule


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
