"""The server role: a generator that yields requests, receives sums, and moves the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Mean, Recovered, Veil
from fedveil.errors import ProtocolError
from fedveil.ledger.account import Account
from fedveil.ledger.releases import UndeclaredError, check_declared
from fedveil.protocol.asking import Ask, Gathered, RoundDone, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.conducting import Conductor
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.moving import Mover
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parts import RoundContext, Scheme, Summing
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


class ServerRole(Conductor):
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
        account: Account | None = None,
        name: str = "",
        announced: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(
            scheme,
            blueprint,
            state,
            secrets=secrets,
            cohort=cohort,
            rounds=rounds,
            account=account,
            name=name,
            announced=announced,
        )
        self._blueprint = blueprint
        self._uplink = scheme.summing
        self._mover = Mover(blueprint, optimiser)
        self._private: dict[int, Request] = {}
        self.state: ServerState = state
        check_declared((f"upload.{name}" for name in self._terms.layout.names), self._declared)

    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        state, uplink = self.state, self._uplink
        veil = self._scheme.downlink.veil(
            self._blueprint,
            state.weights,
            stream=self._secrets.stream("veil", state.round),
            head_level=state.head_level,
        )
        total = uplink.accumulator(context, self._terms, device=state.weights.parameters.device)
        named = None if self._introductions is None else torch.tensor(context.cohort, dtype=torch.int64)
        request = Train(context.round, context.attempt, veil.broadcast(), named)
        each = {client: self._private[client] for client in able if client in self._private}
        ask = Ask(able, request, total, each=each)
        begins = context.begins()
        yield begins
        gathered = yield self._declared_only(ask)
        assert gathered is not None
        for client in gathered.arrived:  # whoever is missing may not have been told, and is told again
            self._private.pop(client, None)
        failed, traffic = "", gathered
        revealed: tuple[tuple[int, int], ...] = ()
        try:
            if not gathered.arrived:
                raise ProtocolError("no upload arrived")
            phase = uplink.open(total, gathered, context)
            self._check_affordable(context, gathered, uplink.revealed(total))
            while phase is not None:
                revealed = uplink.revealed(total)
                if len(traffic.arrived) < len(context.cohort):
                    yield replace(begins, arrived=traffic.arrived, revealed=revealed)
                answer = yield self._declared_only(phase)
                assert answer is not None
                gathered, traffic = answer, traffic.and_then(answer)
                phase = uplink.open(total, gathered, context)
            recovered = self._recovered(veil, total, context, arrived=traffic.arrived)
        except UndeclaredError:
            raise
        except ProtocolError as reason:
            failed = str(reason)
        self._owe(uplink.parting(total))
        state.round += 1
        if failed:
            yield RoundDone(context.round, None, context.cohort, traffic, failed=failed, revealed=revealed)
            return
        self._move(recovered, round=context.round)
        yield RoundDone(context.round, recovered.loss, context.cohort, traffic, revealed=revealed)

    def _owe(self, told: Mapping[int, Request | None]) -> None:
        """Tell clients with the next round what they are owed; where that cannot be had, they wait for a new epoch."""
        for client, owed in told.items():
            if owed is not None:
                self._private[client] = owed
            elif self._introductions is not None:
                self._private.pop(client, None)
                self._introductions.renew()

    def _check_affordable(
        self, context: RoundContext, gathered: Gathered, revealed: tuple[tuple[int, int], ...]
    ) -> None:
        """Fewer uploads leave less noise in the sum, and revealed noise covers nobody: is it still enough?"""
        if self._account is None or len(gathered.arrived) == len(context.cohort):
            return
        covering = self._scheme.covering(context, self._terms)
        if covering is None:
            return
        over = self._account.exceeded_by(covering, arrived=gathered.arrived, revealed=revealed)
        if over and (not revealed or self._account.honest_arrivals):
            raise ProtocolError(
                f"{len(context.cohort) - len(gathered.arrived)} of {len(context.cohort)} uploads are missing, and with "
                f"them their noise: publishing the sum would bring client {min(over)} over the privacy target"
            )
        if over:
            raise ProtocolError(
                f"taking off the noise shared with missing clients would bring client {min(over)} over the privacy "
                "target, since its upload may have been seen after all; use dropouts = 'tolerate', or state that the "
                "server is honest about arrivals (honest_arrivals)"
            )

    def _recovered(self, veil: Veil, total: Summing, context: RoundContext, *, arrived: Sequence[int]) -> Recovered:
        found, central = total.total().to(self.state.weights.parameters.device), self._scheme.central
        stream = self._secrets.stream("central noise", context.round, context.attempt)
        if central is not None:
            found = central.on_sum(found, context, self._terms, stream=stream)
        sums = dict(self._terms.layout.split(found))
        if context.directory is not None:
            # Whoever has announced its size is held to it: what an upload says is not asked.
            sums["weight"] = torch.full_like(sums["weight"], float(sum(context.directory.samples_of(arrived))))
        if not float(sums["weight"]) > 0:
            raise ProtocolError("the uploads' weights do not add up to a positive number")
        recovered = veil.recover(_mean(sums))
        if central is not None:
            central.on_gradient(recovered.gradient, context, stream=stream)
        return recovered

    def _move(self, recovered: Recovered, *, round: int) -> None:
        state = self.state
        self._mover.move(state.weights, state.velocity, recovered, round=round)
        state.head_level = recovered.head_level


def _mean(sums: Mapping[str, Tensor]) -> Mean:
    weight = sums["weight"]
    return Mean(sums["gradients"] / weight, sums["values"] / weight, sums["statistics"] / weight)
