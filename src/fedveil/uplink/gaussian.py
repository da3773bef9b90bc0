"""Gaussian noise on a vector, from fresh secret randomness or from a seed that two clients share."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.secrets import SecretStream


def add_fresh(vector: Tensor, *, scale: float, stream: SecretStream) -> None:
    """vector + N(0, scale²) per coordinate, in place.

    On a GPU, simulated secrets (those that follow from a seed) come from PyTorch's generator there;
    real ones always from the keyed stream.
    """
    if vector.device.type != "cpu" and stream.simulation:
        generator = torch.Generator(device=vector.device)
        generator.manual_seed(int.from_bytes(stream.bytes(8), "big") >> 1)
        vector.add_(
            torch.randn(vector.shape, generator=generator, device=vector.device, dtype=vector.dtype), alpha=scale
        )
        return
    add_seeded(vector, scale=scale, seed=stream.bytes(32))


def add_seeded(vector: Tensor, *, scale: float, seed: bytes) -> None:
    """vector + scale × the seed's standard normal numbers, in place."""
    from fedveil.crypto.stream import add_gaussian

    if vector.device.type == "cpu":
        add_gaussian(vector.numpy(), seed, scale=scale)
        return
    noise = torch.zeros(vector.shape, dtype=vector.dtype)
    add_gaussian(noise.numpy(), seed, scale=scale)
    vector += noise.to(vector.device)
