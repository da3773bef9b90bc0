"""A model that lives with the clients: what each of them holds, and what it remembers of a round's work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.client_held.divided import Parallel
from fedveil.client_held.messages import Borrowed, Divide, Lent
from fedveil.downlink.messages import Recovered
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.protocol.client_state import ClientState, Held
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Aggregate, Request
from fedveil.protocol.optimiser import Mover, Optimiser
from fedveil.protocol.parts import RoundContext, Terms
from fedveil.tensors import raw
from fedveil.uplink.unmasking import listed

First = Callable[[bytes], Held]


class UnreadableError(ProtocolError):
    """Sums that cannot be what clients sent. Whether they are depends on what is hidden, so a client says it rarely."""

    code = Code.UNREADABLE

    def __init__(self, reason: str) -> None:
        super().__init__(f"a sum cannot be read: {reason}")


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
        self._mover = Mover(terms.blueprint, optimiser)
        self._moved: tuple[Aggregate, Held, Held] | None = None

    def held(self, state: ClientState) -> Held:
        """What a client holds."""
        if state.held is not None:
            return state.held
        if self._first is None:
            return self._start
        seed = state.membership().seed(round=0, attempt=0, purpose="first model")
        if self._begun is None or self._begun[0] != seed:
            self._begun = (seed, self._first(seed))
        return self._begun[1]

    def brought_up(
        self, state: ClientState, version: int, latest: Aggregate | None, private: Request | None
    ) -> ClientState:
        """The state with the model of `version`: held already, one aggregate behind, or borrowed."""
        if version < 0:
            raise ProtocolError(f"client {state.client} was asked for version {version} of the model, which cannot be")
        held = self.held(state)
        if version < held.version and state.ran == state.ring().run:
            raise ProtocolError(
                f"client {state.client} holds version {held.version} of the model and was asked to go back to {version}"
            )
        if held.version == version:
            return replace(state, held=held)
        if isinstance(private, Borrowed):
            return replace(state, held=self._borrowed(state, private, version), pending=None)
        if held.version + 1 == version and latest is not None and latest.version == version:
            return replace(state, held=self.moved(replace(state, held=held), latest), pending=None)
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
        device = self._terms.blueprint.trainable.device
        return Held.restored(facts, {name: one.to(device) for name, one in tensors.items()})

    def moved(self, state: ClientState, latest: Aggregate) -> Held:
        """The model one aggregate further; simulated clients that hold the same one share the result."""
        held, pending = self.held(state), state.pending
        if self._moved is not None and self._moved[0] is latest and self._moved[1] is held:
            return self._moved[2]
        which = (latest.round, latest.attempt)
        if pending is None or pending.winners is None or (pending.round, pending.attempt) != which:
            raise ProtocolError(f"client {state.client} does not know which coordinates round {latest.round + 1} hid")
        try:
            recovered = self._recovered(state, latest, pending.winners)
        except (ProtocolError, ConfigError) as reason:
            raise UnreadableError(str(reason)) from reason
        weights, velocity = held.weights.clone(), held.velocity.clone()
        self._mover.move(weights, velocity, recovered, round=latest.round)
        story = told_sums(held.story, latest) if self._uplink.masks else b""
        after = Held(weights, velocity, latest.version, recovered.loss, story)
        self._moved = (latest, held, after)
        return after

    def _recovered(self, state: ClientState, latest: Aggregate, winners: Tensor) -> Recovered:
        asked, contributors = tuple(listed(latest.asked)), listed(latest.contributors)
        if not contributors or not set(contributors) <= set(asked):
            raise ProtocolError("a round's sums name contributors that were not asked, or none")
        self._uplink.fits(len(contributors))
        context = RoundContext(latest.round, latest.attempt, asked, state.ring().known(), state.ring().beacon)
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


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def _model_purpose(version: int) -> str:
    return f"model of version {version}"


_NOTHING = b"-"


def told_sums(before: bytes, sums: Aggregate) -> bytes:
    """The story up to and including a round's sums."""
    facts = f"{sums.version} {sums.round} {sums.attempt}".encode()
    return _digest(b"sums", before, facts, sums.asked, sums.contributors, sums.rest, sums.hidden)


def told_outcome(before: bytes, outcome: Divide) -> bytes:
    """The story up to and including the outcome of a vote."""
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
