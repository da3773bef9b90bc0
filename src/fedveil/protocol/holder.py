"""The client role where the model lives with the clients: it holds, trains, votes, divides and puts together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import Broadcast, Recovered
from fedveil.errors import FedVeilError, ProtocolError
from fedveil.ledger.policy import Policy
from fedveil.protocol.client import Answer, own_target
from fedveil.protocol.directory import Directory, Hello, from_bytes, to_bytes
from fedveil.protocol.dividing import (
    Aggregate,
    Begin,
    Borrowed,
    Divide,
    Finish,
    Finished,
    Lend,
    Lent,
    Vote,
)
from fedveil.protocol.group import Found, Join, OpeningKeys, found, join
from fedveil.protocol.handshake import introduce
from fedveil.protocol.held import Held, Pending
from fedveil.protocol.hiding import Pads
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.moving import Mover
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parallel import Parallel
from fedveil.protocol.parts import RoundContext, Scheme, planned
from fedveil.protocol.state import ClientState
from fedveil.protocol.stored import as_bytes, from_stored
from fedveil.protocol.unmasking import Unmask, listed
from fedveil.secrets import OsSecrets, SecretSource
from fedveil.work.messages import Bench, ClientData

if TYPE_CHECKING:
    from fedveil.crypto.roster import Roster

_VOTE, _UPLOAD = 0, 1


class HolderRole:
    """What a client does, whoever drives it. `start` is the model that every client of the run begins with."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        *,
        start: Held,
        optimiser: Optimiser,
        secrets: SecretSource | None = None,
        policy: Policy | None = None,
        roster: Roster | None = None,
        identities: Mapping[int, bytes] | None = None,
    ) -> None:
        self._scheme = scheme
        self._uplink = parallel(scheme)
        self._blueprint = blueprint
        self._terms = scheme.terms(blueprint)
        self._start = start
        self._mover = Mover(blueprint, optimiser)
        self._secrets = OsSecrets() if secrets is None else secrets
        self._bench = Bench(blueprint, self._terms.layout, self._secrets)
        self._policy = own_target(scheme) if policy is None else policy
        self._roster = roster
        self._identities = {} if identities is None else identities
        self._moved: tuple[Aggregate, Held, Held] | None = None
        self._elected: tuple[Divide, tuple[bytes, tuple[int, ...]], Tensor] | None = None
        if policy is not None:
            policy.check_scheme(
                noised=self._uplink.noises_all,
                clip=getattr(scheme.work, "clip", None),
                acquainted=True,
                repaired=False,
            )

    def handle(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None = None
    ) -> tuple[ClientState, Reply]:
        """Answer one message, or raise why not; `private` is what the server sent to this client alone."""
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
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Answer one message for many simulated clients; one that would have raised gives its error instead."""
        told = {} if private is None else private
        ready: dict[int, list[tuple[ClientState, RoundContext, ClientData]]] = {}
        for state, data in zip(states, clients, strict=True):
            try:
                if isinstance(request, Begin):
                    begun, context = self._begin(state, request, told.get(state.client))
                    ready.setdefault(id(begun.held), []).append((begun, context, data))
                else:
                    yield self._answer(state, request, data, told.get(state.client))
            except FedVeilError as reason:
                yield state, reason
        for together in ready.values():
            yield from self._train(together)

    def _begin(self, state: ClientState, request: Begin, private: Request | None) -> tuple[ClientState, RoundContext]:
        """Bring the model up to date, and promise to answer this round once."""
        state = self._brought_up(state, request.version, request.latest, private)
        context = self._context(state, request.round, request.attempt, request.cohort)
        voting = self._uplink.votes(request.round, self._blueprint.size)
        stage = context.stage(_VOTE if voting else _UPLOAD)
        state = state.answering(stage.round, stage.attempt)
        return (state if voting else self._charged(state, context)), context

    def _context(self, state: ClientState, round: int, attempt: int, cohort: Tensor) -> RoundContext:
        members = tuple(listed(cohort))
        # Who pads follows from the list: told in another order each, nobody would, and the server could read the sum.
        if any(later <= earlier for earlier, later in pairwise(members)):
            raise ProtocolError("a round must name each of its clients once, in ascending order")
        context = RoundContext(round, attempt, members, state.ring().known())
        context.check_member(state.client)
        self._uplink.fits(len(members))
        state.ring().vouch_for(members)
        self._policy.check_cohort(state.client, len(members))
        return context

    def _charged(self, state: ClientState, context: RoundContext) -> ClientState:
        plan, size = self._uplink.plan, self._blueprint.size
        if plan is None or (self._uplink.count(context.round, size) == size and not self._uplink.throughout):
            return state
        covering = planned(plan, context, self._terms.work)
        return replace(state, spent=self._policy.charged(covering, client=state.client, spent=state.spent))

    def _train(
        self, together: Sequence[tuple[ClientState, RoundContext, ClientData]]
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
                yield self._vote_or_upload(state, context, vector[:-1])
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
            return self._upload(state, context, Pending(context.round, context.attempt, contribution, winners))
        state = replace(state, pending=Pending(context.round, context.attempt, contribution))
        if uplink.ballots is None:
            tags = uplink.vote(contribution, state.membership(), **which)
            return state, Vote(state.client, context.round, context.attempt, tags)
        words = uplink.marked(contribution, round=context.round, size=size)
        return uplink.ballots.hide_words(state, words, context.stage(_VOTE), secrets=self._secrets)

    def _upload(self, state: ClientState, context: RoundContext, pending: Pending) -> tuple[ClientState, Reply]:
        state, reply = self._uplink.protect(
            replace(state, pending=pending), context, self._terms, secrets=self._secrets
        )
        # From here on only the winners are needed, to put the sums together.
        done = replace(pending, contribution=pending.contribution.new_empty(0))
        return replace(state, pending=done), reply

    def _answer(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None
    ) -> tuple[ClientState, Reply]:
        if isinstance(request, (Hello, Directory)):
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
            return found(state, request, keys=self._opening_keys(), secrets=self._secrets)
        if isinstance(request, Join):
            return join(state, request, private)
        if isinstance(request, Divide):
            return self._divide(state, request)
        if isinstance(request, Unmask):
            return self._masks(state, request).answer(state, request, private)  # type: ignore[return-value]
        if isinstance(request, (Lend, Finish)):
            return self._up_to_date(state, request, private)
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def _opening_keys(self) -> OpeningKeys:
        return _NO_KEYS if self._uplink.cipher is None else self._uplink.cipher

    def _masks(self, state: ClientState, request: Unmask) -> Pads:
        used = self._uplink.cipher if request.round % 2 == _UPLOAD else self._uplink.ballots
        if not isinstance(used, Pads):
            raise ProtocolError(f"client {state.client} was asked to unmask where nothing is masked")
        return used

    def _divide(self, state: ClientState, request: Divide) -> tuple[ClientState, Reply]:
        """Learn who has won, divide, upload."""
        pending = state.pending
        if pending is None or (pending.round, pending.attempt) != (request.round, request.attempt):
            raise ProtocolError(f"client {state.client} was told the outcome of a vote in which it has no part")
        context = self._context(state, request.round, request.attempt, request.cohort)
        if not len(pending.contribution):
            raise ProtocolError(f"client {state.client} was asked for a second upload of round {request.round + 1}")
        winners = self._outcome(state, request, context)
        stage = context.stage(_UPLOAD)
        state = self._charged(state.answering(stage.round, stage.attempt), context)
        return self._upload(state, context, replace(pending, winners=winners))

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
            # Pads and masks of the ballots belong to the cohort that was asked for them.
            asked = RoundContext(request.round, request.attempt, state.seat, context.directory)
            winners = uplink.counted(request.counts, state.membership(), asked, listed(request.voters), size)
        self._elected = (request, told, winners)
        return winners

    # --- the model

    def _up_to_date(
        self, state: ClientState, request: Lend | Finish, private: Request | None
    ) -> tuple[ClientState, Reply]:
        state = self._brought_up(state, request.version, request.latest, private)
        held = state.held
        assert held is not None
        if isinstance(request, Finish):
            return state, Finished(state.client, held.version)
        from fedveil.crypto.sealing import seal

        key = state.membership().seed(round=0, attempt=0, purpose="model")
        sealed = seal(as_bytes(held.facts(), held.tensors()), key=key, purpose=_model_purpose(held.version))
        return state, Lent(state.client, held.version, from_bytes(sealed))

    def _brought_up(
        self, state: ClientState, version: int, latest: Aggregate | None, private: Request | None
    ) -> ClientState:
        """The state with the model of `version`: held already, one aggregate behind, or borrowed."""
        held = self._start if state.held is None else state.held
        if isinstance(private, Borrowed):
            return replace(state, held=self._borrowed(state, private, version), pending=None)
        if held.version == version:
            return replace(state, held=held)
        if held.version + 1 == version and latest is not None and latest.version == version:
            return replace(state, held=self.moved(replace(state, held=held), latest), pending=None)
        raise ProtocolError(
            f"client {state.client} holds version {held.version} of the model, was asked to work on {version}, and was "
            "not sent what it lacks"
        )

    def _borrowed(self, state: ClientState, lent: Borrowed, version: int) -> Held:
        from fedveil.crypto.sealing import unseal

        key = state.membership().seed(round=0, attempt=0, purpose="model")
        facts, tensors = from_stored(unseal(to_bytes(lent.sealed), key=key, purpose=_model_purpose(version)))
        if facts.get("version") != version or _shapes(tensors) != _shapes(self._start.tensors()):
            raise ProtocolError(f"client {state.client} was lent a model of another version or architecture")
        device = self._blueprint.trainable.device
        return Held.restored(facts, {name: one.to(device) for name, one in tensors.items()})

    def moved(self, state: ClientState, latest: Aggregate) -> Held:
        """The model one aggregate further; simulated clients that hold the same one share the result."""
        held = self._start if state.held is None else state.held
        if self._moved is not None and self._moved[0] is latest and self._moved[1] is held:
            return self._moved[2]
        pending = state.pending
        if (
            pending is None
            or pending.winners is None
            or (pending.round, pending.attempt)
            != (
                latest.round,
                latest.attempt,
            )
        ):
            raise ProtocolError(f"client {state.client} does not know which coordinates round {latest.round + 1} hid")
        recovered = self._recovered(state, latest, pending.winners)
        weights, velocity = held.weights.clone(), held.velocity.clone()
        self._mover.move(weights, velocity, recovered, round=latest.round)
        after = Held(weights, velocity, latest.version, recovered.loss)
        self._moved = (latest, held, after)
        return after

    def _recovered(self, state: ClientState, latest: Aggregate, winners: Tensor) -> Recovered:
        asked, contributors = tuple(listed(latest.asked)), listed(latest.contributors)
        if not contributors or len(set(contributors)) < len(contributors) or not set(contributors) <= set(asked):
            raise ProtocolError("a round's sums name contributors that were not asked, or one twice")
        self._uplink.fits(len(contributors))
        context = RoundContext(latest.round, latest.attempt, asked, state.ring().known())
        mean = self._uplink.mean(
            state.membership(),
            rest=latest.rest,
            hidden=latest.hidden,
            winners=winners,
            context=context,
            contributors=contributors,
            terms=self._terms,
        )
        sums = self._terms.layout.split(torch.cat([mean, mean.new_ones(1)]))
        values = sums["values"]
        return Recovered(sums["gradients"][0], float(values[0]) if values.numel() else None, sums["statistics"], None)


class _NoKeys:
    """Where nothing is hidden."""

    def fresh_opening(self, clients: int) -> bytes:
        return b""

    def public_of(self, opening: bytes) -> bytes:
        return b""


_NO_KEYS = _NoKeys()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def _model_purpose(version: int) -> str:
    return f"model of version {version}"


def parallel(scheme: Scheme) -> Parallel:
    """The divided uplink of a scheme whose model lives with its clients."""
    if scheme.holder != "clients" or not isinstance(scheme.uplink, Parallel):
        raise ProtocolError(f"the model of {scheme.name} lives with the server")
    return scheme.uplink
