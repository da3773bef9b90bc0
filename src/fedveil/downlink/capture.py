"""Getting hold of a network's graph: what fx or export may miss is found out here.

A captured graph is believed only if it draws no random numbers while it is captured and replays to the
network's own output: fx bakes in whatever eager code decides or draws, and takes a wrong branch where
code asks `isinstance(x, Tensor)`.
"""

from __future__ import annotations

import io
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

_TOLERANCE = 1e-3
_Result = TypeVar("_Result")


class CaptureError(Exception):
    """The graph would not be the network's; the text says why."""


class CustomFunction:
    """A user's `torch.autograd.Function` as one opaque operation: its backward pass may be anything."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def custom_functions_seen() -> Iterator[list[str]]:
    """Collects the names of custom autograd functions that run, and keeps fx from tracing into them."""
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, fx.Proxy):
                return leaf.tracer.create_proxy("call_function", CustomFunction(cls), args, kwargs)
        seen.append(cls.__name__)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield seen
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Whatever runs inside leaves the global random states as they were."""
    state = random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state)


def seeded(run: Callable[[], _Result], device: torch.device) -> _Result:
    """Run with fixed random states, so that a replay draws the same numbers."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.manual_seed(0)
    return run()


_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class _Tracer(fx.Tracer):
    """Notes for every operation the line of the network's own code that asks for it.

    torch's own record of such lines loads a second's worth of symbolic algebra.
    """

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_code is not captured_by_fx.__code__ and frame.f_code.co_filename.startswith(_NOT_THEIRS):
            assert frame.f_back is not None
            frame = frame.f_back
        if frame.f_code is not captured_by_fx.__code__:
            proxy.node.meta["line"] = _line(frame.f_code.co_filename, frame.f_lineno)
        return proxy


def _line(file: str, number: int) -> str:
    return f"{Path(file).name}:{number}"


def line_of(node: fx.Node) -> str:
    """The line of the network's own code behind a node; empty where there is none."""
    if "line" in node.meta:
        return str(node.meta["line"])
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    theirs = [(file, int(number)) for file, number in frames if not file.startswith(_NOT_THEIRS)]
    return _line(*theirs[-1]) if theirs else ""


def captured_by_fx(model: nn.Module) -> fx.Graph:
    """The graph by symbolic tracing; refused where eager code drew numbers or read parameters."""
    states = torch.get_rng_state(), random.getstate()
    with torch.enable_grad():
        graph = _Tracer().trace(model)
    if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
        raise CaptureError("its code draws random numbers that a trace would freeze")
    for node in graph.nodes:
        if node.op == "get_attr":
            owner, _, attribute = str(node.target).rpartition(".")
            value = getattr(model.get_submodule(owner), attribute)
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise CaptureError("its code computes with parameters that a trace would freeze")
    return graph


def captured_by_export(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The graph by running the code on tensors without values."""
    state = random.getstate()
    # It prints the graph it gave up on; our error says what a user needs.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (example,), strict=False)
    if random.getstate() != state:
        raise CaptureError("its code draws random numbers that a trace would freeze")
    return exported


def check_replay(truth: object, replayed: object) -> None:
    """Refuse a graph whose output on the example is not the network's."""
    left, right = pytree.tree_leaves(truth), pytree.tree_leaves(replayed)
    pairs = list(zip(left, right, strict=False))
    same = len(left) == len(right) and all(
        _close(value, other) if isinstance(value, Tensor) and isinstance(other, Tensor) else value is other
        for value, other in pairs
    )
    if not same:
        raise CaptureError("its trace computes something else than the network")


def _close(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not tensor.is_floating_point():
        return torch.equal(tensor, other)
    scale = float(tensor.nan_to_num().abs().max()) if tensor.numel() else 0.0
    return torch.allclose(tensor, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def first_line(error: Exception) -> str:
    """An error's kind and first line, and the line of the network's own code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    at = f" at {_line(theirs[-1].filename, theirs[-1].lineno or 0)}" if theirs else ""
    return f"{type(error).__name__}{at}: {(str(error).splitlines() or ['no message'])[0][:160]}"
