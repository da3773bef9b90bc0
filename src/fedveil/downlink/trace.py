"""Following a network operation by operation, and what comes of it: the scale table.

Every node of a captured graph runs on an example batch, and the rules say what it does to scales, orders and signs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fedveil.downlink.capture import (
    CaptureError,
    CustomFunction,
    captured_by_export,
    captured_by_fx,
    check_replay,
    custom_functions_seen,
    first_line,
    line_of,
    own_randomness,
    seeded,
)
from fedveil.downlink.folds import foldable
from fedveil.downlink.limits import LIMITED, as_activation, layer_ids
from fedveil.downlink.rotary import stretches, turned
from fedveil.downlink.rules import (
    REARRANGEMENTS,
    RULES,
    SAME_NAME,
    NoRuleError,
    affine,
    in_place,
    normalisation,
    normalised,
    operation_name,
    rearrangement,
)
from fedveil.downlink.scales import (
    Edge,
    HeadSite,
    NormScale,
    ParameterRef,
    Pin,
    Reader,
    Scaled,
    ScaleTable,
    Tracing,
)
from fedveil.downlink.slots import ClassSet, SlotSet, broadcast
from fedveil.downlink.symmetry import PINNED
from fedveil.downlink.tokens import crossed, crossing, layer_name
from fedveil.errors import TraceError, spelled
from fedveil.tensors import twin_of

_SHAPE_QUESTIONS = frozenset(
    "size dim numel getattr shape ndim is_floating_point sym_size stride _assert_tensor_metadata".split()
)
# These read a tensor's shape and type, not its values.
_SHAPE_ONLY = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_MULTIPLIES = frozenset("matmul mm addmm linear".split())
_UNFIT = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError)

_DIMS = (1, 2, 3)
NORM_KINDS: dict[type[nn.Module], str] = {
    **{getattr(nn, f"{kind}Norm{dims}d"): kind.lower() for kind in ("Batch", "Instance") for dims in _DIMS},
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
}
_MOVES = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
_ZERO_PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_OTHER_PADS = {
    getattr(nn, f"{kind}Pad{dims}d"): mode
    for kind, mode in (("Reflection", "reflect"), ("Replication", "replicate"), ("Circular", "circular"))
    for dims in _DIMS
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _is_leaf(value: object) -> bool:
    return isinstance(value, (Edge, ParameterRef))


def values(tree: Any) -> Any:
    """The example values in a tree of arguments."""
    return pytree.tree_map(lambda leaf: leaf.value if _is_leaf(leaf) else leaf, tree, is_leaf=_is_leaf)


def leaves(tree: object, kind: type[Any]) -> list[Any]:
    """Every leaf of one kind in a tree of arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=_is_leaf) if isinstance(leaf, kind)]


class Walker:
    """Runs every node on an example batch and asks the rules what happens to the scales."""

    def __init__(self, model: nn.Module, tracing: Tracing) -> None:
        self.model = model
        self.tracing = tracing

    def reference(self, owner: nn.Module, attribute: str) -> ParameterRef | Edge | None:
        """A module's parameter or buffer as an operand; None for anything else."""
        value = getattr(owner, attribute, None)
        if isinstance(value, nn.Parameter):
            return ParameterRef(self.tracing.names[id(value)], value.detach())
        return self.tracing.constant(value, fixed=True) if isinstance(value, Tensor) else None

    def function(self, target: Any, args: Any, kwargs: Any, *, method: bool = False) -> Any:
        """Evaluate a call and the ids of its result."""
        given, named = values(args), values(kwargs)
        out = getattr(given[0], str(target))(*given[1:], **named) if method else target(*given, **named)
        name = operation_name(target)
        edges, parameters = leaves((args, kwargs), Edge), leaves((args, kwargs), ParameterRef)
        label = name or str(getattr(target, "__name__", target))
        if isinstance(target, CustomFunction):
            self.tracing.opaque.append(label)
        beside = crossing(self.tracing, edges, name, label)
        if not leaves(out, Tensor):
            if (edges or parameters) and name not in _SHAPE_QUESTIONS:
                self._pin(edges, parameters, label, "its result leaves the network's arithmetic")
            return out
        if name in _ZEROS and self.tracing.slots is not None:
            return pytree.tree_map_only(Tensor, self._zeros, out)
        if name in _SHAPE_ONLY or not (edges or parameters):
            return pytree.tree_map_only(Tensor, self.tracing.constant, out)
        if name == "getitem" and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if self.tracing.slots is not None and not kwargs and _turns_round(name, *args):
            return ParameterRef(args[0].name, out, transposed=not args[0].transposed)

        def ids() -> Any:
            if name is None:
                raise NoRuleError("there is no rule for it")
            if name not in _MULTIPLIES and any(parameter.transposed for parameter in parameters):
                raise NoRuleError("it reads a transposed parameter")
            made = self._function_ids(name, target, args, kwargs, out, method=method)
            if in_place(target) and not self._same(made, args[0]):
                raise NoRuleError("it changes an activation's scale in place")
            return made

        made = self._judge(ids, edges, parameters, label, out)
        crossed(self.tracing, beside, name, made)
        return made

    def _zeros(self, value: Tensor) -> Edge:
        """Zeros fit any secret: a first state, say; those of several layers (layers, batch, units) different ones."""
        if not value.is_floating_point() or value.dim() == 0:
            return self.tracing.constant(value)
        rows = value.shape[0] if value.dim() == 3 else 1
        ids = self.tracing.classes.fresh(rows * value.shape[-1])
        ids = ids.reshape(rows, *(1,) * (value.dim() - 2), -1) if value.dim() > 1 else ids
        assert self.tracing.slots is not None
        self.tracing.slots.seen(ids)
        return Edge(value, ids)

    def _judge(
        self,
        rule: Callable[[], Any],
        edges: list[Edge],
        parameters: list[ParameterRef],
        label: str,
        out: Any,
    ) -> Any:
        """Apply a rule; where it does not fit, pin. Freedom that the rule took away is written down."""
        tracing, lost, pins = self.tracing, self.tracing.classes.lost, len(self.tracing.pins)
        try:
            ids = rule()
            if not all(pytree.tree_leaves(pytree.tree_map(_fits, out, ids))):
                raise NoRuleError("its result is not laid out as expected")
        except NoRuleError as reason:
            return self._pin_all(edges, parameters, label, str(reason), out)
        except _UNFIT:
            return self._pin_all(edges, parameters, label, "it is called in an unknown form", out)
        if tracing.classes.lost > lost and len(tracing.pins) == pins:
            tracing.pins.append(Pin(label, tracing.spot, "it ties channels to others of scale 1"))
        if tracing.slots is not None:
            for made in pytree.tree_leaves(ids):
                if isinstance(made, Tensor):
                    tracing.slots.seen(made)
        return pytree.tree_map(Edge, out, ids)

    def _function_ids(self, name: str, target: Any, args: Any, kwargs: Any, out: Any, *, method: bool) -> Any:
        self.tracing.operation = name
        if name in REARRANGEMENTS:
            if self.tracing.slots is not None:
                args, kwargs = as_activation(self.tracing, (args, kwargs))
            moved = (lambda first, *rest, **more: getattr(first, str(target))(*rest, **more)) if method else target
            return rearrangement(self.tracing, out, moved, args, kwargs, name=name)
        if name in _NORM_POSITIONS:
            return self._functional_norm(name, target, args, kwargs, out)
        return self._rule(name)(self.tracing, out, *args, **kwargs)

    def _rule(self, name: str) -> Callable[..., Any]:
        """What an operation does to scales, or demands where more than scales is asked for."""
        found = LIMITED.get(name) if self.tracing.slots is not None else None
        if found is None and name not in RULES:
            raise NoRuleError("there is no rule for it")
        return found or RULES[name]

    def _same(self, ids: Any, first: object) -> bool:
        if not isinstance(first, Edge) or not isinstance(ids, Tensor):
            return False
        left, right = broadcast(self.tracing.classes.find(ids), self.tracing.classes.find(first.ids))
        return bool((left == right).all())

    def _pin(self, edges: list[Edge], parameters: list[ParameterRef], name: str, reason: str) -> None:
        self.tracing.pin(edges, name, reason)
        for parameter in parameters:
            self.tracing.pin_parameter(parameter, name, reason)

    def _pin_all(self, edges: list[Edge], parameters: list[ParameterRef], name: str, reason: str, out: Any) -> Any:
        self._pin(edges, parameters, name, reason)
        return pytree.tree_map_only(Tensor, self.tracing.constant, out)

    def module(self, path: str, args: Any, kwargs: Any) -> Any:
        """A leaf module: the same rules, with the module's own parameters and settings."""
        module = self.model.get_submodule(path)
        out = module(*values(args), **values(kwargs))
        parameters = [
            ParameterRef(self.tracing.names[id(parameter)], parameter.detach()) for parameter in module.parameters()
        ]
        edges, label, name = leaves((args, kwargs), Edge), type(module).__name__, layer_name(module)
        beside = crossing(self.tracing, edges, name, label)
        made = self._judge(lambda: self._module_ids(module, path, args, kwargs, out), edges, parameters, label, out)
        crossed(self.tracing, beside, name, made)
        return made

    def _module_ids(self, module: nn.Module, path: str, args: Any, kwargs: Any, out: Any) -> Any:
        if module._forward_hooks or module._forward_pre_hooks:
            raise NoRuleError("it has hooks, which may do anything")
        if self.tracing.slots is not None:
            ids = layer_ids(self.tracing, module, args, kwargs, out, self.reference)
            if ids is not None:
                return ids
        if kwargs or len(args) != 1:
            raise NoRuleError("it is called with further arguments")
        kind, tracing, first = type(module), self.tracing, args[0]
        weight, bias = self.reference(module, "weight"), self.reference(module, "bias")
        if kind is nn.Linear:
            return self._rule("linear")(tracing, out, first, weight, bias)
        if kind in _CONVOLUTIONS:
            assert isinstance(module, _CONVOLUTIONS)
            return self._rule("conv2d")(tracing, out, first, weight, bias, groups=module.groups)
        if kind in _TRANSPOSED:
            assert isinstance(module, _TRANSPOSED)
            return self._rule("conv_transpose2d")(tracing, out, first, weight, bias, groups=module.groups)
        if isinstance(module, nn.Embedding) and kind is nn.Embedding:
            return self._rule("embedding")(tracing, out, first, weight, max_norm=module.max_norm)
        if kind is nn.PReLU:
            return self._rule("prelu")(tracing, out, first, weight)
        if kind in NORM_KINDS:
            return self._norm(module, path, out, first)
        if kind in SAME_NAME:
            return self._rule(SAME_NAME[kind])(tracing, out, first)
        if kind in _MOVES:
            return rearrangement(tracing, out, module, args, {})
        if isinstance(module, _ZERO_PADS):
            return self._rule("pad")(tracing, out, first, module.padding)
        if kind in _OTHER_PADS:
            return self._rule("pad")(tracing, out, first, module.padding, mode=_OTHER_PADS[kind])
        raise NoRuleError("there is no rule for it")

    def _norm(self, module: nn.Module, path: str, out: Tensor, first: object) -> Any:
        kind = NORM_KINDS[type(module)]
        if kind == "instance" and getattr(module, "track_running_stats", False):
            raise NoRuleError("an instance norm with running statistics changes meaning in evaluation")
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else 1
        if self.tracing.slots is not None:
            return normalised(
                self.tracing,
                out,
                first,
                kind=kind,
                weight=self.reference(module, "weight"),
                bias=self.reference(module, "bias"),
                groups=groups,
                dims=len(module.normalized_shape) if isinstance(module, nn.LayerNorm) else 1,
                name=self.tracing.norms.get(path),
            )
        return normalisation(
            self.tracing,
            out,
            first,
            name=self.tracing.norms[path],
            kind=kind,
            groups=groups,
            weight=self.reference(module, "weight"),
            bias=self.reference(module, "bias"),
        )

    def _functional_norm(self, name: str, target: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """A normalisation outside its module has a fixed ε, so that its in edge is pinned."""
        kind = name.removesuffix("_norm")
        exported = isinstance(target, torch._ops.OpOverload)
        inside = self.tracing.inside
        if exported and inside in self.tracing.norms:
            module = self.model.get_submodule(inside)
            if NORM_KINDS[type(module)] == kind:
                return self._norm(module, inside, out, args[0])
        first = args[0] if args else kwargs["input"]
        position = _NORM_POSITIONS[name][exported]
        weight, bias = (
            kwargs.get(which, args[place] if len(args) > place else None)
            for which, place in (("weight", position), ("bias", position + 1))
        )
        if self.tracing.slots is not None:
            if kind == "batch" or (kind == "instance" and any(leaves((args, kwargs), Edge)[1:])):
                raise NoRuleError("its statistics are not a layer's")
            given = {**dict(zip(("input", _SHAPES.get(kind, "")), args, strict=False)), **kwargs}
            shape = given.get(_SHAPES.get(kind, ""), 1)
            return normalised(
                self.tracing,
                out,
                first,
                kind=kind,
                weight=weight,
                bias=bias,
                groups=shape if isinstance(shape, int) else 1,
                dims=1 if isinstance(shape, int) else len(shape),
            )
        if kind == "rms":
            raise NoRuleError("there is no rule for it")
        self.tracing.pin([first], name, "a functional normalisation has a fixed ε")
        return affine(self.tracing, out, weight, bias, kind=kind)


def _turns_round(name: str | None, given: object = None, *how: Any) -> bool:
    """Whether an operation gives a matrix of parameters the other way round, and nothing else."""
    if not isinstance(given, ParameterRef) or given.value.dim() != 2:
        return False
    if name == "getattr":
        return how[0] in ("T", "mT")
    dims = [dim % 2 for dim in pytree.tree_leaves(how) if isinstance(dim, int)]
    if name == "permute":
        return dims == [1, 0]
    return name in ("t", "numpy_T") or (name in ("transpose", "swapaxes", "swapdims") and sorted(dims) == [0, 1])


# Where F.* and ATen put the affine weight; the bias follows it.
_NORM_POSITIONS = {"batch_norm": (3, 1), "instance_norm": (3, 1), "group_norm": (2, 2), "layer_norm": (2, 2)}
_NORM_POSITIONS["rms_norm"] = (2, 2)
_SHAPES = {"group": "num_groups", "layer": "normalized_shape", "rms": "normalized_shape"}


def _fits(value: object, ids: object) -> bool:
    """Whether ids have the value's rank and broadcast to its shape."""
    if not isinstance(value, Tensor) or not isinstance(ids, Tensor):
        return value is ids
    return ids.dim() == value.dim() and all(i in (1, v) for i, v in zip(ids.shape, value.shape, strict=True))


_READERS = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def trace(model: nn.Module, example: Tensor, *, family: str = "scale", streams: bool = False) -> ScaleTable:
    """Trace `model` on an example batch into its scale table, and whatever other symmetries the family has.

    Operations without a rule pin their edges to 1 and are listed in `pins`; nothing is guessed. `streams`: gains are
    folded into what reads them, so that residual streams can be rotated.
    """
    tracing = walk(model, example, family=family, streams=streams)
    symmetry = None if tracing.slots is None else tracing.slots.symmetry(family)
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
    if symmetry is not None:  # what no parameter sees is no secret: a state of zeros, padding
        ids = [part.reshape(-1) for entry in entries for part in (entry.out, entry.into) if part is not None]
        slots = symmetry.slot[torch.cat([torch.tensor([PINNED]), *ids])]
        # Scores of a head move with it.
        frames = [order.reshape(-1) for order in symmetry.orders if bool(torch.isin(order, slots).any())]
        seen = torch.isin(symmetry.slot, torch.cat([slots, *frames]))
        symmetry = symmetry.without(torch.nonzero(~seen).reshape(-1))
    norms = tuple(NormScale(path, compact[read]) for path, read in tracing.norm_uses.items())
    head, refusal = _head(model, tracing)
    # Transitional layers are made for scales.
    reading = (
        []
        if symmetry is not None
        else [entry for entry in entries if entry.into is not None and bool((entry.into != PINNED).any())]
    )
    readers = tuple(_reader(model, tracing, entry.name) for entry in reading)
    pins, sized = tuple(tracing.pins), tracing.sized
    folds = tuple(tracing.folds)
    return ScaleTable(classes, tuple(entries), norms, pins, head, refusal, readers, symmetry, sized, folds, streams)


def _reader(model: nn.Module, tracing: Tracing, weight: str) -> Reader:
    parameter = model.get_parameter(weight)
    paths: dict[int, str] = {}
    for inside in tracing.readers[weight]:
        try:
            module = model.get_submodule(inside)
        except AttributeError:
            module = model
        if type(module) not in _READERS or module.weight is not parameter:
            return Reader(weight, (), f"{weight} is read outside the call of an nn.Linear or convolution module")
        paths.setdefault(id(module), inside)
    return Reader(weight, tuple(paths.values()))


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


def walk(model: nn.Module, example: Tensor, *, family: str = "scale", streams: bool = False) -> Tracing:
    """Trace a network on an example batch; the result holds every class, use and pin.

    The network is traced in its own mode, training or evaluation, because its code may ask for it.
    """
    device = example.device
    sample = example if len(example) > 1 else example.repeat_interleave(2, 0)  # batch norms need two
    with torch.no_grad(), own_randomness(device), custom_functions_seen() as functions:
        try:
            truth = seeded(lambda: twin_of(model)(sample.clone()), device)
        except Exception as reason:
            raise TraceError(
                f"The model cannot be run on a batch of shape {tuple(sample.shape)}: {first_line(reason)}. "
                "FedVeil trains models that take one input tensor, the batch."
            ) from reason
        present = sorted(set(functions))
        try:
            tracing, output = seeded(lambda: _walk_fx(twin_of(model), sample.clone(), family, streams), device)
            check_replay(truth, output)
        except Exception as fx_reason:  # fx raises whatever the traced code raises on proxies
            try:
                tracing, output = seeded(lambda: _walk_exported(twin_of(model), sample.clone(), family), device)
                check_replay(truth, output)
            except Exception as reason:  # export raises many kinds of errors; each means the same to a user
                raise TraceError(
                    f"The model can be traced neither by torch.fx ({first_line(fx_reason)}) nor by torch.export "
                    f"({first_line(reason)}). Remove control flow that depends on values, "
                    f"or train it with {spelled('scheme', 'fedavg')}, which needs no trace."
                ) from reason
            tracing.sized = True
            for name in present:  # export looked into them and saw only their forward pass
                tracing.opaque.append(name)
                tracing.pin_everything(name, "a custom autograd function in a model that torch.fx cannot trace")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            tracing.opaque.append(f"the backward hook of {path or 'the model'}")
            tracing.pin_everything(type(module).__name__, "it has backward hooks, which may do anything")
    return tracing


def norm_paths(model: nn.Module) -> dict[str, str]:
    """Every path of every normalisation layer that can take a vector ε → the layer's first path.

    Layers inside one of torch's own (a transformer layer) belong to it: it reads their ε itself.
    """
    paths: dict[str, str] = {}
    first_path: dict[int, str] = {}
    owned: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
            owned |= {id(part) for part in module.modules() if part is not module}
        if type(module) in NORM_KINDS:
            paths[path] = first_path.setdefault(id(module), path)
    return {path: first for path, first in paths.items() if id(model.get_submodule(path)) not in owned}


def _walk(
    twin: nn.Module,
    graph: fx.Graph,
    inside: Callable[[fx.Node], str],
    operand: Callable[[Walker, fx.Node], Any],
    family: str,
    fixed: Callable[[fx.Node], bool],
    *,
    streams: bool = False,
) -> tuple[Tracing, object]:
    """Run a captured graph: `inside` tells the module of a node, `operand` what an input or an attribute is.

    `fixed`: which of those are the model's own buffers.
    """
    names = {id(parameter): name for name, parameter in twin.named_parameters()}
    slots = None if family == "scale" else SlotSet()
    tracing = Tracing(names, norm_paths(twin), classes=slots or ClassSet(), slots=slots)
    if streams and slots is not None:
        tracing.foldable = foldable(graph, twin)
    walker = Walker(twin, tracing)
    environment: dict[fx.Node, Any] = {}

    def step(node: fx.Node) -> None:
        tracing.where, tracing.inside, tracing.line = node.name, inside(node), line_of(node)
        if slots is not None:
            slots.where = tracing.spot
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: environment[argument])
        if node.op == "output":
            _finish(tracing, node, args)
            environment[node] = values(args[0])
        elif node.op == "call_module":
            environment[node] = walker.module(str(node.target), args, kwargs)
        elif node.op in ("call_function", "call_method"):
            environment[node] = walker.function(node.target, args, kwargs, method=node.op == "call_method")
        else:
            environment[node] = operand(walker, node)

    held = {} if slots is None else stretches(graph, fixed)
    for node in graph.nodes:
        stretch = held.get(node)
        if stretch is None:
            step(node)
        elif node is stretch.sink:
            edge = turned(tracing, stretch, environment)
            if edge is not None:
                environment[node] = edge
            for part in stretch.nodes if edge is None else ():
                step(part)
        if node.op == "output":
            return tracing, environment[node]
    raise CaptureError("it has no output")


def _walk_fx(twin: nn.Module, example: Tensor, family: str, streams: bool) -> tuple[Tracing, object]:
    inputs: Iterator[Tensor] = iter((example,))

    def operand(walker: Walker, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return _attribute(walker, str(node.target))
        value = next(inputs, None)
        return walker.tracing.constant(value) if value is not None else node.args[0]

    def fixed(node: fx.Node) -> bool:
        # What eager code computed counts as well: it drew nothing and read no parameter, or there would be no graph.
        path, _, attribute = str(node.target).rpartition(".")
        return node.op == "get_attr" and not isinstance(getattr(twin.get_submodule(path), attribute), nn.Parameter)

    def inside(node: fx.Node) -> str:
        return str(node.target) if node.op == "call_module" else ""

    return _walk(twin, captured_by_fx(twin), inside, operand, family, fixed, streams=streams)


def _attribute(walker: Walker, target: str) -> Any:
    path, _, attribute = target.rpartition(".")
    owner = walker.model.get_submodule(path)
    operand = walker.reference(owner, attribute)
    # fx keeps what eager code computed under a name of its own: that may differ next time.
    if isinstance(operand, Edge) and attribute.startswith("_tensor_constant"):
        return walker.tracing.constant(operand.value)
    return getattr(owner, attribute) if operand is None else operand


def _finish(tracing: Tracing, node: fx.Node, args: Any) -> None:
    crossing(tracing, leaves(args, Edge), None, "output")
    for edge in leaves(args, Edge):
        tracing.classes.pin(edge.ids)
    produced = node.args[0]
    if isinstance(produced, (tuple, list)) and len(produced) == 1:
        produced = produced[0]
    # Another reader might be an in-place operation, and the output no longer the layer's.
    if isinstance(produced, fx.Node) and len(produced.users) == 1:
        tracing.produced = produced.name


def _walk_exported(twin: nn.Module, example: Tensor, family: str) -> tuple[Tracing, object]:
    exported = captured_by_export(twin, example)
    signature = exported.graph_signature

    def inside(node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        return str(list(stack.values())[-1][0])

    def operand(walker: Walker, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(exported.graph_module, str(node.target))
        if name := signature.inputs_to_parameters.get(node.name):
            parameter = twin.get_parameter(name)
            return ParameterRef(walker.tracing.names[id(parameter)], parameter.detach())
        if name := signature.inputs_to_buffers.get(node.name):
            return walker.tracing.constant(twin.get_buffer(name), fixed=True)
        if name := signature.inputs_to_lifted_tensor_constants.get(node.name):
            value = exported.constants[name]
            assert isinstance(value, Tensor)
            return walker.tracing.constant(value, fixed=True)
        return walker.tracing.constant(example)

    def fixed(node: fx.Node) -> bool:
        return node.name in signature.inputs_to_buffers or node.name in signature.inputs_to_lifted_tensor_constants

    return _walk(twin, exported.graph, inside, operand, family, fixed)
