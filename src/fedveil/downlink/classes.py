"""Scale classes: which channels of a network must share one secret number.

Every channel of every edge belongs to a class. Class 0 is pinned to the number 1. A class is
free, or the product of two others (a gate multiplies two edges), or has been united with another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PINNED = 0


def broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both arrays expanded to their common shape."""
    shape = torch.broadcast_shapes(left.shape, right.shape)  # type: ignore[no-untyped-call]
    return left.expand(shape), right.expand(shape)


class ClassSet:
    """Union-find over class ids, with product classes."""

    def __init__(self) -> None:
        self._parent: list[int] = [PINNED]
        self._products: dict[int, tuple[int, int]] = {}
        self.lost = 0
        """How many classes have been pinned so far: a rule that raises it took freedom away."""

    def fresh(self, count: int) -> Tensor:
        """`count` new, free classes."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def all(self) -> Tensor:
        """Every id made so far."""
        return torch.arange(len(self._parent))

    def _root(self, one: int) -> int:
        parent = self._parent
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        if one in self._products:
            left, right = (self._root(factor) for factor in self._products[one])
            if PINNED in (left, right):
                del self._products[one]
                parent[one] = right if left == PINNED else left
                return parent[one]
        return one

    def find(self, ids: Tensor) -> Tensor:
        """The representative of every id, same shape."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        roots = torch.tensor([self._root(int(one)) for one in unique], dtype=torch.int64)
        return roots[inverse].reshape(ids.shape)

    def unite(self, left: Tensor, right: Tensor) -> None:
        """Force equal scales element by element (arrays broadcast against each other)."""
        first, second = broadcast(left, right)
        pairs = torch.unique(torch.stack([first.reshape(-1), second.reshape(-1)], dim=1), dim=0)
        for one, other in pairs.tolist():
            self._unite(one, other)

    def _unite(self, one: int, other: int) -> None:
        one, other = self._root(one), self._root(other)
        if one == other:
            return
        # A product equals another class only if nothing about either is free: pin its factors.
        for root in (one, other):
            if root in self._products:
                for factor in self._products.pop(root):
                    self._unite(factor, PINNED)
                self._parent[root] = PINNED
                self.lost += 1
        one, other = self._root(one), self._root(other)
        low, high = min(one, other), max(one, other)
        if low == PINNED != high:
            self.lost += 1
        self._parent[high] = low

    def pin(self, ids: Tensor) -> None:
        """Force the scale 1."""
        self.unite(ids, torch.tensor(PINNED))

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Classes whose scale is the product of the two operands' scales."""
        first, second = broadcast(self.find(left), self.find(right))
        pairs, inverse = torch.unique(
            torch.stack([first.reshape(-1), second.reshape(-1)], dim=1), dim=0, return_inverse=True
        )
        made = []
        for one, other in pairs.tolist():
            if PINNED in (one, other):
                made.append(max(one, other))
            else:
                new = int(self.fresh(1)[0])
                self._products[new] = (one, other)
                made.append(new)
        return torch.tensor(made, dtype=torch.int64)[inverse].reshape(first.shape)

    def compile(self) -> tuple[Classes, Tensor]:
        """The compact classes, and for every id ever made its compact index."""
        roots = self.find(torch.arange(len(self._parent)))
        unique, compact = torch.unique(roots, return_inverse=True)
        index = {int(root): place for place, root in enumerate(unique)}
        products = tuple(
            (index[root], index[self._root(left)], index[self._root(right)])
            for root, (left, right) in sorted(self._products.items())
            if root in index
        )
        return Classes(count=len(unique), products=products), compact


@dataclass(frozen=True)
class Classes:
    """How many classes there are, and which are products (class, factor, factor), in order."""

    count: int
    products: tuple[tuple[int, int, int], ...] = ()

    def scales(self, logs: Tensor) -> Tensor:
        """Positive scales from one logarithm per class; class 0 is 1, products multiply."""
        values = logs.clone()
        values[PINNED] = 0.0
        for made, left, right in self.products:
            values[made] = values[left] + values[right]
        return values.exp()
