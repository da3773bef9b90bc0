"""Per-sample gradients in the cheapest form each layer has, with their norms and weighted sums.

A linear layer's gradient for one sample is an outer product δ·aᵀ, an embedding's touches only the rows
of the words seen: neither has to be written out to know its norm or to be summed. No form computes a
norm from a Gram matrix, whose cancellation could make a gradient look shorter than it is, and each
sums the very numbers whose norm it gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedveil.work.bounds import SAMPLES_ADDED, scaled_norms, squares, working


class Factor(Protocol):
    """One parameter's gradients for B samples."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Matrices with B rows: a gradient's norm is the product of the norms of its rows."""
        ...

    def total(self, weights: Tensor) -> Tensor:
        """Σ_b w_kb·g_kb for weights (K, b) of K clients with b samples each, B = K·b: (K, size)."""
        ...

    def careful(self) -> tuple[Factor, Tensor]:
        """The same gradients in a form that sums them whatever their magnitudes, and their norms."""
        ...

    def without(self, odd: Tensor) -> Factor:
        """The same with zeros for the samples that a mask (B,) names."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients written out: (B, size)."""

    rows: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The gradients themselves."""
        return (self.rows,)

    def total(self, weights: Tensor) -> Tensor:
        """One matrix–vector product per client."""
        clients, each = weights.shape
        rows = self.rows.to(weights.dtype).reshape(clients, each, -1)
        return _by_blocks(lambda left, right: torch.bmm(left[:, None], right)[:, 0], weights, rows)

    def careful(self) -> tuple[Dense, Tensor]:
        """Nothing is multiplied but by a weight."""
        return self, scaled_norms(self.rows)

    def without(self, odd: Tensor) -> Dense:
        """Rows of zeros."""
        return Dense(_zeroed(self.rows, odd))


@dataclass(frozen=True, eq=False)
class Outer:
    """Outer products δ·aᵀ of (B, outputs) and (B, inputs), times `scales` (B,) in float64 where there are any."""

    deltas: Tensor
    inputs: Tensor
    scales: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """‖δ·aᵀ‖ = ‖δ‖·‖a‖."""
        return self.deltas, self.inputs

    def total(self, weights: Tensor) -> Tensor:
        """(w·δ)ᵀ·a: the product an ordinary backward pass makes."""
        clients, each = weights.shape
        flat = weights.reshape(-1)
        if self.scales is not None:
            flat = (flat * self.scales).to(weights.dtype)
        left = (flat[:, None] * self.deltas).reshape(clients, each, -1)
        right = self.inputs.to(weights.dtype).reshape(clients, each, -1)
        return _by_blocks(lambda one, other: torch.bmm(one.transpose(1, 2), other).flatten(1), left, right)

    def careful(self) -> tuple[Outer, Tensor]:
        """Both factors near 1: a δ that rounds to nothing when weighted may meet an a that makes it large."""
        (left, one), (right, two) = _near_one(self.deltas), _near_one(self.inputs)
        return Outer(left, right, one * two), scaled_norms(self.deltas) * scaled_norms(self.inputs)

    def without(self, odd: Tensor) -> Outer:
        """Zeros times zeros."""
        scales = None if self.scales is None else _zeroed(self.scales, odd)
        return Outer(_zeroed(self.deltas, odd), _zeroed(self.inputs, odd), scales)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table with `size` rows: word (B, R) of each sample gets values (B, R, width).

    A word that a sample has several times has zeros in all places but one.
    """

    words: Tensor
    values: Tensor
    size: int

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """No two places of a sample add up on the same row."""
        return (self.values.flatten(1),)

    def total(self, weights: Tensor) -> Tensor:
        """One table per client, filled in one go (not `index_add_`, whose order varies on a GPU)."""
        clients, each = weights.shape
        scaled = weights[:, :, None, None] * self.values.reshape(clients, each, *self.values.shape[1:])
        offset = torch.arange(clients, device=self.words.device)[:, None, None] * self.size
        places = self.words.reshape(clients, each, -1) + offset

        def table(places: Tensor, values: Tensor) -> Tensor:
            given = (values.flatten(0, 2), places.flatten(), clients * self.size, -1, False)
            return torch.ops.aten.embedding_dense_backward(*given).reshape(clients, -1)  # type: ignore[no-any-return]

        return _by_blocks(table, places, scaled)

    def careful(self) -> tuple[Rows, Tensor]:
        """Nothing is multiplied but by a weight."""
        return self, scaled_norms(self.values.flatten(1))

    def without(self, odd: Tensor) -> Rows:
        """Words with zeros."""
        return replace(self, values=_zeroed(self.values, odd))


def measured(factors: Mapping[str, Factor]) -> tuple[dict[str, Factor], Tensor]:
    """Every sample's norm over all parameters, in float64, and factors to sum with.

    Norms are not finite for samples whose gradient is not, and in the factors those are zero: zero times what is not
    finite would not be zero.
    """
    parts = [factor.parts for factor in factors.values()]
    products = [one for one in parts if len(one) == 2]
    single = [one[0] for one in parts if len(one) == 1]
    found, usual = squares([*single, *(one[0] for one in products), *(one[1] for one in products)])
    alone, left, right = torch.split(found, [len(single), len(products), len(products)])
    norms = (alone.sum(0) + (left * right).sum(0)).sqrt()
    if bool(usual.all()):
        return dict(factors), norms
    made = {name: factor.careful() for name, factor in factors.items()}
    # Only of those that need it: were all norms taken anew, and rounded otherwise, one record would move every weight.
    norms = torch.where(usual, norms, scaled_norms(torch.stack([norm for _, norm in made.values()], 1)))
    odd = ~norms.isfinite()
    return {name: factor.without(odd) for name, (factor, _) in made.items()}, norms


def _by_blocks(product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """A product that adds the samples (dimension 1) of its factors, a bounded number of them at a time."""
    samples = left.shape[1]
    if samples <= SAMPLES_ADDED:
        return product(left, right)
    spans = (slice(start, start + SAMPLES_ADDED) for start in range(0, samples, SAMPLES_ADDED))
    return _added(product(left[:, one], right[:, one]) for one in spans)


def _added(parts: Iterator[Tensor]) -> Tensor:
    """The sum, pairwise: a rounding for every doubling, and not for every part."""
    waiting: list[tuple[int, Tensor]] = []
    for part in parts:
        size = 1
        while waiting and waiting[-1][0] == size:
            part = waiting.pop()[1].add_(part)
            size *= 2
        waiting.append((size, part))
    total = waiting.pop()[1]
    while waiting:
        total = waiting.pop()[1].add_(total)
    return total


def _zeroed(values: Tensor, odd: Tensor) -> Tensor:
    return values.masked_fill(odd.reshape(-1, *[1] * (values.dim() - 1)), 0)


def _near_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by powers of two that bring their largest numbers near 1, and those powers in float64."""
    rows = rows.to(working(rows.dtype))
    limit = -int(math.log2(torch.finfo(rows.dtype).tiny))  # 2^±limit are both normal numbers, so nothing is rounded
    _, exponents = torch.frexp(rows.abs().amax(1))
    powers = torch.exp2(exponents.clamp(-limit, limit).double())
    return rows * (1.0 / powers).to(rows.dtype)[:, None], powers


def linear_weight(inputs: Tensor, deltas: Tensor) -> Factor:
    """The weight's gradient from (B, R, inputs) and (B, R, outputs): Σ_r δ_r·a_rᵀ."""
    if inputs.shape[1] == 1:
        return Outer(deltas[:, 0], inputs[:, 0])
    return Dense(torch.bmm(deltas.transpose(1, 2), inputs).flatten(1))


def embedding_weight(words: Tensor, deltas: Tensor, *, size: int, padding: int | None) -> Factor:
    """The table's gradient from (B, R) word numbers and (B, R, width); padding gets none.

    Values of equal words are added first, once for norm and sum: added again in another order, values that all but
    cancel would leave another remainder.
    """
    if padding is not None:
        deltas = deltas * (words != padding)[:, :, None]
    equal = words[:, :, None] == words[:, None, :]
    positions = torch.arange(words.shape[1], device=words.device)
    first = torch.where(equal, positions, len(positions)).amin(2)
    gather = (first[:, None, :] == positions[:, None]).to(deltas.dtype)
    return Rows(words, torch.bmm(gather, deltas), size)
