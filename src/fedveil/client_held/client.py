"""A client that holds the model itself: a reducer like `roles/client.py`'s that also votes, divides and puts together.

What it is asked, after it has introduced itself

    Found → Founded      found the group, or let newcomers into it (`client_held/group.py`)
    Join → Joined        open the group's secrets, which another client has sealed for it
    Begin → Vote         move the model by the last round's sums, train on it, vote; without a vote, upload at once
    Divide → Divided     learn which coordinates have won, hide those, noise the rest, upload
    Unmask → …           open what masks hide, where masks do
    Lend → Lent          seal the model for one that has missed rounds
    Finish → Finished    the last sums

What it remembers besides (`ClientState`): `group`, which all clients share and the server does not; `held`, the model,
its version and the transcript of the sums that made it; `pending`, its contribution to the round in work, until it has
been uploaded, and then the winners, without which the next sums mean nothing; `misread`, how many sums it has refused,
and `refused`, which was the last: to be asked again for the same tells nobody anything new, and counts once.

What it refuses: to go back to an earlier version of the model, unless it was lent what it has; a stage again (a round
has two, vote and upload, each answered once); a vote's outcome that names voters who were not asked, or too few; sums
that do not open to numbers that clients could have sent (`Code.UNREADABLE`). Under CKKS that depends on what is hidden,
so it says so three times in a run and then leaves (`Code.ENDED`): a server must not learn the hidden part answer by
answer. Under pads it tells that a sum was changed or spoilt, and no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from fedveil.client_held.ciphers import Pads
from fedveil.client_held.divided import Parallel
from fedveil.client_held.group import Found, Join, OpeningKeys, found, join
from fedveil.client_held.messages import Begin, Borrowed, Divide, Finish, Finished, Lend, Lent, Vote
from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import Broadcast, Recovered
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError
from fedveil.protocol.client_state import ClientState, Held, Pending
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.protocol.directory import Directory, Hello, Nonces, from_bytes, to_bytes
from fedveil.protocol.messages import Aggregate, Reply, Request
from fedveil.protocol.parts import RoundContext, Scheme, Terms, planned
from fedveil.roles.client import Answer, ClientTerms, Participant, Promised, own_errors
from fedveil.roles.server import Mover, Optimiser
from fedveil.tensors import raw
from fedveil.uplink.unmasking import Unmask
from fedveil.uplink.vote import ballot
from fedveil.work.messages import ClientData

First = Callable[[bytes], Held]
_VOTE, _UPLOAD = 0, 1
MOST_MISREAD = 3
"""So many unreadable sums of one run does a client refuse before it leaves: one bad client must not end a run."""


class UnreadableError(ProtocolError):
    """Sums that cannot be what clients sent. Under CKKS that depends on what is hidden, so a client says it rarely."""

    code = Code.UNREADABLE

    def __init__(self, reason: str) -> None:
        super().__init__(f"a sum cannot be read: {reason}")


class HolderRole(Participant):
    """What a client does, whoever drives it. `start` is the model that every client of the run begins with; `first`
    makes it from a secret of the group, where there is one."""

    @property
    def _keeps(self) -> Callable[..., Keeper]:
        return Keeper

    def __init__(
        self,
        scheme: Scheme,
        architecture: Architecture,
        *,
        start: Held,
        optimiser: Optimiser,
        first: First | None = None,
        **own: Unpack[ClientTerms],
    ) -> None:
        super().__init__(scheme, architecture, **own)
        self._uplink = parallel(scheme)
        self._keeper = self._keeps(self._uplink, self._terms, start=start, optimiser=optimiser, first=first)
        self._elected: tuple[Divide, tuple[bytes, tuple[int, ...]], Tensor] | None = None
        policy = own.get("policy")
        if policy is not None:
            policy.check_scheme(
                noised=self._uplink.noises_all,
                clip=scheme.work.clip,
                acquainted=True,
                repaired=False,
            )

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
                    self._request_check.check(state, request, private_too)
                    self._check_patience(state, request)
                    if isinstance(request, Begin):
                        begun, context = self._begin(state, request, len(data), private_too)
                        promised(begun)
                        ready.setdefault(id(begun.held), []).append((begun, context, data))
                        continue
                    answer = self._answer(state, request, data, private_too)
                yield answer
            except UnreadableError as reason:
                yield _refusing(state, request), reason
            except FedVeilError as reason:
                yield state, reason
        for together in ready.values():
            yield from self._train(together, request)

    @staticmethod
    def _check_patience(state: ClientState, request: Request) -> None:
        """Whether a sum can be read may depend on what is hidden: a server must not learn that answer by answer."""
        here = state.keys is not None and state.ran == state.keys.run
        if here and state.misread >= MOST_MISREAD and isinstance(request, (Begin, Divide, Lend, Finish)):
            raise ProtocolError(
                f"client {state.client} has refused {MOST_MISREAD} sums of this run and takes no further part",
                code=Code.ENDED,
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
        voting = self._uplink.votes(request.round, self._terms.divisible)
        state = _answering(state, context.stage(_VOTE if voting else _UPLOAD))
        return (state if voting else self._charged(state, context)), context

    def _context(self, state: ClientState, round: int, attempt: int, cohort: Tensor, *, samples: int) -> RoundContext:
        # Who pads follows from the list, which is in ascending order (`fedveil.shapes`): told in another order each,
        # nobody would, and the server could read the sum.
        members = tuple(cohort.tolist())
        ring = state.ring()
        context = RoundContext(round, attempt, members, ring.known(), ring.beacon)
        context.check_scheduled()
        context.check_member(state.client)
        self._uplink.fits(len(members), asked=ring.known().epoch.size)
        state.ring().vouch_for(members)
        self._policy.check_cohort(state.client, len(members))
        self._check_shrunk(state.client, context.round)
        context.check_sizes(state.client, self._policy.size_ratio(self._scheme.max_size_ratio), samples=samples)
        return context

    def _charged(self, state: ClientState, context: RoundContext) -> ClientState:
        plan, size = self._uplink.plan, self._terms.divisible
        if plan is None or (self._uplink.count(context.round, size) == size and not self._uplink.throughout):
            return state
        noise_layout = planned(plan, context, self._terms.work)
        return replace(state, spent=self._policy.charged(noise_layout, client=state.client, spent=state.spent))

    def _train(
        self, together: Sequence[tuple[ClientState, RoundContext, ClientData]], request: Request
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Local work on one and the same model, then what the round asks for next."""
        first, context, _ = together[0]
        assert first.held is not None
        able = [data for _, _, data in together]
        work = self._run_many(self._workspace, self._broadcast(first.held), able, round=context.round)
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
        """The model as local work takes it: it has not travelled, and nothing is veiled."""
        weights, nothing = held.weights, held.weights.parameters.new_empty(0)
        statistics = weights.statistics.clone() if self._architecture.frozen_statistics else torch.empty(0)
        return Broadcast(weights.parameters.clone(), weights.epsilon.clone(), statistics, nothing, None)

    def _vote_or_upload(
        self, state: ClientState, context: RoundContext, contribution: Tensor
    ) -> tuple[ClientState, Reply]:
        uplink, size = self._uplink, self._terms.divisible
        which = {"round": context.round, "attempt": context.attempt, "size": size}
        told, beacon = self._told.hex(), context.beacon.hex()
        pending = Pending(context.round, context.attempt, contribution, told=told, beacon=beacon)
        if not uplink.votes(context.round, size):
            pending = replace(pending, winners=uplink.unvoted(state.membership(), **which))
            return self._upload(state, context, pending, self._transcript(state, pending))
        state = replace(state, pending=pending)
        indices = uplink.chosen(contribution, client=state.client, secrets=self._secrets, **which)
        if uplink.ballots is None:
            tags = uplink.vote(indices, state.membership(), round=context.round, attempt=context.attempt)
            return state, Vote(state.client, context.round, context.attempt, tags)
        words = ballot(indices, size)
        transcript = self._transcript(state, pending)
        return uplink.ballots.hide_words(
            state, words, context.stage(_VOTE), secrets=self._secrets, transcript=transcript
        )

    def _transcript(self, state: ClientState, pending: Pending) -> bytes:
        """What others must have been told, too: the sums that made the model, and what local work is told besides.

        A server that has all but one do nothing would let whoever reads the sum read that one.
        """
        before = self._keeper.held(state).transcript
        return _digest(b"work", before, pending.told.encode()) if pending.told else before

    def _upload(
        self, state: ClientState, context: RoundContext, pending: Pending, transcript: bytes
    ) -> tuple[ClientState, Reply]:
        state, reply = self._uplink.protect(
            replace(state, pending=pending), context, self._terms, secrets=self._secrets, transcript=transcript
        )
        # From here on only the winners are needed, to put the sums together.
        done = replace(pending, contribution=pending.contribution.new_empty(0), transcript=transcript.hex())
        return replace(state, pending=done), reply

    def _answer(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None
    ) -> tuple[ClientState, Reply]:
        if isinstance(request, (Hello, Directory, Nonces)):
            return self._introduced(state, request, data)
        if isinstance(request, Found):
            return found(state, request, keys=opening_keys(self._uplink), secrets=self._secrets)
        if isinstance(request, Join):
            return join(state, request, private)
        if isinstance(request, Divide):
            return self._divide(state, request, len(data))
        if isinstance(request, Unmask):
            return self._masks(state, request).answer(state, request, private)
        if isinstance(request, (Lend, Finish)):
            state = self._keeper.brought_up(state, request.version, request.latest, private)
            if isinstance(request, Lend):
                return state, self._keeper.lend(state)
            return state, Finished(state.client, self._keeper.held(state).version)
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def _masks(self, state: ClientState, request: Unmask) -> Pads:
        used = self._uplink.cipher if request.round % 2 == _UPLOAD else self._uplink.ballots
        if not isinstance(used, Pads):
            raise ProtocolError(f"client {state.client} was asked to unmask where nothing is masked")
        return used

    def _divide(self, state: ClientState, request: Divide, samples: int) -> tuple[ClientState, Reply]:
        """Learn who has won, divide, upload."""
        pending = state.pending
        if pending is None or (pending.round, pending.attempt) != (request.round, request.attempt):
            raise ProtocolError(f"client {state.client} was told the outcome of a vote in which it has no part")
        context = self._context(state, request.round, request.attempt, request.cohort, samples=samples)
        self._check_voters(state.client, context, request.voters.tolist())
        if not len(pending.contribution):
            raise ProtocolError(f"client {state.client} was asked for a second upload of round {request.round + 1}")
        winners = self._outcome(state, pending, request, context)
        state = self._charged(_answering(state, context.stage(_UPLOAD)), context)
        transcript = told_outcome(self._transcript(state, pending), request)
        return self._upload(state, context, replace(pending, winners=winners), transcript)

    def _check_voters(self, client: int, context: RoundContext, voters: list[int]) -> None:
        """Whoever has not voted will not upload: those who have must still be enough."""
        if client not in voters or not set(voters) <= set(context.cohort):
            raise ProtocolError("the outcome of a vote names voters that were not asked, or not this client")
        self._uplink.fits(len(voters))
        self._policy.check_cohort(client, len(voters))

    def _outcome(self, state: ClientState, pending: Pending, request: Divide, context: RoundContext) -> Tensor:
        """The winners of a vote; simulated clients that were told the same share the result."""
        uplink, size = self._uplink, self._terms.divisible
        told = (state.membership().fingerprint(), state.cohort)
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
                voters, before = request.voters.tolist(), self._transcript(state, pending)
                winners = uplink.counted(request.counts, state.membership(), context, voters, size, transcript=before)
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


def _refusing(state: ClientState, request: Request) -> ClientState:
    """Count a sum that cannot be read."""
    assert isinstance(request, (Begin, Divide, Lend, Finish))
    if isinstance(request, Divide):
        digest = told_outcome(b"", request).hex()
    else:
        assert request.latest is not None
        digest = told_sums(b"", request.latest).hex()
    return state if digest == state.refused else replace(state, misread=state.misread + 1, refused=digest)


class Keeper:
    """A client's way with the model; `start` is what every client of the run begins with.

    `first`, where given, makes that from a secret of the group instead: then the server does not know it either.
    """

    def __init__(
        self, uplink: Parallel, terms: Terms, *, start: Held, optimiser: Optimiser, first: First | None = None
    ) -> None:
        self._uplink = uplink
        self._terms = terms
        self._start = start
        self._first = first
        self._begun: tuple[bytes, Held] | None = None
        self._mover = Mover(terms.architecture, optimiser)
        self._moved: tuple[Aggregate, Held, Held] | None = None

    def held(self, state: ClientState) -> Held:
        """What a client holds."""
        if state.held is not None:
            return state.held
        if self._first is None:
            return self._start
        seed = state.membership().seed(round=0, attempt=0, purpose="first model")
        if self._begun is None or self._begun[0] != seed:
            made = self._first(seed)
            self._begun = (seed, made if made.transcript else replace(made, transcript=_digest(b"first", seed)))
        return self._begun[1]

    def brought_up(
        self, state: ClientState, version: int, latest: Aggregate | None, private: Request | None
    ) -> ClientState:
        """The state with the model of `version`: held already, one aggregate behind, or borrowed."""
        if version < 0:
            raise ProtocolError(f"client {state.client} was asked for version {version} of the model, which cannot be")
        held = self.held(state)
        # What was lent may have been false, or of sums that were taken back: another's word takes its place, but not
        # that of what this client has come to by itself: loans can be sent again.
        lent_again = held.borrowed and isinstance(private, Borrowed)
        least = held.reached if lent_again else held.version
        if version < least and state.ran == state.ring().run:
            raise ProtocolError(
                f"client {state.client} holds version {least} of the model and was asked to go back to {version}"
            )
        if held.version == version and not lent_again:
            return replace(state, held=held)
        following = latest if latest is not None and latest.version == version == held.version + 1 else None
        # Sums that it has worked for itself come before anybody's word.
        own_work = following is not None and _worked_for(state, following)
        if following is not None and (own_work or not isinstance(private, Borrowed)):
            return replace(state, held=self.moved(replace(state, held=held), following), pending=None)
        if isinstance(private, Borrowed):
            return replace(state, held=self._borrowed(state, private, version), pending=None)
        raise ProtocolError(
            f"client {state.client} holds version {held.version} of the model, was asked to work on {version}, and was "
            "not sent what it lacks"
        )

    def lend(self, state: ClientState) -> Lent:
        """The held model, sealed under the group key."""
        from fedveil.crypto.keys import seal

        held = self.held(state)
        key = state.membership().seed(round=0, attempt=0, purpose="model")
        sealed = seal(as_bytes(held.facts(), held.tensors()), key=key, purpose=_model_purpose(held.version))
        return Lent(state.client, held.version, from_bytes(sealed))

    def _borrowed(self, state: ClientState, lent: Borrowed, version: int) -> Held:
        from fedveil.crypto.keys import unseal

        key = state.membership().seed(round=0, attempt=0, purpose="model")
        facts, tensors = from_stored(unseal(to_bytes(lent.sealed), key=key, purpose=_model_purpose(version)))
        if facts.get("version") != version or _shapes(tensors) != _shapes(self._start.tensors()):
            raise ProtocolError(f"client {state.client} was lent a model of another version or architecture")
        device = self._terms.architecture.trainable.device
        held = Held.restored(facts, {name: tensor.to(device) for name, tensor in tensors.items()})
        return replace(held, borrowed=True, own=self.held(state).reached)

    def moved(self, state: ClientState, latest: Aggregate) -> Held:
        """The model one aggregate further; simulated clients that hold the same one share the result."""
        held, pending = self.held(state), state.pending
        if self._moved is not None and self._moved[0] is latest and self._moved[1] is held:
            return self._moved[2]
        if pending is None or not _worked_for(state, latest):
            raise ProtocolError(f"client {state.client} does not know which coordinates round {latest.round + 1} hid")
        if not (pending.beacon or state.ring().beacon):  # a round's of before clients kept it
            raise ProtocolError(f"client {state.client} was not told how this epoch's rounds are drawn")
        try:
            recovered = self._recovered(state, latest, pending)
        except (ProtocolError, ConfigError) as reason:
            raise UnreadableError(str(reason)) from reason
        weights, velocity = held.weights.clone(), held.velocity.clone()
        self._mover.move(weights, velocity, recovered, round=latest.round)
        # Also where no masks are bound to it yet: a resumed run may have some.
        # What a sum does to a model depends on how many samples its clients are said to have.
        sizes = state.ring().known().samples_of(latest.asked.tolist())
        transcript = told_sums(bytes.fromhex(pending.transcript), latest, sizes=sizes)
        after = Held(weights, velocity, latest.version, recovered.loss, transcript)
        self._moved = (latest, held, after)
        return after

    def _recovered(self, state: ClientState, latest: Aggregate, pending: Pending) -> Recovered:
        asked, contributors = tuple(latest.asked.tolist()), latest.contributors.tolist()
        if not contributors or not set(contributors) <= set(asked):
            raise ProtocolError("a round's sums name contributors that were not asked, or none")
        self._uplink.fits(len(contributors))
        assert pending.winners is not None
        beacon = bytes.fromhex(pending.beacon) or state.ring().beacon
        context = RoundContext(latest.round, latest.attempt, asked, state.ring().known(), beacon)
        mean = self._uplink.mean(
            state.membership(),
            rest=latest.rest,
            hidden=latest.hidden,
            winners=pending.winners,
            context=context,
            contributors=contributors,
            terms=self._terms,
            transcript=bytes.fromhex(pending.transcript),
        )
        sums = self._terms.layout.split(torch.cat([mean, mean.new_ones(1)]))
        values = sums["values"]
        return Recovered(sums["gradients"][0], float(values[0]) if values.numel() else None, sums["statistics"], None)


def _worked_for(state: ClientState, sums: Aggregate) -> bool:
    """Whether sums are those of the round that a client has uploaded in, or knows the winners of."""
    pending = state.pending
    known = pending is not None and pending.winners is not None
    return known and pending is not None and (pending.round, pending.attempt) == (sums.round, sums.attempt)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _model_purpose(version: int) -> str:
    return f"model of version {version}"


_NOTHING = b"-"


def told_sums(before: bytes, sums: Aggregate, *, sizes: Sequence[int] = ()) -> bytes:
    """The transcript up to and including a round's sums, of clients that are said to have so many samples."""
    facts = f"{sums.version} {sums.round} {sums.attempt} {list(sizes)}".encode()
    return _digest(b"sums", before, facts, sums.asked, sums.contributors, sums.rest, sums.hidden)


def told_settings(before: bytes, settings: str) -> bytes:
    """The transcript after an attempt at a run, of which `settings` is a digest: what it began with is made by them."""
    return _digest(b"settings", before, settings.encode())


def told_outcome(before: bytes, outcome: Divide) -> bytes:
    """The transcript up to and including the outcome of a vote."""
    facts = f"{outcome.round} {outcome.attempt}".encode()
    return _digest(b"outcome", before, facts, outcome.cohort, outcome.winners, outcome.counts, outcome.voters)


def _digest(what: bytes, *parts: bytes | Tensor | None) -> bytes:
    digest = hashlib.sha256(b"fedveil story 1 " + what)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {part.numel()}".encode())
            digest.update(raw(part).data)
        else:
            content = _NOTHING if part is None else part
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


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
