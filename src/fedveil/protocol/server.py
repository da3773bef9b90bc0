"""The server role: a generator that yields requests, receives sums, and moves the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Mean, Recovered
from fedveil.downlink.norms import batch_norms
from fedveil.ledger.releases import check_declared
from fedveil.protocol.asking import Ask, RoundDone, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.messages import Train, released_fields
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parts import RoundContext, Scheme
from fedveil.secrets import SecretSource


@dataclass(eq=False)
class ServerState:
    """Everything a run needs to go on from a round boundary."""

    weights: Weights
    velocity: Tensor
    round: int = 0
    attempt: int = 0
    head_level: float | None = None

    @staticmethod
    def fresh(weights: Weights) -> ServerState:
        """The state before the first round."""
        return ServerState(weights, torch.zeros_like(weights.parameters, dtype=torch.float64))


class ServerRole:
    """The server of one run. Its secrets come from one source and are drawn anew every round."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        state: ServerState,
        *,
        secrets: SecretSource,
        cohort: Cohort,
        optimiser: Optimiser,
        rounds: int,
    ) -> None:
        self._scheme = scheme
        self._blueprint = blueprint
        self._secrets = secrets
        self._cohort = cohort
        self._optimiser = optimiser
        self._rounds = rounds
        self._layout = scheme.layout(blueprint)
        self._momenta = _statistics_momenta(blueprint)
        self.state = state
        self._declared = scheme.releases(blueprint)
        check_declared((f"upload.{name}" for name in self._layout.names), self._declared)

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`."""
        while self.state.round < self._rounds:
            yield from self._round()

    def _round(self) -> Steps:
        state = self.state
        context = RoundContext(state.round, state.attempt, self._cohort.draw(state.round))
        veil = self._scheme.downlink.veil(
            self._blueprint,
            state.weights,
            stream=self._secrets.stream("veil", state.round),
            head_level=state.head_level,
        )
        device = state.weights.parameters.device
        total = self._scheme.uplink.accumulator(self._layout, context, device=device)
        request = Train(context.round, context.attempt, veil.broadcast())
        check_declared(released_fields(request), self._declared)
        ask = Ask(context.cohort, request, total)
        gathered = yield ask
        assert gathered is not None
        first = gathered
        while (phase := self._scheme.uplink.open(total, gathered, context)) is not None:
            answer = yield phase
            assert answer is not None
            gathered = answer
        failed = ""
        if len(first.arrived) < ask.quorum:
            failed = (
                f"{len(first.arrived)} of {ask.quorum} needed uploads arrived" if first.arrived else "no upload arrived"
            )
        sums = self._layout.split(total.total())
        if not failed and not float(sums["weight"]) > 0:
            failed = "the uploads' weights do not add up to a positive number"
        if failed:
            state.round += 1
            yield RoundDone(context.round, None, context.cohort, first, failed=failed)
            return
        recovered = veil.recover(_mean(sums))
        del veil
        self._move(recovered)
        state.round += 1
        yield RoundDone(context.round, recovered.loss, context.cohort, first)

    def _move(self, recovered: Recovered) -> None:
        state = self.state
        gradient = recovered.gradient * self._blueprint.trainable
        moved = self._optimiser.step(
            state.weights.parameters.to(torch.float64), gradient, state.velocity, round=state.round
        )
        moved = torch.where(self._blueprint.trainable, moved, state.weights.parameters.to(torch.float64))
        state.weights.parameters.copy_(moved)
        if recovered.statistics.numel():
            running = state.weights.statistics.to(torch.float64)
            running += self._momenta * (recovered.statistics - running)
            state.weights.statistics.copy_(running)
        state.head_level = recovered.head_level


def _mean(sums: Mapping[str, Tensor]) -> Mean:
    weight = sums["weight"]
    return Mean(sums["gradients"] / weight, sums["values"] / weight, sums["statistics"] / weight)


def _statistics_momenta(blueprint: Blueprint) -> Tensor:
    parts = [
        torch.full((2 * len(norm.running_mean),), norm.momentum if norm.training else 0.0, dtype=torch.float64)
        for _, norm in batch_norms(blueprint.skeleton)
    ]
    device = blueprint.trainable.device
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.float64, device=device)
