"""The client role where the model lives with the clients: it holds, trains, votes, divides and puts together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedveil.client_held.divided import Parallel
from fedveil.client_held.group import Found, Join, OpeningKeys, found, join
from fedveil.client_held.messages import Begin, Divide, Finish, Finished, Lend, Vote
from fedveil.client_held.model import First, Keeper, UnreadableError, told_outcome
from fedveil.downlink.architecture import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import FedVeilError, ProtocolError
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState, Held, Pending
from fedveil.protocol.directory import Directory, Hello, Nonces
from fedveil.protocol.key_agreement import introduce
from fedveil.protocol.messages import Aggregate, Reply, Request
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parts import RoundContext, Scheme, planned
from fedveil.roles.client import Answer, Gate, Promised, own_errors, own_target
from fedveil.secrets import OsSecrets, SecretSource
from fedveil.uplink.unmasking import Unmask, listed
from fedveil.work.messages import Bench, ClientData

if TYPE_CHECKING:
    from fedveil.crypto.keys import Roster

_VOTE, _UPLOAD = 0, 1
MOST_MISREAD = 3
"""So many unreadable sums of one run does a client refuse before it leaves: one bad client must not end a run."""


class HolderRole:
    """What a client does, whoever drives it. `start` is the model that every client of the run begins with; `first`
    makes it from a secret of the group, where there is one."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        *,
        start: Held,
        optimiser: Optimiser,
        first: First | None = None,
        secrets: SecretSource | None = None,
        policy: Policy | None = None,
        roster: Roster | None = None,
        identities: Mapping[int, bytes] | None = None,
    ) -> None:
        self._scheme = scheme
        self._uplink = parallel(scheme)
        self._blueprint = blueprint
        self._terms = scheme.terms(blueprint)
        self._keeper = Keeper(self._uplink, self._terms, start=start, optimiser=optimiser, first=first)
        self._secrets = OsSecrets() if secrets is None else secrets
        self._gate = Gate(scheme, blueprint)
        self._bench = Bench(blueprint, self._terms.layout, self._secrets)
        self._policy = own_target(scheme) if policy is None else policy
        self._roster = roster
        self._identities = {} if identities is None else identities
        self._elected: tuple[Divide, tuple[bytes, tuple[int, ...]], Tensor] | None = None
        if policy is not None:
            policy.check_scheme(
                noised=self._uplink.noises_all,
                clip=scheme.work.clip,
                acquainted=True,
                repaired=False,
            )

    def handle(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None = None
    ) -> tuple[ClientState, Reply]:
        """Answer one message, or raise why not; `private` is what the server sent to this client alone.

        Whoever raises forgets what it refused: `handle_many` gives the state that counts it.
        """
        told = {} if private is None else {state.client: private}
        advanced, answer = next(self.handle_many([state], request, [data], told))
        if isinstance(answer, FedVeilError):
            raise answer
        return advanced, answer

    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
        *,
        promised: Promised = lambda state: None,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Answer one message for many simulated clients; one that would have raised gives its error instead."""
        told = {} if private is None else private
        ready: dict[int, list[tuple[ClientState, RoundContext, ClientData]]] = {}
        for state, data in zip(states, clients, strict=True):
            private_too = told.get(state.client)
            try:
                with own_errors(state, request):
                    self._gate.check(state, request, private_too)
                    self._check_patience(state, request)
                    if isinstance(request, Begin):
                        begun, context = self._begin(state, request, len(data), private_too)
                        promised(begun)
                        ready.setdefault(id(begun.held), []).append((begun, context, data))
                        continue
                    answer = self._answer(state, request, data, private_too)
                yield answer
            except UnreadableError as reason:
                yield replace(state, misread=state.misread + 1), reason
            except FedVeilError as reason:
                yield state, reason
        for together in ready.values():
            yield from self._train(together, request)

    @staticmethod
    def _check_patience(state: ClientState, request: Request) -> None:
        """Whether a sum can be read depends on what is hidden: a server must not learn that answer by answer."""
        here = state.keys is not None and state.ran == state.keys.run
        if here and state.misread >= MOST_MISREAD and isinstance(request, (Begin, Divide, Lend, Finish)):
            raise ProtocolError(
                f"client {state.client} has refused {MOST_MISREAD} sums of this run and takes no further part"
            )

    def moved(self, state: ClientState, latest: Aggregate) -> Held:
        """The model one aggregate further."""
        return self._keeper.moved(state, latest)

    def _begin(
        self, state: ClientState, request: Begin, samples: int, private: Request | None
    ) -> tuple[ClientState, RoundContext]:
        """Bring the model up to date, and promise to answer this round once."""
        state = self._keeper.brought_up(state, request.version, request.latest, private)
        context = self._context(state, request.round, request.attempt, request.cohort, samples=samples)
        voting = self._uplink.votes(request.round, self._blueprint.size)
        state = _answering(state, context.stage(_VOTE if voting else _UPLOAD))
        return (state if voting else self._charged(state, context)), context

    def _context(self, state: ClientState, round: int, attempt: int, cohort: Tensor, *, samples: int) -> RoundContext:
        # Who pads follows from the list, which is in ascending order (`fedveil.shapes`): told in another order each,
        # nobody would, and the server could read the sum.
        members = tuple(listed(cohort))
        ring = state.ring()
        context = RoundContext(round, attempt, members, ring.known(), ring.beacon)
        context.check_scheduled()
        context.check_member(state.client)
        self._uplink.fits(len(members), asked=ring.known().epoch.size)
        state.ring().vouch_for(members)
        self._policy.check_cohort(state.client, len(members))
        context.check_sizes(state.client, self._policy.size_ratio(self._scheme.max_size_ratio), samples=samples)
        return context

    def _charged(self, state: ClientState, context: RoundContext) -> ClientState:
        plan, size = self._uplink.plan, self._blueprint.size
        if plan is None or (self._uplink.count(context.round, size) == size and not self._uplink.throughout):
            return state
        covering = planned(plan, context, self._terms.work)
        return replace(state, spent=self._policy.charged(covering, client=state.client, spent=state.spent))

    def _train(
        self, together: Sequence[tuple[ClientState, RoundContext, ClientData]], request: Request
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Local work on one and the same model, then what the round asks for next."""
        first, context, _ = together[0]
        assert first.held is not None
        able = [data for _, _, data in together]
        work = self._scheme.work.run_many(self._bench, self._broadcast(first.held), able, round=context.round)
        for position, vector in work:
            state, context, _ = together[position]
            if isinstance(vector, FedVeilError):
                yield state, vector
                continue
            try:
                with own_errors(state, request):
                    answer = self._vote_or_upload(state, context, vector[:-1])
                yield answer
            except FedVeilError as reason:
                yield state, reason

    def _broadcast(self, held: Held) -> Broadcast:
        veil = self._scheme.downlink.veil(
            self._blueprint, held.weights, stream=self._secrets.stream("unused"), head_level=None
        )
        return veil.broadcast()

    def _vote_or_upload(
        self, state: ClientState, context: RoundContext, contribution: Tensor
    ) -> tuple[ClientState, Reply]:
        uplink, size = self._uplink, self._blueprint.size
        which = {"round": context.round, "attempt": context.attempt, "size": size}
        if not uplink.votes(context.round, size):
            winners = uplink.unvoted(state.membership(), **which)
            pending = Pending(context.round, context.attempt, contribution, winners)
            return self._upload(state, context, pending, self._keeper.held(state).story)
        state = replace(state, pending=Pending(context.round, context.attempt, contribution))
        if uplink.ballots is None:
            tags = uplink.vote(contribution, state.membership(), **which)
            return state, Vote(state.client, context.round, context.attempt, tags)
        words = uplink.marked(contribution, round=context.round, size=size)
        story = self._keeper.held(state).story
        return uplink.ballots.hide_words(state, words, context.stage(_VOTE), secrets=self._secrets, story=story)

    def _upload(
        self, state: ClientState, context: RoundContext, pending: Pending, story: bytes
    ) -> tuple[ClientState, Reply]:
        state, reply = self._uplink.protect(
            replace(state, pending=pending), context, self._terms, secrets=self._secrets, story=story
        )
        # From here on only the winners are needed, to put the sums together.
        done = replace(pending, contribution=pending.contribution.new_empty(0))
        return replace(state, pending=done), reply

    def _answer(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None
    ) -> tuple[ClientState, Reply]:
        if isinstance(request, (Hello, Directory, Nonces)):
            return introduce(
                state,
                request,
                samples=len(data),
                how=self._uplink.introduction,
                secrets=self._secrets,
                roster=self._roster,
                identity=self._identities.get(state.client),
            )
        if isinstance(request, Found):
            return found(state, request, keys=opening_keys(self._uplink), secrets=self._secrets)
        if isinstance(request, Join):
            return join(state, request, private)
        if isinstance(request, Divide):
            return self._divide(state, request, len(data))
        if isinstance(request, Unmask):
            return self._uplink.unmask(state, request, private)
        if isinstance(request, (Lend, Finish)):
            state = self._keeper.brought_up(state, request.version, request.latest, private)
            if isinstance(request, Lend):
                return state, self._keeper.lend(state)
            return state, Finished(state.client, self._keeper.held(state).version)
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def _divide(self, state: ClientState, request: Divide, samples: int) -> tuple[ClientState, Reply]:
        """Learn who has won, divide, upload."""
        pending = state.pending
        if pending is None or (pending.round, pending.attempt) != (request.round, request.attempt):
            raise ProtocolError(f"client {state.client} was told the outcome of a vote in which it has no part")
        context = self._context(state, request.round, request.attempt, request.cohort, samples=samples)
        self._check_voters(state.client, context, listed(request.voters))
        if not len(pending.contribution):
            raise ProtocolError(f"client {state.client} was asked for a second upload of round {request.round + 1}")
        winners = self._outcome(state, request, context)
        state = self._charged(_answering(state, context.stage(_UPLOAD)), context)
        story = told_outcome(self._keeper.held(state).story, request) if self._uplink.masks else b""
        return self._upload(state, context, replace(pending, winners=winners), story)

    def _check_voters(self, client: int, context: RoundContext, voters: list[int]) -> None:
        """Whoever has not voted will not upload: those who have must still be enough."""
        if client not in voters or not set(voters) <= set(context.cohort):
            raise ProtocolError("the outcome of a vote names voters that were not asked, or not this client")
        self._uplink.fits(len(voters))
        self._policy.check_cohort(client, len(voters))

    def _outcome(self, state: ClientState, request: Divide, context: RoundContext) -> Tensor:
        """The winners of a vote; simulated clients that were told the same share the result."""
        uplink, size = self._uplink, self._blueprint.size
        told = (state.membership().fingerprint(), state.seat)
        if self._elected is not None and self._elected[0] is request and self._elected[1] == told:
            return self._elected[2]
        if uplink.ballots is None:
            if request.winners is None:
                raise ProtocolError("the outcome of a vote names no winners")
            winners = uplink.winners(
                request.winners, state.membership(), round=request.round, attempt=request.attempt, size=size
            )
        else:
            if request.counts is None:
                raise ProtocolError("the outcome of a vote holds no sum of ballots")
            try:
                winners = uplink.counted(request.counts, state.membership(), context, listed(request.voters), size)
            except ProtocolError as reason:
                raise UnreadableError(str(reason)) from reason
        self._elected = (request, told, winners)
        return winners


def _answering(state: ClientState, stage: RoundContext) -> ClientState:
    """Promise to answer a stage once, whatever the attempt: two sums of one round that differ by a client show it."""
    run = state.ring().run
    if state.ran == run and stage.round <= state.answered[0]:
        raise ProtocolError(
            f"client {state.client} was asked for round {stage.round // 2 + 1} of this run, which it has answered or "
            "left behind: a run that is resumed begins with new keys"
        )
    assert stage.directory is not None
    return state.answering(stage.round, stage.attempt, run=run, epoch=stage.directory.epoch.number)


class _NoKeys(OpeningKeys):
    """Where nothing is hidden."""


def opening_keys(uplink: Parallel) -> OpeningKeys:
    """What makes the keys of an uplink's ciphertexts."""
    return _NoKeys() if uplink.cipher is None else uplink.cipher


def parallel(scheme: Scheme) -> Parallel:
    """The divided uplink of a scheme whose model lives with its clients."""
    if scheme.holder != "clients" or not isinstance(scheme.uplink, Parallel):
        raise ProtocolError(f"the model of {scheme.name} lives with the server")
    return scheme.uplink
