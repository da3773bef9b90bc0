"""One gradient, or the m + 2 gradients that undo head noise, from one shared forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import (
    Blueprint,
    TappedLinear,
    load_epsilon,
    load_parameters,
    load_statistics,
)
from fedveil.downlink.messages import Broadcast
from fedveil.downlink.norms import batch_norms
from fedveil.errors import NumericError
from fedveil.flat import Layout, flatten
from fedveil.work.batches import Batches
from fedveil.work.losses import Loss, SquareLoss
from fedveil.work.messages import Bench, ClientData

_CHUNK_BYTES = 192 << 20


def contribution_layout(blueprint: Blueprint, *, tensors: int) -> Layout:
    """gradients (tensors × parameters), values, batch statistics, weight."""
    statistics = 0 if blueprint.frozen_statistics else blueprint.statistics_size
    return Layout(
        (
            ("gradients", (tensors, blueprint.size)),
            ("values", (tensors,)),
            ("statistics", (statistics,)),
            ("weight", (1,)),
        )
    )


def prepare(bench: Bench, module: nn.Module, broadcast: Broadcast) -> None:
    """Fill a skeleton with a broadcast."""
    load_parameters(module, broadcast.parameters)
    load_epsilon(bench.blueprint, module, broadcast.epsilon)
    if broadcast.statistics.numel():
        load_statistics(module, broadcast.statistics)


def head_alpha(blueprint: Blueprint, module: nn.Module) -> Tensor:
    """α = Σ_j ĥ_j, + 1 if the last layer has a bias."""
    assert blueprint.table is not None
    assert blueprint.table.head is not None
    layer = module.get_submodule(blueprint.table.head.path)
    assert isinstance(layer, TappedLinear)
    alpha = layer.tap.sum(1)
    return alpha if layer.bias is None else alpha + 1.0


def objectives(
    blueprint: Blueprint, module: nn.Module, loss: Loss, output: Tensor, target: Tensor, broadcast: Broadcast
) -> Tensor:
    """The functions to differentiate, as one vector: the loss, or φ₀, φ_s, φ_β under head noise."""
    if broadcast.head is None:
        return loss.mean(output, target).reshape(1)
    assert isinstance(loss, SquareLoss)
    return loss.basis(output, head_alpha(blueprint, module), target, broadcast.head)


def collect_statistics(module: nn.Module, like: Tensor) -> Tensor:
    """Mean and variance of every training batch norm, flat."""
    parts = [part for _, norm in batch_norms(module) if norm.training for part in norm.take_statistics()]
    return flatten(parts) if parts else like.new_empty(0)


@dataclass(frozen=True)
class Gradients:
    """The gradient(s) at the broadcast point, on one batch, weighted by the client's sample count."""

    loss: Loss
    batches: Batches
    vectorise: bool | None = None

    returns = "gradient"

    def layout(self, blueprint: Blueprint, *, tensors: int) -> Layout:
        """gradients, values, statistics, weight."""
        return contribution_layout(blueprint, tensors=tensors)

    def run(self, bench: Bench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """One forward pass, one backward pass per objective."""
        module = bench.module
        prepare(bench, module, broadcast)
        return self._step(bench, module, broadcast, data, round)

    def _step(self, bench: Bench, module: nn.Module, broadcast: Broadcast, data: ClientData, round: int) -> Tensor:
        chosen = self.batches.indices(client=data.client, samples=len(data), step=round)
        x, y = data.take(chosen)
        with torch.enable_grad(), dropout_seed(bench.module, self.batches.seed, data.client, round):
            phi = objectives(bench.blueprint, module, self.loss, module(x), y, broadcast)
            parameters = list(module.parameters())
            rows = []
            for number in range(len(phi)):
                grads = torch.autograd.grad(
                    phi[number],
                    parameters,
                    retain_graph=number + 1 < len(phi),
                    allow_unused=True,
                    materialize_grads=True,
                )
                rows.append(flatten(grads))
        with torch.no_grad():
            statistics = collect_statistics(module, phi)
            weight = phi.new_full((1,), float(len(data)))
            vector = torch.cat([*rows, phi.detach(), statistics, weight[:0]]) * float(len(data))
            vector = torch.cat([vector, weight])
        check_finite(vector, phi, client=data.client, round=round, chosen=chosen)
        return vector

    def run_many(
        self, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Clients of equal batch size together under vmap, a bounded number at a time."""
        if not self.should_vectorise(bench, clients):
            prepare(bench, bench.module, broadcast)
            for position, data in enumerate(clients):
                yield position, self._step(bench, bench.module, broadcast, data, round)
            return
        by_size: dict[int, list[int]] = {}
        for position, data in enumerate(clients):
            by_size.setdefault(self.batches.batch_size(len(data)), []).append(position)
        prepare(bench, bench.functional, broadcast)
        row = bench.layout.length * broadcast.parameters.element_size()
        for size, positions in by_size.items():
            at_once = max(1, min(64, _CHUNK_BYTES // (row + size * 4096)))
            for start in range(0, len(positions), at_once):
                part = positions[start : start + at_once]
                yield from self._together(bench, broadcast, [clients[p] for p in part], part, round)

    def should_vectorise(self, bench: Bench, clients: Sequence[ClientData]) -> bool:
        """Whether vmap is right (no random layers) and pays (measured: see benchmarks)."""
        module = bench.module
        if len(clients) < 2 or has_random_layers(module):
            return False
        if self.vectorise is not None:
            return self.vectorise
        return not any(isinstance(one, nn.modules.conv._ConvNd) for one in module.modules())

    def _together(
        self,
        bench: Bench,
        broadcast: Broadcast,
        clients: list[ClientData],
        positions: list[int],
        round: int,
    ) -> Iterator[tuple[int, Tensor]]:
        chosen = [self.batches.indices(client=d.client, samples=len(d), step=round) for d in clients]
        pairs = [data.take(which) for data, which in zip(clients, chosen, strict=True)]
        x, y = torch.stack([one for one, _ in pairs]), torch.stack([one for _, one in pairs])
        module = bench.functional
        parameters = {name: value.detach() for name, value in module.named_parameters()}

        def one_client(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def forward(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                output = torch.func.functional_call(module, values, (inputs,))
                phi = objectives(bench.blueprint, module, self.loss, output, targets, broadcast)
                return phi, collect_statistics(module, phi)

            phi, pull, statistics = torch.func.vjp(forward, parameters, has_aux=True)  # type: ignore[misc]
            rows = []
            for number in range(len(phi)):
                seed = torch.zeros_like(phi)
                seed[number] = 1.0
                rows.append(flatten(list(pull(seed)[0].values())))
            return torch.stack(rows), phi, statistics

        gradients, phi, statistics = torch.vmap(one_client)(x, y)
        weights = torch.tensor([float(len(d)) for d in clients], dtype=phi.dtype, device=phi.device)[:, None]
        vectors = torch.cat([gradients.flatten(1), phi, statistics, torch.ones_like(weights)], 1) * weights
        for place, position in enumerate(positions):
            data = clients[place]
            check_finite(vectors[place], phi[place], client=data.client, round=round, chosen=chosen[place])
            yield position, vectors[place]


def check_finite(vector: Tensor, phi: Tensor, *, client: int, round: int, chosen: Tensor) -> None:
    """Refuse NaN and infinity, naming the client and the batch."""
    if torch.isfinite(vector.sum()):
        return
    if torch.isfinite(vector).all():
        return
    sort = "loss" if not torch.isfinite(phi).all() else "gradient"
    first = ", ".join(str(int(one)) for one in chosen[:5])
    more = ", …" if len(chosen) > 5 else ""
    raise NumericError(
        f"The {sort} of client {client} is not finite in round {round + 1} "
        f"(batch of {len(chosen)} samples: local numbers {first}{more}). Lower the learning rate, check the "
        "client's data, or train with --dtype float64. Checkpoints written so far are untouched."
    )


def has_random_layers(module: nn.Module) -> bool:
    """Whether a training pass draws random numbers (dropout)."""
    return any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 for one in module.modules())


class dropout_seed:  # noqa: N801  (used as a context manager, like a function)
    """Seeds dropout from (seed, client, round) and leaves the global generator as it was."""

    def __init__(self, module: nn.Module, *parts: int) -> None:
        self.parts = parts if has_random_layers(module) else None

    def __enter__(self) -> None:
        if self.parts is None:
            return
        from fedveil.work.batches import mixed_seed

        self.fork = torch.random.fork_rng()
        self.fork.__enter__()
        torch.manual_seed(mixed_seed(*self.parts))

    def __exit__(self, *error: object) -> None:
        if self.parts is not None:
            self.fork.__exit__(None, None, None)
