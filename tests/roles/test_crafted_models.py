"""A server that crafts its model against clipping: what real clients then upload stays within their bound."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from driving import drive
from federation import digits, job, server_of
from fedveil.engine import ClientPool, LocalEngine
from fedveil.errors import FedVeilError
from fedveil.ledger.policy import Policy
from fedveil.protocol.messages import Upload
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state
from fedveil.secrets import SeededSecrets
from fedveil.uplink.noised import gridded

CLIP = 1e-4
WIDTH = 256


def crafted(one: Job) -> Tensor:
    """δ ≈ 2e-23 meets a ≈ 1e18 in the middle layer: ‖δ‖² is no number of single precision, δ·aᵀ is 2e-5 everywhere.

    The head is sure of class 0, so that its own gradient is far below the bound and nothing else is clipped.
    """
    named = one.architecture.parameters.split(one.weights.parameters)
    parts = {name: torch.zeros_like(value) for name, value in named.items()}
    parts["linear1.bias"].fill_(1e18)
    parts["linear2.bias"].fill_(1e-3)
    parts["head.bias"][0] = 20.0
    parts["head.weight"][1] = 2e-23 / math.exp(-20.0)
    return torch.cat([value.reshape(-1) for value in parts.values()])


class Overhearing(ClientRole):
    """Clients as they are; what they send is written down."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.sent: dict[int, Tensor] = {}
        self.step = 0.0

    def handle_many(self, *given: Any) -> Any:
        for state, reply in super().handle_many(*given):
            if isinstance(reply, FedVeilError):
                raise reply
            if isinstance(reply, Upload):
                self.sent[reply.client] = reply.payload
                assert self._latest is not None
                assert self._uplink.plan is not None
                self.step = gridded(self._uplink.plan, self._latest[1], self._terms).step
            yield state, reply


def uploads(one: Job, parameters: Tensor) -> tuple[dict[int, Tensor], float]:
    """What clients upload to a server that sends these parameters, in whole steps, and how long a step is.

    Equal secrets, and so equal noise, each time.
    """
    role = Overhearing(one.scheme, one.architecture, secrets=SeededSecrets(5), policy=Policy(max_clip=CLIP))
    state = fresh_state(one)
    state.weights.parameters.copy_(parameters)
    drive(LocalEngine(role, one.pool), server_of(one, state).run(), on_round=lambda done: None)
    return role.sent, role.step


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize("scheme", ["ldp", "nadp"])
def test_a_crafted_model_does_not_carry_a_contribution_past_its_bound(scheme: str, batch: int) -> None:
    """Two uploads with equal noise differ by their contributions, each of which is at most n_k·C long."""
    one = job(
        scheme=scheme,
        options={"depth": 3, "width": WIDTH},
        loss="cross-entropy",
        dtype="float32",
        rounds=1,
        clip=CLIP,
        batch_size=batch,
        epsilon=50.0,
    )
    train, _ = digits()
    rows = (train.y == 0).nonzero().flatten()[:25]
    one = dataclasses.replace(one, pool=ClientPool.separate([(train.x[k].float(), train.y[k]) for k in rows.split(5)]))
    honest, step = uploads(one, torch.zeros_like(one.weights.parameters))
    hostile, _ = uploads(one, crafted(one))
    assert sorted(hostile) == sorted(honest) == list(range(5))
    for client, payload in hostile.items():
        moved = float((payload - honest[client]).double().norm()) * step
        most = 2 * 5 * CLIP
        assert moved > 0.01 * most  # they are not alike either
        assert moved <= most, f"{moved / most:.1f} times what the bound allows"
