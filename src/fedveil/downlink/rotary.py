"""Rotary positions, recognised by what they compute and not by what they are called.

Queries and keys are often turned, pair of channels by pair, by angles that depend on the token's place and are known to
everybody. Code has many forms of it: halves or neighbours as pairs, complex numbers, a part of the channels only. What
they have in common is a stretch of a graph from one tensor to another of the same shape, linear, with coefficients that
follow from the model's own buffers and from shapes, and which maps every pair by

    (x, y) ↦ (a·x − b·y, b·x + a·y).

Such maps commute with every turn and scale of the same pairs, whatever a and b are, so that a secret of that form
passes (`SlotSet.turned`). A stretch is found by its shape in the graph and believed by its numbers: what it does to one
generic tensor tells what a linear map does. Where that is not so, its operations get their own rules, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fedveil.downlink.limits import DROPOUTS, LIMITED
from fedveil.downlink.rules import REARRANGEMENTS, RULES, in_place, operation_name
from fedveil.downlink.scales import Edge, Tracing

_LONGEST = 40
"""Operations in a stretch: the longest form in use has about twenty."""
_TOLERANCE = 1e-4

_JOINS = frozenset({"add", "sub", "cat", "concat", "concatenate", "stack", "view_as_real"})
_QUOTIENTS = frozenset({"div", "truediv"})
_PRODUCTS = frozenset({"mul", "multiply"}) | _QUOTIENTS
_LINEAR = (
    REARRANGEMENTS
    | _JOINS
    | _PRODUCTS
    | frozenset("neg clone contiguous alias to float double _to_copy view_as_complex".split())
)
_SEVERAL = frozenset({"chunk", "split", "split_with_sizes", "unbind", "tensor_split", "unsafe_chunk", "unsafe_split"})
_SHAPES = frozenset({"size", "dim", "numel", "sym_size", "stride"})
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})
# What makes tables of angles. Whatever draws numbers is not here.
_TABLES = (
    frozenset(RULES).union(
        LIMITED,
        REARRANGEMENTS,
        "arange outer polar einsum ones zeros full linspace logspace view_as_complex view_as_real floordiv mod".split(),
    )
    - DROPOUTS
)


@dataclass(frozen=True, eq=False)
class Stretch:
    """Linear operations between one tensor and another, in order; the last one gives the result."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def sink(self) -> fx.Node:
        """The operation that gives the result."""
        return self.nodes[-1]

    def run(self, x: Tensor, known: Mapping[fx.Node, Any]) -> Any:
        """Its result on another tensor than the example's."""
        made: dict[fx.Node, Any] = {self.source: x}

        def value(node: fx.Node) -> Any:
            if node in made:
                return made[node]
            given = known[node]
            return given.value if isinstance(given, Edge) else given

        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            if node.op == "call_method":
                made[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                made[node] = node.target(*args, **kwargs)
        return made[self.sink]


def stretches(graph: fx.Graph, fixed: Callable[[fx.Node], bool]) -> dict[fx.Node, Stretch]:
    """For every operation that may belong to a rotary position the stretch that it is in.

    `fixed` tells which inputs of the graph are the model's own and the same for every batch.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    public = _public(graph, fixed)
    held: dict[fx.Node, Stretch] = {}
    for node in reversed(graph.nodes):  # from the end: what turns a tensor has smaller joins inside
        if node not in held and _name(node) in _JOINS and (stretch := _grown(node, public, place)):
            held.update(dict.fromkeys(stretch.nodes, stretch))
    return held


def _name(node: fx.Node) -> str | None:
    return operation_name(node.target) if node.op in ("call_function", "call_method") else None


def _public(graph: fx.Graph, fixed: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Nodes whose values follow from buffers, shapes and numbers in the code."""
    public: set[fx.Node] = set()
    for node in graph.nodes:
        name, given = _name(node), node.all_input_nodes
        if name is None:
            known = node.op in ("get_attr", "placeholder") and fixed(node)
        elif name == "getattr":
            known = node.args[1] in _ATTRIBUTES
        else:
            known = name in _SHAPES or (name in _TABLES and all(part in public for part in given))
        if known and not in_place(node.target):
            public.add(node)
    return public


def _grown(sink: fx.Node, public: set[fx.Node], place: Mapping[fx.Node, int]) -> Stretch | None:
    """The stretch that ends here: backwards until one tensor is behind everything."""
    inside: set[fx.Node] = set()
    complete = _name(sink) != "view_as_real"  # a stretch in complex numbers begins where they do
    tabled = False
    frontier = {sink}
    while frontier:
        node = max(frontier, key=place.__getitem__)
        if inside and len(frontier) == 1 and complete and _name(node) not in _SEVERAL:
            nodes = sorted(inside, key=place.__getitem__)
            return Stretch(node, tuple(nodes)) if tabled else None
        name = _name(node)
        outside = node is not sink and not inside.issuperset(node.users)
        if name not in _LINEAR or in_place(node.target) or outside or len(inside) >= _LONGEST:
            return None
        varying = [part for part in node.all_input_nodes if part not in public]
        if name in _PRODUCTS and (len(varying) != 1 or (name in _QUOTIENTS and node.args[0] is not varying[0])):
            return None
        tabled |= name in _PRODUCTS and len(node.all_input_nodes) > 1
        complete |= name == "view_as_complex"
        inside.add(node)
        frontier.discard(node)
        frontier.update(varying)
    return None


def turned(tracing: Tracing, stretch: Stretch, known: Mapping[fx.Node, Any]) -> Edge | None:
    """The edge behind a stretch that turns pairs of channels; None where it does anything else."""
    edge = known[stretch.source]
    if not isinstance(edge, Edge) or not edge.value.is_floating_point() or id(edge.value) in tracing.crossed:
        return None
    try:
        out = stretch.run(edge.value, known)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not isinstance(out, Tensor) or out.shape != edge.value.shape or out.dtype != edge.value.dtype:
        return None
    if not bool(tracing.classes.find(edge.ids).any()):
        return None
    for dims in (1, 2):  # (…, channels) or (…, pairs, 2)
        if edge.ids.dim() > dims and edge.ids.shape[-dims:] == edge.value.shape[-dims:]:
            pairs = _pairs(lambda x: stretch.run(x, known), edge.value, dims)
            if pairs is not None:
                _limit(tracing, edge.ids, pairs, dims)
                return Edge(out, edge.ids)
    return None


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Which channels are turned together, and by what: a and b of every pair at every place."""

    first: Tensor
    second: Tensor
    rest: Tensor
    cosine: Tensor
    sine: Tensor


def _pairs(run: Callable[[Tensor], Tensor], like: Tensor, dims: int) -> _Pairs | None:
    """What a linear map does, if it turns pairs and leaves the other channels alone."""
    shape, channels = like.shape, like.shape[-dims:].numel()

    def mapped(x: Tensor) -> Tensor:
        return run(x.reshape(shape)).reshape(*shape[:-dims], channels)

    def ones_at(chosen: Tensor) -> Tensor:
        return like.new_zeros((*shape[:-dims], channels)).index_fill(-1, chosen.to(like.device), 1.0)

    reached = mapped(ones_at(torch.tensor([0]))).abs().reshape(-1, channels).amax(0)
    partners = [number for number in torch.nonzero(reached > _TOLERANCE).reshape(-1).tolist() if number]
    if len(partners) != 1:
        return None
    apart = int(partners[0])
    numbers = torch.arange(channels)
    if apart == 1 and channels % 2 == 0:
        first, rest = numbers[::2], numbers[:0]
    else:
        first, rest = numbers[:apart], numbers[2 * apart :]
    second = first + apart
    if int(second.max()) >= channels:
        return None
    answer = mapped(ones_at(first))
    cosine, sine = answer[..., first], answer[..., second]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((*shape[:-dims], channels), generator=generator, dtype=torch.float64).to(like)
    expected = x.clone()
    expected[..., first] = cosine * x[..., first] - sine * x[..., second]
    expected[..., second] = sine * x[..., first] + cosine * x[..., second]
    bound = _TOLERANCE * float(expected.abs().max())
    if not bool((mapped(x) - expected).abs().max() <= bound):
        return None
    return _Pairs(first, second, rest, cosine, sine)


def _limit(tracing: Tracing, ids: Tensor, pairs: _Pairs, dims: int) -> None:
    """The secrets of a pair commute with its turns; pairs differ from each other, and heads that are turned unlike."""
    slots = tracing.slots
    assert slots is not None
    for dim, size in enumerate(ids.shape[:-dims]):
        alike = all(bool((table == table.narrow(dim, 0, 1)).all()) for table in (pairs.cosine, pairs.sine))
        if size > 1 and not alike:
            slots.distinguish(ids, [dim])
    flat = ids.reshape(*ids.shape[:-dims], -1)
    slots.turned(flat[..., pairs.first], flat[..., pairs.second])
    if len(pairs.rest):
        slots.seen(flat[..., pairs.rest])
