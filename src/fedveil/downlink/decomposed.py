"""The decomposed downlink: rescaling whose secret factors make the clients' bounded noise Gaussian.

Clients add bounded noise η to the gradients of Ŵ = R ∘ W; the server recovers ∇L + R ∘ η. Transitional
layers make the factors of R independent, with laws under which R ∘ η is N(0, σ²) for everybody who does
not know R (not for the server, which does). Everything else is rescaling.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Broadcast, Mean, Recovered
from fedveil.downlink.rescaling import (
    HeadNoise,
    Rescaling,
    ScaledVeil,
    head_tensors,
    scale_table,
    scaled_veil,
)
from fedveil.downlink.samplers import secret_uniforms
from fedveil.downlink.transitional import transitional
from fedveil.ledger.releases import Release
from fedveil.secrets import Guarded, SecretStream


@dataclass(frozen=True)
class Decomposed:
    """Transitional layers, secret scales by the laws DN*(1) and DN*(2), and optionally head noise."""

    head: HeadNoise | None = None

    traced = True

    def head_tensors(self, blueprint: Blueprint) -> int:
        """1 without head noise, m + 2 with it (2m + 1 with weighted outputs)."""
        transitional(scale_table(blueprint))  # what cannot be veiled is refused before the first round
        return head_tensors(self.head, blueprint)

    def releases(self) -> tuple[Release, ...]:
        """What rescaling gives away, and the transitional layers' numbers."""
        what = "1/(r·s) for every channel that a weight reads; with the parameters it gives r/r′ ∘ W"
        own = Release("train.multipliers", "server", ("clients",), what)
        return tuple(own if one.field == own.field else one for one in Rescaling(head=self.head).releases())

    def veil(
        self, blueprint: Blueprint, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> DecomposedVeil:
        """Fresh scales on both sides of every transitional layer and, with head noise, a fresh γ."""
        layers = transitional(scale_table(blueprint))
        scales = layers.scales(secret_uniforms(stream)).to(weights.parameters.device)
        scaled = scaled_veil(
            dataclasses.replace(blueprint, table=layers.table),
            weights,
            scales,
            head=self.head,
            stream=stream,
            head_level=head_level,
        )
        return DecomposedVeil(scaled, layers.multipliers(scales).to(weights.parameters.dtype))


class DecomposedVeil(Guarded):
    """One round's secrets: a rescaling of the network with transitional layers, and their public numbers."""

    __slots__ = ("_multipliers", "_scaled")

    def __init__(self, scaled: ScaledVeil, multipliers: Tensor) -> None:
        self._scaled = scaled
        self._multipliers = multipliers

    def broadcast(self) -> Broadcast:
        """Ŵ = R ∘ W (+ r·1ᵀ on the head), ε·k², running statistics, and 1/(r·s)."""
        return dataclasses.replace(self._scaled.broadcast(), multipliers=self._multipliers)

    def veiled_statistics(self) -> Tensor:
        """Running mean·k and variance·k², in float64."""
        return self._scaled.veiled_statistics()

    def recover(self, mean: Mean) -> Recovered:
        """∇_W L = R ∘ (G₀ − Σ_s γ_s·G_s + v·G_β), in float64; noise in G₀ comes out as R ∘ noise."""
        return self._scaled.recover(mean)
