"""The client role: a reducer. State and message in, state and reply out; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedveil.downlink.blueprint import Blueprint
from fedveil.protocol.messages import Reply, Request, Train, Upload
from fedveil.protocol.parts import Scheme
from fedveil.protocol.state import ClientState
from fedveil.work.messages import Bench, ClientData


class ClientRole:
    """What a client does, whoever drives it. Holds the architecture and settings, never a secret of the server."""

    def __init__(self, scheme: Scheme, blueprint: Blueprint) -> None:
        self._scheme = scheme
        self._bench = Bench(blueprint, scheme.layout(blueprint))

    def handle(self, state: ClientState, request: Request, data: ClientData) -> tuple[ClientState, Reply]:
        """Answer one message."""
        if not isinstance(request, Train):
            return self._scheme.uplink.answer(state, request)
        state = state.answering(request.round, request.attempt)
        vector = self._scheme.work.run(self._bench, request.broadcast, data, round=request.round)
        state, payload = self._scheme.uplink.protect(state, vector, round=request.round, attempt=request.attempt)
        return state, Upload(data.client, request.round, request.attempt, payload)

    def handle_many(
        self, states: Sequence[ClientState], request: Request, clients: Sequence[ClientData]
    ) -> Iterator[tuple[ClientState, Reply]]:
        """Answer one message for many simulated clients; equal to `handle` for each, in any order."""
        if not isinstance(request, Train):
            for state in states:
                yield self._scheme.uplink.answer(state, request)
            return
        advanced = [state.answering(request.round, request.attempt) for state in states]
        work = self._scheme.work.run_many(self._bench, request.broadcast, clients, round=request.round)
        for position, vector in work:
            state, payload = self._scheme.uplink.protect(
                advanced[position], vector, round=request.round, attempt=request.attempt
            )
            yield state, Upload(clients[position].client, request.round, request.attempt, payload)
