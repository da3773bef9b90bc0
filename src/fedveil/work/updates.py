"""Local training: several steps or epochs of SGD, and the update they made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import NumericError
from fedveil.flat import Layout, flatten
from fedveil.work.batches import Batches
from fedveil.work.checks import check_finite
from fedveil.work.dropout import seeded_dropout
from fedveil.work.losses import Loss
from fedveil.work.messages import Bench, ClientData, one_by_one
from fedveil.work.schedule import Schedule
from fedveil.work.step import collect_statistics, contribution_layout, prepare, weighted


@dataclass(frozen=True)
class LocalSteps:
    """`steps` SGD steps, or `epochs` passes over the client's data; sends w − w_k, n_k-weighted."""

    loss: Loss
    batches: Batches
    schedule: Schedule
    steps: int | None = None
    epochs: int | None = None

    returns = "update"

    def count(self, samples: int) -> int:
        """Local steps of a client with `samples` samples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * max(1, samples // self.batches.batch_size(samples))

    def layout(self, blueprint: Blueprint, *, tensors: int) -> Layout:
        """gradients (here w − w_k), values (the mean loss), statistics, weight."""
        return contribution_layout(blueprint, tensors=tensors)

    def run(self, bench: Bench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """Train locally and report how far the parameters moved."""
        module = bench.module
        prepare(bench.blueprint, module, broadcast)
        parameters: list[Tensor] = list(module.parameters())
        moving = _moving(bench.blueprint, parameters)
        count, rate = self.count(len(data)), self.schedule.at(round)
        losses = []
        with seeded_dropout(module, self.batches.seed, data.client, round):
            for step in range(count):
                chosen = self.batches.indices(client=data.client, samples=len(data), step=round * count + step)
                x, y = data.take(chosen)
                with torch.enable_grad():
                    loss = self.loss.mean(module(x), y)
                    grads = torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    torch._foreach_add_(moving, grads, alpha=-rate)
                losses.append(loss.detach())
                if not torch.isfinite(losses[-1]):
                    break
        value = torch.stack(losses).mean().reshape(1)
        moved = broadcast.parameters - flatten([one.detach() for one in parameters])
        statistics = collect_statistics(module, value)
        vector = weighted(torch.cat([moved, value, statistics]), len(data))
        check_finite(vector, value, client=data.client, round=round, chosen=chosen)
        return vector

    def run_many(
        self, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """One client after the other: local steps change the parameters, so nothing is shared."""
        return one_by_one(self, bench, broadcast, clients, round=round)


def _moving(blueprint: Blueprint, parameters: list[Tensor]) -> list[Tensor]:
    """The parameters that are trained: those the model's author did not freeze."""
    masks = torch.split(blueprint.trainable, [one.numel() for one in parameters])
    return [one for one, mask in zip(parameters, masks, strict=True) if bool(mask.any())]
