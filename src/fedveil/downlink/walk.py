"""Walking a network once: torch.fx where it can, torch.export where fx cannot."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fedveil.downlink.classes import broadcast
from fedveil.downlink.edges import Edge, ParameterRef, Tracing
from fedveil.downlink.rules import REARRANGEMENTS, RULES, NoRuleError, affine, normalisation, rearrangement
from fedveil.errors import TraceError

_SHAPE_QUESTIONS = frozenset("size dim numel getattr shape ndim is_floating_point sym_size stride".split())

NORM_KINDS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch",
    nn.BatchNorm2d: "batch",
    nn.BatchNorm3d: "batch",
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
    nn.InstanceNorm1d: "instance",
    nn.InstanceNorm2d: "instance",
    nn.InstanceNorm3d: "instance",
}

_SAME_NAME: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout",
    nn.Dropout2d: "dropout",
    nn.Dropout3d: "dropout",
    nn.Identity: "identity",
    nn.Upsample: "upsample",
    nn.UpsamplingNearest2d: "upsample",
    nn.UpsamplingBilinear2d: "upsample",
    **{getattr(nn, f"{kind}{dims}d"): "max_pool1d" for kind in ("MaxPool", "AvgPool") for dims in (1, 2, 3)},
    **{getattr(nn, f"Adaptive{kind}Pool{dims}d"): "max_pool1d" for kind in ("Max", "Avg") for dims in (1, 2, 3)},
}
_MOVES = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
_ZERO_PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_OTHER_PADS = {
    nn.ReflectionPad1d: "reflect",
    nn.ReflectionPad2d: "reflect",
    nn.ReplicationPad1d: "replicate",
    nn.ReplicationPad2d: "replicate",
    nn.CircularPad1d: "circular",
    nn.CircularPad2d: "circular",
}
_CONVOLUTIONS = {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}
_TRANSPOSED = {nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d"}


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


def _in_place(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.endswith("_")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.endswith("_") or name in {"iadd", "isub", "imul", "itruediv"}


def _is_leaf(value: object) -> bool:
    return isinstance(value, (Edge, ParameterRef))


def _values(tree: Any) -> Any:
    return pytree.tree_map(lambda one: one.value if _is_leaf(one) else one, tree, is_leaf=_is_leaf)


def _leaves(tree: object, kind: type[Any]) -> list[Any]:
    return [one for one in pytree.tree_leaves(tree, is_leaf=_is_leaf) if isinstance(one, kind)]


class _Walker:
    """Runs every node on an example batch and asks the rules what happens to the scales."""

    def __init__(self, model: nn.Module, tracing: Tracing) -> None:
        self.model = model
        self.tracing = tracing

    def reference(self, owner: nn.Module, attribute: str) -> ParameterRef | Edge | None:
        value = getattr(owner, attribute, None)
        if isinstance(value, nn.Parameter):
            return ParameterRef(self.tracing.names[id(value)], value.detach())
        return self.tracing.constant(value) if isinstance(value, Tensor) else None

    def function(self, target: Callable[..., Any], args: Any, kwargs: Any, *, method: bool = False) -> Any:
        """Evaluate a call and the ids of its result."""
        values, named = _values(args), _values(kwargs)
        out = getattr(values[0], str(target))(*values[1:], **named) if method else self._evaluate(target, values, named)
        return self.judge(target, args, kwargs, out, method=method)

    @staticmethod
    def _evaluate(target: Callable[..., Any], values: Any, named: Any) -> Any:
        return target(*values, **named)

    def judge(self, target: Any, args: Any, kwargs: Any, out: Any, *, method: bool) -> Any:
        name = operation_name(target)
        edges, parameters = _leaves((args, kwargs), Edge), _leaves((args, kwargs), ParameterRef)
        if not _leaves(out, Tensor):
            if (edges or parameters) and name not in _SHAPE_QUESTIONS:
                self.pin(edges, parameters, name or str(target), "its result leaves the network's arithmetic")
            return out
        if not edges and not parameters:
            return pytree.tree_map_only(Tensor, self.tracing.constant, out)
        try:
            if name == "getitem" and not isinstance(args[0], Edge):
                return args[0][args[1]]
            if name in REARRANGEMENTS:
                moved = (lambda first, *rest, **more: getattr(first, str(target))(*rest, **more)) if method else target
                ids = rearrangement(self.tracing, out, moved, args, kwargs)
            elif name == "batch_norm" and isinstance(target, torch._ops.OpOverload):
                ids = self.exported_norm("batch", out, args[0], args[1], args[2], running=args[3])
            elif name in {"group_norm", "layer_norm", "batch_norm", "instance_norm"}:
                ids = self.functional_norm(name, target, args, kwargs, out)
            elif name in RULES:
                ids = RULES[name](self.tracing, out, *args, **kwargs)
            else:
                raise NoRuleError("there is no rule for it")
            if _in_place(target) and not self.same(ids, args[0]):
                raise NoRuleError("it changes an activation's scale in place")
        except NoRuleError as reason:
            return self.pin_all(edges, parameters, name or str(target), str(reason), out)
        except TypeError:
            return self.pin_all(edges, parameters, name or str(target), "it is called in an unknown form", out)
        return pytree.tree_map(lambda value, one: Edge(value, one), out, ids)

    def same(self, ids: Any, first: object) -> bool:
        if not isinstance(first, Edge) or not isinstance(ids, Tensor):
            return False
        left, right = broadcast(self.tracing.classes.find(ids), self.tracing.classes.find(first.ids))
        return bool((left == right).all())

    def pin(self, edges: list[Edge], parameters: list[ParameterRef], name: str, reason: str) -> None:
        self.tracing.pin(edges, name, reason)
        for parameter in parameters:
            self.tracing.pin_parameter(parameter, name, reason)

    def pin_all(self, edges: list[Edge], parameters: list[ParameterRef], name: str, reason: str, out: Any) -> Any:
        self.pin(edges, parameters, name, reason)
        return pytree.tree_map_only(Tensor, self.tracing.constant, out)

    def module(self, path: str, args: Any, kwargs: Any) -> Any:
        """A leaf module: the same rules, with the module's own parameters and settings."""
        module = self.model.get_submodule(path)
        out = module(*_values(args), **_values(kwargs))
        kind = type(module)
        edges = _leaves((args, kwargs), Edge)
        try:
            if kwargs or not args:
                raise NoRuleError("it is called with keyword arguments")
            ids = self.module_ids(module, path, args, out)
        except NoRuleError as reason:
            parameters = [
                ParameterRef(self.tracing.names[id(parameter)], parameter.detach()) for parameter in module.parameters()
            ]
            return self.pin_all(edges, parameters, kind.__name__, str(reason), out)
        return pytree.tree_map(lambda value, one: Edge(value, one), out, ids)

    def module_ids(self, module: nn.Module, path: str, args: Any, out: Any) -> Any:
        kind, tracing, first = type(module), self.tracing, args[0]
        weight, bias = self.reference(module, "weight"), self.reference(module, "bias")
        if kind is nn.Linear:
            return RULES["linear"](tracing, out, first, weight, bias)
        if kind in _CONVOLUTIONS:
            assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
            return RULES["conv2d"](tracing, out, first, weight, bias, groups=module.groups)
        if kind in _TRANSPOSED:
            assert isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d))
            return RULES["conv_transpose2d"](tracing, out, first, weight, bias, groups=module.groups)
        if isinstance(module, nn.Embedding) and kind is nn.Embedding:
            return RULES["embedding"](tracing, out, first, weight, max_norm=module.max_norm)
        if kind is nn.PReLU:
            return RULES["prelu"](tracing, out, first, weight)
        if kind in NORM_KINDS:
            return self.norm(module, path, out, first)
        if kind in _SAME_NAME:
            return RULES[_SAME_NAME[kind]](tracing, out, first)
        if kind in _MOVES:
            return rearrangement(tracing, out, module, args, {})
        if isinstance(module, _ZERO_PADS):
            return RULES["pad"](tracing, out, first, module.padding)
        if kind in _OTHER_PADS:
            return RULES["pad"](tracing, out, first, module.padding, mode=_OTHER_PADS[kind])
        raise NoRuleError("there is no rule for it")

    def norm(self, module: nn.Module, path: str, out: Tensor, first: object) -> Any:
        kind = NORM_KINDS[type(module)]
        if kind == "instance" and getattr(module, "track_running_stats", False):
            raise NoRuleError("an instance norm with running statistics changes meaning in evaluation")
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else 1
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

    def exported_norm(self, kind: str, out: Any, first: Any, weight: Any, bias: Any, *, running: Any) -> Any:
        """A normalisation in an exported graph belongs to the module that owns its parameters."""
        owner = weight.name.rpartition(".")[0] if isinstance(weight, ParameterRef) else None
        if owner is None or owner not in self.tracing.norms:
            self.tracing.pin([first], f"{kind}_norm", "a functional normalisation has a fixed ε")
            return affine(self.tracing, out, weight, bias, kind=kind)
        return self.norm(self.model.get_submodule(owner), owner, out, first)

    def functional_norm(self, name: str, target: Any, args: Any, kwargs: Any, out: Any) -> Any:
        kind = name.removesuffix("_norm")
        weight = kwargs.get("weight")
        bias = kwargs.get("bias")
        positions = {"batch": (3, 4), "group": (2, 3), "layer": (2, 3), "instance": (3, 4)}[kind]
        if weight is None and len(args) > positions[0]:
            weight = args[positions[0]]
        if bias is None and len(args) > positions[1]:
            bias = args[positions[1]]
        if isinstance(target, torch._ops.OpOverload):
            return self.exported_norm(kind, out, args[0], weight, bias, running=None)
        self.tracing.pin([args[0]], name, "a functional normalisation has a fixed ε")
        return affine(self.tracing, out, weight, bias, kind=kind)


def walk(model: nn.Module, example: Tensor) -> Tracing:
    """Trace a network on an example batch; the result holds every class, use and pin."""
    twin = copy.deepcopy(model).eval()
    names = {id(parameter): name for name, parameter in twin.named_parameters()}
    norms: dict[str, str] = {}
    first_path: dict[int, str] = {}
    for path, module in twin.named_modules(remove_duplicate=False):
        if type(module) in NORM_KINDS:
            norms[path] = first_path.setdefault(id(module), path)
    with torch.no_grad():
        try:
            graph = fx.Tracer().trace(twin)
        except Exception as fx_reason:  # fx raises whatever the traced code raises on proxies
            return _walk_exported(twin, example, Tracing(names, norms), fx_reason)
        return _walk_graph(twin, example, Tracing(names, norms), graph)


def _walk_graph(twin: nn.Module, example: Tensor, tracing: Tracing, graph: fx.Graph) -> Tracing:
    walker = _Walker(twin, tracing)
    environment: dict[fx.Node, Any] = {}
    inputs: Iterator[Tensor] = iter((example,))
    for node in graph.nodes:
        tracing.where = node.name
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: environment[one])
        if node.op == "placeholder":
            value = next(inputs, None)
            environment[node] = tracing.constant(value) if value is not None else _default(node)
        elif node.op == "get_attr":
            environment[node] = _attribute(walker, str(node.target))
        elif node.op == "call_module":
            environment[node] = walker.module(str(node.target), args, kwargs)
        elif node.op == "call_method":
            environment[node] = walker.function(node.target, args, kwargs, method=True)
        elif node.op == "call_function":
            environment[node] = walker.function(node.target, args, kwargs)
        elif node.op == "output":
            _finish(tracing, node, args)
    return tracing


def _default(node: fx.Node) -> Any:
    if not node.args:
        raise TraceError(f"The model takes a second input ({node.name}); FedVeil trains models of one input tensor.")
    return node.args[0]


def _attribute(walker: _Walker, target: str) -> Any:
    path, _, attribute = target.rpartition(".")
    return walker.reference(walker.model.get_submodule(path), attribute)


def _finish(tracing: Tracing, node: fx.Node, args: Any) -> None:
    for edge in _leaves(args, Edge):
        tracing.classes.pin(edge.ids)
    produced = node.args[0]
    if isinstance(produced, (tuple, list)) and len(produced) == 1:
        produced = produced[0]
    tracing.where = produced.name if isinstance(produced, fx.Node) else ""


def _walk_exported(twin: nn.Module, example: Tensor, tracing: Tracing, fx_reason: Exception) -> Tracing:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(twin, (example,), strict=False)
    except Exception as reason:  # export raises many kinds of errors; each means the same to a user
        raise TraceError(
            "The model can be traced neither by torch.fx "
            f"({type(fx_reason).__name__}: {_first_line(fx_reason)}) nor by torch.export "
            f"({type(reason).__name__}: {_first_line(reason)}). Remove control flow that depends on values, "
            "or train it with --scheme fedavg, which needs no trace."
        ) from reason
    walker = _Walker(twin, tracing)
    signature = exported.graph_signature
    environment: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        tracing.where = node.name
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: environment[one])
        if node.op == "placeholder":
            if name := signature.inputs_to_parameters.get(node.name):
                parameter = twin.get_parameter(name)
                environment[node] = ParameterRef(tracing.names[id(parameter)], parameter.detach())
            elif name := signature.inputs_to_buffers.get(node.name):
                environment[node] = tracing.constant(twin.get_buffer(name))
            elif name := signature.inputs_to_lifted_tensor_constants.get(node.name):
                environment[node] = tracing.constant(exported.constants[name])
            else:
                environment[node] = tracing.constant(example)
        elif node.op == "call_function":
            environment[node] = walker.function(node.target, args, kwargs)
        elif node.op == "get_attr":
            environment[node] = getattr(exported.graph_module, str(node.target))
        elif node.op == "output":
            _finish(tracing, node, args)
    return tracing


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:160]
