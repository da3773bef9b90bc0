"""The plain downlink: clients receive the model as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedveil.downlink.architecture import Architecture, Weights
from fedveil.downlink.messages import Broadcast, Downlink, Mean, Recovered
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.secrets import SecretStream


@dataclass(frozen=True)
class Plain(Downlink):
    """No veil."""

    def caveats(self) -> Caveats:
        """The model is everybody's."""
        return Caveats(unprotected=(caveats.MODEL_OPEN,))

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> Unveiled:
        """Nothing to draw."""
        return Unveiled(architecture, weights)


@dataclass(frozen=True)
class Kept(Plain):
    """Nothing travels down but sums: the model lives with the clients."""

    def caveats(self) -> Caveats:
        """Clients have the model."""
        return Caveats(unprotected=(caveats.MODEL_WITH_CLIENTS,))


@dataclass(frozen=True, eq=False)
class Unveiled:
    """A round without a veil."""

    architecture: Architecture
    weights: Weights

    def broadcast(self) -> Broadcast:
        """The model itself."""
        weights, nothing = self.weights, self.weights.parameters.new_empty(0)
        statistics = weights.statistics if self.architecture.frozen_statistics else torch.empty(0)
        return Broadcast(weights.parameters.clone(), weights.epsilon.clone(), statistics.clone(), nothing, None)

    def recover(self, mean: Mean) -> Recovered:
        """The mean gradient is the gradient."""
        return Recovered(
            mean.gradients[0].to(torch.float64),
            float(mean.values[0]) if mean.values.numel() else None,
            mean.statistics.to(torch.float64),
            None,
        )
