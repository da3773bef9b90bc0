"""Flat vectors with named sections: the one shape in which tensors travel and are summed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST = 2.0**36
"""Numbers of this size and above are taken for a training that has run away: clients refuse to send
them, and exact sums to add them."""


@dataclass(frozen=True)
class Layout:
    """Named sections, in order, of one flat vector."""

    sections: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names."""
        return tuple(name for name, _ in self.sections)

    @property
    def length(self) -> int:
        """The vector's length."""
        return sum(math.prod(shape) for _, shape in self.sections)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of the sections, in their shapes; leading dimensions of `vector` are kept."""
        parts, start = {}, 0
        for name, shape in self.sections:
            size = math.prod(shape)
            parts[name] = vector[..., start : start + size].reshape((*vector.shape[:-1], *shape))
            start += size
        return parts

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """One vector from the sections, in order."""
        return torch.cat([parts[name].reshape(-1) for name, _ in self.sections])


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, in order, without a copy where it lies on the CPU in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)


def from_raw(content: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of these bytes, in memory of its own."""
    if not len(content):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(tuple(shape))


def flatten(tensors: Sequence[Tensor], *, like: Tensor | None = None) -> Tensor:
    """Concatenate tensors into one new vector; none at all give an empty vector like `like`."""
    if not tensors:
        return torch.empty(0) if like is None else like.new_empty(0)
    return torch.cat([one.reshape(-1) for one in tensors])
