"""Which samples a client trains on in a round: a function of seed, client and round alone.

Nothing is remembered between rounds, so a resumed run draws the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 63) - 1


def mixed_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers (splitmix64 over each)."""
    state = 0
    for part in parts:
        state = (state ^ (part & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK


@dataclass(frozen=True)
class Batches:
    """Batches of `size` samples (0: all), without replacement within a local epoch.

    A tail smaller than `size` is left out of its epoch; the next epoch shuffles anew.
    """

    size: int
    seed: int

    def batch_size(self, samples: int) -> int:
        """The batch size of a client with `samples` samples."""
        return samples if self.size == 0 else min(self.size, samples)

    def indices(self, *, client: int, samples: int, step: int) -> Tensor:
        """The sample numbers of local step `step`."""
        size = self.batch_size(samples)
        if size == samples:
            return torch.arange(samples)
        per_epoch = samples // size
        epoch, position = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, client, epoch))
        return torch.randperm(samples, generator=generator)[position * size : (position + 1) * size]
