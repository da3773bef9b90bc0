"""Flat vectors with named sections, in which tensors travel; exact sums of them; work that a GPU repeats."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import operator
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.errors import Code, ProtocolError

# --- work on a GPU that is captured once and replayed from then on: what takes its time is launching it piece by piece

Result = TypeVar("Result")

_WARM_UPS = 2
_KEPT = 16


def recorded(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `work` does, and what it gives: places that each replay fills anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on streams and first calls; what fails is raised
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        graph, cudnn = torch.cuda.CUDAGraph(), torch.backends.cudnn
        before, mode = cudnn.benchmark, torch.cuda.get_sync_debug_mode()
        # The algorithm that is fastest for a shape pays: it is replayed thousands of times.
        cudnn.benchmark = before or not cudnn.deterministic
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    work()
                # A capture that fails half-way leaves the random numbers of the device unusable: what waits for the
                # host, which no capture may, is refused before.
                torch.cuda.set_sync_debug_mode("error")
                work()
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                result = work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            cudnn.benchmark = before
    return graph, result


class Replayed:
    """A function of tensors, captured for each set of shapes that it is called with.

    Its result lies where the next call of the same shapes puts its own.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._made: dict[object, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, *given: Tensor) -> Tensor:
        """What the function makes of these; on the present stream."""
        key = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in given)
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            places = [tensor.clone() for tensor in given]
            graph, result = recorded(lambda: self._function(*places))
            made = self._made[key] = (graph, places, result)
        graph, places, result = made
        torch._foreach_copy_(places, list(given))
        graph.replay()
        return result


LARGEST = 2.0**36
"""Numbers of this size and above are taken for a training that has run away: clients refuse to send
them, and exact sums to add them."""
_LIMBS = 3
_MOST_ADDENDS = int(2.0**52 / LARGEST)
_BLOCK = 1 << 17
_ROWS = 8
_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Layout:
    """Named sections, in order, of one flat vector."""

    sections: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names."""
        return tuple(name for name, _ in self.sections)

    @property
    def length(self) -> int:
        """The vector's length."""
        return sum(math.prod(shape) for _, shape in self.sections)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of the sections, in their shapes; leading dimensions of `vector` are kept."""
        parts, start = {}, 0
        for name, shape in self.sections:
            size = math.prod(shape)
            parts[name] = vector[..., start : start + size].reshape((*vector.shape[:-1], *shape))
            start += size
        return parts

    def part(self, vector: Tensor, name: str) -> Tensor:
        """A view of one section of a flat vector, in its shape."""
        start = 0
        for section, shape in self.sections:
            size = math.prod(shape)
            if section == name:
                return vector[start : start + size].view(shape)
            start += size
        raise KeyError(name)

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """One vector from the sections, in order."""
        return torch.cat([parts[name].reshape(-1) for name, _ in self.sections])


class ExactSum:
    """Σ of vectors, exact to 2⁻⁷² and therefore independent of their order.

    Each number x (|x| < 2³⁶) is cut into three integers x = l₀ + l₁·2⁻³⁶ + l₂·2⁻⁷², each below 2³⁶ in
    size. Sums of up to 2¹⁶ such integers are exact in float64, so addition commutes bit for bit.
    """

    def __init__(self, length: int, *, device: torch.device | str = "cpu") -> None:
        self._limbs = torch.zeros(_LIMBS, length, dtype=torch.float64, device=device)
        # Blocks that stay in a CPU's cache are twice as fast as whole vectors; a GPU wants few launches.
        block = min(_BLOCK, length) if self._limbs.device.type == "cpu" else length
        self._blocks = [slice(start, start + block) for start in range(0, length, max(block, 1))]
        # Zeros, not empty: memory that was handed back may still hold somebody's numbers. Short vectors are copied here
        # until there are enough to be added together.
        self._scratch = torch.zeros(
            min(_ROWS, max(2, _BLOCK // max(block, 1))), block, dtype=torch.float64, device=device
        )
        self._copied = 0
        self._addends = 0
        self._seen: tuple[Tensor, int] | None = None
        self._waiting: list[Tensor] = []

    @property
    def length(self) -> int:
        """The vectors' length."""
        return self._limbs.shape[1]

    def check(self, vector: Tensor) -> None:
        """Refuse wrong shapes, numbers out of range, NaN and infinity, and more vectors than can be exact."""
        if vector.dim() != 1 or len(vector) != self.length:
            raise ProtocolError(
                f"an upload has shape {tuple(vector.shape)} where ({self.length},) belongs; "
                "do server and client use the same model and scheme?"
            )
        if self._addends >= _MOST_ADDENDS:
            raise ProtocolError(f"more than {_MOST_ADDENDS} uploads in one round")
        if self.length and not self._in_range(vector):
            raise ProtocolError("an upload holds NaN, infinity or a number beyond 2^36", code=Code.NUMBERS)

    def _in_range(self, vector: Tensor) -> bool:
        """A look at a GPU's numbers costs a wait: rows of one tensor are looked at together; if it changes, again."""
        whole = vector._base if vector.is_cuda else None
        if whole is None or whole.shape[1:] != (self.length,):
            return all_in_range(vector)
        if self._seen is None or self._seen[0] is not whole or self._seen[1] != whole._version:
            if not all_in_range(whole):
                return all_in_range(vector)
            self._seen = (whole, whole._version)
        return True

    def add(self, vector: Tensor) -> None:
        """Add one vector, or refuse it and stay unchanged."""
        self.check(vector)
        self._addends += 1
        if vector.is_cuda and vector._base is not None:
            # Launches, not sums, take a GPU's time: rows of one tensor are added together.
            if self._waiting and self._waiting[0]._base is not vector._base:
                self._settle()
            self._waiting.append(vector)
            if len(self._waiting) == len(vector._base):
                self._settle()
            return
        self._add(vector)

    def _settle(self) -> None:
        """Add the rows that wait to be added together."""
        if self._copied:
            self._limbs += _limbs_of(self._scratch[: self._copied])
            self._copied = 0
        if not self._waiting:
            return
        rows, self._waiting = torch.stack(self._waiting), []
        step = max(1, _AT_ONCE // len(rows))
        for start in range(0, self.length, step):
            self._limbs[:, start : start + step] += _replayed(_limbs_of)(rows[:, start : start + step])

    def _add(self, vector: Tensor) -> None:
        if len(self._scratch) > 2:
            self._scratch[self._copied].copy_(vector)
            self._copied += 1
            if self._copied == len(self._scratch):
                self._settle()
            return
        for block in self._blocks:
            *limbs, last = self._limbs[:, block]
            rest, whole = self._scratch[:, : len(last)]
            rest.copy_(vector[block])
            for limb in limbs:
                torch.round(rest, out=whole)
                limb += whole
                rest -= whole
                rest *= LARGEST
            last += rest.round_()

    def total(self) -> Tensor:
        """The sum, in float64."""
        self._settle()
        if self._limbs.is_cuda and self.length <= _AT_ONCE:
            return _replayed(_carried)(self._limbs).clone()
        return _carried(self._limbs.clone())


def _limbs_of(rows: Tensor) -> Tensor:
    """The limbs of the rows' sum: sums of whole numbers, and so exact in any order."""
    rest, limbs = rows.double(), []
    for place in range(_LIMBS):
        whole = torch.round(rest)
        limbs.append(whole.sum(0))
        if place + 1 < _LIMBS:
            rest = (rest - whole) * LARGEST
    return torch.stack(limbs)


def _carried(limbs: Tensor) -> Tensor:
    """The number that limbs, which are used up, stand for."""
    for place in range(_LIMBS - 1, 0, -1):  # carry, so that large limbs of opposite sign cancel exactly
        carried = torch.round(limbs[place] / LARGEST)
        limbs[place] -= carried * LARGEST
        limbs[place - 1] += carried
    result = limbs[_LIMBS - 1]
    for place in range(_LIMBS - 2, -1, -1):
        result = result / LARGEST + limbs[place]
    return result


@functools.lru_cache(maxsize=8)
def _replayed(function: Callable[..., Tensor]) -> Replayed:

    return Replayed(function)


def all_in_range(numbers: Tensor) -> bool:
    """Whether all are finite, and below what is taken for a training that has run away."""
    low, high = numbers.aminmax()
    if numbers.is_cuda:
        return bool((low > -LARGEST) & (high < LARGEST))  # false for NaN too; one look, for which a GPU is waited for
    return low.item() > -LARGEST and high.item() < LARGEST


class _Compiler(ModuleType):
    """Stands where torch's compiler would, and lets it be loaded by whoever wants more of it than to stand aside."""

    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


_SHAPES = "torch.fx.experimental.symbolic_shapes"


class _Shapes(ModuleType):
    """Stands where torch's shapes with unknowns would: those of real tensors are equal, or they are not."""

    sym_eq, expect_true = staticmethod(operator.eq), staticmethod(bool)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # an import asks whether this is a package
            raise AttributeError(name)
        if sys.modules.get(_SHAPES) is self:
            del sys.modules[_SHAPES]
        return getattr(importlib.import_module(_SHAPES), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Derivatives by torch.func ask torch's compiler to stand aside, and load it to ask, which takes 1.5 seconds; and
    compare shapes by what can compare unknown ones, for half a second more. Where nobody has loaded these, there is
    nothing to ask."""
    shapes = None if _SHAPES in sys.modules else _Shapes(_SHAPES)
    stand_in = None if "torch._dynamo" in sys.modules else _Compiler("torch._dynamo")
    if shapes is not None:
        sys.modules[_SHAPES] = shapes
    if stand_in is not None:
        torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if stand_in is not None and torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]
        if shapes is not None and sys.modules.get(_SHAPES) is shapes:
            del sys.modules[_SHAPES]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as products and a softmax: vmap has no rule for the fused kernels, runs them one by one and warns."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def vectorising() -> Iterator[None]:
    """What a function under vmap is run in; where vmap runs an operation one by one, users cannot help it."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        with without_compiler(), plain_attention():
            yield
    finally:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def under_vmap(tensor: Tensor) -> bool:
    """Whether it stands for many, where functions that vmap takes apart cost several times what they are made of."""
    return torch._C._functorch.is_batchedtensor(tensor)


Network = TypeVar("Network", bound=nn.Module)


def twin_of(module: Network) -> Network:
    """A copy that shares nothing: copy.deepcopy, which needs half its time to find that a layer has no hooks."""
    kept = [value for layer in module.modules() for value in vars(layer).values()]
    empty = {id(value): type(value)() for value in kept if type(value) in (dict, OrderedDict) and not value}
    return copy.deepcopy(module, empty)


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, in order, without a copy where it lies on the CPU in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)


def from_raw(content: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor of these bytes, in memory of its own, which lies as torch lays it: that may decide about last bits."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if len(content):
        raw(tensor).data[:] = content
    return tensor


def flatten(tensors: Sequence[Tensor], *, like: Tensor | None = None) -> Tensor:
    """Concatenate tensors into one new vector; none at all give an empty vector like `like`."""
    if not tensors:
        return torch.empty(0) if like is None else like.new_empty(0)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


STATISTICS_CUT = 2.0**10
"""Batch statistics that travel under noise without a proof are cut off beyond this, so that sums have room for them."""


def statistics_in(layout: Layout) -> int:
    """How many batch statistics a contribution carries."""
    return math.prod(dict(layout.sections).get("statistics", (0,)))
