"""How each operation treats scales. An operation that is not here pins its edges.

Rules are registered under the operation's own name ("relu", "conv2d", …), which is the same for
a module, a function, a tensor method and an ATen operator, so that one rule serves all four.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.downlink.scales import (
    Edge,
    LinearSite,
    ParameterRef,
    Tracing,
    along,
    collapse,
    level,
    place,
)
from fedveil.downlink.slots import SlotSet, broadcast
from fedveil.downlink.symmetry import ISOMETRY, POSITIVE, SPARSE, UNIT

# A rule sees the operation's arguments (tensors as Edge or ParameterRef) and its value, and returns
# the ids of that value. It raises NoRuleError where the arguments leave its ground.
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


class NoRuleError(Exception):
    """The operation cannot carry scales with these arguments; its text is the reason."""


def registering(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that takes operation names and enters a rule in the table under them."""

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return rule


rule = registering(RULES)


def operation_name(target: object) -> str | None:
    """The plain name of a function, method or ATen operator of torch; None for anything foreign."""
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        if namespace != "aten":
            return None
    else:
        name = getattr(target, "__name__", "")
        if target is getattr:
            return "getattr"
        homes = (torch, F, operator, torch.Tensor)
        if not any(getattr(home, name, None) is target for home in homes):
            return None
    return name if name.startswith("__") else name.rstrip("_")


def in_place(target: object) -> bool:
    """Whether an operation changes its first operand."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.endswith("_")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.endswith("_") or name in {"iadd", "isub", "imul", "itruediv"}


def as_edge(value: object) -> Edge:
    """An operand that must be an activation."""
    if isinstance(value, Edge):
        return value
    raise NoRuleError("its input is not an activation")


def weighted(value: object) -> ParameterRef:
    """An operand that must be a parameter."""
    if isinstance(value, ParameterRef):
        return value
    raise NoRuleError("its weight is computed, not a parameter")


# -- linear maps -----------------------------------------------------------------------------------


def fresh_out(tracing: Tracing, weight: ParameterRef, count: int) -> Tensor:
    """Classes of what a weight produces: fresh, or those of its earlier use."""
    known = tracing.uses.get(weight.name)
    if known is not None and known.out.numel() == count:
        return known.out.reshape(-1)
    return tracing.classes.fresh(count)


@rule("linear")
def linear(tracing: Tracing, out: Tensor, input: object, weight: object, bias: object = None) -> Tensor:
    """y = Wx + b: W × (out ⊗ 1/in), b × out, fresh classes on the out edge."""
    edge, matrix = as_edge(input), weighted(weight)
    outputs, features = matrix.value.shape
    made = fresh_out(tracing, matrix, outputs)
    tracing.use(matrix, view=(outputs, features), out=made[:, None], into=along(tracing, edge, -1)[None, :])
    if bias is not None:
        tracing.use(weighted(bias), view=(outputs,), out=made)
    tracing.linear_sites[tracing.where] = LinearSite(
        matrix.name, bias.name if isinstance(bias, ParameterRef) else None, out.dim(), tracing.inside
    )
    return place(made, -1, out.dim())


def convolution(
    tracing: Tracing,
    out: Tensor,
    input: object,
    weight: object,
    bias: object = None,
    stride: object = 1,
    padding: object = 0,
    third: object = None,
    groups: int = 1,
    *_: object,
    transposed: bool,
    **__: object,
) -> Tensor:
    """A convolution: like a linear map over channels, group by group. `third` is one more that no scale depends on."""
    edge, kernel = as_edge(input), weighted(weight)
    spatial = kernel.value.dim() - 2
    channel_dim = edge.value.dim() - spatial - 1
    read = along(tracing, edge, channel_dim)
    first, second, *sizes = kernel.value.shape
    ones = (1,) * spatial
    view = (groups, first // groups, second, *sizes)
    left, right = (groups, first // groups, 1, *ones), (groups, 1, second, *ones)
    # The weight of a transposed one is (in, out/groups, …), else (out, in/groups, …).
    outputs, out_shape, in_shape = (second * groups, right, left) if transposed else (first, left, right)
    made = fresh_out(tracing, kernel, outputs)
    tracing.use(kernel, view=view, out=made.reshape(out_shape), into=read.reshape(in_shape))
    if bias is not None:
        tracing.use(weighted(bias), view=(outputs,), out=made)
    return place(made, channel_dim, out.dim())


for _dims in (1, 2, 3):
    RULES[f"conv{_dims}d"] = partial(convolution, transposed=False)
    RULES[f"conv_transpose{_dims}d"] = partial(convolution, transposed=True)


@rule("embedding")
def embedding(
    tracing: Tracing,
    out: Tensor,
    input: object,
    weight: object,
    *rest: object,
    max_norm: object = None,
    **_: object,
) -> Tensor:
    """A table look-up is linear in the table: fresh classes on the feature dimension."""
    # F.embedding takes (input, weight, padding_idx, max_norm, …), ATen takes (weight, indices, …).
    function_form = isinstance(weight, ParameterRef)
    table = weight if function_form else input
    if function_form and len(rest) > 1:
        max_norm = rest[1]
    if max_norm is not None:
        raise NoRuleError("max_norm rescales the table while reading it")
    ref = weighted(table)
    rows, features = ref.value.shape
    made = fresh_out(tracing, ref, features)
    tracing.use(ref, view=(rows, features), out=made[None, :])
    return place(made, -1, out.dim())


# -- operations that commute with positive scales -----------------------------------------------------


@rule("relu", "leaky_relu", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
@rule("identity", "neg", "abs", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "dropout_eval")
def elementwise(tracing: Tracing, out: Tensor, input: object, *_: object, **__: object) -> Tensor:
    """f(k·x) = k·f(x) for every k > 0, element by element."""
    if not out.is_floating_point():
        raise NoRuleError("its result is not a floating-point tensor")
    return as_edge(input).ids


@rule("float", "double", "half", "bfloat16", "to", "type", "type_as", "_to_copy")
def conversion(tracing: Tracing, out: Tensor, input: object, *_: object, **__: object) -> Tensor:
    """Another type of at least the same precision; fewer digits would round scaled numbers differently."""
    edge = as_edge(input)
    if not out.is_floating_point():
        raise NoRuleError("its result is not a floating-point tensor")
    if edge.value.is_floating_point() and torch.finfo(out.dtype).eps > torch.finfo(edge.value.dtype).eps:
        raise NoRuleError("it rounds to fewer digits")
    return edge.ids


@rule("prelu")
def prelu(tracing: Tracing, out: Tensor, input: object, weight: object) -> Tensor:
    """PReLU commutes; its slopes stay visible."""
    tracing.pin_parameter(weighted(weight), "prelu", "slopes of a PReLU are not scaled")
    return as_edge(input).ids


def over_space(
    tracing: Tracing, out: Tensor, input: object, *_: object, spatial: int | None = None, **__: object
) -> Tensor:
    """Pooling and resampling mix the last `spatial` dimensions (None: all past the channels), no others."""
    if not isinstance(out, Tensor):
        raise NoRuleError("it returns indices too")
    edge = as_edge(input)
    rank = edge.value.dim()
    return level(tracing, edge.ids, range(rank - spatial if spatial else 2, rank))


for _dims in (1, 2, 3):
    for _kind in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"):
        RULES[f"{_kind}{_dims}d"] = partial(over_space, spatial=_dims)
for _name in (
    "interpolate upsample upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
).split():
    RULES[_name] = over_space


@rule("mean", "sum", "amax", "amin")
def reduction(
    tracing: Tracing,
    out: Tensor,
    input: object,
    dim: object = None,
    keepdim: bool = False,
    *,
    axis: object = None,
    keepdims: bool = False,
    dtype: object = None,
) -> Tensor:
    """Reducing over dimensions needs one scale along them."""
    edge = as_edge(input)
    rank = edge.value.dim()
    asked = axis if dim is None else dim
    dims = [asked] if isinstance(asked, int) else list(asked or range(rank))  # type: ignore[call-overload]
    gone = sorted({index % rank for index in dims})
    ids = level(tracing, edge.ids, gone)
    if keepdim or keepdims:
        return ids
    return ids.reshape([ids.shape[index] for index in range(rank) if index not in gone])


@rule("add", "sub", "iadd", "isub", "maximum", "minimum", "rsub")
def addition(tracing: Tracing, out: Tensor, input: object, other: object, alpha: object = 1) -> Tensor:
    """A sum needs equal scales: unite the two arrays element by element."""
    for value in (input, other):
        if isinstance(value, (int, float)) and value != 0:
            raise NoRuleError("it adds a constant")
        if isinstance(value, ParameterRef):
            raise NoRuleError("it adds a parameter directly")
    edges = [value for value in (input, other) if isinstance(value, Edge)]
    if len(edges) == 2:
        pinned = [not bool(tracing.classes.find(edge.ids).any()) for edge in edges]
        if pinned[0] != pinned[1]:
            tracing.pin(edges, "add", "the other operand has scale 1")
        tracing.classes.unite(aligned(edges[0], out), aligned(edges[1], out))
    return aligned(edges[0], out)


@rule("mul", "imul", "multiply")
def product(tracing: Tracing, out: Tensor, input: object, other: object) -> Tensor:
    """A product multiplies scales; numbers, buffers and visible parameters have scale 1."""
    edges = [value for value in (input, other) if isinstance(value, Edge)]
    for value in (input, other):
        if isinstance(value, ParameterRef):
            tracing.pin_parameter(value, "mul", "it multiplies an activation directly")
    if not edges:
        raise NoRuleError("it multiplies parameters")
    if len(edges) == 1:
        return aligned(edges[0], out)
    return tracing.classes.product(aligned(edges[0], out), aligned(edges[1], out))


@rule("div", "truediv", "itruediv")
def division(tracing: Tracing, out: Tensor, input: object, other: object, **kwargs: object) -> Tensor:
    """Division by a number keeps the scale."""
    if kwargs or not isinstance(other, (int, float)):
        raise NoRuleError("it divides by a tensor or rounds")
    return as_edge(input).ids


@rule("clamp", "clamp_min", "threshold")
def clamp(tracing: Tracing, out: Tensor, input: object, min: object = None, max: object = None) -> Tensor:
    """clamp(min=0) is ReLU; any other bound fixes a scale."""
    if min != 0 or max not in (None, 0.0):
        raise NoRuleError("it cuts at a fixed value")
    return as_edge(input).ids


def aligned(edge: Edge, out: Tensor) -> Tensor:
    """An operand's ids in the rank of the result."""
    missing = out.dim() - edge.ids.dim()
    return edge.ids.reshape((1,) * missing + tuple(edge.ids.shape))


# -- normalisation ---------------------------------------------------------------------------------------


def normalisation(
    tracing: Tracing,
    out: Tensor,
    input: object,
    *,
    name: str,
    kind: str,
    groups: int,
    weight: object,
    bias: object,
) -> Tensor:
    """Normalisation with ε·k² forgets the in edge's scale k; the affine part sets a fresh one."""
    edge = as_edge(input)
    if kind == "layer":
        ids = edge.ids
        tracing.classes.unite(ids.reshape(-1)[:1], ids)
        read = ids.reshape(-1)[:1]
    else:
        read = along(tracing, edge, 1)
        if kind == "group":
            grouped = read.reshape(groups, -1)
            tracing.classes.unite(grouped[:, :1], grouped)
            read = grouped[:, 0]
    tracing.classes.unite(tracing.norm_uses.setdefault(name, read), read)
    return affine(tracing, out, weight, bias, kind=kind)


def affine(tracing: Tracing, out: Tensor, weight: object, bias: object, *, kind: str) -> Tensor:
    """The per-channel multiply and add after a normalisation: fresh classes, or 1 if there is none."""
    rank = out.dim()
    if not isinstance(weight, ParameterRef):
        if isinstance(bias, ParameterRef):
            tracing.pin_parameter(bias, "normalisation", "a shift without a scale is not hidden")
        return torch.zeros((1,) * rank, dtype=torch.int64)
    shape = tuple(weight.value.shape)
    made = fresh_out(tracing, weight, weight.value.numel()).reshape(shape)
    tracing.use(weight, view=shape, out=made)
    if isinstance(bias, ParameterRef):
        tracing.use(bias, view=shape, out=made)
    if kind == "layer":
        return made.reshape((1,) * (rank - made.dim()) + shape)
    return place(made.reshape(-1), 1, rank)


def normalised(
    tracing: Tracing,
    out: Tensor,
    input: object,
    *,
    kind: str,
    weight: object = None,
    bias: object = None,
    groups: int = 1,
    dims: int = 1,
    name: str | None = None,
) -> Tensor:
    """Normalisation keeps isometries of its kind with ε as it is: signs per channel, else orders. Fresh numbers behind.

    `dims`: of a layer normalisation, over how many last dimensions; `name`: the layer whose statistics follow.
    """
    edge, slots, rank = as_edge(input), tracing.slots, out.dim()
    assert slots is not None
    fold = tracing.foldable.get(weight.name) if isinstance(weight, ParameterRef) else None
    if fold is not None and fold.rank <= rank:  # its readers carry the gain
        tracing.folds.append(fold)
        weight = bias = None
    if kind in ("layer", "rms"):
        ids = edge.ids
        if isinstance(weight, ParameterRef):
            ids = level(tracing, ids, range(rank - dims))
        else:
            slots.distinguish(ids, range(rank - dims))
        read, alone = ids.reshape(ids.shape[rank - dims :]) if isinstance(weight, ParameterRef) else ids, kind == "rms"
    else:
        read, ids = along(tracing, edge, 1), edge.ids
        alone = kind != "group" or groups == len(read)
        if not alone:
            slots.group(read.reshape(groups, -1))
    limits = SPARSE | ISOMETRY if alone else UNIT
    bare = kind in ("layer", "rms") and dims == 1 and not isinstance(weight, ParameterRef)
    if bare and read.shape[-1] == edge.value.shape[-1]:
        for row in torch.unique(read.reshape(-1, read.shape[-1]), dim=0):  # tokens may differ in their classes
            slots.stream(row, ones=kind == "layer", instead=limits)
    else:
        slots.limit(read, limits)
    if name is not None and kind in ("batch", "instance"):
        tracing.classes.unite(tracing.norm_uses.setdefault(name, read), read)
    made = read
    if isinstance(weight, ParameterRef):
        shape = tuple(weight.value.shape)
        if bool(tracing.classes.find(read).any()):
            made = slots.beside(read, SPARSE)
            tracing.use(weight, view=shape, out=made, into=read)
        else:  # on a public edge only the affine part's own numbers are left
            made = fresh_out(tracing, weight, weight.value.numel()).reshape(shape)
            slots.limit(made, SPARSE)
            slots.fix(made)
            tracing.use(weight, view=shape, out=made)
    if isinstance(bias, ParameterRef):
        if kind in ("layer", "rms") and not isinstance(weight, ParameterRef):
            raise NoRuleError("it shifts without a gain")
        tracing.use(bias, view=tuple(bias.value.shape), out=made)
    if kind in ("layer", "rms"):
        return made.reshape((1,) * (rank - made.dim()) + tuple(made.shape))
    return place(made.reshape(-1), 1, rank)


# -- recurrent cells --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecurrentCell:
    """The parameters of one layer of a recurrent network in one direction."""

    input: ParameterRef
    hidden: ParameterRef
    biases: tuple[ParameterRef, ...]


def recurrent(
    tracing: Tracing,
    input: object,
    layers: Sequence[Sequence[RecurrentCell]],
    *,
    gates: str,
    homogeneous: bool,
    first: Sequence[object] = (),
) -> tuple[Tensor, Tensor]:
    """The ids of the outputs' last axis and of the last states (layers, units).

    All gates of a unit move together. States and the gate behind a tanh may also change sign: tanh is odd. States that
    it is given at first (`first`) have the secrets of its own.
    """
    slots = tracing.slots
    assert slots is not None
    read = along(tracing, as_edge(input), -1)
    states: list[Tensor] = []
    given = [_by_layer(tracing, as_edge(state)) for state in first]
    for directions in layers:
        ends: list[Tensor] = []
        for cell in directions:
            size = cell.hidden.value.shape[1]
            known = tracing.uses.get(cell.hidden.name)
            unit = slots.fresh(size) if known is None or known.into is None else known.into.reshape(-1)
            slots.limit(unit, POSITIVE if homogeneous else SPARSE | ISOMETRY)
            slots.seen(unit)
            for rows in given:
                slots.unite(rows[len(states) + len(ends)], unit)
            gate = slots.beside(unit, UNIT)
            stacked = torch.stack([unit if one == "t" else gate for one in gates])
            for weight, into in ((cell.hidden, unit), (cell.input, read)):
                view = (len(gates), size, len(into))
                tracing.use(weight, view=view, out=stacked[:, :, None], into=into[None, None, :])
            for bias in cell.biases:
                tracing.use(bias, view=(len(gates), size), out=stacked)
            ends.append(unit)
        states += ends
        read = torch.cat(ends)
        slots.seen(read)
    return read, torch.stack(states)


def _by_layer(tracing: Tracing, state: Edge) -> Tensor:
    """The ids (layers, units) of states, which have the batch between them."""
    rank = state.value.dim()
    ids = level(tracing, state.ids, range(1, rank - 1))
    return ids.reshape(ids.shape[0], ids.shape[-1]).expand(state.value.shape[0], state.value.shape[-1])


def one_step(
    tracing: Tracing,
    input: object,
    first: object,
    weight_ih: object,
    weight_hh: object,
    bias_ih: object = None,
    bias_hh: object = None,
    *,
    gates: str,
    homogeneous: bool = False,
) -> Tensor:
    """The ids of a recurrent cell's states, which are alike, after one step."""
    biases = tuple(weighted(bias) for bias in (bias_ih, bias_hh) if bias is not None)
    cell = RecurrentCell(weighted(weight_ih), weighted(weight_hh), biases)
    given = () if first is None else first if isinstance(first, (tuple, list)) else (first,)
    before = [Edge(state.value[None], state.ids[None]) for state in map(as_edge, given)]
    unit, _ = recurrent(tracing, input, [[cell]], gates=gates, homogeneous=homogeneous, first=before)
    return place(unit, -1, as_edge(input).value.dim())


# -- rearrangements ---------------------------------------------------------------------------------------


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

    first = next(traced for traced in pytree.tree_leaves((args, kwargs), is_leaf=leaf) if leaf(traced))
    if any(result.dtype != first.value.dtype for result in pytree.tree_leaves(out) if isinstance(result, Tensor)):
        raise NoRuleError("it reads the numbers as another type")
    if name in INDEXED_BY_VALUE:
        # Its first argument is moved about, the others say where to.
        edge = as_edge(args[0] if args else kwargs.pop("input", None))
        ids = _spread(edge)
        dims = _unforeseeable_dims(name, edge, args[1:], kwargs)
        if dims:
            ids = level(tracing, ids, dims).expand(edge.value.shape)
        args = (edge, *args[1:])
        rest, moved_kwargs = pytree.tree_map(to_value, (args[1:], kwargs), is_leaf=leaf)
        moved_args = (ids, *rest)
    else:
        moved_args, moved_kwargs = pytree.tree_map(to_ids, (args, kwargs), is_leaf=leaf)
    try:
        moved = operation(*moved_args, **moved_kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise NoRuleError("it cannot be followed channel by channel") from error
    ids = pytree.tree_map_only(Tensor, collapse, moved)
    if tracing.slots is not None:
        _note_places(tracing.slots, operation, args, kwargs, ids, by_value=name in INDEXED_BY_VALUE)
    return ids


def _note_places(
    slots: SlotSet, operation: Callable[..., object], args: Any, kwargs: Any, ids: object, *, by_value: bool
) -> None:
    """Run the operation once more, on the numbers of places: a channel may have several of them."""
    before: list[Tensor] = []

    def numbered(value: object) -> object:
        if not isinstance(value, Edge):
            return value
        if by_value and before:
            return value.value
        start = sum(len(part) for part in before)
        before.append(value.ids.reshape(-1))
        return _spread(Edge(value.value, torch.arange(start, start + value.ids.numel()).reshape(value.ids.shape)))

    given, named = pytree.tree_map(numbered, (args, kwargs), is_leaf=lambda value: isinstance(value, Edge))
    places = operation(*given, **named)
    for made, numbers in zip(pytree.tree_leaves(ids), pytree.tree_leaves(places), strict=True):
        if isinstance(made, Tensor):
            after, source = broadcast(made, collapse(numbers))
            slots.moved(torch.cat(before), after.reshape(-1), source.reshape(-1))


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
    widths = [_width(part) for part in parts]
    dims: list[int] = []
    at = 0
    for part, width in zip(parts, widths, strict=True):
        if varies(part):
            dims += range(at, at + width)
        at += rank - sum(widths) if part is Ellipsis else width
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
        "flatten view reshape permute transpose t unsqueeze squeeze chunk split split_with_sizes getitem narrow select "
        "slice unbind expand expand_as movedim moveaxis swapaxes swapdims channel_shuffle native_channel_shuffle "
        "pixel_shuffle pixel_unshuffle unflatten repeat index_select flip roll cat concat concatenate stack tile "
        "view_as reshape_as unsafe_split unsafe_chunk _unsafe_view hsplit vsplit tensor_split"
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


_POOLS = {"Max": "max", "Avg": "avg", "AdaptiveMax": "adaptive_max", "AdaptiveAvg": "adaptive_avg"}
SAME_NAME: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Identity: "identity",
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "dropout"),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), "upsample"),
    **{getattr(nn, f"{kind}Pool{dims}d"): f"{name}_pool{dims}d" for kind, name in _POOLS.items() for dims in (1, 2, 3)},
}
"""Layers that are one operation."""
