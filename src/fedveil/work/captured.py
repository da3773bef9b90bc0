"""A client step captured once as a CUDA graph and replayed: no launch costs between its small kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import PublicHead
from fedveil.work.losses import Loss
from fedveil.work.step import step

_WARM_UPS = 3


class CapturedStep:
    """`step` for one batch shape, with its inputs in fixed places that each replay reads anew.

    The module's parameters are such places too: filling them (`prepare`) before a replay is enough.
    """

    def __init__(
        self, blueprint: Blueprint, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None
    ) -> None:
        self._x, self._y = x.clone(), y.clone()
        self._head = None
        if head is not None:
            self._head = PublicHead(head.vector.clone(), head.groups.clone(), head.count, head.per_group)
        self._graph, self._result = _recorded(lambda: step(blueprint, module, loss, self._x, self._y, self._head))

    def __call__(self, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
        """The step's result; valid until the next call."""
        self._x.copy_(x)
        self._y.copy_(y)
        if head is not None and self._head is not None:
            self._head.vector.copy_(head.vector)
            self._head.groups.copy_(head.groups)
        self._graph.replay()
        return self._result


class CapturedDescent:
    """One SGD step on `moving`, in place: loss, gradients, w ← w − lr·g, for one batch shape.

    Capturing takes steps too: whoever makes one fills the parameters again before using it.
    """

    def __init__(self, module: nn.Module, loss: Loss, moving: Sequence[Tensor], x: Tensor, y: Tensor) -> None:
        self._x, self._y = x.clone(), y.clone()
        self._rate = torch.zeros((), dtype=moving[0].dtype, device=x.device)
        self._graph, self._result = _recorded(lambda: self._step(module, loss, list(moving)))

    def _step(self, module: nn.Module, loss: Loss, moving: list[Tensor]) -> Tensor:
        with torch.enable_grad():
            value = loss.mean(module(self._x), self._y)
            grads = torch.autograd.grad(value, moving, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_sub_(moving, torch._foreach_mul(grads, self._rate))
        return value.detach()

    def __call__(self, x: Tensor, y: Tensor, *, rate: float) -> Tensor:
        """Take the step; the loss before it."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(rate)
        self._graph.replay()
        return self._result.clone()


def _recorded(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result
