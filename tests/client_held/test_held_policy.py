"""A client's own limits, where it holds the model itself: kept at every stage, whatever the server says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_held.relaying import Hall
from driving import drive
from federation import held_run, job, relay_of
from fedveil.client_held.client import HolderRole
from fedveil.client_held.messages import Begin, Divide
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.correlated import NoiseLayout, by_peer, charges
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Epoch, Hello
from fedveil.protocol.phases import RoundDone
from fedveil.runs.job import Guard, Job
from fedveil.runs.loop import client_role, fresh_state, train_job

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {"loss": "cross-entropy", "lr": 0.1, "batch_size": 16, "options": {"depth": 1, "width": 4}}
KEY = bytes(range(32))
File = Callable[[str], str]
# Where everything that leaves a client carries noise, and where part of it is only hidden.
EVERYWHERE: dict[str, dict[str, Any]] = {
    "nothing hidden": {"scheme": "paraaegis", "share": 0.0},
    "serial": {"scheme": "serial", "cipher": "pads"},
    "serial, ckks": {"scheme": "serial"},
}
IN_PART: dict[str, dict[str, Any]] = {
    "tags": {"scheme": "paraaegis", "cipher": "pads"},
    "tags, ckks": {"scheme": "paraaegis"},
    "ballots": {"scheme": "paraaegis", "cipher": "pads", "vote": "histogram"},
    "by lot": {"scheme": "paraaegis", "cipher": "pads", "strategy": "random"},
}
NOISED = {**EVERYWHERE, **IN_PART}


@pytest.fixture
def file(tmp_path: Path) -> File:
    def written(text: str) -> str:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return str(path)

    return written


def guarded(policy: Policy, **settings: Any) -> Job:
    return replace(job(**{**SMALL, **settings}), guard=Guard(policy))


def covering_of(one: Job) -> NoiseLayout:
    plan, samples = one.scheme.plan, [len(data) for data in one.pool.clients]
    assert plan is not None
    reach = [one.scheme.work.sensitivity(count) for count in samples]  # type: ignore[attr-defined]
    return plan.noise_layout(range(len(samples)), samples, reach, seed=bytes(32))


def prices(one: Job) -> np.ndarray:
    """μ² of one round, against the server or against another client if that is worse."""
    noise_layout = covering_of(one)
    return np.maximum(charges(noise_layout), by_peer(noise_layout))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_client_refuses_the_round_that_would_exceed_its_epsilon(name: str) -> None:
    """The server aims at ε = 6 in 6 rounds and keeps no account; each client stops by its own, before it uploads."""
    policy = Policy(max_epsilon=2.5)
    one = guarded(policy, clients=5, rounds=6, epsilon=6.0, how="size", ratio=3.0, **NOISED[name])
    run = held_run(one)
    for client, price in enumerate(prices(one)):
        able = max(n for n in range(7) if epsilon_of(math.sqrt(n * price), policy.delta) <= 2.5)
        assert 0 < able < 6
        assert [done.round for done in run.rounds if client in done.gathered.arrived] == list(range(able))
        said = [done.gathered.refused[client].text for done in run.rounds if client in done.gathered.refused]
        assert len(said) == 6 - able
        assert all(f"client {client} takes no further part" in why and "limit is 2.5" in why for why in said)
        spent = run.engine.state_of(client).spent
        assert spent == pytest.approx(able * price, rel=1e-9)
        assert epsilon_of(math.sqrt(spent), 1e-5) <= 2.5


def test_a_vote_costs_nothing_and_an_upload_is_paid_for_before_it_is_made() -> None:
    one = Hall(job(scheme="paraaegis", clients=4, rounds=2, epsilon=3.0, cipher="pads", **SMALL))
    one.until(Begin)
    replies = [one.answer(client) for client in range(4)]
    assert [one.states[client].spent for client in range(4)] == [0.0] * 4
    one.go_on(replies)
    one.answer(0)
    assert one.states[0].spent == pytest.approx(prices(one.job)[0], rel=1e-9)
    assert one.states[1].spent == 0.0


def test_whatever_the_scheme_aims_at_a_client_counts_by_its_own_target(file: File) -> None:
    for lie in ({"epsilon": 1000.0}, {"delta": 0.4}, {"epsilon": 1000.0, "accounting": "paper"}):
        for name in ("nothing hidden", "serial"):
            one = job(clients=5, rounds=1, policy=file("max_epsilon = 1.0"), **SMALL, **NOISED[name], **lie)
            with pytest.raises(ProtocolError, match="client 0 takes no further part: this round would bring it to ε"):
                train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_policy_equal_to_the_target_allows_the_whole_run(name: str, file: File) -> None:
    one = job(clients=4, rounds=4, epsilon=2.0, policy=file("max_epsilon = 2.0"), **SMALL, **NOISED[name])
    outcome = train_job(one, state=fresh_state(one))
    assert [row["clients"] for row in outcome.rows] == [4] * 4
    assert not any("refused" in row for row in outcome.rows)


@pytest.mark.parametrize("name", NOISED)
def test_without_a_policy_a_client_holds_the_run_to_its_target(name: str) -> None:
    """Two rounds more than were announced, by a server that keeps no account: nobody uploads in them."""
    one = job(clients=4, rounds=3, epsilon=1.0, how="size", **SMALL, **NOISED[name])
    longer = replace(one, config=one.config.with_changes(rounds=5))
    role = client_role(one)
    role._schedule = (5, one.cohort)
    engine, boundaries = LocalEngine(role, one.pool), list[RoundDone]()
    drive(engine, relay_of(longer).run(), on_round=boundaries.append)
    assert [bool(done.failed) for done in boundaries] == [False, False, False, True, True]
    for done in boundaries[3:]:
        assert all("takes no further part" in done.gathered.refused[client].text for client in range(4))
    for client, price in enumerate(prices(one)):
        assert engine.state_of(client).spent == pytest.approx(3 * price, rel=1e-9)


def test_through_the_configuration_a_run_ends_where_the_policy_does(file: File) -> None:
    one = job(clients=5, rounds=6, epsilon=3.0, policy=file("max_epsilon = 1.5"), **SMALL, **NOISED["serial"])
    said: list[str] = []
    outcome = train_job(one, state=fresh_state(one), say=said.append)
    assert 0 < outcome.state.round < 6
    assert "its limit is 1.5 (δ = 1e-05)" in outcome.stopped
    assert said == [f"The run ends after {outcome.state.round} round: {outcome.stopped}."]


# ---- schemes under which a limit could not be kept


def test_a_limit_on_epsilon_or_clip_needs_noise_and_clipping(file: File) -> None:
    for how in ({"scheme": "ckks-fedavg"}, {"scheme": "paraaegis", "share": 1.0}):
        for text, why in (("max_epsilon = 50.0", "carry no noise"), ("max_clip = 0.5", "this scheme clips nothing")):
            one = job(clients=4, rounds=1, policy=file(text), **SMALL, **how)
            with pytest.raises(ConfigError, match=why):
                train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("name", IN_PART)
def test_a_limit_on_epsilon_cannot_be_kept_where_part_of_an_upload_is_only_hidden(name: str, file: File) -> None:
    one = job(clients=4, rounds=1, policy=file("max_epsilon = 50.0"), **SMALL, **NOISED[name])
    with pytest.raises(ConfigError, match="or part of them, carry no noise of its own"):
        train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("scheme", ["dp-fedavg", "serial", "paraaegis"])
def test_a_clip_beyond_the_policy_is_refused(scheme: str, file: File) -> None:
    policy = file("max_clip = 0.5")
    loose, tight = (job(scheme=scheme, clients=4, rounds=1, clip=clip, policy=policy, **SMALL) for clip in (0.51, 0.5))
    with pytest.raises(ConfigError, match=r"clip = 0\.51 exceeds the client's policy \(max_clip = 0\.5\)"):
        train_job(loose, state=fresh_state(loose))
    assert len(train_job(tight, state=fresh_state(tight)).rows) == 1


@pytest.mark.parametrize("scheme", ["ckks-fedavg", "serial", "paraaegis"])
def test_a_round_with_too_few_clients_is_refused(scheme: str, file: File) -> None:
    policy = file("min_cohort = 4")
    small, large = (job(scheme=scheme, clients=6, rounds=1, cohort=size, policy=policy, **SMALL) for size in (3, 4))
    with pytest.raises(ProtocolError, match="takes part in no round of 3 clients: its policy asks for 4"):
        train_job(small, state=fresh_state(small))
    assert train_job(large, state=fresh_state(large)).rows[0]["clients"] == 4


def test_a_cohort_that_shrinks_after_the_vote_is_refused_too() -> None:
    one = Hall(guarded(Policy(min_cohort=4), clients=5, rounds=1, **NOISED["tags, ckks"]))
    one.until(Divide)
    fewer = replace(one.ask.common, voters=torch.arange(3))  # type: ignore[type-var]
    assert "takes part in no round of 3 clients: its policy asks for 4" in one.refusal(0, fewer)
    for voters in (torch.arange(1, 5), torch.tensor([0, 1, 2, 3, 9])):
        odd = replace(one.ask.common, voters=voters)  # type: ignore[type-var]
        assert "names voters that were not asked, or not this client" in one.refusal(0, odd)


# ---- what was spent is remembered


class Sleepy:
    """Clients that are sealed, and woken again, between all messages."""

    def __init__(self, role: HolderRole) -> None:
        self._role = role

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any) -> Any:
        woken = [ClientState.unseal(state.seal(KEY), KEY) for state in states]
        yield from self._role.handle_many(woken, request, clients, private)


@pytest.mark.parametrize("name", ["tags, ckks", "ballots"])
def test_clients_that_sleep_between_messages_train_the_same_model_and_remember_what_they_spent(name: str) -> None:
    one = job(clients=5, cohort=4, rounds=4, epsilon=50.0, momentum=0.9, value_range=64.0, **SMALL, **NOISED[name])
    awake, asleep = held_run(one), held_run(one, through=Sleepy)
    assert not any(done.failed or done.gathered.refused for done in asleep.rounds)
    assert torch.equal(awake.model, asleep.model)
    for client in range(5):
        assert awake.engine.state_of(client).spent == asleep.engine.state_of(client).spent > 0.0


def test_neither_a_new_attempt_nor_a_new_run_resets_what_was_spent() -> None:
    one = job(clients=4, rounds=2, **SMALL, **NOISED["tags"])
    run = held_run(one)
    state = run.engine.state_of(0)
    assert state.spent > 0
    again, _ = run.role.handle(state, Hello("another run", Epoch(0, 0, 2, 4, 4, 0)), one.pool.clients[0])
    assert again.spent == state.spent
    assert state.answering(0, 1).spent == state.spent
