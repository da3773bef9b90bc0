"""Noise added once, by a server that is trusted with everything it receives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.decomposed import client_noise, simulated_noise
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Assumed, RoundContext, Terms, planned
from fedveil.secrets import SecretStream
from fedveil.uplink.fixed_point import FixedPoint
from fedveil.uplink.grid import add_noise
from fedveil.uplink.grid_noise import gridded
from fedveil.uplink.noise_plan import NoisePlan


@dataclass(frozen=True)
class PlannedCentral:
    """The noise of a plan with layout "sum": the exact sum of uploads is rounded to the grid and gets integer noise."""

    plan: NoisePlan

    assumed_noise = None

    def caveats(self) -> Caveats:
        """It counts on announced sizes and on the server."""
        return Caveats(assumptions=(caveats.SIZES, caveats.TRUSTED))

    def on_sum(self, total: Tensor, context: RoundContext, terms: Terms, *, stream: SecretStream) -> Tensor:
        """Σ uploads + N(0, Σ residual variances), in whole steps; the weight is public and stays."""
        grid = gridded(self.plan, context, terms)
        codec = FixedPoint(grid.range * 2.0 ** (grid.addends - 1).bit_length(), 1)  # the same step, for a whole sum
        words = codec.encode(total)
        variance = float(planned(self.plan, context, terms.work).residual.sum())
        add_noise(words[:-1], variance=variance, step=codec.step, seed=stream.bytes(32))
        return torch.from_numpy(codec.decode(words)).to(total)

    def on_gradient(self, gradient: Tensor, context: RoundContext, *, stream: SecretStream) -> None:
        """Nothing more."""


@dataclass(frozen=True)
class AssumedCentral:
    """σ(ε, δ) of one round, for a mean of K client gradients each assumed to lie within a ball of radius S."""

    sigma: float
    sensitivity: float = 1.0

    plan = None

    @property
    def assumed_noise(self) -> Assumed:
        """σ of one round for S."""
        return Assumed(self.sigma, self.sensitivity)

    def caveats(self) -> Caveats:
        """Nobody clips."""
        return Caveats(assumptions=(caveats.UNCLIPPED,))

    def on_sum(self, total: Tensor, context: RoundContext, terms: Terms, *, stream: SecretStream) -> Tensor:
        """As it is: what is assumed is assumed of the true gradient."""
        return total

    def on_gradient(self, gradient: Tensor, context: RoundContext, *, stream: SecretStream) -> None:
        """Gaussian noise of deviation σ / K, in floating point: nothing is proven by it."""
        kinds, sigma = torch.zeros(len(gradient), dtype=torch.uint8), self.sigma / len(context.cohort)
        if gradient.device.type != "cpu" and stream.simulation:
            noise = simulated_noise(kinds, sigma=sigma, stream=stream, like=gradient)
        else:
            noise = torch.from_numpy(client_noise(kinds, sigma=sigma, seed=stream.bytes(32)))
        gradient += noise.to(gradient)
