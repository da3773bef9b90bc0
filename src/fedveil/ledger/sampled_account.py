"""An account for secretly sampled records: rounds are counted, and ε follows from their number."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.ledger.account import Account
from fedveil.ledger.correlated import Covering
from fedveil.ledger.gaussian import mu_of
from fedveil.ledger.sampled import sampled_epsilon


@dataclass
class SampledAccount(Account):
    """Every client adds noise for itself, σ/C = `noise_multiplier`, to a batch drawn secretly with probability `rate`.

    Nobody but the client knows the batch, so that everybody else is the same adversary. `limit` is a
    number of rounds here, and `spent` counts them.
    """

    noise_multiplier: float = 0.0
    rate: float = 1.0
    delta: float = 1e-5

    def prices(
        self,
        covering: Covering,
        *,
        arrived: Collection[int] | None = None,
        revealed: Collection[tuple[int, int]] = (),
        published: bool = True,
    ) -> dict[str, NDArray[np.float64]]:
        """One round each."""
        return {name: np.ones(len(covering.members)) for name in self.adversaries}

    def worst(self, adversary: str) -> tuple[int, float]:
        """(client, the μ of a Gaussian mechanism with the same ε at `delta`) of whoever took part most often."""
        client = int(np.argmax(self.spent[adversary]))
        reached = self.epsilon(adversary, self.delta)
        return client, mu_of(reached, self.delta) if 0 < reached < math.inf else reached

    def epsilon(self, adversary: str, delta: float) -> float:
        """ε at δ of whoever took part most often, by privacy loss distributions, replace-one."""
        rounds = round(float(self.spent[adversary].max()))
        if rounds == 0:
            return 0.0
        return sampled_epsilon(
            noise_multiplier=self.noise_multiplier, sampling_rate=self.rate, rounds=rounds, delta=delta
        )
