"""Local training: several steps or epochs of SGD, and the update they made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import Architecture, batch_norms
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError
from fedveil.tensors import Layout, flatten
from fedveil.work.batches import Batches, Schedule, has_random_layers, seeded_dropout
from fedveil.work.gradients import CapturedDescent, collect_statistics, contribution_layout, prepare, weighted
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, OneByOne, Workspace, check_finite, reported
from fedveil.work.per_sample import trained_names

Descent = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class LocalSteps(OneByOne):
    """`steps` SGD steps, or `epochs` passes over the client's data; sends w − w_k, n_k-weighted.

    A step is v ← μ·v + g + λ·w; w ← w − lr·v. v begins with 0 in every round: a client remembers nothing of the last.
    Where the uplink hides what is sent, a client does not refuse to send what is no number (`refuses` = False).
    """

    loss: Loss
    batches: Batches
    schedule: Schedule
    steps: int | None = None
    epochs: int | None = None
    refuses: bool = True
    momentum: float = 0.0
    weight_decay: float = 0.0

    returns = "update"
    clip = None
    reports = True

    def __post_init__(self) -> None:
        for name, value in (("local_steps", self.steps), ("local_epochs", self.epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 (got {value}).")

    @property
    def local_training(self) -> tuple[int | None, int | None]:
        """As given."""
        return self.steps, self.epochs

    def count(self, samples: int) -> int:
        """Local steps of a client with `samples` samples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * max(1, samples // self.batches.batch_size(samples))

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients (here w − w_k), values (the mean loss), statistics, weight."""
        return contribution_layout(architecture, tensors=tensors)

    def run(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """Train locally and report how far the parameters moved."""
        module = workspace.module
        prepare(workspace.architecture, module, broadcast)
        parameters: list[Tensor] = list(module.parameters())
        trained = trained_names(workspace.architecture)
        moving: list[Tensor] = [parameter for name, parameter in module.named_parameters() if name in trained]
        count, rate = self.count(len(data)), self.schedule.at(round)
        losses = []
        drawn = [
            self.batches.indices(client=data.client, samples=len(data), step=round * count + step)
            for step in range(count)
        ]
        # One transfer instead of one a step, each of which a GPU would wait for.
        there = torch.stack(drawn).to(data.x.device)
        descend = self._descent(workspace, broadcast, moving, data, there[0])
        with seeded_dropout(module, self.batches.seed, data.client, round):
            for step, chosen in enumerate(there):
                x, y = data.take(chosen, step=round * count + step)
                loss = descend(x, y, rate)
                losses.append(loss)
                if x.device.type == "cpu" and not torch.isfinite(loss):  # on a GPU, looking would cost a wait each step
                    break
        value = torch.stack(losses).mean().reshape(1)
        moved = broadcast.parameters - flatten([parameter.detach() for parameter in parameters])
        statistics = collect_statistics(module, value)
        vector = weighted(torch.cat([moved, value, statistics]), len(data))
        if not self.refuses:
            return reported(vector, workspace.layout.split(vector)["values"])
        check_finite(vector, value, client=data.client, round=round, chosen=chosen)
        return vector

    def _descent(
        self, workspace: Workspace, broadcast: Broadcast, moving: list[Tensor], data: ClientData, first: Tensor
    ) -> Descent:
        """One SGD step: captured on a GPU, where launches and not arithmetic take the time of a small batch."""
        module = workspace.module
        fixed = not has_random_layers(module) and not any(norm.training for _, norm in batch_norms(module))
        fixed = fixed and self.loss.capturable and not (self.momentum or self.weight_decay)
        if data.x.device.type != "cuda" or not fixed:
            velocity = [torch.zeros_like(parameter) for parameter in moving] if self.momentum else []
            return lambda x, y, rate: self._descended(module, moving, velocity, x, y, rate)
        x, y = data.take(first)
        key = (CapturedDescent, self.loss, tuple(x.shape), tuple(y.shape))
        made: dict[object, object] = workspace.captured  # type: ignore[assignment]
        captured = made.get(key)
        if not isinstance(captured, CapturedDescent):
            captured = made[key] = CapturedDescent(module, self.loss, moving, x, y)
            prepare(workspace.architecture, module, broadcast)
        return lambda x, y, rate: captured(x, y, rate=rate)

    def _descended(
        self, module: nn.Module, moving: list[Tensor], velocity: list[Tensor], x: Tensor, y: Tensor, rate: float
    ) -> Tensor:
        """One step on one batch, of parameters and `velocity` (without momentum: none) in place; the loss before it."""
        with torch.enable_grad():
            value = self.loss.mean(module(x), y)
            grads = torch.autograd.grad(value, moving, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            descend(moving, grads, velocity, rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return value.detach()


def descend(
    moving: list[Tensor],
    grads: list[Tensor] | tuple[Tensor, ...],
    velocity: list[Tensor],
    rate: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """v ← μ·v + g + λ·w; w ← w − lr·v in place; without momentum there is no `velocity`."""
    if weight_decay:
        grads = torch._foreach_add(grads, moving, alpha=weight_decay)
    if velocity:
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, grads)
        grads = velocity
    torch._foreach_add_(moving, grads, alpha=-rate)
