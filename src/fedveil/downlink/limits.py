"""What operations demand of the secrets on their edges, where more than scales is asked for.

A rule here limits the edge instead of pinning it (see `slots`); names and arguments are as in `rules`, which serves
whatever is not here: linear maps, embeddings, averages and rearrangements set no limit of their own. An operation that
is in neither pins, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.downlink.rules import (
    RULES,
    NoRuleError,
    RecurrentCell,
    Rule,
    aligned,
    as_edge,
    convolution,
    fresh_out,
    normalised,
    one_step,
    over_space,
    recurrent,
    registering,
    weighted,
)
from fedveil.downlink.scales import Edge, ParameterRef, Pin, Tracing, along, level, place
from fedveil.downlink.slots import Heads, SlotSet
from fedveil.downlink.symmetry import ISOMETRY, POSITIVE, SPARSE, UNIT

LIMITED: dict[str, Rule] = {}
rule = registering(LIMITED)
SIGNED = SPARSE | ISOMETRY


def _slots(tracing: Tracing) -> SlotSet:
    assert tracing.slots is not None
    return tracing.slots


# -- element by element ------------------------------------------------------------------------------


def elementwise(
    tracing: Tracing, out: Tensor, input: object, *rest: object, limits: int, even: bool = False, **more: object
) -> Tensor:
    """One function of every number. What is odd lets signs pass; what is even forgets them."""
    edge = as_edge(input)
    if not out.is_floating_point():
        raise NoRuleError("its result is not a floating-point tensor")
    if any(isinstance(value, (Edge, ParameterRef)) for value in (*rest, *more.values())):
        raise NoRuleError("its settings are tensors")
    _slots(tracing).limit(edge.ids, limits)
    return _slots(tracing).beside(edge.ids, UNIT) if even else edge.ids


_HOMOGENEOUS = "relu leaky_relu abs"
_ODD = "tanh softsign erf sin sinh asin asinh atan atanh tan tanhshrink softshrink hardshrink sign erfinv"
_EVEN = "square cos cosh"
_OTHERS = (
    "sigmoid logsigmoid log_sigmoid gelu silu swish elu selu celu softplus mish hardsigmoid hardswish relu6 exp exp2 "
    "expm1 log log2 log10 log1p sqrt rsqrt reciprocal erfc nan_to_num clamp clamp_min clamp_max threshold clip "
    "floor ceil round"
)
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout".split()
)
for _names, _limits in ((_HOMOGENEOUS, POSITIVE), (_ODD, SIGNED), (_OTHERS, UNIT)):
    LIMITED.update(dict.fromkeys(_names.split(), partial(elementwise, limits=_limits)))
LIMITED.update(dict.fromkeys(DROPOUTS, partial(elementwise, limits=SPARSE)))
ELEMENTWISE = frozenset(LIMITED)
"""One function of every number."""
LIMITED.update(dict.fromkeys(_EVEN.split(), partial(elementwise, limits=SIGNED, even=True)))
for _name in ("alpha_dropout", "feature_alpha_dropout"):  # what they put in is not 0
    LIMITED[_name] = partial(elementwise, limits=UNIT)


@rule("pow", "float_power")
def power(tracing: Tracing, out: Tensor, input: object, exponent: object) -> Tensor:
    """x² forgets a sign and x³ keeps it."""
    whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
    even = whole and int(exponent) % 2 == 0  # type: ignore[call-overload]
    return elementwise(tracing, out, input, exponent, limits=SIGNED if whole else UNIT, even=even)


@rule("clamp", "clamp_min", "threshold")
def clamp(tracing: Tracing, out: Tensor, input: object, min: object = None, max: object = None) -> Tensor:
    """clamp(min=0) is ReLU."""
    homogeneous = min == 0 and max in (None, 0.0)
    return elementwise(tracing, out, input, min, max, limits=POSITIVE if homogeneous else UNIT)


@rule("hardtanh")
def hardtanh(
    tracing: Tracing,
    out: Tensor,
    input: object,
    min_val: object = -1.0,
    max_val: object = 1.0,
    *_: object,
    **__: object,
) -> Tensor:
    """Odd only between bounds that are each other's negative."""
    odd = isinstance(min_val, (int, float)) and isinstance(max_val, (int, float)) and min_val == -max_val
    return elementwise(tracing, out, input, min_val, max_val, limits=SIGNED if odd else UNIT)


def _settings(module: object) -> tuple[float, ...]:
    """What an activation's rule has to know of its layer."""
    return (module.min_val, module.max_val) if type(module) is nn.Hardtanh else ()


@rule("prelu")
def prelu(tracing: Tracing, out: Tensor, input: object, weight: object) -> Tensor:
    """Slopes move with their channels."""
    edge, slopes = as_edge(input), weighted(weight)
    if slopes.value.numel() == 1:
        tracing.pin_parameter(slopes, "prelu", "one slope for all channels is not changed")
    else:
        read = along(tracing, edge, 1)
        tracing.use(slopes, view=(len(read),), out=_slots(tracing).beside(read, UNIT))
    _slots(tracing).limit(edge.ids, POSITIVE)
    return edge.ids


def _largest(tracing: Tracing, out: Tensor, input: object, *rest: object, spatial: int, **more: object) -> Tensor:
    _slots(tracing).limit(as_edge(input).ids, POSITIVE)
    return over_space(tracing, out, input, *rest, spatial=spatial, **more)


for _dims in (1, 2, 3):
    for _kind in ("max_pool", "adaptive_max_pool"):
        LIMITED[f"{_kind}{_dims}d"] = partial(_largest, spatial=_dims)


@rule("mean", "sum", "amax", "amin")
def reduction(
    tracing: Tracing, out: Tensor, input: object, dim: Any = None, keepdim: bool = False, **more: Any
) -> Tensor:
    """A sum over channels does not see their order; one over other dimensions sets no limit."""
    edge, slots = as_edge(input), _slots(tracing)
    rank = edge.value.dim()
    asked = more.get("axis") if dim is None else dim
    dims = [asked] if isinstance(asked, int) else list(asked or range(rank))
    gone = {index % rank for index in dims}
    if not any(edge.ids.shape[index] > 1 for index in gone):
        slots.limit(edge.ids, POSITIVE if tracing.operation in ("amax", "amin") else 0)
        return RULES["mean"](tracing, out, input, dim, keepdim, **more)  # type: ignore[no-any-return]
    slots.limit(edge.ids, UNIT)
    slots.distinguish(edge.ids, set(range(rank)) - gone)
    return torch.zeros((1,) * out.dim(), dtype=torch.int64)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def softmax(tracing: Tracing, out: Tensor, input: object, dim: object = None, *_: object, **__: object) -> Tensor:
    """Over tokens it is one function of all of them; over channels it does not see their order."""
    edge, slots = as_edge(input), _slots(tracing)
    if not isinstance(dim, int):
        raise NoRuleError("it does not say over which dimension")
    slots.limit(edge.ids, UNIT)
    if edge.ids.shape[dim] > 1:
        slots.distinguish(edge.ids, set(range(edge.ids.dim())) - {dim % edge.ids.dim()})
    return edge.ids


# -- two operands --------------------------------------------------------------------------------------


def _operand(tracing: Tracing, ref: ParameterRef, ids: Tensor) -> Tensor:
    """An edge's ids as a parameter that is added to it or multiplied sees them."""
    shape = tuple(ref.value.shape)
    lead = ids.dim() - len(shape)
    missing = [*range(lead), *(lead + dim for dim, size in enumerate(shape) if size == 1)]
    return level(tracing, ids, missing).reshape(ids.shape[lead:])


def _varies(value: Tensor, ids: Tensor) -> list[int]:
    """The dimensions along which both the ids and a public tensor vary."""
    lead = ids.dim() - value.dim()
    return [dim for dim, size in enumerate(ids.shape) if size > 1 and dim >= lead and value.shape[dim - lead] > 1]


def _public(tracing: Tracing, edge: Edge) -> bool:
    return not bool(tracing.classes.find(edge.ids).any())


@rule("add", "sub", "iadd", "isub", "maximum", "minimum", "rsub")
def addition(tracing: Tracing, out: Tensor, input: object, other: object, alpha: object = 1) -> Tensor:
    """A sum needs equal secrets. A number for all channels needs an order; a learned table follows its edge."""
    slots = _slots(tracing)
    edges = [value for value in (input, other) if isinstance(value, Edge)]
    tables = [value for value in (input, other) if isinstance(value, ParameterRef)]
    if not edges:
        raise NoRuleError("it adds parameters")
    if tracing.operation in ("maximum", "minimum"):
        slots.limit(edges[0].ids, POSITIVE)
    ids = aligned(edges[0], out)
    if tables and tables[0].value.numel() > 1:
        tracing.use(tables[0], view=tuple(tables[0].value.shape), out=_operand(tracing, tables[0], ids))
        return ids
    if tables:
        tracing.pin_parameter(tables[0], "add", "one number for all channels is not changed")
    if len(edges) == 1:
        slots.limit(ids, 0 if other == 0 else UNIT)
        return ids
    second = aligned(edges[1], out)
    for public, kept in ((edges[0], second), (edges[1], ids)):
        if _public(tracing, public) and not _varies(public.value, kept):
            slots.limit(kept, UNIT)
            return kept
    return RULES["add"](tracing, out, *edges)  # type: ignore[no-any-return]


@rule("mul", "imul", "multiply")
def product(tracing: Tracing, out: Tensor, input: object, other: object) -> Tensor:
    """Two edges share an order and multiply their numbers; a parameter stands between two edges of one order."""
    slots = _slots(tracing)
    edges = [value for value in (input, other) if isinstance(value, Edge)]
    gains = [value for value in (input, other) if isinstance(value, ParameterRef)]
    if not edges:
        raise NoRuleError("it multiplies parameters")
    ids = aligned(edges[0], out)
    if gains:
        return gain(tracing, gains[0], ids)
    if len(edges) == 1:
        return ids
    second = aligned(edges[1], out)
    for public, kept in ((edges[0], second), (edges[1], ids)):
        if _public(tracing, public):
            dims = _varies(public.value, kept)
            if dims:
                slots.limit(kept, SPARSE)
                slots.distinguish(kept, dims)
                tracing.pins.append(
                    Pin("mul", tracing.spot, "a public tensor tells channels apart: they keep their order")
                )
            return kept
    return slots.product(ids, second)


def gain(tracing: Tracing, ref: ParameterRef, ids: Tensor) -> Tensor:
    """x ∘ γ with learned γ: fresh numbers behind it, in the order before it."""
    slots = _slots(tracing)
    if ref.value.numel() == 1 or not bool(tracing.classes.find(ids).any()):
        tracing.pin_parameter(ref, "mul", "it multiplies an activation that nothing hides")
        return ids
    read = _operand(tracing, ref, ids)
    lead = ids.dim() - read.dim()
    slots.limit(read, SPARSE)
    made = slots.beside(read, SPARSE)
    tracing.use(ref, view=tuple(ref.value.shape), out=made, into=read)
    return made.reshape((1,) * lead + tuple(made.shape))


@rule("glu")
def gated(tracing: Tracing, out: Tensor, input: object, dim: int = -1) -> Tensor:
    """The first half times the sigmoid of the second: two halves of one order."""
    edge, slots = as_edge(input), _slots(tracing)
    if edge.ids.shape[dim] == 1:  # one class for all: each half is it
        slots.limit(edge.ids, UNIT)
        return edge.ids
    left, right = edge.ids.chunk(2, dim)
    slots.seen(left)
    slots.seen(right)
    slots.limit(right, UNIT)
    return slots.product(left, right)


@rule("div", "truediv", "itruediv")
def division(tracing: Tracing, out: Tensor, input: object, other: object, **kwargs: object) -> Tensor:
    """By a number, or by an edge of the same order whose own numbers are 1."""
    edge, slots = as_edge(input), _slots(tracing)
    if kwargs or isinstance(other, ParameterRef):
        raise NoRuleError("it divides by a parameter or rounds")
    if not isinstance(other, Edge):
        return edge.ids
    slots.limit(other.ids, UNIT)
    return product(tracing, out, edge, other)  # type: ignore[no-any-return]


# -- weights -------------------------------------------------------------------------------------------


def _convolved(
    tracing: Tracing, out: Tensor, input: object, weight: object, *rest: Any, transposed: bool, **more: Any
) -> Tensor:
    """Groups move as wholes; a convolution of each channel by itself keeps the order of channels."""
    made = convolution(tracing, out, input, weight, *rest, transposed=transposed, **more)
    groups = more.get("groups", rest[4] if len(rest) > 4 else 1)
    if groups > 1:
        slots, edge = _slots(tracing), as_edge(input)
        channel_dim = edge.value.dim() - (weighted(weight).value.dim() - 2) - 1
        read = along(tracing, edge, channel_dim).reshape(groups, -1)
        outputs = made.reshape(groups, -1)
        if read.shape[1] == 1:
            slots.limit(read, SPARSE)
            slots.limit(outputs, SPARSE)
            slots.tie(outputs, read)
        else:
            slots.group(torch.cat([read, outputs], 1))
    return made


for _dims in (1, 2, 3):
    LIMITED[f"conv{_dims}d"] = partial(_convolved, transposed=False)
    LIMITED[f"conv_transpose{_dims}d"] = partial(_convolved, transposed=True)


@rule("matmul", "mm", "bmm")
def matmul(tracing: Tracing, out: Tensor, input: object, other: object) -> Tensor:
    """x·W with a learned W; queries times keys; and what became of scores times values."""
    if isinstance(other, Edge):
        return _attended_by_hand(tracing, out, as_edge(input), other)
    return _multiplied(tracing, out, input, other, None)


@rule("addmm")
def addmm(tracing: Tracing, out: Tensor, bias: object, input: object, weight: object) -> Tensor:
    """b + x·W."""
    return _multiplied(tracing, out, input, weight, bias)


def _attended_by_hand(tracing: Tracing, out: Tensor, left: Edge, right: Edge) -> Tensor:
    slots, rank = _slots(tracing), out.dim()
    if not 2 < rank == left.value.dim() == right.value.dim() or left.ids.shape[-2] > 1:
        raise NoRuleError("it multiplies two activations")
    if (left.ids.shape[-1] > 1 or right.ids.shape[-2] > 1) and right.ids.shape[-1] == 1:
        query, key = _by_head(tracing, left), _by_head(tracing, Edge(right.value.mT, right.ids.mT))
        marks = slots.score(query, key)
        return marks.reshape((1,) * (rank - 3) + (-1, 1, 1))
    if left.ids.shape[-1] > 1 or right.ids.shape[-2] > 1:
        raise NoRuleError("it multiplies two activations")
    if _public(tracing, left):  # tokens are mixed by what everybody knows
        slots.distinguish(right.ids, _varies(left.value[..., :1, :1], right.ids))
        return right.ids
    value = _by_head(tracing, right)
    marks = level(tracing, left.ids, [dim for dim in range(rank) if dim != rank - 3]).reshape(-1).expand(len(value))
    made = slots.weigh(marks, value)
    if made is None:
        raise NoRuleError("it multiplies two activations")
    return made.reshape((1,) * (rank - 3) + (len(made), 1, -1))


def _by_head(tracing: Tracing, edge: Edge) -> Tensor:
    """The ids (heads, width) of queries, keys or values; of three dimensions the first is the batch."""
    rank = edge.value.dim()
    kept = {rank - 1, rank - 3} if rank > 3 else {rank - 1}
    ids = level(tracing, edge.ids, [dim for dim in range(rank) if dim not in kept])
    count = edge.value.shape[-3] if rank > 3 else 1
    return ids.reshape(-1, ids.shape[-1]).expand(count, edge.value.shape[-1])


@rule("masked_fill")
def masked(tracing: Tracing, out: Tensor, input: object, mask: object, value: object) -> Tensor:
    """Scores that nobody may see, by a public mask."""
    edge = as_edge(input)
    hidden = not isinstance(mask, Edge) or not _public(tracing, mask) or bool(_varies(mask.value, edge.ids))
    if hidden or isinstance(value, (Edge, ParameterRef)):
        raise NoRuleError("its mask is hidden, or tells channels apart")
    _slots(tracing).limit(edge.ids, UNIT)
    return edge.ids


def _multiplied(tracing: Tracing, out: Tensor, input: object, weight: object, bias: object) -> Tensor:
    edge, matrix = as_edge(input), weighted(weight)
    if matrix.value.dim() != 2:
        raise NoRuleError("its weight is not a matrix")
    if matrix.transposed:
        return RULES["linear"](  # type: ignore[no-any-return]
            tracing, out, input, ParameterRef(matrix.name, matrix.value.mT), bias
        )
    features, outputs = matrix.value.shape
    made = fresh_out(tracing, matrix, outputs)
    tracing.use(matrix, view=(features, outputs), out=made[None, :], into=along(tracing, edge, -1)[:, None])
    if bias is not None:
        tracing.use(weighted(bias), view=(outputs,), out=made)
    return place(made, -1, out.dim())


def as_activation(tracing: Tracing, tree: Any) -> Any:
    """Parameters that are rearranged (class tokens, tables that are cut) as edges: the last axis is hidden."""

    def edge(leaf: object) -> object:
        if not isinstance(leaf, ParameterRef):
            return leaf
        shape = tuple(leaf.value.shape)
        wide = [dim for dim, size in enumerate(shape) if size > 1]
        if not wide:
            raise NoRuleError("it rearranges a single number")
        made = place(fresh_out(tracing, leaf, shape[wide[-1]]), wide[-1], len(shape))
        tracing.use(leaf, view=shape, out=made)
        _slots(tracing).seen(made)
        return Edge(leaf.value, made)

    return pytree.tree_map(edge, tree, is_leaf=lambda leaf: isinstance(leaf, (Edge, ParameterRef)))


# -- attention -----------------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def attention(
    tracing: Tracing,
    out: Tensor,
    query: object,
    key: object,
    value: object,
    attn_mask: object = None,
    *_: object,
    **__: object,
) -> Tensor:
    """q·k sees M⁻ᵀ and M, a value head N; heads may change places where no mask tells them apart."""
    edges = [as_edge(one) for one in (query, key, value)]
    rank = out.dim()
    ordered = False
    if isinstance(attn_mask, (Edge, ParameterRef)):
        if isinstance(attn_mask, ParameterRef):
            raise NoRuleError("its mask is a parameter")
        tracing.pin([attn_mask], "scaled_dot_product_attention", "it is a mask")
        ordered = rank > 3 and attn_mask.value.dim() > 2 and attn_mask.value.shape[-3] > 1
    query_heads, key_heads, value_heads = (_by_head(tracing, edge) for edge in edges)
    spread = _slots(tracing).attend(Heads(query_heads, key_heads, value_heads, ordered))
    return (
        spread[None, :, None, :].reshape((1,) * (rank - 3) + (len(spread), 1, -1)) if rank > 3 else spread[:, None, :]
    )


def multihead(
    tracing: Tracing, layer: nn.MultiheadAttention, operands: tuple[Edge, Edge, Edge], ref: Callable[..., Any]
) -> Tensor:
    """torch's MultiheadAttention: q, k and v are stacked in one weight; the ids of its result's last axis."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise NoRuleError("its keys and values have weights or tokens of their own")
    slots, size, heads = _slots(tracing), layer.embed_dim, layer.num_heads
    weight, bias = ref(layer, "in_proj_weight"), ref(layer, "in_proj_bias")
    reads = torch.stack([along(tracing, edge, -1) for edge in operands])
    made = fresh_out(tracing, weight, 3 * size).reshape(3, size)
    tracing.use(weight, view=(3, size, size), out=made[:, :, None], into=reads[:, None, :])
    if bias is not None:
        tracing.use(bias, view=(3, size), out=made)
    for part in made:
        slots.seen(part)
    query, key, value = made.reshape(3, heads, -1)
    slots.attend(Heads(query, key, value, ordered=False))
    return project(tracing, made[2], ref(layer.out_proj, "weight"), ref(layer.out_proj, "bias"))


def project(tracing: Tracing, read: Tensor, weight: ParameterRef, bias: ParameterRef | None) -> Tensor:
    """A linear layer from known ids."""
    made = fresh_out(tracing, weight, len(weight.value))
    tracing.use(weight, view=tuple(weight.value.shape), out=made[:, None], into=read[None, :])
    if bias is not None:
        tracing.use(bias, view=(len(made),), out=made)
    _slots(tracing).seen(made)
    return made


# -- recurrent cells -------------------------------------------------------------------------------------------

GATES: dict[type[nn.Module], str] = {nn.LSTM: "iftg", nn.GRU: "rzt", nn.RNN: "t"}
"""The gates as torch stacks them; t: behind a tanh."""
CELLS = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}
"""One step of each, as a layer of its own."""


def _exported_step(tracing: Tracing, out: Any, *operands: Any, gates: str) -> Any:
    """As torch.export has it: (input, first states, weights, biases)."""
    unit = one_step(tracing, *operands, gates=gates, homogeneous=tracing.operation == "rnn_relu_cell")
    return pytree.tree_map_only(Tensor, lambda _: unit, out)


def _exported_recurrent(
    tracing: Tracing,
    out: Any,
    input: object,
    first: Any,
    weights: Any,
    biases: bool,
    layers: int,
    *more: Any,
    gates: str,
) -> tuple[Tensor, ...]:
    """As torch.export has it: (input, first states, all parameters in a row, …)."""
    parts = [weighted(weight) for weight in weights]
    each = 4 if biases else 2
    if any(ref.value.dim() != 2 for ref in (*parts[::each], *parts[1::each])):
        raise NoRuleError("its states are projected")
    cells = [
        RecurrentCell(parts[at], parts[at + 1], tuple(parts[at + 2 : at + each])) for at in range(0, len(parts), each)
    ]
    ways = len(cells) // layers
    stacked = [cells[at : at + ways] for at in range(0, len(cells), ways)]
    homogeneous = tracing.operation == "rnn_relu"
    given = first if isinstance(first, (tuple, list)) else (first,)
    read, states = recurrent(tracing, input, stacked, gates=gates, homogeneous=homogeneous, first=given)
    return place(read, -1, out[0].dim()), *(_states(states, part.dim()) for part in out[1:])


def _states(states: Tensor, rank: int) -> Tensor:
    return states.reshape((len(states),) + (1,) * (rank - 2) + (states.shape[1],))


for _name, _layer in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn_tanh", nn.RNN), ("rnn_relu", nn.RNN)):
    LIMITED[_name] = partial(_exported_recurrent, gates=GATES[_layer])
    LIMITED[f"{_name}_cell"] = partial(_exported_step, gates=GATES[_layer])


# -- layers that torch has as wholes ---------------------------------------------------------------------------

ACTIVATIONS: dict[type[nn.Module], str] = {
    getattr(nn, name): operation
    for name, operation in (
        *(
            (name, name.lower())
            for name in "Sigmoid GELU SiLU ELU SELU CELU Softplus Mish Hardsigmoid Hardswish".split()
        ),
        *((name, name.lower()) for name in "ReLU6 Tanh Softsign Hardtanh Tanhshrink Softshrink Hardshrink".split()),
        *((name, name.lower()) for name in "LogSigmoid Threshold".split()),
        ("AlphaDropout", "alpha_dropout"),
        ("FeatureAlphaDropout", "feature_alpha_dropout"),
    )
}


def layer_ids(
    tracing: Tracing, module: nn.Module, args: Any, kwargs: Any, out: Any, ref: Callable[..., Any]
) -> Any | None:
    """The ids of what one of torch's own layers gives; None where it has no rule of its own here."""
    kind = type(module)
    if kind in ACTIVATIONS and not kwargs:
        return LIMITED[ACTIVATIONS[kind]](tracing, out, *args, *_settings(module))
    if isinstance(module, nn.GLU) and kind is nn.GLU:
        return gated(tracing, out, args[0], module.dim)
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and kind in (nn.Softmax, nn.LogSoftmax):
        return softmax(tracing, out, args[0], module.dim)
    if isinstance(module, nn.Dropout) and kind is nn.Dropout and module.p == 0 and len(args) == 1:
        return as_edge(args[0]).ids
    if isinstance(module, nn.RMSNorm) and kind is nn.RMSNorm:
        return _norm(tracing, module, args[0], ref)
    if isinstance(module, nn.MultiheadAttention) and kind is nn.MultiheadAttention:
        return _attended(tracing, module, args, kwargs, out, ref)
    if isinstance(module, nn.TransformerEncoderLayer) and kind is nn.TransformerEncoderLayer:
        return _encoder_layer(tracing, module, _only_input(args, kwargs), ref).ids
    if isinstance(module, nn.TransformerEncoder) and kind is nn.TransformerEncoder:
        edge = _only_input(args, kwargs)
        for part in module.layers:
            if type(part) is not nn.TransformerEncoderLayer:
                raise NoRuleError("its layers are not torch's own")
            edge = _encoder_layer(tracing, part, edge, ref)
        return edge.ids if module.norm is None else _norm(tracing, module.norm, edge, ref)
    if isinstance(module, nn.RNNBase) and kind in GATES:
        if module.proj_size:
            raise NoRuleError("its states are projected")
        first = kwargs.get("hx", args[1] if len(args) > 1 else None)
        read, states = recurrent(
            tracing,
            args[0] if args else kwargs.get("input"),
            _cells(module, ref),
            gates=GATES[kind],
            homogeneous=isinstance(module, nn.RNN) and module.nonlinearity == "relu",
            first=() if first is None else first if isinstance(first, (tuple, list)) else (first,),
        )
        rank = out[0].dim()
        last = _states(states, rank)
        return place(read, -1, rank), (last, last) if isinstance(module, nn.LSTM) else last
    if kind in CELLS:
        unit = one_step(
            tracing,
            args[0],
            kwargs.get("hx", args[1] if len(args) > 1 else None),
            *(ref(module, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")),
            gates=GATES[CELLS[kind]],
            homogeneous=getattr(module, "nonlinearity", "") == "relu",
        )
        return pytree.tree_map_only(Tensor, lambda _: unit, out)
    return None


def _cells(layer: nn.RNNBase, ref: Callable[..., Any]) -> list[list[RecurrentCell]]:
    ways = ("", "_reverse")[: 1 + layer.bidirectional]
    kinds = ("ih", "hh") if layer.bias else ()

    def cell(name: str) -> RecurrentCell:
        biases = tuple(ref(layer, f"bias_{kind}_{name}") for kind in kinds)
        return RecurrentCell(ref(layer, f"weight_ih_{name}"), ref(layer, f"weight_hh_{name}"), biases)

    return [[cell(f"l{number}{way}") for way in ways] for number in range(layer.num_layers)]


def _only_input(args: Any, kwargs: Any) -> Edge:
    """The first argument of an encoder; masks are as public as the tokens that they hide."""
    if any(isinstance(value, ParameterRef) for value in pytree.tree_leaves((args, kwargs))):
        raise NoRuleError("its mask is a parameter")
    return as_edge(args[0] if args else kwargs.get("src"))


def _norm(tracing: Tracing, module: nn.Module, edge: Edge, ref: Callable[..., Any]) -> Tensor:
    if type(module) not in (nn.LayerNorm, nn.RMSNorm):
        raise NoRuleError("its normalisation is not torch's own")
    return normalised(
        tracing,
        edge.value,
        edge,
        kind="layer" if type(module) is nn.LayerNorm else "rms",
        weight=ref(module, "weight"),
        bias=ref(module, "bias"),
        dims=len(module.normalized_shape),  # type: ignore[arg-type]
    )


def _attended(
    tracing: Tracing, module: nn.MultiheadAttention, args: Any, kwargs: Any, out: Any, ref: Callable[..., Any]
) -> tuple[Tensor, Tensor | None]:
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = [given.get(name) for name in ("attn_mask", "key_padding_mask")]
    if any(isinstance(mask, ParameterRef) or (isinstance(mask, Edge) and not _public(tracing, mask)) for mask in masks):
        raise NoRuleError("its mask is computed from what is hidden")
    if isinstance(masks[0], Edge) and masks[0].value.dim() > 2:
        raise NoRuleError("its mask tells heads apart")
    if out[1] is not None and given.get("average_attn_weights", True) is not True:
        raise NoRuleError("it shows every head's weights")
    operands = tuple(as_edge(given.get(name)) for name in names[:3])
    made = multihead(tracing, module, operands, ref)  # type: ignore[arg-type]
    weights = None if out[1] is None else torch.zeros((1,) * out[1].dim(), dtype=torch.int64)
    return place(made, -1, out[0].dim()), weights


def _encoder_layer(tracing: Tracing, module: nn.TransformerEncoderLayer, edge: Edge, ref: Callable[..., Any]) -> Edge:
    """Attention and a feed-forward part, each with its residual and its normalisation, before or behind."""
    slots, rank = _slots(tracing), edge.value.dim()
    activation: Any = module.activation
    functions = {torch.nn.functional.relu: "relu", torch.nn.functional.gelu: "gelu"}
    name = functions.get(activation) or {**ACTIVATIONS, nn.ReLU: "relu"}.get(type(activation))
    if name is None:
        raise NoRuleError("its activation is not torch's own")

    def at(ids: Tensor) -> Edge:
        slots.seen(ids)
        return Edge(edge.value, ids)

    def dropped(x: Edge, layer: nn.Dropout) -> Edge:
        return x if layer.p == 0 else at(LIMITED["dropout"](tracing, x.value, x))

    def attended(x: Edge) -> Edge:
        made = at(place(multihead(tracing, module.self_attn, (x, x, x), ref), -1, rank))
        return dropped(made, module.dropout1)

    def fed(x: Edge) -> Edge:
        linear1, linear2 = module.linear1, module.linear2
        hidden = project(tracing, along(tracing, x, -1), ref(linear1, "weight"), ref(linear1, "bias"))
        wide = Edge(edge.value.new_empty((*edge.value.shape[:-1], len(hidden))), place(hidden, -1, rank))
        wide = Edge(wide.value, LIMITED[name](tracing, wide.value, wide, *_settings(activation)))
        dropped(wide, module.dropout)
        made = project(tracing, along(tracing, wide, -1), ref(linear2, "weight"), ref(linear2, "bias"))
        return dropped(at(place(made, -1, rank)), module.dropout2)

    for part, norm in ((attended, module.norm1), (fed, module.norm2)):
        if module.norm_first:
            edge = at(addition(tracing, edge.value, edge, part(at(_norm(tracing, norm, edge, ref)))))
        else:
            edge = at(_norm(tracing, norm, at(addition(tracing, edge.value, edge, part(edge))), ref))
    return edge
