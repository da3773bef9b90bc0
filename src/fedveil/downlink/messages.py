"""What a downlink sends and what it gets back: public on one side, sums on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from torch import Tensor

from fedveil.downlink.architecture import Blueprint, Weights
from fedveil.ledger.releases import Release
from fedveil.secrets import SecretStream
from fedveil.shapes import Number, counts, reals


@dataclass(frozen=True, eq=False)
class PublicHead:
    """What clients are told about the head noise: the vector a and each output's group."""

    vector: Annotated[Tensor, reals("outputs")]
    groups: Annotated[Tensor, counts("outputs", below="head groups")]
    count: Annotated[int, Number("head groups")]
    per_group: bool

    @property
    def tensors(self) -> int:
        """How many gradients a client returns: φ₀, one φ_s per group, and φ_β (or one per group)."""
        return 1 + self.count + (self.count if self.per_group else 1)


@dataclass(frozen=True, eq=False)
class Broadcast:
    """One round's model as clients see it.

    `multipliers` are the numbers of the transitional layers, one per channel that a weight reads; empty
    where the downlink has none.
    """

    parameters: Annotated[Tensor, reals("parameters")]
    epsilon: Annotated[Tensor, reals("epsilon")]
    statistics: Annotated[Tensor, reals("statistics")]
    multipliers: Annotated[Tensor, reals("multipliers")]
    head: PublicHead | None


@dataclass(frozen=True, eq=False)
class Mean:
    """The cohort's weighted mean of everything uploaded."""

    gradients: Tensor
    values: Tensor
    statistics: Tensor


@dataclass(frozen=True, eq=False)
class Recovered:
    """What the server makes of a round: the true gradient, loss (where clients may send one) and batch statistics.

    `head_level` is √(2φ_β), the size of α, by which the next round's head noise is set.
    """

    gradient: Tensor
    loss: float | None
    statistics: Tensor
    head_level: float | None


class Veil(Protocol):
    """One round's perturbation: made fresh, used once."""

    def broadcast(self) -> Broadcast:
        """What clients receive."""

    def recover(self, mean: Mean) -> Recovered:
        """The true gradient, exactly, from what clients returned."""


class Downlink(Protocol):
    """How the model travels to clients."""

    @property
    def traced(self) -> bool:
        """Whether it needs the network's scale table."""

    def head_tensors(self, blueprint: Blueprint) -> int:
        """How many gradients each client returns."""

    def releases(self) -> tuple[Release, ...]:
        """What a broadcast gives away, field by field."""

    def veil(self, blueprint: Blueprint, weights: Weights, *, stream: SecretStream, head_level: float | None) -> Veil:
        """Draw this round's secrets and perturb."""
