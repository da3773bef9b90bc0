"""What every server's run has: introductions, the cohort of a round, and the end of the privacy target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedveil.downlink.architecture import Blueprint, Weights
from fedveil.downlink.messages import Mean, Recovered, Veil
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.accountant import Account
from fedveil.ledger.releases import UndeclaredError, check_declared
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.key_agreement import Introductions, Phases
from fedveil.protocol.messages import Request, Train, released_fields
from fedveil.protocol.optimiser import Mover, Optimiser
from fedveil.protocol.parts import RoundContext, Scheme, Summing
from fedveil.protocol.phases import Ask, Gathered, Inbox, RoundDone, RunStopped, Step, Steps
from fedveil.secrets import SecretSource

_LATECOMERS_EVERY = 10


class Progress(Protocol):
    """How far a run has come."""

    round: int
    attempt: int


class Conductor(ABC):
    """A server's run up to the question what a round is."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        state: Progress,
        *,
        secrets: SecretSource,
        cohort: Cohort,
        rounds: int,
        account: Account | None,
        name: str = "",
        announced: Mapping[int, int] | None = None,
    ) -> None:
        """`name` is how the run's name begins, where clients on other machines hold the server to it; `announced` are
        the sizes that clients have announced in it before."""
        self._scheme = scheme
        self._secrets = secrets
        self._cohort = cohort
        self._rounds = rounds
        self._terms = scheme.terms(blueprint)
        self._account = account
        self._progress = state
        self._first = state.round
        self._stopped = False
        self._declared = scheme.releases(blueprint)
        how = scheme.uplink.introduction
        drawn = secrets.stream("run", state.attempt).bytes(16).hex()
        self._introductions = (
            None
            if how == "none"
            else Introductions(
                how,
                name + drawn,
                cohort=cohort,
                rounds=max(rounds, 1),
                max_size_ratio=scheme.max_size_ratio,
                earlier=announced,
            )
        )

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`."""
        if self._introductions is not None:
            yield from self._introduced(self._introductions.steps(self._progress.round))
        while not self._stopped and self._progress.round < self._rounds:
            try:
                context, able = yield from self._assembled()
            except ConfigError as reason:  # no noise would do for so few
                if self._progress.round == self._first:
                    raise
                yield RunStopped(str(reason).rstrip("."))
                return
            if len(able) < self._fewest:
                yield RunStopped(self._why_stopped(context, able))
                return
            try:
                self._scheme.uplink.fits(len(able))
                self._scheme.uplink.fits(len(context.cohort), asked=self._cohort.size)
            except ConfigError as reason:
                yield RunStopped(self._refusal() or str(reason).rstrip("."))
                return
            yield from self._round(context, able)
        yield from self._finish()

    @abstractmethod
    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        """One round, to its boundary; of its cohort, `able` can be asked."""

    def _finish(self) -> Steps:
        """What follows the last round."""
        yield from ()

    @property
    def _fewest(self) -> int:
        return 1 if self._account is None or self._account.limit is None else min(2, self._cohort.size)

    def _assembled(self) -> Generator[Step, Gathered | None, tuple[RoundContext, tuple[int, ...]]]:
        """This round's clients, with privacy left to spend, and those of them that know everything they must.

        Where clients know each other the cohort is the epoch's schedule and nobody's choice: one that is away stays in
        it and counts as missing, and one without privacy left to spend leaves with a new epoch.
        """
        round, known = self._progress.round, self._introductions
        if known is not None:
            yield from self._introduced(known.steps(round, again=self._asks_again()))
        while True:
            cohort = self._cohort.draw(round) if known is None else known.cohort(round)
            context = self._context(cohort)
            able = cohort if known is None else known.known(cohort)
            over = self._over(context) if able else set()
            if not over:
                return context, (yield from self._acquainted(able))
            assert known is not None
            known.leave_out(over)
            yield from self._introduced(known.steps(round))

    def _asks_again(self) -> bool:
        return self._progress.round % _LATECOMERS_EVERY == 0

    def _context(self, cohort: tuple[int, ...]) -> RoundContext:
        known = self._introductions
        at = self._progress
        if known is None:
            return RoundContext(at.round, at.attempt, cohort)
        return RoundContext(at.round, at.attempt, cohort, known.directory, known.beacon)

    def _over(self, context: RoundContext) -> set[int]:
        """Whom this round would bring over the privacy target."""
        covering = None if self._account is None else self._scheme.covering(context, self._terms)
        return set() if covering is None or self._account is None else self._account.exceeded_by(covering)

    def _introduced(self, phases: Phases) -> Generator[Step, Gathered | None, None]:
        """Introductions, with nothing in them that is not declared."""
        answer = None
        while True:
            try:
                ask = phases.send(answer)
            except StopIteration:
                return
            answer = yield self._declared_only(ask)

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        """Those of `clients` that can take part, once everything they share has been dealt out."""
        yield from ()
        return tuple(clients)

    def _refusal(self) -> str:
        """Why somebody could not be made acquainted with the others; empty where nobody refused."""
        refused = {} if self._introductions is None else self._introductions.refused
        return too_few("have agreed on keys", refused) or too_few("have a size that compares", self.left_out)

    @property
    def left_out(self) -> dict[int, str]:
        """Who takes no part because of the size it claims, and why."""
        return {} if self._introductions is None else self._introductions.left_out

    def _why_stopped(self, context: RoundContext, able: tuple[int, ...]) -> str:
        refusal = self._refusal()
        if refusal:
            return refusal
        if self._account is not None and self._account.limit is not None:
            return (
                f"round {context.round + 1} would bring clients over the privacy target, and {len(able)} are "
                "left that it would not"
            )
        return "no client has introduced itself"

    def _declared_only(self, ask: Ask) -> Ask:
        check_declared(released_fields(ask.common), self._declared)
        for kind in {type(one) for one in ask.each.values()}:
            example = next(one for one in ask.each.values() if type(one) is kind)
            check_declared(released_fields(example), self._declared)
        if isinstance(ask.into, Inbox):
            check_declared(ask.into.awaits(), self._declared)
        return ask


def too_few(have: str, refused: Mapping[int, str]) -> str:
    """Who of those that refused was the first, and why; empty where nobody did."""
    for client, reason in refused.items():
        return f"too few clients {have}; client {client}: {reason}"
    return ""


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
