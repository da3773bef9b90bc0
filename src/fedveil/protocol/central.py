"""Noise added once, by a server that is trusted with everything it receives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedveil.protocol.parts import RoundContext, Terms, planned
from fedveil.uplink.plan import NoisePlan


@dataclass(frozen=True)
class PlannedCentral:
    """The noise of a plan with layout "sum", added to the aggregate."""

    plan: NoisePlan

    def scale(self, context: RoundContext, terms: Terms, *, weight: float) -> float:
        """√(Σ residual variances) / Σ n_k."""
        return math.sqrt(float(planned(self.plan, context, terms.work).residual.sum())) / weight


@dataclass(frozen=True)
class AssumedCentral:
    """σ(ε, δ) of one round, for a mean of K client gradients each assumed to lie within a ball of radius S."""

    sigma: float
    plan: NoisePlan | None = None

    def scale(self, context: RoundContext, terms: Terms, *, weight: float) -> float:
        """σ / K."""
        return self.sigma / len(context.cohort)
