"""The scale table: how every tensor of one architecture scales, and the arithmetic that uses it.

A parameter W becomes Ŵ = R ∘ W with R = scales[out] ⊗ 1/scales[into]; a gradient with respect to Ŵ
becomes the gradient with respect to W by the same R. R itself is never materialised: the two small
vectors broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedveil.downlink.edges import PINNED, Classes, Pin, Tracing
from fedveil.downlink.trace import walk
from fedveil.tensors import flatten

_READERS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


@dataclass(frozen=True, eq=False)
class Scaled:
    """How one parameter scales: viewed as `view`, × scales[out] / scales[into]."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    out: Tensor | None
    into: Tensor | None


@dataclass(frozen=True, eq=False)
class NormScale:
    """The classes k that one normalisation layer reads: ε·k², running mean·k, running variance·k²."""

    path: str
    kind: str
    read: Tensor


@dataclass(frozen=True)
class Reader:
    """The modules whose call lets one weight read a scaled input, or why they cannot be told."""

    weight: str
    paths: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True)
class HeadSite:
    """The last linear layer, if the model's output is its output."""

    path: str
    weight: str
    bias: str | None
    features: int
    outputs: int


@dataclass(frozen=True, eq=False)
class ScaleTable:
    """One architecture's scales, found by tracing it once."""

    classes: Classes
    parameters: tuple[Scaled, ...]
    norms: tuple[NormScale, ...]
    pins: tuple[Pin, ...]
    head: HeadSite | None
    head_refusal: str = ""
    readers: tuple[Reader, ...] = ()

    def to(self, device: torch.device) -> ScaleTable:
        """The same table with its index arrays on another device."""

        def move(ids: Tensor | None) -> Tensor | None:
            return None if ids is None else ids.to(device)

        return ScaleTable(
            self.classes,
            tuple(Scaled(p.name, p.shape, p.view, move(p.out), move(p.into)) for p in self.parameters),
            tuple(NormScale(n.path, n.kind, n.read.to(device)) for n in self.norms),
            self.pins,
            self.head,
            self.head_refusal,
            self.readers,
        )

    def rescale(self, flat: Tensor, scales: Tensor) -> Tensor:
        """R ∘ flat in float64, for all parameters in one flat vector (or their gradients).

        The same R takes parameters down (Ŵ = R ∘ W) and gradients up (∇_W L = R ∘ ∇_Ŵ L).
        """
        result = flat.to(torch.float64, copy=True)
        views = torch.split(result, [math.prod(entry.shape) for entry in self.parameters])
        for side, factors in ((self._out, scales), (self._into, scales.reciprocal())):
            _multiply(views, side, factors)
        return result

    @cached_property
    def _out(self) -> _Side:
        return _side([(entry.view, entry.out) for entry in self.parameters])

    @cached_property
    def _into(self) -> _Side:
        return _side([(entry.view, entry.into) for entry in self.parameters])

    def free(self) -> int:
        """How many secret numbers one draw takes."""
        return self.classes.count - 1 - len(self.classes.products)


@dataclass(frozen=True, eq=False)
class _Side:
    """The out or the in sides of all parameters that have one: which, how viewed, and all ids in a row."""

    which: tuple[int, ...]
    views: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    ids: Tensor


def _side(entries: Sequence[tuple[tuple[int, ...], Tensor | None]]) -> _Side:
    found = [(number, view, ids) for number, (view, ids) in enumerate(entries) if ids is not None]
    return _Side(
        tuple(number for number, _, _ in found),
        tuple(view for _, view, _ in found),
        tuple(tuple(ids.shape) for _, _, ids in found),
        flatten([ids for _, _, ids in found], like=torch.empty(0, dtype=torch.int64)),
    )


def _multiply(parts: Sequence[Tensor], side: _Side, factors: Tensor) -> None:
    # One look-up for all factors and one call for all products: on a GPU, launches are the cost.
    if not side.which:
        return
    pieces = torch.split(factors[side.ids], [math.prod(shape) for shape in side.shapes])
    torch._foreach_mul_(
        [parts[number].view(view) for number, view in zip(side.which, side.views, strict=True)],
        [piece.view(shape) for piece, shape in zip(pieces, side.shapes, strict=True)],
    )


def trace(model: nn.Module, example: Tensor) -> ScaleTable:
    """Trace `model` on an example batch into its scale table.

    Operations without a rule pin their edges to 1 and are listed in `pins`; nothing is guessed.
    """
    tracing = walk(model, example)
    classes, compact = tracing.classes.compile()
    entries = []
    for name, parameter in model.named_parameters():
        use = tracing.uses.get(name)
        shape = tuple(parameter.shape)
        if use is None or name in tracing.pinned_parameters:
            entries.append(Scaled(name, shape, shape, None, None))
            continue
        into = None if use.into is None else compact[use.into]
        entries.append(Scaled(name, shape, use.view, compact[use.out], into))
    norms = tuple(NormScale(path, use.kind, compact[use.read]) for path, use in tracing.norm_uses.items())
    head, refusal = _head(model, tracing)
    readers = tuple(_reader(model, tracing, entry.name) for entry in entries if _reads(entry))
    return ScaleTable(classes, tuple(entries), norms, tuple(tracing.pins), head, refusal, readers)


def _reads(entry: Scaled) -> bool:
    return entry.into is not None and bool((entry.into != PINNED).any())


def _reader(model: nn.Module, tracing: Tracing, weight: str) -> Reader:
    parameter = model.get_parameter(weight)
    found: dict[int, str] = {}
    for inside in tracing.readers[weight]:
        try:
            module = model.get_submodule(inside)
        except AttributeError:
            module = model
        if type(module) not in _READERS or module.weight is not parameter:
            return Reader(weight, (), f"{weight} is read outside the call of an nn.Linear or convolution module")
        found.setdefault(id(module), inside)
    return Reader(weight, tuple(found.values()))


def _head(model: nn.Module, tracing: Tracing) -> tuple[HeadSite | None, str]:
    if tracing.opaque:
        return None, f"{tracing.opaque[0]} may have any backward pass, and the recovery needs a linear one"
    site = tracing.linear_sites.get(tracing.produced or "")
    if site is None:
        return None, "the model's output is not the output of a linear layer, and nothing else"
    path = site.inside
    module = model.get_submodule(path)
    if type(module) is not nn.Linear or (module.bias is None) != (site.bias is None):
        return None, f"the last linear map ({site.weight}) is not the call of an nn.Linear module"
    for name in (site.weight, site.bias):
        if name is not None and tracing.use_counts[name] > 1:
            return None, f"the last linear layer's {name} is used more than once (tied)"
    if site.rank != 2:
        return None, "the last linear layer does not produce one vector per sample"
    return HeadSite(path, site.weight, site.bias, module.in_features, module.out_features), ""
