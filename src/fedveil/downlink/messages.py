"""What a downlink sends and what it gets back: public on one side, sums on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, Weights, draw
from fedveil.ledger.releases import Caveats, Cover, Released
from fedveil.secrets import SecretStream
from fedveil.shapes import Number, Shape, counts, reals


@dataclass(frozen=True, eq=False)
class PublicHead:
    """What clients are told about the head noise: the vector a and each output's group."""

    vector: Annotated[Tensor, reals("outputs"), Released("the vector a of the head noise")]
    groups: Annotated[Tensor, counts("outputs", below="head groups"), Released("which outputs share a γ")]
    count: Annotated[int, Number("head groups"), Released("how many γ there are")]
    per_group: Annotated[bool, Released("whether φ_β is split by group")]

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

    parameters: Annotated[Tensor, reals("parameters"), Released("the model's parameters")]
    epsilon: Annotated[Tensor, reals("epsilon"), Released("ε of the normalisation layers")]
    statistics: Annotated[Tensor, reals("statistics"), Released("running statistics, where they are frozen")]
    multipliers: Annotated[Tensor, reals("multipliers"), Released("nothing: there are no transitional layers")]
    head: PublicHead | None

    released_as = "train"


@dataclass(frozen=True, eq=False)
class ClipBroadcast(Broadcast):
    """The same where the clip changes from round to round: `clip` is this round's."""

    clip: Annotated[
        Tensor,
        Shape((torch.float64,), (1,)),
        Released("the round's clip, which follows from noised answers", about="data", protection="noised"),
    ]

    @staticmethod
    def of(broadcast: Broadcast, clip: float) -> ClipBroadcast:
        """A broadcast with a clip."""
        known = {field.name: getattr(broadcast, field.name) for field in dataclasses.fields(Broadcast)}
        return ClipBroadcast(**known, clip=torch.tensor([clip], dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class SketchBroadcast(Broadcast):
    """The same where the model comes in sketches: those of a round follow from its `seed`."""

    seed: Annotated[Tensor, Shape((torch.uint8,), (32,)), Released("the seed of the round's sketches")]

    @staticmethod
    def of(broadcast: Broadcast, seed: bytes) -> SketchBroadcast:
        """A broadcast with a seed."""
        known = {field.name: getattr(broadcast, field.name) for field in dataclasses.fields(Broadcast)}
        return SketchBroadcast(**known, seed=torch.frombuffer(bytearray(seed), dtype=torch.uint8))


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
    """How the model travels to clients; where a downlink says nothing else, open, whole, and without noise."""

    @property
    def traced(self) -> bool:
        """Whether it needs the network's scale table."""
        return False

    @property
    def family(self) -> str:
        """The symmetries behind which it hides the model; "scale" where it has nothing more."""
        return "scale"

    @property
    def streams(self) -> bool:
        """Whether gains are folded into what reads them, so that residual streams can be rotated."""
        return False

    @property
    def shifted(self) -> bool:
        """Whether a secret number is added to all logits of a sample, which softmax does not see."""
        return False

    @property
    def head_noise(self) -> bool:
        """Whether the last layer is covered by noise."""
        return False

    @property
    def sends(self) -> type[Broadcast]:
        """As what the model travels."""
        return Broadcast

    def head_tensors(self, architecture: Architecture) -> int:
        """How many gradients each client returns."""
        return 1

    def noise_factors(self, architecture: Architecture, *, stream: SecretStream) -> Tensor | None:
        """By what recovery multiplies bounded client noise, for one draw of its secrets; None where there is none."""
        return None

    def spared(self, architecture: Architecture) -> int:
        """How many of the parameters a client needs not be sent, nor send back: the rest follows from the others."""
        return 0

    def covers(self) -> Mapping[str, Cover]:
        """What hides each field of a broadcast, where something does, or what else is in it."""
        return {}

    def caveats(self) -> Caveats:
        """What it assumes and leaves open, for the ledger."""
        return Caveats()

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> Veil:
        """Draw this round's secrets and perturb."""


def draw_for(downlink: Downlink, model: nn.Module, example: Tensor) -> tuple[Architecture, Weights]:
    """A model's architecture and weights, traced for what the downlink hides of it."""
    return draw(model, example, traced=downlink.traced, family=downlink.family, streams=downlink.streams)
