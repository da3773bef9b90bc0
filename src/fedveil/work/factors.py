"""Per-sample gradients in the cheapest form each layer has, with their norms and weighted sums.

A linear layer's gradient for one sample is an outer product δ·aᵀ, an embedding's touches only the rows
of the words seen: neither has to be written out to know its norm or to be summed. No form computes a
norm from a Gram matrix, whose cancellation could make a gradient look shorter than it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Factor(Protocol):
    """One parameter's gradients for B samples."""

    def squares(self) -> Tensor:
        """‖g_i‖² of every sample."""
        ...

    def total(self, weights: Tensor) -> Tensor:
        """Σ_b w_kb·g_kb for weights (K, b) of K clients with b samples each, B = K·b: (K, size)."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients written out: (B, size)."""

    rows: Tensor

    def squares(self) -> Tensor:
        """Σ_j g_j²."""
        return self.rows.square().sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """One matrix–vector product per client."""
        clients, each = weights.shape
        return torch.bmm(weights[:, None], self.rows.reshape(clients, each, -1))[:, 0]


@dataclass(frozen=True, eq=False)
class Outer:
    """Outer products δ·aᵀ of (B, outputs) and (B, inputs)."""

    deltas: Tensor
    inputs: Tensor

    def squares(self) -> Tensor:
        """‖δ·aᵀ‖² = ‖δ‖²·‖a‖²."""
        return self.deltas.square().sum(1) * self.inputs.square().sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """(w·δ)ᵀ·a: the product an ordinary backward pass makes."""
        clients, each = weights.shape
        left = (weights.reshape(-1, 1) * self.deltas).reshape(clients, each, -1)
        return torch.bmm(left.transpose(1, 2), self.inputs.reshape(clients, each, -1)).flatten(1)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table with `size` rows: word (B, R) of each sample gets values (B, R, width) added."""

    words: Tensor
    values: Tensor
    size: int

    def squares(self) -> Tensor:
        """Values of equal words are added first: they fall on the same row."""
        equal = self.words[:, :, None] == self.words[:, None, :]
        positions = torch.arange(self.words.shape[1], device=self.words.device)
        first = torch.where(equal, positions, len(positions)).amin(2)
        gather = (first[:, None, :] == positions[:, None]).to(self.values.dtype)
        return torch.bmm(gather, self.values).square().sum((1, 2))

    def total(self, weights: Tensor) -> Tensor:
        """One table per client, filled in one go (not `index_add_`, whose order varies on a GPU)."""
        clients, each = weights.shape
        scaled = (weights.reshape(-1, 1, 1) * self.values).flatten(0, 1)
        offset = torch.arange(clients, device=self.words.device).repeat_interleave(each) * self.size
        places = (self.words + offset[:, None]).flatten()
        table = torch.ops.aten.embedding_dense_backward(scaled, places, clients * self.size, -1, False)
        return table.reshape(clients, -1)  # type: ignore[no-any-return]


def linear_weight(inputs: Tensor, deltas: Tensor) -> Factor:
    """The weight's gradient from (B, R, inputs) and (B, R, outputs): Σ_r δ_r·a_rᵀ."""
    if inputs.shape[1] == 1:
        return Outer(deltas[:, 0], inputs[:, 0])
    return Dense(torch.bmm(deltas.transpose(1, 2), inputs).flatten(1))


def embedding_weight(words: Tensor, deltas: Tensor, *, size: int, padding: int | None) -> Factor:
    """The table's gradient from (B, R) word numbers and (B, R, width); padding gets none."""
    if padding is not None:
        deltas = deltas * (words != padding)[:, :, None]
    return Rows(words, deltas, size)
