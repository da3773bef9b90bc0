"""Dropout that depends on seed, client and round alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedveil.work.batches import mixed_seed


def has_random_layers(module: nn.Module) -> bool:
    """Whether a layer of it draws random numbers in a training pass (dropout, also inside torch's own layers)."""
    return any(_drops(one) for one in module.modules())


def _drops(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RReLU):
        return True
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0


@contextmanager
def seeded_dropout(module: nn.Module, *parts: int) -> Iterator[None]:
    """Seed whatever is drawn inside, and leave the global generators as they were.

    On a CPU this also covers dropout that no layer shows (`F.dropout`); on a GPU, where saving a
    generator's state waits for the device, only models with random layers are seeded.
    """
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    gpu = device.type == "cuda"
    if gpu and not has_random_layers(module):
        yield
        return
    seed = mixed_seed(*parts)
    with torch.random.fork_rng([device] if gpu else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU for good
        if gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
