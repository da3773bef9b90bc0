"""Local training whose update the uplink divides: part of it hidden, the rest clipped there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import NumericError
from fedveil.flat import Layout
from fedveil.work.clipped import BoundedUpdate, bounded_layout, refuse_broken
from fedveil.work.messages import Bench, ClientData, one_by_one
from fedveil.work.step import weighted

RAN_AWAY = 1e6
"""The training loss that a client reports whose training ran away."""


@dataclass(frozen=True)
class DividedUpdate(BoundedUpdate):
    """n_k·u, not yet clipped: the uplink clips what it does not hide.

    `reports` adds the training loss and BatchNorm statistics, where the uplink hides those too.
    """

    reports: bool = True

    def layout(self, blueprint: Blueprint, *, tensors: int) -> Layout:
        """gradients (here w − w_k), what is reported beside them, and weight."""
        if self.reports:
            return self.local.layout(blueprint, tensors=tensors)
        return bounded_layout(blueprint, tensors=tensors)

    def run(self, bench: Bench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """Train locally; a training that ran away has moved nothing, for a refusal would tell about the data."""
        refuse_broken(broadcast, round)
        length = bench.layout.length - 1
        try:
            moved = self.local.run(bench, broadcast, data, round=round)[:length]
        except NumericError:
            moved = torch.zeros(length, dtype=broadcast.parameters.dtype, device=broadcast.parameters.device)
            if self.reports:  # it travels hidden, and a loss of zero would look like success
                moved[bench.blueprint.size] = RAN_AWAY * len(data)
        return weighted(moved / len(data), len(data))

    def run_many(
        self, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """One client after the other."""
        return one_by_one(self, bench, broadcast, clients, round=round)
