"""Layers over tokens: a linear map along a public dimension, the same for every hidden channel.

A mixer's layer sees x'[channel] = A·x and maps along tokens, y = x·Wᵀ + b. The channels' secret A passes (with a bias
only an order does: A·1 = 1), and what W makes of tokens has secrets of its own: the edge behind it carries A ⊗ B. Its
classes say A; those of B, along the last dimension, stand beside them (`Tracing.crossed`). Elementwise functions pass
both as orders, another linear map reads B, and whatever else meets such an edge pins B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedveil.downlink.limits import ACTIVATIONS, DROPOUTS, ELEMENTWISE, LIMITED
from fedveil.downlink.rules import RULES, SAME_NAME, NoRuleError, as_edge, fresh_out, weighted
from fedveil.downlink.scales import Edge, Tracing, place
from fedveil.downlink.symmetry import PINNED, UNIT

_MODULES = {**SAME_NAME, **ACTIVATIONS, nn.Linear: "linear"}
_PASSING = ELEMENTWISE - DROPOUTS | {"dropout", "linear"}


def layer_name(module: nn.Module) -> str | None:
    """The operation that one of torch's own layers is, where it is a single one."""
    return _MODULES.get(type(module))


def crossing(tracing: Tracing, edges: Sequence[Edge], name: str | None, label: str) -> Tensor | None:
    """The classes along tokens of the edge that an operation reads; pinned where it does not know of them."""
    if tracing.slots is None:
        return None
    beside = [(edge, tracing.crossed[id(edge.value)]) for edge in edges if id(edge.value) in tracing.crossed]
    if name in _PASSING and len(edges) == 1 and beside:
        return beside[0][1]
    tracing.pin([Edge(edge.value, ids) for edge, ids in beside], label, "it reads tokens that a layer has mixed")
    return None


def crossed(tracing: Tracing, ids: Tensor | None, name: str | None, made: object) -> None:
    """The same classes along tokens behind an elementwise function, as an order; pinned where its rule did not fit."""
    if ids is None:
        return
    assert tracing.slots is not None
    if not isinstance(made, Edge) or not bool(tracing.slots.find(made.ids).any()):
        tracing.slots.pin(ids)
    elif name != "linear":
        tracing.slots.limit(ids, UNIT)
        tracing.crossed[id(made.value)] = ids


def linear(tracing: Tracing, out: Tensor, input: object, weight: object, bias: object = None) -> Tensor:
    """Along channels as ever; along tokens for every channel alike."""
    edge, matrix, slots = as_edge(input), weighted(weight), tracing.slots
    if matrix.transposed:
        raise NoRuleError("its weight is transposed")
    assert slots is not None
    ids, rank = edge.ids, edge.value.dim()
    tokens = ids.shape[-1] == 1 < edge.value.shape[-1] and ids.numel() > 1 and bool(slots.find(ids).any())
    read = tracing.crossed.get(id(edge.value))
    if not tokens:
        if read is not None:
            slots.pin(read)
        return RULES["linear"](tracing, out, input, weight, bias)  # type: ignore[no-any-return]
    outputs, features = matrix.value.shape
    if read is None:
        read = torch.full((features,), PINNED)
    made = fresh_out(tracing, matrix, outputs)
    tracing.use(matrix, view=(outputs, features), out=made[:, None], into=read.reshape(-1)[None, :])
    if bias is not None:
        tracing.use(weighted(bias), view=(outputs,), out=made)
        slots.limit(ids, UNIT)
    along_tokens = place(made, -1, rank)
    slots.seen(along_tokens)
    tracing.crossed[id(out)] = along_tokens
    return ids


LIMITED["linear"] = linear
