"""Walking a network once: torch.fx where it can, torch.export where fx cannot."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedveil.downlink.capture import (
    CaptureError,
    captured_by_export,
    captured_by_fx,
    check_replay,
    custom_functions_seen,
    own_randomness,
    seeded,
)
from fedveil.downlink.edges import Edge, ParameterRef, Tracing
from fedveil.downlink.walker import NORM_KINDS, Walker, leaves, values
from fedveil.errors import TraceError

__all__ = ["NORM_KINDS", "norm_paths", "walk"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def walk(model: nn.Module, example: Tensor) -> Tracing:
    """Trace a network on an example batch; the result holds every class, use and pin.

    The network is traced in its own mode, training or evaluation, because its code may ask for it.
    """
    device = example.device
    sample = example if len(example) > 1 else example.repeat_interleave(2, 0)  # batch norms need two
    with torch.no_grad(), own_randomness(device), custom_functions_seen() as functions:
        try:
            truth = seeded(lambda: copy.deepcopy(model)(sample.clone()), device)
        except Exception as reason:
            raise TraceError(
                f"The model cannot be run on a batch of shape {tuple(sample.shape)}: {_first_line(reason)}. "
                "FedVeil trains models that take one input tensor, the batch."
            ) from reason
        present = sorted(set(functions))
        try:
            tracing, output = seeded(lambda: _walk_fx(copy.deepcopy(model), sample.clone()), device)
            check_replay(truth, output)
        except Exception as fx_reason:  # fx raises whatever the traced code raises on proxies
            try:
                tracing, output = seeded(lambda: _walk_exported(copy.deepcopy(model), sample.clone()), device)
                check_replay(truth, output)
            except Exception as reason:  # export raises many kinds of errors; each means the same to a user
                raise TraceError(
                    f"The model can be traced neither by torch.fx ({_first_line(fx_reason)}) nor by torch.export "
                    f"({_first_line(reason)}). Remove control flow that depends on values, "
                    "or train it with --scheme fedavg, which needs no trace."
                ) from reason
            for name in present:  # export looked into them and saw only their forward pass
                tracing.opaque.append(name)
                tracing.pin_everything(name, "a custom autograd function in a model that torch.fx cannot trace")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            tracing.opaque.append(f"the backward hook of {path or 'the model'}")
            tracing.pin_everything(type(module).__name__, "it has backward hooks, which may do anything")
    return tracing


def _new_tracing(twin: nn.Module) -> Tracing:
    return Tracing({id(parameter): name for name, parameter in twin.named_parameters()}, norm_paths(twin))


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


def _walk_fx(twin: nn.Module, example: Tensor) -> tuple[Tracing, object]:
    graph = captured_by_fx(twin)
    tracing = _new_tracing(twin)
    walker = Walker(twin, tracing)
    environment: dict[fx.Node, Any] = {}
    inputs: Iterator[Tensor] = iter((example,))
    for node in graph.nodes:
        tracing.where = node.name
        tracing.inside = str(node.target) if node.op == "call_module" else ""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: environment[one])
        if node.op == "placeholder":
            value = next(inputs, None)
            environment[node] = tracing.constant(value) if value is not None else node.args[0]
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
            return tracing, values(args[0])
    raise CaptureError("it has no output")


def _attribute(walker: Walker, target: str) -> Any:
    path, _, attribute = target.rpartition(".")
    owner = walker.model.get_submodule(path)
    found = walker.reference(owner, attribute)
    # fx keeps what eager code computed under a name of its own: that may differ next time.
    if isinstance(found, Edge) and attribute.startswith("_tensor_constant"):
        return walker.tracing.constant(found.value)
    return getattr(owner, attribute) if found is None else found


def _finish(tracing: Tracing, node: fx.Node, args: Any) -> None:
    for edge in leaves(args, Edge):
        tracing.classes.pin(edge.ids)
    produced = node.args[0]
    if isinstance(produced, (tuple, list)) and len(produced) == 1:
        produced = produced[0]
    # Another reader might be an in-place operation, and the output no longer the layer's.
    if isinstance(produced, fx.Node) and len(produced.users) == 1:
        tracing.produced = produced.name


def _walk_exported(twin: nn.Module, example: Tensor) -> tuple[Tracing, object]:
    exported = captured_by_export(twin, example)
    tracing = _new_tracing(twin)
    walker = Walker(twin, tracing)
    signature = exported.graph_signature
    environment: dict[fx.Node, Any] = {}
    for node in exported.graph.nodes:
        tracing.where = node.name
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        tracing.inside = list(stack.values())[-1][0]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: environment[one])
        if node.op == "placeholder":
            if name := signature.inputs_to_parameters.get(node.name):
                parameter = twin.get_parameter(name)
                environment[node] = ParameterRef(tracing.names[id(parameter)], parameter.detach())
            elif name := signature.inputs_to_buffers.get(node.name):
                environment[node] = tracing.constant(twin.get_buffer(name), fixed=True)
            elif name := signature.inputs_to_lifted_tensor_constants.get(node.name):
                value = exported.constants[name]
                assert isinstance(value, Tensor)
                environment[node] = tracing.constant(value, fixed=True)
            else:
                environment[node] = tracing.constant(example)
        elif node.op == "call_function":
            environment[node] = walker.function(node.target, args, kwargs)
        elif node.op == "get_attr":
            environment[node] = getattr(exported.graph_module, str(node.target))
        elif node.op == "output":
            _finish(tracing, node, args)
            return tracing, values(args[0])
    raise CaptureError("it has no output")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:160]}"
