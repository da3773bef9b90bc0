"""Learning rates as a function of the round."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """lr·decay^round, or, with `cosine`, half a cosine from lr to 0 over the run."""

    lr: float
    decay: float = 1.0
    cosine: bool = False
    rounds: int = 1

    def at(self, round: int) -> float:
        """The learning rate of a round."""
        rate = self.lr * self.decay**round
        if self.cosine:
            rate *= 0.5 * (1.0 + math.cos(math.pi * round / self.rounds))
        return rate
