"""Runs whose model lives with the clients, message by message: honest clients, and a server that may misbehave."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from torch import Tensor

from federation import relay_of
from fedveil.client_held.ciphers import Ciphertext
from fedveil.client_held.client import HolderRole, UnreadableError
from fedveil.client_held.divided import Parallel
from fedveil.client_held.group import Found, Founded, Invitation, Join, Joined
from fedveil.client_held.messages import Begin, Borrowed, Divide, Divided, Finish, Finished, Lend, Lent, Vote
from fedveil.errors import Code, FedVeilError, Refusal
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.messages import Aggregate, Request
from fedveil.protocol.phases import Ask, Gathered, RoundDone, RunStopped
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role

HELD_SCHEMES = ("ckks-fedavg", "serial", "paraaegis")
HELD_MESSAGES: set[type] = {
    *(Found, Founded, Join, Invitation, Joined),
    *(Begin, Vote, Divide, Divided, Ciphertext, Aggregate),
    *(Lend, Lent, Borrowed, Finish, Finished),
}


class Hall:
    """A relaying server's run, driven by hand; every message goes through the wire."""

    def __init__(self, one: Job, *, attempt: int = 0) -> None:
        role = client_role(one)
        assert isinstance(role, HolderRole)
        self.job, self.role = one, role
        self.relay = relay_of(one, attempt=attempt)
        self.states = {data.client: ClientState(data.client) for data in one.pool.clients}
        self.done: list[RoundDone] = []
        self.stopped = ""
        self._steps = self.relay.run()
        self.ask = self._next(None)

    def _next(self, answer: Gathered | None) -> Ask:
        step = self._steps.send(answer)
        while not isinstance(step, Ask):
            if isinstance(step, RoundDone):
                self.done.append(step)
            elif isinstance(step, RunStopped):
                self.stopped = step.reason
            step = self._steps.send(None)
        return step

    def answer(self, client: int, request: Request | None = None, private: Request | None = None) -> Any:
        """A client's reply to what the server asks now, or to what somebody made of it."""
        sent = decode(encode(self.ask.common if request is None else request))
        told = self.ask.each.get(client) if private is None else private
        private_too = {} if told is None else {client: decode(encode(told))}
        answers = self.role.handle_many([self.states[client]], sent, [self.job.pool.clients[client]], private_too)  # type: ignore[arg-type]
        self.states[client], reply = next(answers)
        if isinstance(reply, FedVeilError):
            raise reply
        return decode(encode(reply))

    def refusal(self, client: int, request: Request | None = None, private: Request | None = None) -> str:
        """Why a client does not answer; it is left as it was, but for the sums it counts as unreadable."""
        before = self.states[client]
        with pytest.raises(FedVeilError) as caught:
            self.answer(client, request, private)
        after, self.states[client] = self.states[client], before
        if isinstance(caught.value, UnreadableError):
            assert after.misread == before.misread + 1
            after = replace(after, misread=before.misread, refused=before.refused)
            assert all(getattr(after, one.name) is getattr(before, one.name) for one in fields(before))
        else:
            assert after is before
        return str(caught.value)

    def go_on(self, replies: list[Any], refused: dict[int, str] | None = None) -> Ask:
        """Hand these replies to the server, and let it ask the next thing."""
        for reply in replies:
            self.ask.into.add(reply)
        arrived = tuple(reply.client for reply in replies)
        missing = tuple(one for one in self.ask.to if one not in arrived)
        said = {client: Refusal(Code.PROTOCOL, why) for client, why in (refused or {}).items()}
        self.ask = self._next(Gathered(arrived, said, missing, 0, 0))
        return self.ask

    def until(self, kind: type[Request], *, round: int = 0) -> Ask:
        """Everybody answers honestly until the server asks for a `kind` of this round."""
        while not isinstance(self.ask.common, kind) or getattr(self.ask.common, "round", round) != round:
            self.go_on([self.answer(client) for client in self.ask.to])
        return self.ask


@dataclass(frozen=True, eq=False)
class Covered:
    """What a client was about to divide and cover."""

    round: int
    client: int
    contribution: Tensor
    winners: Tensor


def watch_uploads(monkeypatch: pytest.MonkeyPatch) -> list[Covered]:
    """Every contribution of a run, before anything covers it."""
    seen: list[Covered] = []
    protect = Parallel.protect

    def spying(self: Any, state: Any, context: Any, terms: Any, **named: Any) -> Any:
        pending = state.pending
        seen.append(Covered(context.round, state.client, pending.contribution.clone(), pending.winners.clone()))
        return protect(self, state, context, terms, **named)

    monkeypatch.setattr(Parallel, "protect", spying)
    return seen


class Recording:
    """Clients that keep every message."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self.received: list[Any] = []
        self.replied: list[Any] = []

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        self.received += [request, *private.values()]
        for state, reply in self._role.handle_many(states, request, clients, private):
            assert not isinstance(reply, Exception), reply
            self.replied.append(reply)
            yield state, reply
