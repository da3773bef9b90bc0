"""Who takes part in a round: a function of the seed and the round."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedveil.errors import ConfigError
from fedveil.shapes import MOST
from fedveil.work.batches import mixed_seed

_PURPOSE = 0xC0408


@dataclass(frozen=True)
class Cohort:
    """`size` of `clients` clients, drawn without replacement each round (all of them by default)."""

    clients: int
    size: int
    seed: int

    @staticmethod
    def of(clients: int, *, cohort: float | None, seed: int) -> Cohort:
        """A cohort given as a fraction (0 < f ≤ 1, not the whole number 1) or as a count."""
        seed %= MOST  # clients are told it, to draw cohorts for themselves
        if cohort is None:
            return Cohort(clients, clients, seed)
        fraction = isinstance(cohort, float) and cohort <= 1.0
        size = 0
        if math.isfinite(cohort):
            size = round(cohort * clients) if fraction else int(cohort)
        if not 1 <= size <= clients or not (fraction or size == cohort):
            raise ConfigError(
                f"cohort = {cohort} of {clients} clients leaves {max(size, 0)} per round: give a fraction in (0, 1] "
                f"(like 0.1) or a count from 1 to {clients}."
            )
        return Cohort(clients, size, seed)

    def most_participations(self, rounds: int) -> int:
        """The largest number of rounds that any one client takes part in."""
        if self.size == self.clients:
            return rounds
        counts = [0] * self.clients
        for round in range(rounds):
            for client in self.draw(round):
                counts[client] += 1
        return max(counts)

    def draw(self, round: int) -> tuple[int, ...]:
        """The round's clients, ascending."""
        if self.size == self.clients:
            return tuple(range(self.clients))
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, _PURPOSE, round))
        return tuple(sorted(torch.randperm(self.clients, generator=generator)[: self.size].tolist()))
