"""The plain downlink: clients receive the model as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Broadcast, Mean, Recovered
from fedveil.ledger.releases import Release
from fedveil.secrets import SecretStream


@dataclass(frozen=True)
class Plain:
    """No veil."""

    traced = False

    def head_tensors(self, blueprint: Blueprint) -> int:
        """One gradient."""
        return 1

    def releases(self) -> tuple[Release, ...]:
        """Everything, as it is."""
        return (
            Release("train.parameters", "server", ("clients",), "the model's parameters"),
            Release("train.epsilon", "server", ("clients",), "ε of the normalisation layers"),
            Release("train.statistics", "server", ("clients",), "running statistics, where they are frozen"),
        )

    def veil(
        self, blueprint: Blueprint, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> Unveiled:
        """Nothing to draw."""
        return Unveiled(blueprint, weights)


@dataclass(frozen=True, eq=False)
class Unveiled:
    """A round without a veil."""

    blueprint: Blueprint
    weights: Weights

    def broadcast(self) -> Broadcast:
        """The model itself."""
        statistics = self.weights.statistics if self.blueprint.frozen_statistics else torch.empty(0)
        return Broadcast(self.weights.parameters.clone(), self.weights.epsilon.clone(), statistics.clone(), None)

    def recover(self, mean: Mean) -> Recovered:
        """The mean gradient is the gradient."""
        return Recovered(
            mean.gradients[0].to(torch.float64),
            float(mean.values[0]),
            mean.statistics.to(torch.float64),
            None,
        )
