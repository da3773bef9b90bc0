"""Exact sums: the same bits whatever the order of arrival, in memory that does not grow with clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.errors import Code, ProtocolError
from fedveil.tensors import LARGEST

_LIMBS = 3
_RANGE = LARGEST
_MOST_ADDENDS = int(2.0**52 / LARGEST)
_BLOCK = 1 << 17


class ExactSum:
    """Σ of vectors, exact to 2⁻⁷² and therefore independent of their order.

    Each number x (|x| < 2³⁶) is cut into three integers x = l₀ + l₁·2⁻³⁶ + l₂·2⁻⁷², each below 2³⁶ in
    size. Sums of up to 2¹⁶ such integers are exact in float64, so addition commutes bit for bit.
    """

    def __init__(self, length: int, *, device: torch.device | str = "cpu") -> None:
        self._limbs = torch.zeros(_LIMBS, length, dtype=torch.float64, device=device)
        # Blocks that stay in a CPU's cache are twice as fast as whole vectors; a GPU wants few launches.
        self._block = _BLOCK if self._limbs.device.type == "cpu" else max(length, 1)
        # Zeros, not empty: memory that was handed back may still hold somebody's numbers.
        self._scratch = torch.zeros(2, self._block, dtype=torch.float64, device=device)
        self._addends = 0

    @property
    def length(self) -> int:
        """The vectors' length."""
        return self._limbs.shape[1]

    def check(self, vector: Tensor) -> None:
        """Refuse wrong shapes, numbers out of range, NaN and infinity, and more vectors than can be exact."""
        if vector.dim() != 1 or len(vector) != self.length:
            raise ProtocolError(
                f"an upload has shape {tuple(vector.shape)} where ({self.length},) belongs; "
                "do server and client use the same model and scheme?"
            )
        if self._addends >= _MOST_ADDENDS:
            raise ProtocolError(f"more than {_MOST_ADDENDS} uploads in one round")
        low, high = vector.aminmax() if self.length else (vector.new_zeros(()), vector.new_zeros(()))
        if not bool((low > -_RANGE) & (high < _RANGE)):  # also catches NaN
            raise ProtocolError("an upload holds NaN, infinity or a number beyond 2^36", code=Code.NUMBERS)

    def add(self, vector: Tensor) -> None:
        """Add one vector, or refuse it and stay unchanged."""
        self.check(vector)
        self._addends += 1
        for start in range(0, self.length, self._block):
            rest, whole = self._scratch[:, : min(self._block, self.length - start)]
            limbs = self._limbs[:, start : start + self._block]
            rest.copy_(vector[start : start + self._block])
            for place in range(_LIMBS):
                torch.round(rest, out=whole)
                limbs[place] += whole
                if place + 1 < _LIMBS:
                    rest -= whole
                    rest *= _RANGE

    def total(self) -> Tensor:
        """The sum, in float64."""
        limbs = self._limbs.clone()
        for place in range(_LIMBS - 1, 0, -1):  # carry, so that large limbs of opposite sign cancel exactly
            carried = torch.round(limbs[place] / _RANGE)
            limbs[place] -= carried * _RANGE
            limbs[place - 1] += carried
        result = limbs[_LIMBS - 1]
        for place in range(_LIMBS - 2, -1, -1):
            result = result / _RANGE + limbs[place]
        return result
