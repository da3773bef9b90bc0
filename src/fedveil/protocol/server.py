"""The server role: a generator that yields requests, receives sums, and moves the model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint, Weights
from fedveil.downlink.messages import Mean, Recovered, Veil
from fedveil.downlink.norms import batch_norms
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.account import Account
from fedveil.ledger.releases import UndeclaredError, check_declared
from fedveil.protocol.asking import Ask, Gathered, RoundBegins, RoundDone, RunStopped, Step, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.directory import Directory, Hello
from fedveil.protocol.handshake import Introductions
from fedveil.protocol.messages import Request, Train, released_fields
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parts import RoundContext, Scheme, Summing
from fedveil.secrets import SecretSource
from fedveil.uplink.gaussian import add_fresh

_LATECOMERS_EVERY = 10


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
        account: Account | None = None,
    ) -> None:
        self._scheme = scheme
        self._blueprint = blueprint
        self._secrets = secrets
        self._cohort = cohort
        self._optimiser = optimiser
        self._rounds = rounds
        self._terms = scheme.terms(blueprint)
        self._momenta = _statistics_momenta(blueprint)
        self._account = account
        self._private: dict[int, Request] = {}
        self.state = state
        self._declared = scheme.releases(blueprint)
        check_declared((f"upload.{name}" for name in self._terms.layout.names), self._declared)
        how = scheme.uplink.introduction
        name = secrets.stream("run", state.attempt).bytes(16).hex()
        self._introductions = None if how == "none" else Introductions(how, name)
        if self._introductions is not None:
            asked = (f"{kind.__name__.lower()}.{one.name}" for kind in (Hello, Directory) for one in fields(kind))
            check_declared(asked, self._declared)

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`."""
        if self._introductions is not None:
            yield from self._introductions.steps(range(self._cohort.clients))
        while self.state.round < self._rounds:
            context = yield from self._assembled()
            if len(context.cohort) < self._fewest:
                yield RunStopped(self._why_stopped(context))
                return
            try:
                self._scheme.uplink.fits(len(context.cohort))
            except ConfigError as reason:
                refused = self._introductions is not None and self._introductions.refused
                yield RunStopped(self._why_stopped(context) if refused else str(reason).rstrip("."))
                return
            yield from self._round(context)

    @property
    def _fewest(self) -> int:
        return 1 if self._account is None or self._account.limit is None else min(2, self._cohort.size)

    def _assembled(self) -> Generator[Step, Gathered | None, RoundContext]:
        """This round's clients: drawn, known to each other, and with privacy left to spend."""
        cohort = self._cohort.draw(self.state.round)
        known = self._introductions
        if known is not None:
            yield from known.steps(cohort, again=self.state.round % _LATECOMERS_EVERY == 0)
            cohort = known.known(cohort)
        directory = None if known is None else known.directory
        while True:
            context = RoundContext(self.state.round, self.state.attempt, cohort, directory)
            if self._account is None or not cohort:
                return context
            covering = self._scheme.covering(context, self._terms)
            over = set() if covering is None else self._account.exceeded_by(covering)
            if not over:
                return context
            cohort = tuple(one for one in cohort if one not in over)

    def _why_stopped(self, context: RoundContext) -> str:
        refused = {} if self._introductions is None else self._introductions.refused
        if refused:
            client, reason = next(iter(refused.items()))
            return f"too few clients have agreed on keys; client {client}: {reason}"
        if self._account is not None and self._account.limit is not None:
            return (
                f"round {context.round + 1} would bring clients over the privacy target, and {len(context.cohort)} are "
                "left that it would not"
            )
        return "no client has introduced itself"

    def _round(self, context: RoundContext) -> Steps:
        state, uplink = self.state, self._scheme.uplink
        veil = self._scheme.downlink.veil(
            self._blueprint,
            state.weights,
            stream=self._secrets.stream("veil", state.round),
            head_level=state.head_level,
        )
        total = uplink.accumulator(context, self._terms, device=state.weights.parameters.device)
        named = None if self._introductions is None else torch.tensor(context.cohort, dtype=torch.int64)
        request = Train(context.round, context.attempt, veil.broadcast(), named)
        each = {client: self._private[client] for client in context.cohort if client in self._private}
        ask = Ask(context.cohort, request, total, each=each)
        graph = b"" if context.directory is None else context.graph_seed()
        yield RoundBegins(context.round, context.attempt, context.cohort, graph)
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
                    yield RoundBegins(context.round, context.attempt, context.cohort, graph, traffic.arrived, revealed)
                answer = yield self._declared_only(phase)
                assert answer is not None
                gathered, traffic = answer, traffic.and_then(answer)
                phase = uplink.open(total, gathered, context)
            recovered = self._recovered(veil, total, context)
        except UndeclaredError:
            raise
        except ProtocolError as reason:
            failed = str(reason)
        self._private.update(uplink.parting(total))
        state.round += 1
        if failed:
            yield RoundDone(context.round, None, context.cohort, traffic, failed=failed, revealed=revealed)
            return
        self._move(recovered, round=context.round)
        yield RoundDone(context.round, recovered.loss, context.cohort, traffic, revealed=revealed)

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

    def _declared_only(self, ask: Ask) -> Ask:
        check_declared(released_fields(ask.common), self._declared)
        for kind in {type(one) for one in ask.each.values()}:
            example = next(one for one in ask.each.values() if type(one) is kind)
            check_declared(released_fields(example), self._declared)
        return ask

    def _recovered(self, veil: Veil, total: Summing, context: RoundContext) -> Recovered:
        sums = self._terms.layout.split(total.total().to(self.state.weights.parameters.device))
        weight = float(sums["weight"])
        if not weight > 0:
            raise ProtocolError("the uploads' weights do not add up to a positive number")
        recovered = veil.recover(_mean(sums))
        if self._scheme.central is not None:
            scale = self._scheme.central.scale(context, self._terms, weight=weight)
            stream = self._secrets.stream("central noise", context.round, context.attempt)
            add_fresh(recovered.gradient, scale=scale, stream=stream)
        return recovered

    def _move(self, recovered: Recovered, *, round: int) -> None:
        state = self.state
        gradient = recovered.gradient * self._blueprint.trainable
        moved = self._optimiser.step(state.weights.parameters.to(torch.float64), gradient, state.velocity, round=round)
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
