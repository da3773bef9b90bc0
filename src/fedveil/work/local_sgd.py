"""Local training: several steps or epochs of SGD or Adam, and the update they made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NumericError
from fedveil.tensors import Layout, all_in_range, flatten, vectorising
from fedveil.work.batches import Batches, LocalOptimiser, Schedule, convolves, has_random_layers, seeded_dropout
from fedveil.work.gradients import collect_statistics, contribution_layout
from fedveil.work.groups import GroupDescent, Task, captures, groups_of
from fedveil.work.losses import Loss
from fedveil.work.messages import ClientData, SideBySide, Units, Workspace, check_finite, prepare, reported

_FEWEST, _MOST = 5, 32
"""Fewer clients at once gain nothing; more would leave the other cores nothing to do."""
_SMALL_STEP = 1 << 14
"""Parameters and inputs of a step up to which its time is torch's own, which many clients then share: beyond, copies
of the parameters cost more than they save."""
_STEPS_AHEAD = 8
"""Batches of so many steps are looked up at once."""


@dataclass(frozen=True)
class LocalSteps(SideBySide):
    """`steps` steps of the client's optimiser, or `epochs` passes over its data; sends w − w_k, n_k-weighted.

    The optimiser begins anew in every round: a client remembers nothing of the last.
    """

    loss: Loss
    batches: Batches
    schedule: Schedule
    steps: int | None = None
    epochs: int | None = None
    refuses: bool = True
    optimiser: LocalOptimiser = field(default_factory=LocalOptimiser)

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

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """Those that take equally many steps of equal size together where steps are small; else each alone."""
        alike: dict[tuple[int, int] | None, list[int]] = {}
        vectorises = not broadcast.parameters.is_cuda and self._vectorises(workspace)
        width = math.prod(workspace.architecture.input_shape)
        for position, data in enumerate(clients):
            size = self.batches.batch_size(len(data))
            small = vectorises and workspace.architecture.size + size * width <= _SMALL_STEP
            alike.setdefault((size, self.count(len(data))) if small else None, []).append(position)
        units: list[list[int]] = []
        for key, positions in alike.items():
            parts = math.ceil(len(positions) / _MOST)
            together = math.ceil(len(positions) / parts) if key is not None and len(positions) >= _FEWEST else 1
            units += (positions[start : start + together] for start in range(0, len(positions), together))
        return units

    def _vectorises(self, workspace: Workspace) -> bool:
        module = workspace.module
        gathers = bool(workspace.architecture.statistics_sizes)
        return workspace.vectorisable and not (convolves(module) or gathers or has_random_layers(module))

    def _captured(self, workspace: Workspace) -> bool:
        return captures(workspace, self.loss)

    def _in_groups(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        groups, batches, rate = groups_of(workspace), self.batches, self.schedule.at(round)
        # Those that take equally many steps side by side: a group goes on until the last is done.
        order = sorted(range(len(clients)), key=lambda position: self.count(len(clients[position])))

        length = self.layout(workspace.architecture, tensors=1).length
        task = Task(workspace.architecture, self.loss, length, batches, broadcast)
        make = partial(GroupDescent, collect_statistics, task, optimiser=self.optimiser)

        def work(group: GroupDescent, part: Sequence[ClientData]) -> tuple[Tensor, Tensor]:
            counts = [self.count(len(data)) for data in part]

            def fill(step: int) -> None:
                steps = [round * count + min(step, count - 1) for count in counts]
                group.fill(part, batches, groups.orders, steps)

            return group.run(broadcast, fill, counts, rate)

        ordered = [clients[position] for position in order]
        for places, vectors, in_range in groups.run(task, ordered, make, work):
            for place, among in enumerate(places):
                position, data = order[among], ordered[among]
                if vectors is None:
                    yield position, self._one(workspace, broadcast, data, round)
                elif in_range:
                    yield position, vectors[place]
                else:
                    yield position, self._checked(workspace, vectors[place], data, round)

    def _together(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> list[Tensor | NumericError]:
        """Clients with equally many steps of equal size, each on parameters of its own."""
        module, architecture, many = workspace.functional, workspace.architecture, len(clients)
        prepare(architecture, module, broadcast)
        copies = {
            name: value.detach().expand(many, *value.shape).clone().requires_grad_(name not in architecture.frozen)
            for name, value in module.named_parameters()
        }
        moving = [value for value in copies.values() if value.requires_grad]
        memory = self.optimiser.start(moving)
        count, rate = self.count(len(clients[0])), self.schedule.at(round)
        losses = []

        def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.loss.mean(torch.func.functional_call(module, parameters, (x,)), y)

        with torch.enable_grad(), vectorising():
            for x, y in self._batches_of(clients, first=round * count, count=count):
                loss = torch.vmap(loss_of)(copies, x, y)
                grads = torch.autograd.grad(loss.sum(), moving, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    self.optimiser.step(moving, grads, memory, rate)
                losses.append(loss.detach())
        value = torch.stack(losses).mean(0)[:, None]
        rows = torch.cat([copy.detach().reshape(many, -1) for copy in copies.values()], dim=1)
        samples = value.new_tensor([[len(data)] for data in clients])
        vectors = torch.cat([broadcast.parameters - rows, value, torch.ones_like(value)], dim=1) * samples
        if all_in_range(vectors):
            return list(vectors)
        return [self._one(workspace, broadcast, data, round) for data in clients]

    def _batches_of(self, clients: Sequence[ClientData], *, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every client's batch of one local step after the other, side by side."""
        drawn = [
            list(self.batches.steps(client=data.client, samples=len(data), first=first, count=count))
            for data in clients
        ]
        if any(data.source is not None or data.augment is not None for data in clients):
            for chosen in zip(*drawn, strict=True):
                pairs = [data.take(which, step=step) for data, (step, which) in zip(clients, chosen, strict=True)]
                x, y = (torch.stack(column) for column in zip(*pairs, strict=True))
                yield x, y
            return
        for start in range(0, count, _STEPS_AHEAD):
            chosen_rows = []
            for data, steps in zip(clients, drawn, strict=True):
                rows = torch.stack([which for _, which in steps[start : start + _STEPS_AHEAD]])
                chosen_rows.append(rows if data.rows is None else data.rows[rows])
            x = _side_by_side([data.x for data in clients], chosen_rows)
            y = _side_by_side([data.y for data in clients], chosen_rows)
            yield from zip(x, y, strict=True)

    def _one(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        module, moving, samples = workspace.module, workspace.moving, len(data)
        prepare(workspace.architecture, module, broadcast)
        count, rate = self.count(samples), self.schedule.at(round)
        values = [parameter.detach() for parameter in moving]
        memory = self.optimiser.start(values)
        losses = []
        steps = self.batches.steps(client=data.client, samples=samples, first=round * count, count=count)
        with torch.enable_grad(), seeded_dropout(module, self.batches.seed, data.client, round):
            for step, chosen in steps:
                x, y = data.take(chosen, step=step)
                loss = self.loss.mean(module(x), y)
                grads = torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True)
                self.optimiser.step(values, grads, memory, rate)
                losses.append(loss.detach())
                if not (loss.is_cuda or math.isfinite(losses[-1])):  # on a GPU, looking would cost a wait each step
                    break
        value = torch.stack(losses).mean().reshape(1)
        moved = broadcast.parameters - flatten([parameter.detach() for parameter in module.parameters()])
        reports = [value, collect_statistics(module, value)] if workspace.architecture.statistics_sizes else [value]
        vector = torch.cat([moved, *reports, torch.ones_like(value)])
        vector *= samples
        return self._checked(workspace, vector, data, round, steps=len(losses))

    def _checked(
        self, workspace: Workspace, vector: Tensor, data: ClientData, round: int, *, steps: int | None = None
    ) -> Tensor | NumericError:
        size = workspace.architecture.size
        values = vector[size : size + 1]
        if not self.refuses:
            return reported(vector, values)
        if all_in_range(vector):
            return vector
        count = self.count(len(data))
        last = round * count + (count if steps is None else steps) - 1
        chosen = self.batches.indices(client=data.client, samples=len(data), step=last)
        try:
            check_finite(vector, values, client=data.client, round=round, chosen=chosen)
        except NumericError as reason:
            return reason
        return vector


def _side_by_side(samples: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Each client's rows of its samples, clients in the second dimension; those who share a tensor in one reading."""
    if all(one is samples[0] for one in samples):
        chosen = torch.stack(tuple(rows), dim=1)
        return samples[0].index_select(0, chosen.flatten()).reshape(*chosen.shape, *samples[0].shape[1:])
    return torch.stack([one[which] for one, which in zip(samples, rows, strict=True)], dim=1)
