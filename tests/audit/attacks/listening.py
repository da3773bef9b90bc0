"""A small run with everything kept that travelled: what attacks are given, and the truth they are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from driving import drive
from federation import server_of
from fedveil.downlink import Broadcast, assemble
from fedveil.engine import LocalEngine
from fedveil.ledger.correlated import NoiseLayout
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import RoundContext, planned
from fedveil.roles.server import ServerState
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role
from fedveil.uplink.noised import gridded
from fedveil.work.messages import Workspace


@dataclass(eq=False)
class Heard:
    """One run. `uploads[t][k]` is what client k sent in round t; `cohorts` and `states` are by round too."""

    job: Job
    state: ServerState
    broadcasts: list[Broadcast] = field(default_factory=list)
    uploads: list[dict[int, Tensor]] = field(default_factory=list)
    states: dict[int, ClientState] = field(default_factory=dict)

    def true_model(self) -> nn.Module:
        return assemble(self.job.architecture, self.state.weights).eval()

    def gradients(self, round: int, client: int) -> Tensor:
        """The gradients section of an upload, flat."""
        layout = self.job.scheme.layout(self.job.architecture)
        sent = self.uploads[round][client]
        unit = self.step(round) if sent.dtype == torch.int64 else 1.0
        return layout.split(sent.double() * unit)["gradients"].reshape(-1)

    def bare(self, round: int, client: int) -> Tensor:
        """A client's contribution before it is covered."""
        layout = self.job.scheme.layout(self.job.architecture)
        workspace = Workspace(self.job.architecture, layout)
        data = self.job.pool.clients[client]
        return self.job.scheme.work.run(workspace, self.broadcasts[round], data, round=round).double()

    def bare_gradients(self, round: int, client: int) -> Tensor:
        layout = self.job.scheme.layout(self.job.architecture)
        return layout.split(self.bare(round, client))["gradients"].reshape(-1)

    def context(self, round: int) -> RoundContext:
        keys = next(iter(self.states.values())).keys
        assert keys is not None
        return RoundContext(round, 0, tuple(sorted(self.uploads[round])), keys.directory, keys.beacon)

    def noise_layout(self, round: int) -> NoiseLayout:
        """The noise of a round, as the ledger charges for it."""
        plan = self.job.scheme.uplink.plan
        assert plan is not None
        return planned(plan, self.context(round), self.job.scheme.work)

    def step(self, round: int) -> float:
        """What one of an upload's whole numbers is, under noise."""
        plan = self.job.scheme.uplink.plan
        assert plan is not None
        return gridded(plan, self.context(round), self.job.scheme.terms(self.job.architecture)).step


class _Wire:
    def __init__(self, role: Any, heard: Heard) -> None:
        self._role, self._heard = role, heard

    def handle_many(
        self, states: Sequence[ClientState], request: Any, clients: Sequence[Any], private: Mapping[int, Any]
    ) -> Iterator[Any]:
        if isinstance(request, Train):
            self._heard.broadcasts.append(request.broadcast)
            self._heard.uploads.append({})
        for state, reply in self._role.handle_many(states, request, clients, private):
            if isinstance(reply, Upload):
                self._heard.uploads[-1][reply.client] = reply.payload.clone()
            self._heard.states[state.client] = state
            yield state, reply


def listen(one: Job) -> Heard:
    """Run a job to its end."""
    server = server_of(one)
    heard = Heard(one, server.state)
    engine = LocalEngine(_Wire(client_role(one), heard), one.pool)  # type: ignore[arg-type]
    failures: list[str] = []
    drive(engine, server.run(), on_round=lambda done: failures.extend([done.failed] if done.failed else []))
    assert not failures
    heard.state = server.state
    return heard


def percent(scores: Tensor, labels: Tensor) -> float:
    return 100.0 * float((scores.argmax(1) == labels).double().mean())


def psnr(found: Tensor, truth: Tensor) -> float:
    error = (found.double() - truth.double()).square().mean().clamp_min(1e-30)
    return float(10.0 * torch.log10(1.0 / error))
