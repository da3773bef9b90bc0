"""Clients that send rubbish: it costs a round or a loan, and not the run; and what a round costs that nobody joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from client_held.test_stories import SMALL, parted, whole
from driving import drive
from federation import held_run, job, relay_of, same_bits
from fedveil.client_held.client import HolderRole, UnreadableError
from fedveil.client_held.group import Founded
from fedveil.client_held.messages import Begin, Divided, Lent
from fedveil.engine import LocalEngine
from fedveil.errors import Code, FedVeilError
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import RoundDone
from fedveil.runs import loop as training
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.uplink.unmasking import MaskedUpload

pytest.importorskip("tenseal")


class Spoiling:
    """Clients whose replies are what `spoil` makes of them."""

    def __init__(self, role: Any, spoil: Callable[[Any], Any]) -> None:
        self._role, self._spoil = role, spoil

    def handle_many(self, *told: Any) -> Any:
        for state, reply in self._role.handle_many(*told):
            yield state, reply if isinstance(reply, FedVeilError) else self._spoil(reply)


def rubbish(reply: Reply) -> Reply:
    """An upload of client 2 in the second round that is far out of range."""
    if isinstance(reply, Divided) and (reply.client, reply.round) == (2, 1) and isinstance(reply.hidden, MaskedUpload):
        return replace(reply, hidden=replace(reply.hidden, payload=reply.hidden.payload + (1 << 62)))
    return reply


@pytest.mark.parametrize("make", [whole, parted], ids=["everything hidden", "a vote"])
def test_one_rubbish_upload_costs_its_round_and_the_run_goes_on(make: Callable[..., Job]) -> None:
    one = make(rounds=6)
    engine, rounds = LocalEngine(Spoiling(client_role(one), rubbish), one.pool), list[RoundDone]()  # type: ignore[arg-type]
    drive(engine, relay_of(one).run(), on_round=rounds.append)
    assert [bool(done.failed) for done in rounds] == [False, False, True, False, False, False]
    assert all(rounds[2].gathered.refused[client].code is Code.UNREADABLE for client in range(5))
    held = [engine.state_of(client).held for client in range(5)]
    assert [one and one.version for one in held] == [4] * 5
    first = held[0]
    assert first is not None
    assert all(one is not None and same_bits(one.weights.parameters, first.weights.parameters) for one in held)


def test_a_recorded_run_survives_a_rubbish_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = HolderRole.handle_many

    def spoilt(self: HolderRole, *told: Any) -> Any:
        yield from ((state, rubbish(one) if isinstance(one, Reply) else one) for state, one in answers(self, *told))

    monkeypatch.setattr(HolderRole, "handle_many", spoilt)
    one = parted()
    outcome = train_job(one, state=fresh_state(one))
    assert [row["round"] for row in outcome.rows if "failed" in row] == [2, 3]
    assert "a sum cannot be read" in outcome.rows[1]["failed"]
    assert len(outcome.rows) == 6
    assert outcome.rows[-1]["loss"] < outcome.rows[0]["loss"]
    assert not torch.equal(outcome.state.weights.parameters, one.weights.parameters)


def test_sums_are_not_given_up_because_everybody_refuses_for_another_reason() -> None:
    """Here each client's own target is used up after three rounds; what they have trained they keep."""
    one = parted(rounds=3, epsilon=1.0, share=0.0)
    longer = replace(one, config=one.config.with_changes(rounds=5))
    role = client_role(one)
    role._schedule = (5, one.cohort)
    run = held_run(longer, through=lambda _: role)
    assert [bool(done.failed) for done in run.rounds] == [False, False, False, True, True]
    held = [run.engine.state_of(client).held for client in range(5)]
    assert [one and one.version for one in held] == [3] * 5


def test_one_client_does_not_undo_sums_while_the_others_are_away() -> None:
    """They may have moved by them already, and would then train another model than those who come back."""

    def spoil(reply: Any) -> Any:
        return UnreadableError("x") if isinstance(reply, Divided) and (reply.client, reply.round) == (0, 2) else reply

    def absent(request: Request, client: int) -> bool:
        return client > 0 and isinstance(request, Begin) and request.round == 2

    run = held_run(whole(rounds=6), through=lambda role: Spoiling(role, spoil), absent=absent)
    assert [bool(done.failed) for done in run.rounds] == [False, False, True, False, False, False]
    held = [run.engine.state_of(client).held for client in range(5)]
    assert [one and one.version for one in held] == [5] * 5


def test_a_founder_with_rubbish_invitations_does_not_end_the_run() -> None:
    def spoil(reply: Any) -> Any:
        mine = isinstance(reply, Founded) and reply.client == 0
        return replace(reply, bundles=reply.bundles ^ 1) if mine else reply

    run = held_run(whole(), through=lambda role: Spoiling(role, spoil))
    assert not run.stops
    assert [done.gathered.arrived for done in run.rounds] == [(0, 1, 2, 3, 4)] * 4
    assert run.relay._group.members == [1, 0, 2, 3, 4]  # another founds it, and lets the first in


def test_who_lent_rubbish_is_not_asked_first_again() -> None:
    lenders: list[int] = []

    def spoil(reply: Any) -> Any:
        if isinstance(reply, Lent):
            lenders.append(reply.client)
            return replace(reply, sealed=reply.sealed ^ 1) if reply.client == 0 else reply
        return reply

    def absent(request: Request, client: int) -> bool:
        return client == 4 and isinstance(request, Begin) and request.round in (1, 4)

    run = held_run(whole(rounds=7), through=lambda role: Spoiling(role, spoil), absent=absent)
    assert lenders == [0, 1, 1]
    assert [list(done.gathered.refused) for done in run.rounds] == [[], [], [4], [], [], [], []]
    assert [4 in done.gathered.arrived for done in run.rounds] == [True, False, False, True, False, True, True]


# ---- what a declined round costs


def test_a_declined_round_is_charged_if_anybody_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is missing may have uploaded, and the server only says that nothing came."""
    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 1.5")

    def spent(missing: int | None) -> tuple[int, int]:
        def absent(request: Any, client: int) -> bool:
            return client == 3 and isinstance(request, Begin) and request.round == missing

        monkeypatch.setattr(training, "_simulated_dropout", lambda one: absent)
        one = job(scheme="serial", **SMALL, clients=5, rounds=6, epsilon=3.0, policy=str(policy))
        outcome = train_job(one, state=fresh_state(one))
        assert outcome.privacy_journal.accountant is not None
        return outcome.state.round, outcome.privacy_journal.accountant.rounds

    ended, charged = spent(None)
    assert 0 < charged == ended < 6
    # The run goes on for those who were merely away, and ends when everybody declines.
    assert spent(ended) == (ended + 1, ended + 1)
