"""Messages made to do harm: whatever a client sends ends no run, whatever a server sends ends no client."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from driving import drive
from federation import job, next_ask, server_of
from fedveil.engine import LocalEngine
from fedveil.engine.local import folded
from fedveil.errors import Code, FedVeilError, ProtocolError, Refusal
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import decode
from fedveil.protocol.directory import Directory, Epoch, Hello
from fedveil.protocol.messages import Reply, Train
from fedveil.protocol.phases import Accumulator, RoundDone
from fedveil.roles.client import ClientRole
from fedveil.runs.loop import client_role
from fedveil.uplink import noise_plan
from fedveil.uplink.noised import Repaired


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
    drive(engine, server_of(one).run(), on_round=rounds.append)
    assert [len(one) <= 137 for one in sent] == [True]
    assert [bool(one.failed) for one in rounds] == [False, True, False]
    assert list(rounds[1].gathered.refused) == [2]


def test_a_client_refuses_a_head_noise_of_more_groups_than_outputs() -> None:
    """One number in the model's header, and a client would have made a matrix of outputs × 2⁴⁰."""
    one = job(rounds=1, head_groups=2)
    ask = next_ask(server_of(one).run())
    assert isinstance(ask.common, Train)
    broadcast = ask.common.broadcast
    assert broadcast.head is not None
    role, state, data = client_role(one), ClientState(0), one.pool.clients[0]
    for wrong in (2**40, 0, 1, 3):
        head = replace(broadcast.head, count=wrong)
        sent = replace(ask.common, broadcast=replace(broadcast, head=head))
        with pytest.raises(ProtocolError):
            role.handle(state, sent, data)
    with pytest.raises(ProtocolError, match="another head noise"):
        role.handle(state, replace(ask.common, broadcast=replace(broadcast, head=None)), data)
    assert role.handle(state, ask.common, data)[1].client == 0


@pytest.mark.parametrize("error", [MemoryError, RecursionError, OverflowError, RuntimeError, KeyError])
def test_an_error_that_is_not_ours_costs_the_reply_and_the_request_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Accumulator):
        def add(self, reply: Reply) -> None:
            raise error

    malformed = Refusal(Code.PROTOCOL, f"its answer is malformed ({error.__name__})", came=True)
    assert folded(Failing(), Reply(3), 3) == malformed
    assert folded(Failing(), Reply(3), 2) == Refusal(Code.PROTOCOL, "its answer names another client", came=True)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    one = job(rounds=1)
    ask = next_ask(server_of(one).run())
    role, state = client_role(one), ClientState(0)
    monkeypatch.setattr(type(one.scheme.uplink), "admit", fail)
    with pytest.raises(ProtocolError, match=rf"client 0 cannot deal with the Train it was sent \({error.__name__}\)"):
        role.handle(state, ask.common, one.pool.clients[0])
    ((after, answer),) = role.handle_many([state], ask.common, [one.pool.clients[0]])
    assert after is state
    assert isinstance(answer, ProtocolError)


@pytest.mark.parametrize("clients", [5, 4], ids=["around a circle", "everybody with everybody"])
def test_no_client_enters_a_run_of_more_graphs_than_its_noise_counts_on(
    clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chance of 2⁻³⁰ a run is none of a run of 2³² rounds."""
    monkeypatch.setattr(noise_plan, "COMPLETE_UP_TO", 4)
    one = job(scheme="nadp", loss=None, rounds=2, clients=clients)
    role, state = ClientRole(one.scheme, one.architecture), ClientState(0)  # which has agreed to no schedule
    agreed, endless = (Hello("run", Epoch(0, 0, rounds, clients, clients, 0, True)) for rounds in (2, 1 << 32))
    assert role.handle(state, agreed, one.pool.clients[0])
    if clients == 4:  # where there is no graph to wait for
        assert role.handle(state, endless, one.pool.clients[0])
        return
    with pytest.raises(ProtocolError, match="the same number of rounds") as refused:
        role.handle(state, endless, one.pool.clients[0])
    assert refused.value.code is Code.PROTOCOL


@pytest.mark.parametrize("given", [{}, {"cohort": 50}, {"sampling_rate": 0.5}])
@pytest.mark.parametrize(
    "lie",
    [
        {"clients": 20, "size": 20, "rate": 0.0, "least": 1},
        {"size": 3, "rate": 0.0, "least": 1},
        {"rounds": 1 << 32},
        {"rate": 0.4, "size": 60, "least": 3},
    ],
)
def test_no_client_enters_a_run_of_another_schedule_than_its_settings(
    lie: dict[str, Any], given: dict[str, Any]
) -> None:
    """Of 20 clients ten allies surround everybody, of 100 nobody; of 2³² rounds beacons can be drawn anew for years."""
    one = job(scheme="veil-secagg", rounds=100, clients=100, secrets="os", **given)
    role, state, cohort = client_role(one), ClientState(0), one.cohort
    said = (cohort.clients, cohort.size, cohort.seed, cohort.shuffled, cohort.rate, cohort.least)
    honest = Epoch(0, 0, 100, *said)
    state, reply = role.handle(state, Hello("run", honest), one.pool.clients[0])
    assert reply.samples == len(one.pool.clients[0])
    for message in (Hello("run", replace(honest, **lie)), Directory.of("run", [reply], replace(honest, **lie))):
        with pytest.raises(ProtocolError):
            role.handle(state, message, one.pool.clients[0])
