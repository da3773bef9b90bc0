"""Layers that write down what they were given, so that their gradients can be had in factors.

A recorded layer computes with its parameters detached and adds a zero tensor, the *tap*, to its
output: the gradient at the tap is δ, and the layer's gradients follow from δ and its input alone.
Convolutions are left to vmap: unfolding their inputs was slower, on a CPU and eight times so on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink.blueprint import TappedLinear
from fedveil.work.factors import Dense, Factor, embedding_weight, linear_weight


@dataclass(eq=False)
class Recorder:
    """One forward pass: `taps` to add in order of the calls (None: probing, make them), and what came in."""

    taps: Sequence[Tensor] | None = None
    expected: Sequence[nn.Module] = ()
    inputs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    layers: list[nn.Module] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def note(self, layer: nn.Module, input: Tensor, output: Tensor) -> Tensor:
        """Record a call and return its output with the tap added."""
        number = len(self.inputs)
        self.inputs.append(input)
        self.layers.append(layer)
        if self.taps is None:
            self.versions.append(input._version)
            self.made.append(torch.zeros_like(output).requires_grad_())
            return output + self.made[-1]
        if number >= len(self.taps) or self.expected[number] is not layer or self.taps[number].shape != output.shape:
            raise RuntimeError("The model calls its layers in another order than when it was probed.")
        return output + self.taps[number]


class _Slot:
    """Where a network's recorded layers find the recorder of the pass that is running."""

    def __init__(self) -> None:
        self.recorder = Recorder()


class RecordedLinear(nn.Linear):
    """Wx + b."""

    original: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, TappedLinear)
    slot: _Slot

    def forward(self, input: Tensor) -> Tensor:
        """Compute and record."""
        bias = None if self.bias is None else self.bias.detach()
        return self.slot.recorder.note(self, input, F.linear(input, self.weight.detach(), bias))

    def factors(self, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Factor]:
        """Gradients of weight and bias from all calls' inputs and δ, samples first."""
        given = torch.cat([one.flatten(1, -2) for one in inputs], 1)
        back = torch.cat([one.flatten(1, -2) for one in deltas], 1)
        return {"weight": linear_weight(given, back), "bias": Dense(back.sum(1))}

    def numbers(self, inputs: Sequence[Tensor]) -> int:
        """How many numbers a sample's factors take."""
        rows = sum(one.numel() // self.in_features for one in inputs)
        return self.in_features + self.out_features if rows == 1 else self.weight.numel()


class RecordedEmbedding(nn.Embedding):
    """A table of words."""

    original: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)
    slot: _Slot

    def forward(self, input: Tensor) -> Tensor:
        """Look up and record."""
        return self.slot.recorder.note(self, input, F.embedding(input, self.weight.detach()))

    def factors(self, inputs: Sequence[Tensor], deltas: Sequence[Tensor]) -> dict[str, Factor]:
        """The table's gradient from all calls' words and δ, samples first."""
        words = torch.cat([one.flatten(1) for one in inputs], 1)
        back = torch.cat([one.flatten(1, -2) for one in deltas], 1)
        return {"weight": embedding_weight(words, back, size=self.num_embeddings, padding=self.padding_idx)}

    def numbers(self, inputs: Sequence[Tensor]) -> int:
        """How many numbers a sample's factors take."""
        words = sum(one.numel() for one in inputs)
        return words * (self.embedding_dim + words)


Recorded = RecordedLinear | RecordedEmbedding
_KINDS: tuple[type[Recorded], ...] = (RecordedLinear, RecordedEmbedding)


def install(module: nn.Module) -> _Slot:
    """Turn every layer that can be recorded into its recorded twin, in place."""
    slot = _Slot()
    owners: dict[int, int] = {}
    for one in module.modules():
        for parameter in one._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for one in module.modules():
        kind = next((kind for kind in _KINDS if type(one) in kind.original), None)
        if (
            kind is not None
            and _plain(one)
            and all(owners[id(p)] == 1 for p in one._parameters.values() if p is not None)
        ):
            one._before = type(one)  # type: ignore[assignment]
            one.slot = slot  # type: ignore[assignment]
            one.__class__ = kind
    return slot


def restore(layer: nn.Module) -> None:
    """Undo `install` for one layer."""
    layer.__class__ = layer._before  # type: ignore[assignment]


def _plain(layer: nn.Module) -> bool:
    """Whether the layer does what its class says and nothing beside it."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if not isinstance(layer._parameters.get("weight"), nn.Parameter) or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return True
