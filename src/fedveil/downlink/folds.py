"""Rotations of a residual stream: gains of normalisations folded into what reads them.

LayerNorm and RMSNorm without gains commute with every rotation of their channels (LayerNorm with those that leave
1 = (1, …, 1) where it is). A gain γ and a shift β tie the stream to its channels; but where only linear layers read the
normalised tensor, they carry them as well as it does:

    V = W·diag(γ),   c = b + W·β,   γ' = 1,   β' = 0.

The server folds before it hides, and recovers with the transposed derivative of the same map:

    G_W = G_V·diag(γ) + g_c·βᵀ,   g_γ = Σ diag(Wᵀ·G_V),   g_β = Σ Wᵀ·g_c     (sums over the readers).

That map is not an isometry: clients who take steps of their own, or noise, would feel the gains.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Fold:
    """A gain and a shift, and the weights and biases of the linear layers that carry them."""

    gain: str
    shift: str | None
    readers: tuple[tuple[str, str | None], ...]
    rank: int
    """How many dimensions the normalised tensor must have, for what stands between to be no matter of channels."""

    @property
    def carried(self) -> tuple[str, ...]:
        """The parameters that are not sent."""
        return (self.gain,) if self.shift is None else (self.gain, self.shift)


def fold(parts: Mapping[str, Tensor], folds: Sequence[Fold]) -> None:
    """Fold gains into readers, in place: views of one flat vector by name."""
    for each in folds:
        gain = parts[each.gain]
        for weight, bias in each.readers:
            if each.shift is not None:
                assert bias is not None
                parts[bias] += parts[weight] @ parts[each.shift]
            parts[weight] *= gain
        gain.fill_(1.0)
        if each.shift is not None:
            parts[each.shift].zero_()


def unfold(gradients: Mapping[str, Tensor], values: Mapping[str, Tensor], folds: Sequence[Fold]) -> None:
    """The gradients of readers, gains and shifts from those of the folded readers, in place."""
    for each in folds:
        gain = gradients[each.gain].zero_()
        for weight, _ in each.readers:
            gain += (gradients[weight] * values[weight]).sum(0)
            gradients[weight] *= values[each.gain]
        if each.shift is not None:
            shift = gradients[each.shift].zero_()
            for weight, bias in each.readers:
                assert bias is not None
                shift += gradients[bias] @ values[weight]
                gradients[weight] += torch.outer(gradients[bias], values[each.shift])


def foldable(graph: fx.Graph, model: nn.Module) -> dict[str, Fold]:
    """The gains that linear layers can carry, by name: of torch's own layers, called once and read by nothing else."""
    finder = _Finder(graph, model)
    return {fold.gain: fold for node in graph.nodes if node.op == "call_module" for fold in finder.folds(node)}


class _Finder:
    def __init__(self, graph: fx.Graph, model: nn.Module) -> None:
        self.model = model
        self.calls = Counter(str(node.target) for node in graph.nodes)
        every = list(model.named_parameters(remove_duplicate=False))
        uses = Counter(id(parameter) for _, parameter in every)
        uses.update(id(model.get_parameter(name)) for name, _ in every if name in self.calls)
        self.names = {id(parameter): name for name, parameter in every if uses[id(parameter)] == 1}

    def folds(self, node: fx.Node) -> Iterator[Fold]:
        """What one call of a layer has to fold."""
        path = str(node.target)
        module = self.model.get_submodule(path)
        if self.calls[path] != 1 or len(node.args) != 1 or node.kwargs:
            return
        layers: list[nn.Module] = [module]
        if type(module) is nn.TransformerEncoder:
            assert isinstance(module, nn.TransformerEncoder)
            layers = [*module.layers, *([] if module.norm is None else [module.norm])]
        for layer in layers:
            if type(layer) is nn.TransformerEncoderLayer:
                assert isinstance(layer, nn.TransformerEncoderLayer)
                attention = layer.self_attn
                if layer.norm_first and attention.in_proj_weight is not None:
                    readers = [(attention.in_proj_weight, attention.in_proj_bias)]
                    yield from self._fold(layer.norm1, readers, 1)
                    yield from self._fold(layer.norm2, [(layer.linear1.weight, layer.linear1.bias)], 1)
            elif layer is layers[-1] and type(layer) in (nn.LayerNorm, nn.RMSNorm):
                found = self._readers(node)
                if found is not None:
                    yield from self._fold(layer, *found)

    def _fold(self, norm: nn.Module, readers: Sequence[tuple[Tensor, Tensor | None]], rank: int) -> Iterator[Fold]:
        gain, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if not isinstance(gain, Tensor) or gain.dim() != 1:
            return
        every = [gain, *(part for reader in readers for part in reader), shift]
        if any(part is not None and id(part) not in self.names for part in every):
            return  # tied, or used elsewhere
        if shift is not None and any(bias is None for _, bias in readers):
            return
        named = tuple((self.names[id(w)], None if b is None else self.names[id(b)]) for w, b in readers)
        yield Fold(self.names[id(gain)], None if shift is None else self.names[id(shift)], named, rank)

    def _readers(self, node: fx.Node) -> tuple[list[tuple[Tensor, Tensor | None]], int] | None:
        """The linear layers behind a node, through averages and choices of tokens; None if anything else reads it."""
        readers: list[tuple[Tensor, Tensor | None]] = []
        rank = 1
        for user in node.users:
            given = [*user.args]
            if user.target in ("size", "dim") or (user.target is getattr and given[1] in ("shape", "ndim")):
                continue
            if user.op == "call_module":
                module = self.model.get_submodule(str(user.target))
                plain = type(module) is nn.Linear and given == [node] and not user.kwargs
                if not plain or self.calls[str(user.target)] != 1:
                    return None
                readers.append((module.weight, module.bias))  # type: ignore[arg-type]
            elif _of_tokens(user, node):
                behind = self._readers(user)
                if behind is None:
                    return None
                readers += behind[0]
                rank = 3
            else:
                return None
        return (readers, rank) if readers else None


def _of_tokens(user: fx.Node, node: fx.Node) -> bool:
    """Whether an operation averages the second of three dimensions or takes one place of it, as behind an encoder."""
    given = [*user.args]
    if user.target in ("mean", torch.mean):
        return given == [node, 1] and not user.kwargs
    if user.target is operator.getitem:
        index = given[1]
        return isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int)
    return False
