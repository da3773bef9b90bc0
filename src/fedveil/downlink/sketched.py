"""Sketched weights (Double-Blind Collaborative Learning, Zhang and Wang 2021): W·S goes down, its gradient comes up.

Every round and layer has a sketch S of n × s numbers, s = ⌊n/q⌋, n what one output reads (channels times the kernel's
size of a convolution): inputs in random order are dealt into s buckets of q, each with a random sign, and n mod q of
them are left out of the round. The cited scheme sends W·S, has clients sketch what a layer reads by the same S, and
gets back the gradient with respect to W·S. Since (x·S)(W·S)ᵀ = x·(W·P)ᵀ with P = S·Sᵀ, modules as they are do the same:

    veil      Ŵ = W·P        on the flattened inputs of a layer
    client    Ĝ·P/q          which says what Ĝ·S says, and no more: P/q is the projection on the sketch's range
    recover   ∇_W = (Ĝ·P/q)·P = Ĝ·P

P is applied by buckets and signs and never made. P² = q·P, and E[P] = (s·q/n)·1: the identity where q divides n.
Biases, normalisations, and what is no linear layer and no convolution travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, Weights
from fedveil.downlink.messages import Mean, Recovered, SketchBroadcast
from fedveil.downlink.plain import Plain, Unveiled
from fedveil.errors import ConfigError, TraceError, spelled, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats, Cover
from fedveil.secrets import SecretStream

SketchedLayers = Literal["all", "head"]
SKETCHED_LAYERS: tuple[SketchedLayers, ...] = get_args(SketchedLayers)
_SEED_BYTES = 32
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Sketched(Plain):
    """Of every q directions in which a layer reads, one is sent; all layers, or the last linear one alone."""

    ratio: int = 2
    layers: SketchedLayers = "all"

    sends = SketchBroadcast

    def __post_init__(self) -> None:
        if self.ratio < 2:
            raise ConfigError(
                f"{spelled('sketch_ratio')} must be at least 2 (got {self.ratio}): 1 would send the model as it is, "
                f"which is {spelled('scheme', 'fedavg')}."
            )
        if self.layers not in SKETCHED_LAYERS:
            raise unknown_name("sketch_layers", self.layers, SKETCHED_LAYERS)

    def head_tensors(self, architecture: Architecture) -> int:
        """One gradient, of a model that has something to sketch."""
        if not self.sizes(architecture):
            what = "nn.Linear layer" if self.layers == "head" else "nn.Linear layer or convolution"
            raise TraceError(
                f"A sketch with {spelled('sketch_ratio', self.ratio)} needs an {what} that reads {self.ratio} numbers "
                f"or more, and this model has none: it would be sent as it is, which is {spelled('scheme', 'fedavg')}."
            )
        return 1

    def sizes(self, architecture: Architecture) -> dict[str, int]:
        """n of every weight that is sketched, by name."""
        skeleton = architecture.skeleton
        names = {id(value): name for name, value in skeleton.named_parameters()}
        found: dict[str, int] = {}
        others: set[str] = set()
        for layer in skeleton.modules():
            for value in layer.parameters(recurse=False):
                name = names[id(value)]
                if not isinstance(layer, _LAYERS):
                    others.add(name)  # an embedding may share it, and reads it in another way
                elif value is layer.weight and value[0].numel() >= self.ratio:
                    if self.layers == "head" and isinstance(layer, nn.Linear):
                        found.clear()
                    if self.layers == "all" or isinstance(layer, nn.Linear):
                        found[name] = value[0].numel()
        return {name: size for name, size in found.items() if name not in others}

    def spared(self, architecture: Architecture) -> int:
        """W·S has s of a layer's n columns."""
        shapes = dict(architecture.parameters.sections)
        return sum(shapes[name][0] * (n - n // self.ratio) for name, n in self.sizes(architecture).items())

    def covers(self) -> Mapping[str, Cover]:
        """Every layer up to what its sketch leaves out."""
        where = "every linear layer and convolution" if self.layers == "all" else "the last linear layer"
        return {
            "parameters": Cover(
                what=f"the parameters, sketched: W·S·Sᵀ of {where}",
                hiding=f"what lies outside of a sketch that clients know, 1 − 1/{self.ratio} of the directions in "
                "which a layer reads, others every round",
            )
        }

    def caveats(self) -> Caveats:
        """Rounds together show what each leaves out."""
        return Caveats(unprotected=(caveats.SKETCHED,))

    def veil(
        self, architecture: Architecture, weights: Weights, *, stream: SecretStream, head_level: float | None
    ) -> SketchedVeil:
        """A fresh sketch for every layer, by a seed that clients are told."""
        seed = stream.bytes(_SEED_BYTES)
        sketches = self.sketches(architecture, seed, device=weights.parameters.device)
        return SketchedVeil(architecture, weights, sketches, seed)

    def sketches(self, architecture: Architecture, seed: bytes, *, device: torch.device) -> dict[str, Sketch]:
        """The sketch of every layer, from a round's seed."""
        stream = SecretStream(seed)
        sizes = self.sizes(architecture)
        return {name: Sketch.drawn(size, self.ratio, stream).to(device) for name, size in sizes.items()}


@dataclass(frozen=True, eq=False)
class Sketch:
    """S by its nonzero entries: which inputs are in each of s buckets, and with which sign."""

    buckets: Tensor
    signs: Tensor

    @staticmethod
    def drawn(size: int, ratio: int, stream: SecretStream) -> Sketch:
        """A random order dealt into ⌊size/ratio⌋ buckets, and a random sign for each entry."""
        kept = size // ratio * ratio
        order = torch.argsort(stream.uniform(size))[:kept]
        return Sketch(order.reshape(-1, ratio), stream.signs(kept).reshape(-1, ratio))

    def to(self, device: torch.device) -> Sketch:
        """The same on another device."""
        return Sketch(self.buckets.to(device), self.signs.to(device))

    def applied(self, rows: Tensor) -> Tensor:
        """rows·S·Sᵀ."""
        sums = (rows[:, self.buckets] * self.signs).sum(-1, keepdim=True)
        whole = torch.zeros_like(rows)
        whole[:, self.buckets] = sums * self.signs
        return whole


def sketched(architecture: Architecture, flat: Tensor, sketches: Mapping[str, Sketch]) -> Tensor:
    """Flat parameters, or a gradient of them, times P of every layer that has a sketch."""
    flat = flat.to(torch.float64, copy=True)
    for name, sketch in sketches.items():
        part = architecture.parameters.part(flat, name)
        part.copy_(sketch.applied(part.flatten(1)).view_as(part))
    return flat


@dataclass(frozen=True, eq=False)
class SketchedVeil(Unveiled):
    """One round's sketches. They are no secret: clients are told the seed."""

    sketches: Mapping[str, Sketch]
    seed: bytes

    def broadcast(self) -> SketchBroadcast:
        """Ŵ = W·P."""
        weights = self.weights.clone()
        weights.parameters.copy_(sketched(self.architecture, weights.parameters, self.sketches))
        return SketchBroadcast.of(Unveiled(self.architecture, weights).broadcast(), self.seed)

    def recover(self, mean: Mean) -> Recovered:
        """∇_W = Ĝ·P."""
        plain = super().recover(mean)
        gradient = sketched(self.architecture, plain.gradient, self.sketches)
        return Recovered(gradient, plain.loss, plain.statistics, None)
