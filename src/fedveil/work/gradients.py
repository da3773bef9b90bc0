"""One client step: a forward pass, and one backward pass per objective."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import (
    Architecture,
    TappedLinear,
    batch_norms,
)
from fedveil.downlink.messages import Broadcast, PublicHead, SketchBroadcast
from fedveil.downlink.sketched import Sketched, sketched
from fedveil.errors import NumericError
from fedveil.tensors import Layout, flatten, vectorising
from fedveil.work.batches import Batches, convolves, has_random_layers, seeded_dropout
from fedveil.work.groups import GroupStep, Task, captures, groups_of
from fedveil.work.losses import Loss, SquareLoss
from fedveil.work.messages import ClientData, SideBySide, Units, Workspace, check_finite, prepare, reported
from fedveil.work.own_loss import OwnLoss


def contribution_layout(architecture: Architecture, *, tensors: int) -> Layout:
    """gradients (tensors × parameters), values, batch statistics, weight."""
    statistics = architecture.statistics_size if _gathers_statistics(architecture.skeleton) else 0
    return Layout(
        (
            ("gradients", (tensors, architecture.size)),
            ("values", (tensors,)),
            ("statistics", (statistics,)),
            ("weight", (1,)),
        )
    )


def head_alpha(architecture: Architecture, module: nn.Module) -> Tensor:
    """α = Σ_j ĥ_j, + 1 if the last layer has a bias; ĥ is what the layer reads, past its multiplier."""
    assert architecture.table is not None
    assert architecture.table.head is not None
    layer = module.get_submodule(architecture.table.head.path)
    assert isinstance(layer, TappedLinear)
    alpha = layer.tap.sum(1)
    layer.tap = layer.tap.detach()  # it would keep this pass alive into the next, and on a GPU tie the two together
    return alpha if layer.bias is None else alpha + 1.0


def objectives(
    architecture: Architecture, module: nn.Module, loss: Loss, output: Tensor, target: Tensor, head: PublicHead | None
) -> Tensor:
    """The functions to differentiate, as one vector: the loss, or φ₀, φ_s, φ_β under head noise."""
    if head is None:
        return loss.mean(output, target).reshape(1)
    assert isinstance(loss, SquareLoss)
    return loss.basis(output, head_alpha(architecture, module), target, head)


def collect_statistics(module: nn.Module, like: Tensor) -> Tensor:
    """Mean and variance of every batch norm, flat; nothing if all are frozen.

    Where only some are frozen, those repeat the running statistics they were sent.
    """
    if not _gathers_statistics(module):
        return like.new_empty(0)
    return flatten([part for _, norm in batch_norms(module) for part in norm.take_statistics()])


def _gathers_statistics(module: nn.Module) -> bool:
    return any(norm.training for _, norm in batch_norms(module))


def step(
    architecture: Architecture, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None
) -> Tensor:
    """gradients, values and statistics of one batch, in one flat vector (without the weight).

    The forward pass is shared; each objective costs one backward pass. Frozen parameters have a gradient of zero,
    whatever the data.
    """
    with torch.enable_grad():
        phi = objectives(architecture, module, loss, module(x), y, head)
        parameters = dict(module.named_parameters())
        moving = [name for name in parameters if name not in architecture.frozen]
        parts: list[Tensor] = []
        for number in range(len(phi)):
            grads = torch.autograd.grad(
                phi[number],
                [parameters[name] for name in moving],
                retain_graph=number + 1 < len(phi),
                allow_unused=True,
                materialize_grads=True,
            )
            parts += _in_order(parameters, dict(zip(moving, grads, strict=True)))
    statistics = [collect_statistics(module, phi)] if architecture.statistics_sizes else []
    return flatten([*parts, phi.detach(), *statistics])


def _in_order(parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> list[Tensor]:
    """All parameters' gradients, zero where nothing is trained."""
    return [grads[name] if name in grads else torch.zeros_like(value) for name, value in parameters.items()]


def weighted(vector: Tensor, samples: int, *, share: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """n_k × `share` × everything, rounded once, and n_k itself at the end: what a client contributes to a sum."""
    result = vector.new_empty(len(vector) + 1, dtype=dtype)
    torch.mul(vector, samples * share, out=result[:-1])
    result[-1] = float(samples)
    return result


def steps(
    architecture: Architecture, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None
) -> Tensor:
    """`step` for every client: x and y have a leading client dimension, and so has the result."""
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    moving = {name: value for name, value in parameters.items() if name not in architecture.frozen}

    def one_client(inputs: Tensor, targets: Tensor) -> Tensor:
        def forward(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            output = torch.func.functional_call(module, {**parameters, **values}, (inputs,))
            phi = objectives(architecture, module, loss, output, targets, head)
            return phi, collect_statistics(module, phi)

        phi, pull, statistics = torch.func.vjp(forward, moving, has_aux=True)  # type: ignore[misc]
        rows: list[Tensor] = []
        for number in range(len(phi)):
            seed = torch.zeros_like(phi)
            seed[number] = 1.0
            rows += _in_order(parameters, pull(seed)[0])
        return flatten([*rows, phi, statistics])

    with vectorising():
        return torch.vmap(one_client)(x, y)


def _step_in_parts(workspace: Workspace, loss: Loss, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
    """`step` of a batch, on a CPU as the mean of its parts' where that is known to be the same."""
    # Of a loss of somebody's own it was tried on some samples, and is not known.
    apart = loss.separable and not isinstance(loss, OwnLoss)
    samples, most = len(y), workspace.at_once if apart and not x.is_cuda else None
    number = 1 if most is None or samples < 2 * most else math.ceil(samples / most)
    whole: Tensor | None = None
    for inputs, targets in zip(x.tensor_split(number), y.tensor_split(number), strict=True):
        part = step(workspace.architecture, workspace.module, loss, inputs, targets, head)
        if number == 1:
            return part
        part *= len(targets) / samples
        whole = part if whole is None else whole.add_(part)
    assert whole is not None
    return whole


_CHUNK_BYTES = 64 << 20
_MOST_AT_ONCE = 64
_VECTORISED_PIXELS = 4096


@dataclass(frozen=True)
class Gradients(SideBySide):
    """The gradient(s) on one batch, weighted by the client's sample count.

    `vectorise` forces many clients at once on or off; None lets the measured rule decide.
    """

    loss: Loss
    batches: Batches
    vectorise: bool | None = None
    refuses: bool = True

    returns = "gradient"
    local_training = (None, None)
    clip = None
    reports = True

    def layout(self, architecture: Architecture, *, tensors: int) -> Layout:
        """gradients, values, statistics, weight."""
        return contribution_layout(architecture, tensors=tensors)

    def units(self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData]) -> Units:
        """Those of equal batch size together where vmap pays; captured groups are made elsewhere."""
        grouped = broadcast.parameters.is_cuda and self._captured(workspace)
        if grouped or not self._should_vectorise(workspace, clients):
            return super().units(workspace, broadcast, clients)
        by_size: dict[int, list[int]] = {}
        for position, data in enumerate(clients):
            by_size.setdefault(self.batches.batch_size(len(data)), []).append(position)
        row = workspace.layout.length * broadcast.parameters.element_size()
        at_once = max(1, min(_MOST_AT_ONCE, _CHUNK_BYTES // row))
        return [
            positions[start : start + at_once]
            for positions in by_size.values()
            for start in range(0, len(positions), at_once)
        ]

    def _captured(self, workspace: Workspace) -> bool:
        return captures(workspace, self.loss)

    def _in_groups(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        groups, batches = groups_of(workspace), self.batches
        task = Task(workspace.architecture, self.loss, workspace.layout.length, batches, broadcast)

        def work(group: GroupStep, part: Sequence[ClientData]) -> tuple[Tensor, Tensor]:
            group.fill(part, batches, groups.orders, [round] * len(part))
            return group.run(broadcast)

        for positions, vectors, in_range in groups.run(task, clients, partial(GroupStep, step, task), work):
            if vectors is not None and not self.refuses:
                reported(vectors, workspace.layout.split(vectors)["values"])
            for place, position in enumerate(positions):
                if vectors is None:
                    yield position, self._one(workspace, broadcast, clients[position], round)
                elif in_range or not self.refuses:
                    yield position, vectors[place]
                else:
                    data = clients[position]
                    chosen = batches.indices(client=data.client, samples=len(data), step=round)
                    yield position, self._checked(workspace, vectors[place], data, round, chosen)

    def _one(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        prepare(workspace.architecture, workspace.module, broadcast)
        chosen = self.batches.indices(client=data.client, samples=len(data), step=round)
        x, y = data.take(chosen, step=round)
        with seeded_dropout(workspace.module, self.batches.seed, data.client, round):
            vector = _step_in_parts(workspace, self.loss, x, y, broadcast.head)
        return self._checked(workspace, weighted(vector, len(data)), data, round, chosen)

    def _together(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], round: int
    ) -> list[Tensor | NumericError]:
        prepare(workspace.architecture, workspace.functional, broadcast)
        chosen = [self.batches.indices(client=data.client, samples=len(data), step=round) for data in clients]
        pairs = [data.take(which, step=round) for data, which in zip(clients, chosen, strict=True)]
        x, y = (torch.stack(column) for column in zip(*pairs, strict=True))
        vectors = steps(workspace.architecture, workspace.functional, self.loss, x, y, broadcast.head)
        return [
            self._checked(workspace, weighted(vector, len(data)), data, round, which)
            for data, which, vector in zip(clients, chosen, vectors, strict=True)
        ]

    def _checked(
        self, workspace: Workspace, vector: Tensor, data: ClientData, round: int, chosen: Tensor
    ) -> Tensor | NumericError:
        values = workspace.layout.part(vector, "values")
        if not self.refuses:
            return reported(vector, values)
        try:
            check_finite(vector, values, client=data.client, round=round, chosen=chosen)
        except NumericError as reason:
            return reason
        return vector

    def _should_vectorise(self, workspace: Workspace, clients: Sequence[ClientData]) -> bool:
        module = workspace.module
        if len(clients) < 2 or has_random_layers(module) or not workspace.vectorisable:
            return False
        if self.vectorise is not None:
            return self.vectorise
        if not convolves(module):
            return True
        # Per-client convolutions pay for small pictures only: beyond, a loop keeps both cores busy.
        pixels = math.prod(workspace.architecture.input_shape[1:])
        return self.batches.batch_size(len(clients[0])) * pixels <= _VECTORISED_PIXELS


@dataclass(frozen=True)
class SketchedGradients(Gradients):
    """The same of a model that came in sketches: what leaves is the part of the gradient within each, Ĝ·P/q.

    A client of the cited scheme computes on x·S and has no more than Ĝ·S, which says the same.
    """

    sketch: Sketched = field(default_factory=Sketched)

    def run_units(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], units: Units, *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """Every client's contribution, projected."""
        architecture, size = workspace.architecture, workspace.architecture.size
        assert isinstance(broadcast, SketchBroadcast)
        seed, device = broadcast.seed.cpu().numpy().tobytes(), broadcast.parameters.device
        sketches = self.sketch.sketches(architecture, seed, device=device)
        for position, vector in super().run_units(workspace, broadcast, clients, units, round=round):
            if isinstance(vector, Tensor):
                within = sketched(architecture, vector[:size], sketches)
                for name in sketches:
                    architecture.parameters.part(within, name).div_(self.sketch.ratio)
                vector = torch.cat([within.to(vector), vector[size:]])
            yield position, vector
