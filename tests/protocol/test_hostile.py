"""Messages made to do harm: whatever a client sends ends no run, whatever a server sends ends no client."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from federation import job, server_of
from fedveil.engines import LocalEngine
from fedveil.errors import FedVeilError
from fedveil.protocol import RoundDone, Train
from fedveil.protocol.noised import Repaired
from fedveil.protocol.wire import decode
from fedveil.runs.roles import client_role


def framed(kind: str, fields: dict[str, Any], tail: bytes = b"") -> bytes:
    """A message as somebody writes it who does not use our encoder."""
    header = json.dumps({"m": kind, "f": fields}, separators=(",", ":")).encode()
    return b"FVW1" + struct.pack("<I", len(header)) + header + tail


class Forging:
    """Clients of which one sends bytes of its own making in place of its replies."""

    def __init__(self, role: Any, client: int, forge: Callable[[Any], bytes | None]) -> None:
        self._role, self._client, self._forge = role, client, forge

    def handle_many(self, *told: Any) -> Any:
        for state, reply in self._role.handle_many(*told):
            forged = None if isinstance(reply, FedVeilError) or state.client != self._client else self._forge(reply)
            if forged is None:
                yield state, reply
                continue
            try:
                yield state, decode(forged)
            except FedVeilError as reason:
                yield state, reason


def test_137_bytes_end_no_run() -> None:
    """An empty tensor with 10¹² rows: nothing but its header is sent, and a list of its rows takes 8 TB."""
    sent: list[bytes] = []

    def forge(reply: Any) -> bytes | None:
        if not isinstance(reply, Repaired):
            return None
        huge = {"t": "i8", "s": [10**12, 0]}
        none = {"t": "u1", "s": [0, 32]}
        fields = {"client": reply.client, "round": reply.round, "attempt": 0, "vanished": huge, "seeds": none}
        sent.append(framed("Repaired", fields))
        return sent[-1]

    one = job(scheme="nadp", rounds=3, clients=6, loss=None)
    engine = LocalEngine(
        Forging(client_role(one), 2, forge),  # type: ignore[arg-type]
        one.pool,
        absent=lambda request, client: isinstance(request, Train) and request.round == 1 and client == 5,
    )
    rounds: list[RoundDone] = []
    engine.drive(server_of(one).run(), on_round=rounds.append)
    assert [len(one) <= 137 for one in sent] == [True]
    assert [bool(one.failed) for one in rounds] == [False, True, False]
    assert list(rounds[1].gathered.refused) == [2]
