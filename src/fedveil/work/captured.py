"""A client step captured once as a CUDA graph and replayed: no launch costs between its small kernels."""

from __future__ import annotations

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
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step(blueprint, module, loss, self._x, self._y, self._head)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = step(blueprint, module, loss, self._x, self._y, self._head)

    def __call__(self, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
        """The step's result; valid until the next call."""
        self._x.copy_(x)
        self._y.copy_(y)
        if head is not None and self._head is not None:
            self._head.vector.copy_(head.vector)
            self._head.groups.copy_(head.groups)
        self._graph.replay()
        return self._result
