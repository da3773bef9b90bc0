"""Work on a GPU that is captured once and replayed from then on: what takes its time is launching it piece by piece."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

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
