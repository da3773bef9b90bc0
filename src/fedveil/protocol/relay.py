"""The server where the model lives with the clients: it asks, counts votes, adds what it cannot read, passes it on.

It holds no model, and no key that opens anything.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.account import Account
from fedveil.ledger.releases import UndeclaredError
from fedveil.protocol.asking import Ask, Gathered, RoundDone, RunStopped, Step, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.conducting import Conductor, too_few
from fedveil.protocol.dividing import Aggregate, Begin, Borrowed, Divide, Finish, Lend
from fedveil.protocol.group import Gathering
from fedveil.protocol.hiding import PaddedSum
from fedveil.protocol.holder import opening_keys, parallel
from fedveil.protocol.keeping import UNREADABLE
from fedveil.protocol.messages import Request
from fedveil.protocol.parts import RoundContext, Scheme
from fedveil.protocol.relayed import DividedSum, Farewells, Loan, Votes
from fedveil.secrets import SecretSource

_LENDERS_TRIED = 3
_BEHIND = -1


@dataclass(eq=False)
class RelayState:
    """How far the run has come: all that a server without a model has to remember."""

    round: int = 0
    attempt: int = 0


class RelayRole(Conductor):
    """The server of one run. `version` counts the aggregates that rounds have brought."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        state: RelayState,
        *,
        secrets: SecretSource,
        cohort: Cohort,
        rounds: int,
        account: Account | None = None,
        name: str = "",
        announced: Mapping[int, int] | None = None,
        behind: Collection[int] = (),
    ) -> None:
        """`behind` are clients that do not hold the model with which the run begins: others lend it to them."""
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
        self.state = state
        self._uplink = parallel(scheme)
        self._size = blueprint.size
        self._length = self._terms.layout.length - 1
        self._group = Gathering(clients=cohort.size, keys=opening_keys(self._uplink))
        self._version = 0
        self._latest: Aggregate | None = None
        self._holding: dict[int, int] = dict.fromkeys(behind, _BEHIND)
        self._informed: set[int] = set()
        self._doubted: set[int] = set()
        self._lender = -1
        # Parameters and their velocity, statistics and ε, other buffers: eight bytes a number at most, and a header.
        values = blueprint.skeleton.state_dict().values()
        self._largest_loan = 32 * sum(one.numel() for one in values) + (1 << 20)

    @property
    def standing(self) -> tuple[int, Aggregate | None]:
        """The model's version, and the sums that bring clients to it: what a resumed run must not lose."""
        return self._version, self._latest

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        asking, answer = self._group.steps(clients), None
        while True:
            try:
                ask = asking.send(answer)
            except StopIteration:
                return tuple(one for one in clients if one in self._group.members)
            answer = yield self._declared_only(ask)

    def _refusal(self) -> str:
        return too_few("have joined the group", self._group.refused) or super()._refusal()

    def _up_to_date(self, client: int) -> bool:
        """Whether a client has the present model, or will have it with the latest aggregate."""
        at = self._holding.get(client, 0)
        return at == self._version or (at + 1 == self._version and client in self._informed)

    def _loans(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, dict[int, Request]]:
        """A sealed model for everybody who has missed rounds, lent by somebody who has not."""
        behind = [one for one in clients if not self._up_to_date(one)]
        lenders = [one for one in self._group.members if self._up_to_date(one)] if behind else []
        # Whoever lent a model that nobody could use comes last.
        for lender in sorted(lenders, key=lambda one: one in self._doubted)[:_LENDERS_TRIED]:
            loan = Loan(self._version, lender, most=self._largest_loan)
            yield self._declared_only(Ask((lender,), Lend(self._version, self._latest), loan))
            if loan.sealed is not None:
                self._holding[lender] = self._version
                self._lender = lender
                return dict.fromkeys(behind, Borrowed(loan.sealed))
        return {}

    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        loans = yield from self._loans(able)
        able = tuple(one for one in able if one in loans or self._up_to_date(one))
        if not able:
            yield RunStopped("no client that answers holds the present model any more")
            self._stopped = True
            return
        yield context.begins()
        heard = _Heard(able)
        failed, latest = "", None
        try:
            latest = yield from self._sums(context, able, loans, heard)
        except UndeclaredError:
            raise
        except (ProtocolError, ConfigError) as reason:
            failed = str(reason).rstrip(".")
        self.state.round += 1
        if any(self._holding.get(one) != self._version for one in loans):
            self._doubted.add(self._lender)
        if failed and heard.unreadable:
            self._take_back()
        if latest is not None:
            self._latest, self._version, self._informed = latest, latest.version, set(heard.arrived)
        yield RoundDone(context.round, None, context.cohort, heard.gathered(), failed=failed, aggregate=latest)

    def _take_back(self) -> None:
        """Give up sums that nobody could read: whoever was sent them still holds the model before them."""
        if self._latest is not None and self._version not in self._holding.values():
            self._latest, self._version, self._informed = None, self._version - 1, set()

    def _sums(
        self, context: RoundContext, able: tuple[int, ...], loans: Mapping[int, Request], heard: _Heard
    ) -> Generator[Step, Gathered | None, Aggregate]:
        """One round up to the sums: the vote, if there is one, then the uploads."""
        uplink = self._uplink
        count = uplink.count(context.round, self._size)
        begin = Begin(context.round, context.attempt, _numbers(context.cohort), self._version, self._latest)
        request: Request = begin
        if uplink.votes(context.round, self._size):
            request = yield from self._vote(context, able, begin, loans, heard)
            able = heard.arrived
            uplink.fits(len(able))
        hidden = None
        if uplink.cipher is not None:
            length = count + self._length - self._size
            hidden = uplink.cipher.accumulator(length, context.stage(1), public=self._group.public)
        total = DividedSum(context, rest=self._size - count, hidden=hidden)
        gathered = yield self._declared_only(Ask(able, request, total, each=loans if request is begin else {}))
        self._heard(heard, gathered, began=request is begin)
        if not heard.arrived:
            raise ProtocolError("no upload arrived")
        try:
            uplink.fits(len(heard.arrived))
        except ConfigError as reason:
            few = f"{len(heard.arrived)} of {len(context.cohort)} uploads arrived"
            raise ProtocolError(f"{few}: a sum of so few would show one of them to the others") from reason
        yield from self._opened(total, heard)
        return total.aggregate(self._version + 1, heard.arrived)

    def _vote(
        self,
        context: RoundContext,
        able: tuple[int, ...],
        begin: Begin,
        loans: Mapping[int, Request],
        heard: _Heard,
    ) -> Generator[Step, Gathered | None, Divide]:
        """What the clients are told of the vote's outcome."""
        winners, counts = None, None
        if self._uplink.ballots is None:
            votes = Votes(context, most=self._uplink.count(context.round, self._size))
            gathered = yield self._declared_only(Ask(able, begin, votes, each=loans))
            self._heard(heard, gathered, began=True)
            if heard.arrived:
                winners = votes.winners()
        else:
            ballots = self._uplink.ballots.accumulator(self._size, context.stage(0), public=b"")
            gathered = yield self._declared_only(Ask(able, begin, ballots.masked, each=loans))
            self._heard(heard, gathered, began=True)
            if heard.arrived:
                yield from self._opened(ballots, heard)
                counts = ballots.total()
        if not heard.arrived:
            raise ProtocolError("no vote arrived")
        # The cohort stays: a graph among those alone who have voted would be one of the server's choosing.
        cohort, voters = _numbers(context.cohort), _numbers(heard.arrived)
        return Divide(context.round, context.attempt, cohort, winners, counts, voters)

    def _opened(self, total: DividedSum | PaddedSum, heard: _Heard) -> Generator[Step, Gathered | None, None]:
        """Whatever phases it takes before clients can read a sum."""
        phase = total.open(heard.last)
        while phase is not None:
            answer = yield self._declared_only(phase)
            assert answer is not None
            heard.also(answer)
            phase = total.open(answer)

    def _heard(self, heard: _Heard, gathered: Gathered | None, *, began: bool) -> None:
        assert gathered is not None
        heard.take(gathered)
        if began:
            self._holding.update(dict.fromkeys(gathered.arrived, self._version))

    def _finish(self) -> Steps:
        """Bring everybody's model up to date."""
        members = tuple(self._group.members)
        loans = yield from self._loans(members)
        able = tuple(one for one in members if one in loans or self._up_to_date(one))
        if able:
            farewell = Finish(self._version, self._latest)
            yield self._declared_only(Ask(able, farewell, Farewells(self._version, able), each=loans))


class _Heard:
    """What came of a round's phases: who answered the last of them, and the traffic of all."""

    def __init__(self, cohort: tuple[int, ...]) -> None:
        self._cohort = cohort
        self.last = Gathered((), {}, cohort, 0, 0)
        self._refused: dict[int, str] = {}
        self._down = self._up = 0

    @property
    def arrived(self) -> tuple[int, ...]:
        """Who answered the last phase, in order."""
        return tuple(sorted(self.last.arrived))

    @property
    def unreadable(self) -> bool:
        """Whether somebody refused because of sums; whoever refuses for another reason has no quarrel with them."""
        return any(UNREADABLE in reason for reason in self._refused.values())

    def take(self, gathered: Gathered) -> None:
        """A phase in which clients send something of their own."""
        self.last = gathered
        self.also(gathered)

    def also(self, gathered: Gathered) -> None:
        """A phase that opens what was sent before."""
        self._refused.update(gathered.refused)
        self._down += gathered.bytes_down
        self._up += gathered.bytes_up

    def gathered(self) -> Gathered:
        """The round as one phase."""
        arrived = self.arrived
        missing = tuple(one for one in self._cohort if one not in arrived and one not in self._refused)
        return Gathered(arrived, self._refused, missing, self._down, self._up)


def _numbers(clients: Sequence[int]) -> Tensor:
    return torch.tensor(list(clients), dtype=torch.int64)
