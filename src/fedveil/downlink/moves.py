"""Rearrangements and padding: the ids move about exactly as the numbers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedveil.downlink.edges import Edge, ParameterRef, Tracing, collapse, level
from fedveil.downlink.rules import NoRuleError, as_edge, rule


def _spread(edge: Edge) -> Tensor:
    return edge.ids.expand(edge.value.shape).contiguous()  # `view` wants it contiguous


def rearrangement(
    tracing: Tracing, out: object, operation: Callable[..., object], args: Any, kwargs: Any, *, name: str = ""
) -> object:
    """Run the operation itself on the ids: index or concatenate in its own order."""

    def to_ids(value: object) -> object:
        if isinstance(value, ParameterRef):
            raise NoRuleError("it rearranges a parameter directly")
        return _spread(value) if isinstance(value, Edge) else value

    def to_value(value: object) -> object:
        if isinstance(value, ParameterRef):
            raise NoRuleError("it is indexed by a parameter")
        return value.value if isinstance(value, Edge) else value

    def leaf(value: object) -> bool:
        return isinstance(value, (Edge, ParameterRef))

    first = next(one for one in pytree.tree_leaves((args, kwargs), is_leaf=leaf) if leaf(one))
    if any(one.dtype != first.value.dtype for one in pytree.tree_leaves(out) if isinstance(one, Tensor)):
        raise NoRuleError("it reads the numbers as another type")
    if name in INDEXED_BY_VALUE:
        # Its first argument is moved about, the others say where to.
        edge = as_edge(args[0] if args else kwargs.pop("input", None))
        ids = _spread(edge)
        dims = _unforeseeable_dims(name, edge, args[1:], kwargs)
        if dims:
            ids = level(tracing, ids, dims).expand(edge.value.shape)
        rest, moved_kwargs = pytree.tree_map(to_value, (args[1:], kwargs), is_leaf=leaf)
        moved_args = (ids, *rest)
    else:
        moved_args, moved_kwargs = pytree.tree_map(to_ids, (args, kwargs), is_leaf=leaf)
    try:
        moved = operation(*moved_args, **moved_kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise NoRuleError("it cannot be followed channel by channel") from error
    return pytree.tree_map_only(Tensor, collapse, moved)


INDEXED_BY_VALUE = frozenset({"getitem", "index_select"})


def _unforeseeable_dims(name: str, edge: Edge, args: Any, kwargs: Any) -> list[int]:
    """The dimensions read through an index that may differ next time: they need one scale."""

    def varies(index: object) -> bool:
        return isinstance(index, Edge) and not index.fixed

    rank = edge.value.dim()
    if name == "index_select":
        dim = args[0] if args else kwargs["dim"]
        index = args[1] if len(args) > 1 else kwargs["index"]
        return [dim % rank] if varies(index) else []
    parts = args[0] if isinstance(args[0], tuple) else (args[0],)
    widths = [_width(one) for one in parts]
    dims: list[int] = []
    at = 0
    for one, width in zip(parts, widths, strict=True):
        if varies(one):
            dims += range(at, at + width)
        at += rank - sum(widths) if one is Ellipsis else width
    return dims


def _width(index: object) -> int:
    """How many dimensions one element of an index consumes."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        raise NoRuleError("it is indexed by a truth value")
    if isinstance(index, Edge) and index.value.dtype is torch.bool:
        return index.value.dim()
    return 1


REARRANGEMENTS = frozenset(
    (
        "flatten view reshape permute transpose t unsqueeze squeeze chunk split split_with_sizes getitem "
        "narrow select slice unbind expand expand_as movedim moveaxis swapaxes swapdims channel_shuffle "
        "native_channel_shuffle pixel_shuffle pixel_unshuffle unflatten repeat index_select flip roll cat "
        "concat concatenate stack tile view_as reshape_as unsafe_split unsafe_chunk _unsafe_view hsplit "
        "vsplit tensor_split"
    ).split()
)


@rule("pad", "constant_pad_nd", "zero_pad")
def padding(
    tracing: Tracing, out: Tensor, input: object, pad: object, mode: object = "constant", value: object = None
) -> Tensor:
    """Zeros fit any scale: padded channels get fresh classes, padded space keeps its channel's."""
    if isinstance(mode, (int, float)):  # ATen: (input, pad, value)
        mode, value = "constant", mode
    edge = as_edge(input)
    amounts = list(pad)  # type: ignore[call-overload]
    ids = edge.ids
    rank = edge.value.dim()
    for position in range(len(amounts) // 2):
        dim, before, after = rank - 1 - position, amounts[2 * position], amounts[2 * position + 1]
        if before == after == 0 or (ids.shape[dim] == 1 and edge.value.shape[dim] != 1):
            continue
        if mode != "constant" or min(before, after) < 0:
            raise NoRuleError("it pads between channels of different scale")
        edges = [ids]
        for amount, front in ((before, True), (after, False)):
            if amount:
                shape = list(ids.shape)
                shape[dim] = amount
                new = tracing.classes.fresh(amount).reshape([amount if d == dim else 1 for d in range(rank)])
                edges.insert(0, new.expand(shape)) if front else edges.append(new.expand(shape))
        ids = torch.cat(edges, dim=dim)
    if mode == "constant" and value not in (None, 0, 0.0):
        raise NoRuleError("it pads with a constant other than zero")
    return ids
