"""Who takes part in a round: a function of public facts.

A seed is enough where nothing rests on who is asked with whom. Where masks or noise are shared it is not: whoever
picks the seed can try many, until some round asks one client and allies. There cohorts are `shuffled`: the rounds of
an epoch go around a table, `size` seats at a time, and who sits where follows from a beacon that nobody picks
(`protocol/directory.py`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from fedveil.errors import ConfigError
from fedveil.shapes import MOST
from fedveil.work.batches import mixed_seed

WINDOW = 64
"""The most rounds of one epoch."""
_PURPOSE = 0xC0408


@dataclass(frozen=True)
class Cohort:
    """`size` of `clients` clients, drawn without replacement each round (all of them by default)."""

    clients: int
    size: int
    seed: int
    shuffled: bool = False

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
        """The largest number of rounds that any one client takes part in, whatever the beacons of full epochs are."""
        if self.size == self.clients:
            return rounds
        if self.shuffled:
            stretches = (min(WINDOW, rounds - first) for first in range(0, rounds, WINDOW))
            return sum(-(-length * self.size // self.clients) for length in stretches)
        counts = [0] * self.clients
        for round in range(rounds):
            for client in self.draw(round):
                counts[client] += 1
        return max(counts)

    def draw(self, round: int, beacon: bytes = b"") -> tuple[int, ...]:
        """The round's clients, ascending; of shuffled cohorts those of the epoch with this beacon."""
        if self.size == self.clients:
            return tuple(range(self.clients))
        if self.shuffled:
            seated = _seated(self.clients, beacon)
            first = round * self.size
            return tuple(sorted(seated[seat % self.clients] for seat in range(first, first + self.size)))
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, _PURPOSE, round))
        return tuple(sorted(torch.randperm(self.clients, generator=generator)[: self.size].tolist()))


@lru_cache(maxsize=4)
def _seated(clients: int, beacon: bytes) -> tuple[int, ...]:
    """Who has which seat: a permutation that is as random as the beacon."""

    def drawn(client: int) -> bytes:
        return hashlib.sha256(b"fedveil seats 1" + beacon + struct.pack("<Q", client)).digest()

    return tuple(sorted(range(clients), key=drawn))
