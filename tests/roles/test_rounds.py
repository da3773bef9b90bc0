"""The server's run, driven by hand: what it asks, what it refuses, and that it goes on without the refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from federation import distance, job, next_ask, same_bits, server_of, trained
from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Reply, Request, Train, Upload
from fedveil.protocol.phases import Accumulator, Ask, Gathered, RoundBegins, RoundDone
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job


def answers(one: Job, ask: Ask) -> list[Upload]:
    role = ClientRole(one.scheme, one.architecture)
    replies = [role.handle(ClientState(k), ask.common, one.pool.clients[k])[1] for k in ask.to]
    assert all(isinstance(reply, Upload) for reply in replies)
    return replies  # type: ignore[return-value]


def gathered(ask: Ask, replies: list[Upload]) -> Gathered:
    for reply in replies:
        ask.into.add(reply)
    return Gathered(tuple(reply.client for reply in replies), {}, (), 0, 0)


def test_a_run_can_be_driven_by_hand() -> None:
    one = job(rounds=2, vectorise=False)
    server = server_of(one)
    steps = server.run()
    for number in range(2):
        begins = next(steps) if number == 0 else steps.send(None)
        assert isinstance(begins, RoundBegins)
        assert (begins.round, begins.attempt, begins.cohort) == (number, 0, (0, 1, 2, 3, 4))
        ask = steps.send(None)
        assert isinstance(ask, Ask)
        assert ask.to == (0, 1, 2, 3, 4)
        assert isinstance(ask.common, Train)
        assert (ask.common.round, ask.common.attempt) == (number, 0)
        done = steps.send(gathered(ask, answers(one, ask)))
        assert isinstance(done, RoundDone)
        assert (done.round, done.cohort, done.failed) == (number, ask.to, "")
        assert server.state.round == number + 1
    with pytest.raises(StopIteration):
        steps.send(None)
    assert same_bits(server.state.weights.parameters, trained(one)[0].weights.parameters)


def test_a_client_alone_answers_as_it_does_among_many() -> None:
    one = job(rounds=1, options={"depth": 3, "width": 8, "norm": "batch"})
    ask = next_ask(server_of(one).run())
    states = [ClientState(k) for k in ask.to]
    together = {
        reply.client: (state, reply)
        for state, reply in ClientRole(one.scheme, one.architecture).handle_many(states, ask.common, one.pool.clients)
    }
    role = ClientRole(one.scheme, one.architecture)
    for k in ask.to:
        state, reply = role.handle(ClientState(k), ask.common, one.pool.clients[k])
        assert state == together[k][0]
        assert isinstance(reply, Upload)
        assert distance(reply.payload, together[k][1].payload) < 1e-12  # type: ignore[attr-defined]


def test_a_client_is_a_reducer_that_leaves_the_old_state_as_it_was() -> None:
    one = job(rounds=1)
    ask = next_ask(server_of(one).run())
    before = ClientState(2)
    after, _ = ClientRole(one.scheme, one.architecture).handle(before, ask.common, one.pool.clients[2])
    assert before == ClientState(2)
    assert after == ClientState(2, answered=(0, 0))


def test_a_client_answers_a_round_and_attempt_only_once() -> None:
    one = job(rounds=1)
    ask = next_ask(server_of(one).run())
    role, data = ClientRole(one.scheme, one.architecture), one.pool.clients[2]
    state, _ = role.handle(ClientState(2), ask.common, data)
    with pytest.raises(ProtocolError, match="client 2 was asked for round 1, attempt 0"):
        role.handle(state, ask.common, data)
    ((unchanged, reason),) = role.handle_many([state], ask.common, [data])
    assert unchanged == state
    assert isinstance(reason, ProtocolError)
    assert "client 2 was asked for round 1, attempt 0" in str(reason)
    assert isinstance(ask.common, Train)
    again = replace(ask.common, attempt=1)
    state, reply = role.handle(state, again, data)
    assert isinstance(reply, Upload)
    assert (reply.round, reply.attempt) == (0, 1)


def test_a_client_refuses_a_request_its_scheme_does_not_have() -> None:
    class Confess(Request):
        pass

    one = job()
    role, data = ClientRole(one.scheme, one.architecture), one.pool.clients[0]
    with pytest.raises(ProtocolError, match="Confess"):
        role.handle(ClientState(0), Confess(), data)
    ((state, reason),) = role.handle_many([ClientState(0)], Confess(), [data])
    assert state == ClientState(0)
    assert isinstance(reason, ProtocolError)
    assert "Confess" in str(reason)


def nan_payload(reply: Upload) -> Upload:
    payload = reply.payload.clone()
    payload[3] = float("nan")
    return replace(reply, payload=payload)


BAD: dict[str, tuple[Any, str]] = {
    "another round": (lambda r: replace(r, round=r.round + 1), "an upload for round 2, attempt 0 arrived in round 1"),
    "another attempt": (lambda r: replace(r, attempt=4), "attempt 4 arrived"),
    "a stranger": (lambda r: replace(r, client=99), "was not asked"),
    "a longer vector": (lambda r: replace(r, payload=torch.cat([r.payload, r.payload[:1]])), "has shape"),
    "a shorter vector": (lambda r: replace(r, payload=r.payload[:-1]), "has shape"),
    "a matrix": (lambda r: replace(r, payload=r.payload[None]), "has shape"),
    "an empty vector": (lambda r: replace(r, payload=r.payload[:0]), "has shape"),
    "not a number": (nan_payload, "NaN"),
    "infinity": (lambda r: replace(r, payload=r.payload * float("inf")), "NaN"),
    "a number out of range": (lambda r: replace(r, payload=r.payload * 1e30), "2^36"),
    "truth values": (lambda r: replace(r, payload=r.payload > 0), "torch.bool"),
    "whole numbers": (lambda r: replace(r, payload=r.payload.long()), "torch.int64"),
    "another message": (lambda r: Reply(r.client), "a Reply arrived where an upload belongs"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD.values(), ids=BAD)
def test_a_bad_upload_is_refused_and_leaves_the_sum_as_it_was(spoil: Any, why: str) -> None:
    one = job(rounds=1)
    ask, clean = next_ask(server_of(one).run()), next_ask(server_of(one).run())
    replies = answers(one, ask)
    for number, reply in enumerate(replies):
        if number == 2:
            with pytest.raises(ProtocolError) as caught:
                ask.into.add(spoil(reply))
            assert why in str(caught.value)
        ask.into.add(reply)  # the honest one is still welcome
        clean.into.add(reply)
    assert same_bits(total(ask.into), total(clean.into))


def total(accumulator: Accumulator) -> torch.Tensor:
    return accumulator.total()  # type: ignore[attr-defined, no-any-return]


def test_a_second_upload_of_a_client_is_refused_and_not_counted_twice() -> None:
    one = job(rounds=1)
    ask = next_ask(server_of(one).run())
    reply = answers(one, ask)[1]
    ask.into.add(reply)
    before = total(ask.into)
    with pytest.raises(ProtocolError, match="a second one"):
        ask.into.add(reply)
    assert same_bits(total(ask.into), before)


def test_a_round_goes_on_with_those_who_were_not_refused() -> None:
    """The model moves as if the refused client had not been in the cohort."""
    one = job(rounds=1, how="size", ratio=3.0)
    server = server_of(one)
    steps = server.run()
    ask = next_ask(steps)
    replies = answers(one, ask)
    kept = [reply for reply in replies if reply.client != 3]
    done = steps.send(gathered(ask, kept))
    assert isinstance(done, RoundDone)
    assert not done.failed
    sums = one.scheme.layout(one.architecture).split(torch.stack([reply.payload for reply in kept]).sum(0))
    assert float(sums["weight"]) == sum(len(one.pool.clients[reply.client]) for reply in kept)
    without = job(scheme="fedavg", rounds=1, how="size", ratio=3.0)
    plain = server_of(without)
    steps = plain.run()
    ask = next_ask(steps)
    steps.send(gathered(ask, [reply for reply in answers(without, ask) if reply.client != 3]))
    assert distance(server.state.weights.parameters, plain.state.weights.parameters) < 1e-12


def test_a_round_without_any_upload_fails_and_leaves_the_model_as_it_was() -> None:
    one = job(rounds=1)
    server = server_of(one)
    steps = server.run()
    ask = next_ask(steps)
    refused = dict.fromkeys(ask.to, Refusal(Code.PROTOCOL, "no"))
    done = steps.send(Gathered((), refused, (), 0, 0))
    assert isinstance(done, RoundDone)
    assert done.failed == "no upload arrived"
    assert done.loss is None
    assert same_bits(server.state.weights.parameters, one.weights.parameters)


def test_every_round_is_veiled_afresh() -> None:
    one = job(rounds=2)
    steps = server_of(one).run()
    first = next_ask(steps)
    second = next_ask(steps, gathered(first, answers(one, first)))
    assert isinstance(first.common, Train)
    assert isinstance(second.common, Train)
    ours, theirs = first.common.broadcast, second.common.broadcast
    assert ours.head is not None
    assert theirs.head is not None
    assert not torch.equal(ours.head.vector, theirs.head.vector)
    hidden = (one.weights.parameters != 0).nonzero()[:, 0]
    ratio = ours.parameters[hidden] / theirs.parameters[hidden]
    assert (ratio - 1).abs().min() > 1e-9
