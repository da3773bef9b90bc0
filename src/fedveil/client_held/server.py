"""The server of a run whose model lives with its clients: it relays sums that it cannot read, and holds no model.

The run is `roles/server.py`'s (epochs, cohorts, the privacy target); what is asked in a round differs:

    Found → Founded      once: a client founds the group and seals its secrets for everybody; later, a member lets
    Join → Joined        latecomers in the same way
    Lend → Lent          where somebody has missed rounds: a member seals its model, the server hands it on unopened
    RoundBegins
    Begin → Vote         who is asked moves its model by the last sums, trains, and votes for the coordinates that
                         matter most, by tags or under masks; without a vote it uploads at once
    Divide → Divided     the outcome of the vote; the winners' coordinates come back hidden (ciphertexts or masks), the
                         rest under noise
    Unmask → …           where masks hide: whatever opens the sum for clients
    RoundDone            with the Aggregate, which travels with the next Begin
    Finish → Finished    after the last round: the last sums

What the server keeps: how far the run has come (`RelayState`); the latest Aggregate and the version of the model that
it leads to; which version each client holds, as far as it has said; whose uploads are in the latest sums, and who of
them has said that it cannot read these; who lent a model that nobody could use, so that it is asked last; and who has a
lent model that no sum has yet shown to be the others'.

What is taken back: sums that most of those whose uploads are in them refuse with `Code.UNREADABLE`, in whichever rounds
and whether asked to train or to lend, are given up, and the run goes on from the version before. Where one cannot read
them nobody is lent what they lead to before it is clear which it is, also at the end of a run. A client that refuses
for any other reason has no quarrel with the sums, and a few cannot undo them while the others are away, or are not of a
round's cohort, who may have moved already.

Who is asked no more (`Code.SPOILT`): whoever says that it has moved by sums which a quorum of those asked could not
read, since clients with the same keys read the same; and whoever has dealt shares of its own mask that a quorum of its
neighbours could not open, which no fewer can pretend. Whoever works on a lent model may have been lied to, and is to
blame once three lenders' models were of no use to it; until then it borrows from another. Of a sum that cannot be read
nothing tells who has spoilt it, and nobody is left out to find out: on the same model the sums with and without
somebody show that one to the spoiler, who alone can read both. So a client that spoils what is under pads, and else
does as it should, costs two rounds each time, and the third time the others leave (`client_held/client.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from fedveil.client_held.ciphers import HiddenSum, PaddedSum
from fedveil.client_held.client import opening_keys, parallel
from fedveil.client_held.group import Gathering
from fedveil.client_held.messages import Begin, Borrowed, Divide, Divided, Finish, Finished, Lend, Lent, Vote
from fedveil.downlink.architecture import Architecture
from fedveil.errors import Code, ConfigError, ProtocolError, Refusal
from fedveil.protocol.messages import Aggregate, Request
from fedveil.protocol.parts import RoundContext, Scheme
from fedveil.protocol.phases import Ask, Confirmations, Gathered, Inbox, RoundDone, RunStopped, Step, Steps
from fedveil.roles.server import Conductor, RunTerms, too_few
from fedveil.uplink.unmasking import MaskedUpload, Quorum
from fedveil.uplink.vote import Tally

_LENDERS_TRIED = 3
_FEWEST_WITNESSES = 3
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
        architecture: Architecture,
        state: RelayState,
        *,
        behind: Collection[int] = (),
        **run: Unpack[RunTerms],
    ) -> None:
        """`behind` are clients that do not hold the model with which the run begins: others lend it to them."""
        super().__init__(scheme, architecture, state, **run)
        self.state = state
        self._uplink = parallel(scheme)
        self._size = self._terms.divisible
        self._length = self._terms.layout.length - 1
        self._group = Gathering(clients=self._cohort.size, keys=opening_keys(self._uplink))
        self._version = 0
        self._latest: Aggregate | None = None
        self._holding: dict[int, int] = dict.fromkeys(behind, _BEHIND)
        self._informed: set[int] = set()
        self._unreadable: set[int] = set()
        self._doubted: set[int] = set()
        self._barred: dict[int, str] = {}
        self._found_out: dict[int, Refusal] = {}
        self._taken_back: tuple[int, ...] = ()
        self._lender = -1
        self._borrowed: dict[int, int] = {}
        self._worked_on_loans: dict[int, int] = {}
        self._quarrels: dict[int, set[int]] = {}
        # What a client brings along into a resumed run may have been lent to it in an earlier attempt.
        self._brought: set[int] = set(range(run["cohort"].clients)) if state.attempt else set()
        # Parameters and their velocity, statistics and ε, other buffers: eight bytes a number at most, and a header.
        values = architecture.skeleton.state_dict().values()
        self._largest_loan = 32 * sum(tensor.numel() for tensor in values) + (1 << 20)

    @property
    def standing(self) -> tuple[int, Aggregate | None]:
        """The model's version, and the sums that bring clients to it: what a resumed run must not lose."""
        return self._version, self._latest

    @property
    def left_out(self) -> dict[int, str]:
        """Who takes no part because of the size it claims, or since it has spoilt a round, and why."""
        return {**super().left_out, **self._barred}

    def bring_up_to_date(self) -> Steps:
        """Have everybody move by the latest sums now, between two rounds."""
        return self._declared_alone(self._finish())

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        if not set(clients) <= set(self._group.members):
            yield from self._group.steps(clients)
        return tuple(client for client in clients if client in self._group.members)

    def _refusal(self) -> str:
        left = too_few("are left", self._barred)
        return left or too_few("have joined the group", self._group.refused) or super()._refusal()

    def _up_to_date(self, client: int) -> bool:
        """Whether a client has the present model, or will have it with the latest aggregate."""
        at = self._holding.get(client, 0)
        return at == self._version or (at + 1 == self._version and client in self._informed)

    def _loans(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, dict[int, Request]]:
        """A sealed model for everybody who has missed rounds, lent by somebody who has not.

        Where one cannot read the latest sums, others are asked until most have, or most could not: then these are given
        up, and the version before is lent. A single one who says that it can may be who has spoilt them.
        """
        behind = [client for client in clients if not self._up_to_date(client)]
        lent: dict[int, Tensor] = {}
        without = 0
        for lender in self._lenders() if behind else ():
            if without == _LENDERS_TRIED or (lent and not self._disputed()):
                break
            loan = Loan(self._version, lender, most=self._largest_loan)
            answer = yield Ask((lender,), Lend(self._version, self._latest), loan)
            assert answer is not None
            self._unreadable.update(unreadable(answer.refused))
            if self._given_up():
                return (yield from self._loans(clients))
            if loan.sealed is not None:
                self._holding[lender] = self._version
                lent[lender] = loan.sealed
            without += loan.sealed is None and lender not in self._unreadable
        if not lent:
            return {}
        self._lender, sealed = next(iter(lent.items()))
        quarrels = self._quarrels
        to = [client for client in behind if client != self._lender and self._lender not in quarrels.get(client, ())]
        self._borrowed.update(dict.fromkeys(to, self._lender))
        return dict.fromkeys(to, Borrowed(sealed))

    def _lenders(self) -> list[int]:
        """Who has a model to lend, by its own word; whoever lent one that nobody could use comes last."""
        without = self._barred.keys() | self._unreadable
        able = (client for client in self._group.members if self._up_to_date(client) and client not in without)
        return sorted(able, key=lambda client: client in self._doubted)

    def _disputed(self) -> bool:
        """Whether some of those whose uploads are in the latest sums could not read them, and not most could."""
        read = [client for client in self._informed if self._holding.get(client) == self._version]
        return bool(self._unreadable & self._informed) and 2 * len(read) <= len(self._informed)

    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        loans = yield from self._loans(able)
        up_to_date = (client for client in able if client in loans or self._up_to_date(client))
        able = tuple(client for client in up_to_date if client not in self._barred)
        if not able:
            yield RunStopped("no client that answers holds the present model any more")
            self._stopped = True
            return
        yield context.begins()
        heard = _Heard(able)
        failed, latest = "", None
        try:
            latest = yield from self._sums(context, able, loans, heard)
        except (ProtocolError, ConfigError) as reason:
            failed = str(reason).rstrip(".")
        self.state.round += 1
        if any(self._holding.get(client) != self._version for client in loans):
            self._doubted.add(self._lender)
        if failed:
            self._given_up()
        heard.name(self._found_out)
        self._found_out = {}
        if latest is not None:
            self._latest, self._version, self._informed = latest, latest.version, set(heard.arrived)
            self._unreadable, self._brought = set(), set()
            self._worked_on_loans, self._borrowed = self._borrowed, {}
        taken_back, self._taken_back = self._taken_back, ()
        gathered = heard.gathered()
        yield RoundDone(
            context.round, None, context.cohort, gathered, failed=failed, aggregate=latest, taken_back=taken_back
        )

    def _given_up(self) -> bool:
        """Take the latest sums back where most of those they are made of could not read them; who says otherwise is
        asked no more. Whether they were.

        Whoever was lent a model that such sums are said to lead to, or worked on a lent one for them, may have been
        deceived: another lends it a model.
        """
        if self._latest is None or 2 * len(self._unreadable & self._informed) <= len(self._informed):
            return False
        holding = [client for client, version in self._holding.items() if version == self._version]
        moved = [client for client in holding if client not in self._borrowed]
        if len(self._unreadable & self._informed) < self._witnesses(len(self._latest.asked)):
            moved = []  # who lies may be most of those whose uploads have arrived
        self._taken_back += (self._latest.round,)
        self._take_back_loans(self._worked_on_loans | self._borrowed)
        self._latest, self._version, self._informed = None, self._version - 1, set()
        self._unreadable = set()
        self._bar(moved, "says that it has moved by a sum that a quorum of clients could not read")
        return True

    def _witnesses(self, asked: int) -> int:
        """How many have to say that they could not read a sum before those who say that they have are to blame: as
        many of all the others as make a quorum of a neighbourhood."""
        parts = (self._uplink.cipher, self._uplink.ballots)
        quorums = [part.masks.quorum for part in parts if part is not None and part.masks is not None]
        return max(_FEWEST_WITNESSES, (quorums[0] if quorums else Quorum()).of(asked - 1))

    def _bar(self, clients: Sequence[int], why: str) -> None:
        """Ask these no more in this run; the round names them."""
        if clients and self._introductions is not None:
            self._introductions.leave_out(clients)
        self._barred.update(dict.fromkeys(clients, why))
        self._holding.update(dict.fromkeys(clients, _BEHIND))
        text = f"it {why}, and takes no further part"
        self._found_out.update({client: Refusal(Code.SPOILT, text, came=True) for client in clients})

    def _check_sums(self, sums: Aggregate) -> None:
        """Refuse sums that cannot be what clients sent, as far as the server can tell (ProtocolError)."""

    def _sums(
        self, context: RoundContext, able: tuple[int, ...], loans: Mapping[int, Request], heard: _Heard
    ) -> Generator[Step, Gathered | None, Aggregate]:
        """One round up to the sums: the vote, if there is one, then the uploads."""
        uplink = self._uplink
        count = uplink.count(context.round, self._size)
        lacking = any(self._holding.get(client, 0) != self._version for client in able)
        latest = self._latest if lacking else None
        begin = Begin(context.round, context.attempt, _numbers(context.cohort), self._version, latest)
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
        gathered = yield Ask(able, request, total, each=loans if request is begin else {})
        self._heard(heard, gathered, began=request is begin)
        if not heard.arrived:
            raise ProtocolError("no upload arrived")
        try:
            uplink.fits(len(heard.arrived))
        except ConfigError as reason:
            few = f"{len(heard.arrived)} of {len(context.cohort)} uploads arrived"
            raise ProtocolError(f"{few}: a sum of so few would show one of them to the others") from reason
        yield from self._opened(total, heard)
        with self._blaming(total, heard):
            sums = total.aggregate(self._version + 1, heard.arrived)
        self._check_sums(sums)
        return sums

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
            gathered = yield Ask(able, begin, votes, each=loans)
            self._heard(heard, gathered, began=True)
            if heard.arrived:
                winners = votes.winners()
        else:
            ballots = self._uplink.ballots.accumulator(self._size, context.stage(0), public=b"")
            gathered = yield Ask(able, begin, ballots.masked, each=loans)
            self._heard(heard, gathered, began=True)
            if heard.arrived:
                yield from self._opened(ballots, heard)
                with self._blaming(ballots, heard):
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
            answer = yield phase
            assert answer is not None
            heard.also(answer)
            phase = total.open(answer)

    @contextmanager
    def _blaming(self, total: DividedSum | PaddedSum, heard: _Heard) -> Iterator[None]:
        """Whoever keeps a sum from being opened is asked no more; but a lender may have lied to who works on its model,
        in an earlier attempt at the run, too: then it is lent another first.

        Who was lent it under other sums than the others know has other masks, and neither opens what the other deals.
        """
        try:
            yield
        except ProtocolError:
            spoilers = total.spoilers(but=self._borrowed)
            for client in self._borrowed.keys() & spoilers:
                self._quarrels.setdefault(client, set()).add(self._borrowed[client])
            quarrels = {client: len(self._quarrels.get(client, ())) for client in self._borrowed}
            guilty = [client for client in spoilers if quarrels.get(client, _LENDERS_TRIED) >= _LENDERS_TRIED]
            deceived = self._brought.intersection(guilty)
            guilty = [client for client in guilty if client not in deceived]
            self._brought -= deceived
            self._holding.update(dict.fromkeys(deceived, _BEHIND))
            self._take_back_loans(self._borrowed)
            self._bar(guilty, "has dealt shares of its mask that cannot be opened")
            raise

    def _take_back_loans(self, borrowed: Mapping[int, int]) -> None:
        """Have these borrowers lent the model by another: what they were lent may be false."""
        self._holding.update(dict.fromkeys(borrowed, _BEHIND))
        self._doubted.update(borrowed.values())

    def _heard(self, heard: _Heard, gathered: Gathered | None, *, began: bool) -> None:
        assert gathered is not None
        heard.take(gathered)
        if began:
            # The outcome of a vote comes later: who cannot read that has no quarrel with the sums before it.
            self._unreadable.update(unreadable(gathered.refused))
            self._holding.update(dict.fromkeys(gathered.arrived, self._version))

    def _finish(self) -> Steps:
        """Bring everybody's model up to date: who can read the latest sums first, then who is lent what they lead to.

        Where most cannot read them, that is the version before, for all.
        """
        before = None
        while before != self._version:
            before = self._version
            members = tuple(client for client in self._group.members if client not in self._barred)
            yield from self._farewell(tuple(client for client in members if self._up_to_date(client)), {})
            if before == self._version:
                loans = yield from self._loans(members)
                if before == self._version:
                    yield from self._farewell(tuple(loans), loans)

    def _broken_off(self) -> Steps:
        """As after the last round: what came of the rounds that were held is everybody's."""
        yield from self._finish()

    def _farewell(self, clients: tuple[int, ...], loans: Mapping[int, Request]) -> Steps:
        if clients:
            into = farewells(self._version, clients)
            gathered = yield Ask(clients, Finish(self._version, self._latest), into, each=loans)
            assert gathered is not None
            self._holding.update(dict.fromkeys(gathered.arrived, self._version))
            without = unreadable(gathered.refused)
            self._unreadable.update(without)
            # Who lacks something else, like what this epoch's rounds are drawn by, is lent what the others have.
            self._holding.update(dict.fromkeys(gathered.refused.keys() - set(without), _BEHIND))
            self._given_up()


def unreadable(refused: Mapping[int, Refusal]) -> list[int]:
    """Who refused because of sums; whoever refuses for another reason has no quarrel with them."""
    return [client for client, refusal in refused.items() if refusal.code is Code.UNREADABLE]


class _Heard:
    """What came of a round's phases: who answered the last of them, and the traffic of all."""

    def __init__(self, cohort: tuple[int, ...]) -> None:
        self._cohort = cohort
        self.last = Gathered((), {}, cohort, 0, 0)
        self.refused: dict[int, Refusal] = {}
        self._down = self._up = 0

    @property
    def arrived(self) -> tuple[int, ...]:
        """Who answered the last phase, in order."""
        return tuple(sorted(self.last.arrived))

    def name(self, spoilers: Mapping[int, Refusal]) -> None:
        """Whose uploads are not taken, and why."""
        self.refused.update(spoilers)

    def take(self, gathered: Gathered) -> None:
        """A phase in which clients send something of their own."""
        self.last = gathered
        self.also(gathered)

    def also(self, gathered: Gathered) -> None:
        """A phase that opens what was sent before."""
        self.refused.update(gathered.refused)
        self._down += gathered.bytes_down
        self._up += gathered.bytes_up

    def gathered(self) -> Gathered:
        """The round as one phase."""
        arrived = tuple(client for client in self.arrived if client not in self.refused)
        missing = tuple(client for client in self._cohort if client not in arrived and client not in self.refused)
        return Gathered(arrived, self.refused, missing, self._down, self._up)


class Votes(Inbox[Vote]):
    """Counts tags."""

    def __init__(self, context: RoundContext, *, most: int) -> None:
        self._tally = Tally(most=most, winners=most)
        self.expect(Vote, context.cohort, which=context.which, sizes={"tags": most})

    def _fold(self, reply: Vote) -> None:
        self._tally.add(reply.tags)

    def winners(self) -> Tensor:
        """The tags with most votes."""
        return self._tally.result()


class DividedSum(Inbox[Divided]):
    """Adds both parts of divided uploads: the noised rest modulo 2⁶⁴, the hidden part unread."""

    def __init__(self, context: RoundContext, *, rest: int, hidden: HiddenSum | None) -> None:
        self._context = context
        self._rest = torch.zeros(rest, dtype=torch.int64)
        self._hidden = hidden
        self.expect(Divided, context.cohort, which=context.which, sizes={"rest": rest})

    def _fold(self, reply: Divided) -> None:
        if (self._hidden is None) != (reply.hidden is None):
            raise ProtocolError("an upload lacks its hidden part, or has one where nothing is hidden")
        if self._hidden is not None and reply.hidden is not None:
            if isinstance(reply.hidden, MaskedUpload) and reply.hidden.client != reply.client:
                raise ProtocolError("an upload carries another client's hidden part")
            self._hidden.add(reply.hidden)
        self._rest += reply.rest.cpu()

    def open(self, gathered: Gathered) -> Ask | None:
        """The next phase before clients can read the hidden sum."""
        return None if self._hidden is None else self._hidden.open(gathered)

    def spoilers(self, *, but: Collection[int] = ()) -> tuple[int, ...]:
        """Who has dealt shares of its mask that cannot be opened, by the word of others than `but`."""
        return self._hidden.spoilers(but=but) if isinstance(self._hidden, PaddedSum) else ()

    def aggregate(self, version: int, contributors: tuple[int, ...]) -> Aggregate:
        """Both sums, ready to be passed on."""
        context = self._context
        return Aggregate(
            version,
            context.round,
            context.attempt,
            torch.tensor(context.cohort, dtype=torch.int64),
            torch.tensor(sorted(contributors), dtype=torch.int64),
            self._rest.clone(),
            None if self._hidden is None else self._hidden.total(),
        )


class Loan(Inbox[Lent]):
    """Takes one sealed model of the wanted version, of at most `most` bytes."""

    def __init__(self, version: int, lender: int, *, most: int) -> None:
        self._version = version
        self.sealed: Tensor | None = None
        self.expect(Lent, (lender,), sizes={"sealed": range(most + 1)})

    def _fold(self, reply: Lent) -> None:
        if reply.version != self._version:
            raise ProtocolError("a client lent a model of another version")
        self.sealed = reply.sealed


def farewells(version: int, clients: Sequence[int]) -> Confirmations[Finished]:
    """Hears which version everybody ends with."""
    other = "a client ends with another version of the model"
    return Confirmations(Finished, clients, "version", version, otherwise=other)


def _numbers(clients: Sequence[int]) -> Tensor:
    return torch.tensor(list(clients), dtype=torch.int64)
