"""One gradient, or the m + 2 gradients that undo head noise, at the broadcast point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.decomposed import has_multipliers
from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.errors import NumericError
from fedveil.flat import Layout
from fedveil.work.batches import Batches
from fedveil.work.captured import CapturedStep
from fedveil.work.checks import check_finite
from fedveil.work.dropout import has_random_layers, seeded_dropout
from fedveil.work.losses import Loss
from fedveil.work.messages import Bench, ClientData
from fedveil.work.step import contribution_layout, prepare, step, weighted
from fedveil.work.vectorised import steps

_CHUNK_BYTES = 64 << 20
_MOST_AT_ONCE = 64
_VECTORISED_PIXELS = 4096


@dataclass(frozen=True)
class Gradients:
    """The gradient(s) on one batch, weighted by the client's sample count.

    `vectorise` forces many clients at once on or off; None lets the measured rule decide.
    """

    loss: Loss
    batches: Batches
    vectorise: bool | None = None

    returns = "gradient"

    def layout(self, blueprint: Blueprint, *, tensors: int) -> Layout:
        """gradients, values, statistics, weight."""
        return contribution_layout(blueprint, tensors=tensors)

    def run(self, bench: Bench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """One client's step."""
        prepare(bench.blueprint, bench.module, broadcast)
        found = self._one(bench, broadcast, data, round)
        if isinstance(found, NumericError):
            raise found
        return found

    def run_many(
        self, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """Clients of equal batch size together under vmap, a bounded number at a time, or one by one."""
        if not self._should_vectorise(bench, clients):
            prepare(bench.blueprint, bench.module, broadcast)
            for position, data in enumerate(clients):
                yield position, self._one(bench, broadcast, data, round)
            return
        by_size: dict[int, list[int]] = {}
        for position, data in enumerate(clients):
            by_size.setdefault(self.batches.batch_size(len(data)), []).append(position)
        prepare(bench.blueprint, bench.functional, broadcast)
        row = bench.layout.length * broadcast.parameters.element_size()
        at_once = max(1, min(_MOST_AT_ONCE, _CHUNK_BYTES // row))
        for positions in by_size.values():
            for start in range(0, len(positions), at_once):
                yield from self._some(bench, broadcast, clients, positions[start : start + at_once], round)

    def _one(self, bench: Bench, broadcast: Broadcast, data: ClientData, round: int) -> Tensor | NumericError:
        chosen = self.batches.indices(client=data.client, samples=len(data), step=round)
        x, y = data.take(chosen)
        with seeded_dropout(bench.module, self.batches.seed, data.client, round):
            vector = weighted(self._step(bench, x, y, broadcast.head), len(data))
        return self._checked(bench, vector, data, round, chosen)

    def _step(self, bench: Bench, x: Tensor, y: Tensor, head: PublicHead | None) -> Tensor:
        if x.device.type != "cuda" or has_random_layers(bench.module):
            return step(bench.blueprint, bench.module, self.loss, x, y, head)
        noise = None if head is None else (head.count, head.per_group)
        key = (self.loss, tuple(x.shape), tuple(y.shape), noise, has_multipliers(bench.module))
        captured = bench.captured.get(key)
        if captured is None:
            captured = CapturedStep(bench.blueprint, bench.module, self.loss, x, y, head)
            bench.captured[key] = captured
        return captured(x, y, head)

    def _some(
        self,
        bench: Bench,
        broadcast: Broadcast,
        clients: Sequence[ClientData],
        positions: Sequence[int],
        round: int,
    ) -> list[tuple[int, Tensor | NumericError]]:
        if bench.vectorisable:
            try:
                return list(self._together(bench, broadcast, clients, positions, round))
            except RuntimeError:  # vmap knows no rule for some operation, or memory is short
                bench.vectorisable = False
                prepare(bench.blueprint, bench.module, broadcast)
        return [(position, self._one(bench, broadcast, clients[position], round)) for position in positions]

    def _together(
        self,
        bench: Bench,
        broadcast: Broadcast,
        clients: Sequence[ClientData],
        positions: Sequence[int],
        round: int,
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        part = [clients[position] for position in positions]
        chosen = [self.batches.indices(client=d.client, samples=len(d), step=round) for d in part]
        pairs = [data.take(which) for data, which in zip(part, chosen, strict=True)]
        x, y = torch.stack([one for one, _ in pairs]), torch.stack([one for _, one in pairs])
        vectors = steps(bench.blueprint, bench.functional, self.loss, x, y, broadcast.head)
        for position, data, which, vector in zip(positions, part, chosen, vectors, strict=True):
            yield position, self._checked(bench, weighted(vector, len(data)), data, round, which)

    def _checked(
        self, bench: Bench, vector: Tensor, data: ClientData, round: int, chosen: Tensor
    ) -> Tensor | NumericError:
        values = bench.layout.split(vector)["values"]
        try:
            check_finite(vector, values, client=data.client, round=round, chosen=chosen)
        except NumericError as reason:
            return reason
        return vector

    def _should_vectorise(self, bench: Bench, clients: Sequence[ClientData]) -> bool:
        module = bench.module
        if len(clients) < 2 or has_random_layers(module) or not bench.vectorisable:
            return False
        if self.vectorise is not None:
            return self.vectorise
        if not any(isinstance(one, nn.modules.conv._ConvNd) for one in module.modules()):
            return True
        # Per-client convolutions pay for small pictures only: beyond, a loop keeps both cores busy
        # (and on a GPU, captured graphs win).
        pixels = math.prod(bench.blueprint.input_shape[1:])
        return self.batches.batch_size(len(clients[0])) * pixels <= _VECTORISED_PIXELS
