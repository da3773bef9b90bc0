"""A client's own limits: read from its file, kept whatever the server asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driving import drive
from federation import job, server_of
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.correlated import NoiseLayout, by_peer, charges, without, worst_collusion
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Epoch, Hello
from fedveil.protocol.messages import Train
from fedveil.protocol.phases import RoundDone
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.schemes import schemes
from fedveil.uplink.noised import Repair

KEY = bytes(range(32))
File = Callable[[str], str]


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(text: str) -> str:
        (tmp_path / "policy.toml").write_text(text)
        return str(tmp_path / "policy.toml")

    return write


def test_a_file_is_read_and_what_it_leaves_out_is_not_limited() -> None:
    assert Policy.parse("") == Policy()
    text = "max_epsilon = 2\ndelta = 1e-6\nmin_cohort = 10\nmax_clip = 0.5\nmin_clip = 0.1\n"
    assert Policy.parse(text) == Policy(2, 1e-6, 10, 0.5, 0.1)
    text = "collusion = 0.3\nmax_size_ratio = 10\n"
    assert Policy.parse(text) == Policy(collusion=0.3, max_size_ratio=10)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_epsilo = 3", r"Unknown setting in a\.toml: 'max_epsilo'\. Did you mean 'max_epsilon'"),
        ("[limits]\nmax_epsilon = 3", "Unknown setting in a.toml: 'limits'"),
        ('max_epsilon = "3"', r"a\.toml: max_epsilon must be a number \(got '3'\)"),
        ("max_epsilon = true", "max_epsilon must be a number"),
        ("max_epsilon = [3]", "max_epsilon must be a number"),
        ("min_cohort = 2.5", "min_cohort must be a"),
        ("min_cohort = false", "min_cohort must be a"),
        ("max_epsilon = nan", r"max_epsilon must be positive \(got nan\)"),
        ("max_epsilon = inf", "max_epsilon must be positive"),
        ("max_epsilon = 0", "max_epsilon must be positive"),
        ("max_epsilon = -1.0", "max_epsilon must be positive"),
        ("max_clip = nan", "max_clip must be positive"),
        ("max_clip = 0.0", "max_clip must be positive"),
        ("min_clip = nan", "min_clip must be positive"),
        ("min_clip = 0", "min_clip must be positive"),
        ("min_clip = 2\nmax_clip = 1", "min_clip = 2 is above max_clip = 1"),
        ("min_cohort = 0", "min_cohort must be positive"),
        ("delta = nan", "delta must lie strictly between 0 and 1"),
        ("delta = 0.0", "delta must lie"),
        ("delta = 1", "delta must lie"),
        ("max_epsilon = = 3", r"a\.toml is not valid TOML"),
    ],
)
def test_whatever_is_wrong_in_the_file_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Policy.parse(text, where="a.toml")


def test_a_file_that_is_wrong_or_missing_stops_the_run_before_it_starts(file: File, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.toml: max_epsilon must be a number"):
        job(scheme="nadp", loss=None, policy=file('max_epsilon = "three"'))
    with pytest.raises(ConfigError, match=r"Cannot read the policy .*absent\.toml"):
        job(scheme="nadp", loss=None, policy=str(tmp_path / "absent.toml"))


# --- schemes under which a limit could not be kept ----------------------------------------------------------------


def of(scheme: str, **settings: Any) -> Job:
    return job(scheme=scheme, loss="square", **settings)


@pytest.mark.parametrize("scheme", [info.name for info in schemes()])
def test_a_limit_on_epsilon_needs_noise_of_the_clients_own(scheme: str, file: File) -> None:
    """cdp counts too: its noise is the server's, and a client cannot rely on it."""
    paired = {"dropouts": "tolerate"} if scheme in ("nadp", "veil-dp") else {}
    one = of(scheme, rounds=1, policy=file("max_epsilon = 50.0"), **paired)
    if scheme in ("ldp", "nadp", "veil-dp", "dp-fedavg", "varying-dp", "serial", "tp-smc", "hybridalpha", "lwe-secagg"):
        assert len(train_job(one, state=fresh_state(one)).rows) == 1
        return
    with pytest.raises(ConfigError, match=r"at most ε = 50, but under this scheme its uploads, or part of them, carry"):
        train_job(one, state=fresh_state(one))


def test_integer_noise_under_masks_counts_as_noise(file: File) -> None:
    one = of("veil-dp", cover="masks", rounds=1, policy=file("max_epsilon = 3.0"))
    assert len(train_job(one, state=fresh_state(one)).rows) == 1


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "pbpfl"])
def test_a_smallest_cohort_needs_a_scheme_that_names_it(scheme: str, file: File) -> None:
    one = of(scheme, rounds=1, policy=file("min_cohort = 2"))
    with pytest.raises(ConfigError, match="clients are not told who else takes part"):
        train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("scheme", ["ldp", "cdp", "nadp", "veil-dp"])
def test_a_clip_beyond_the_policy_is_refused(scheme: str, file: File) -> None:
    policy = file("max_clip = 0.5")
    loose, tight = (of(scheme, rounds=1, clip=clip, policy=policy) for clip in (0.51, 0.5))
    with pytest.raises(ConfigError, match=r"clip = 0\.51 exceeds the client's policy \(max_clip = 0\.5\)"):
        train_job(loose, state=fresh_state(loose))
    assert len(train_job(tight, state=fresh_state(tight)).rows) == 1


def test_a_clipped_update_is_bound_by_the_policy_too(file: File) -> None:
    one = of("ldp", rounds=1, clip=2.0, local_steps=3, policy=file("max_clip = 1.0"))
    with pytest.raises(ConfigError, match="clip = 2 exceeds"):
        train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("scheme", ["fedavg", "lossless", "veil-secagg", "mpdp"])
def test_a_largest_clip_needs_a_scheme_that_clips(scheme: str, file: File) -> None:
    one = of(scheme, rounds=1, policy=file("max_clip = 0.5"))
    with pytest.raises(ConfigError, match="this scheme clips nothing"):
        train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("scheme", ["ldp", "nadp", "veil-dp", "dp-fedavg"])
def test_a_smaller_clip_than_the_smallest_is_refused(scheme: str, file: File) -> None:
    policy = file("min_clip = 0.1")
    one = of(scheme, rounds=1, clip=0.05, policy=policy)
    with pytest.raises(
        ConfigError, match=r"clip = 0\.05 is below the client's policy \(min_clip = 0\.1\)\. Raise clip"
    ):
        train_job(one, state=fresh_state(one))
    enough = of(scheme, rounds=1, clip=0.1, policy=policy)
    assert len(train_job(enough, state=fresh_state(enough)).rows) == 1


def test_a_smallest_clip_needs_a_scheme_that_clips(file: File) -> None:
    one = of("fedavg", rounds=1, policy=file("min_clip = 0.1"))
    with pytest.raises(ConfigError, match=r"asks for clipping \(min_clip = 0\.1\), but this scheme clips nothing"):
        train_job(one, state=fresh_state(one))


# --- limits that are kept round by round ---------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["cdp", "nadp", "veil-secagg"])
def test_a_round_with_too_few_clients_is_refused(scheme: str, file: File) -> None:
    policy = file("min_cohort = 4")
    small, large = (of(scheme, rounds=1, clients=6, cohort=size, policy=policy) for size in (3, 4))
    with pytest.raises(ProtocolError, match="takes part in no round of 3 clients: its policy asks for 4") as caught:
        train_job(small, state=fresh_state(small))
    assert "learning rate" not in str(caught.value)
    assert train_job(large, state=fresh_state(large)).rows[0]["clients"] == 4


def test_a_server_that_does_not_name_the_cohort_is_refused() -> None:
    one = of("cdp", rounds=1)
    role = ClientRole(one.scheme, one.architecture, policy=Policy(min_cohort=2))
    veil = one.scheme.downlink.veil(one.architecture, one.weights, stream=one.secrets.stream("veil"), head_level=None)
    with pytest.raises(ProtocolError, match="takes part in no round of 0 clients"):
        role.handle(ClientState(0), Train(0, 0, veil.broadcast(), None), one.pool.clients[0])


def driven(one: Job, role: ClientRole, **how: Any) -> tuple[list[RoundDone], dict[int, ClientState]]:
    """A server without an account of its own: only clients keep books."""
    boundaries: list[RoundDone] = []
    engine = LocalEngine(role, one.pool, **how)
    drive(engine, server_of(one).run(), on_round=boundaries.append)
    return boundaries, engine._states


def affordable(one: Job, noise_layout: NoiseLayout, policy: Policy) -> list[int]:
    """How many rounds of this noise each client can pay for."""
    assert policy.max_epsilon is not None
    prices = own_charges(noise_layout)
    return [
        max(
            n
            for n in range(one.config.rounds + 1)
            if epsilon_of(math.sqrt(n * price), policy.delta) <= policy.max_epsilon
        )
        for price in prices
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "ldp": {"scheme": "ldp"},
    "nadp": {"scheme": "nadp"},
    "nadp by the paper's formula": {"scheme": "nadp", "accounting": "paper"},
    "veil-dp": {"scheme": "veil-dp"},
    "veil-dp under masks": {"scheme": "veil-dp", "cover": "masks"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_client_refuses_the_round_that_would_exceed_its_epsilon(settings: dict[str, Any]) -> None:
    """The server aims at ε = 6 in 8 rounds and keeps no account; each client stops by its own."""
    tolerant = {} if settings["scheme"] == "ldp" or settings.get("cover") == "masks" else {"dropouts": "tolerate"}
    one = job(loss="square", rounds=8, epsilon=6.0, how="size", ratio=3.0, **tolerant, **settings)
    policy = Policy(max_epsilon=2.5)
    role = ClientRole(one.scheme, one.architecture, secrets=one.secrets, policy=policy)
    boundaries, states = driven(one, role)
    context_cohort = boundaries[0].cohort
    plan = one.scheme.plan
    assert plan is not None
    samples = [len(data) for data in one.pool.clients]
    reach = [one.scheme.work.sensitivity(count) for count in samples]  # type: ignore[attr-defined]
    noise_layout = plan.noise_layout(context_cohort, samples, reach, seed=bytes(32))
    able = affordable(one, noise_layout, policy)
    assert 0 < min(able) < 8
    for client, rounds in enumerate(able):
        took_part = [done.round for done in boundaries if client in done.gathered.arrived]
        assert took_part == list(range(rounds))
        refused = [done for done in boundaries if client in done.gathered.refused]
        assert len(refused) == 8 - rounds
        for done in refused:
            assert f"client {client} takes no further part" in done.gathered.refused[client].text
            assert "its limit is 2.5" in done.gathered.refused[client].text
        assert states[client].spent == pytest.approx(rounds * own_charges(noise_layout)[client], rel=1e-9)
        assert epsilon_of(math.sqrt(states[client].spent), 1e-5) <= 2.5


@pytest.mark.parametrize("lie", [{"epsilon": 1000.0}, {"delta": 0.4}, {"epsilon": 1000.0, "accounting": "paper"}])
@pytest.mark.parametrize("scheme", ["ldp", "nadp", "veil-dp"])
def test_whatever_the_scheme_aims_at_a_client_counts_by_its_own_target(
    scheme: str, lie: dict[str, Any], file: File
) -> None:
    tolerant = {} if scheme == "ldp" else {"dropouts": "tolerate"}
    one = job(scheme=scheme, loss="square", rounds=1, policy=file("max_epsilon = 1.0"), **tolerant, **lie)
    with pytest.raises(ProtocolError, match="client 0 takes no further part: this round would bring it to ε"):
        train_job(one, state=fresh_state(one))


def test_a_policy_equal_to_the_target_allows_the_whole_run(file: File) -> None:
    for rounds in (3, 7, 10):
        settings = {"dropouts": "tolerate", "policy": file("max_epsilon = 2.0")}
        one = job(scheme="nadp", loss=None, rounds=rounds, epsilon=2.0, **settings)
        outcome = train_job(one, state=fresh_state(one))
        assert [row["clients"] for row in outcome.rows] == [5] * rounds
        assert not any("refused" in row for row in outcome.rows)


def test_through_the_configuration_a_run_ends_where_the_policy_does(file: File) -> None:
    one = job(scheme="nadp", loss=None, rounds=6, dropouts="tolerate", policy=file("max_epsilon = 1.5"))
    said: list[str] = []
    outcome = train_job(one, state=fresh_state(one), say=said.append)
    assert [row["clients"] for row in outcome.rows] == [5]
    assert outcome.state.round == 1
    assert outcome.scores is not None
    assert "its limit is 1.5 (δ = 1e-05)" in outcome.stopped
    assert said == [f"The run ends after 1 round: {outcome.stopped}."]


class Sleepy(ClientRole):
    """Clients that are sealed, and woken again, between all messages."""

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
        woken = [ClientState.unseal(state.seal(KEY), KEY) for state in states]
        yield from super().handle_many(woken, request, clients, private)


def test_what_was_spent_survives_sealing() -> None:
    one = job(scheme="nadp", loss=None, rounds=6, dropouts="tolerate")
    awake, asleep = (kind(one.scheme, one.architecture, policy=Policy(1.5)) for kind in (ClientRole, Sleepy))
    ours, theirs = (driven(one, role) for role in (awake, asleep))
    for (_, states), (boundaries, _) in ((ours, theirs), (theirs, ours)):
        assert [sorted(done.gathered.arrived) for done in boundaries] == [[0, 1, 2, 3, 4]] + [[]] * 5
        assert all(state.spent > 0 for state in states.values())
    assert [state.spent for state in ours[1].values()] == [state.spent for state in theirs[1].values()]


def test_neither_a_new_attempt_nor_a_new_run_resets_what_was_spent() -> None:
    one = job(scheme="nadp", loss=None, rounds=2)
    role = client_role(one)
    _, states = driven(one, role)
    spent = states[0].spent
    assert spent > 0
    state, _ = role.handle(states[0], Hello("another run", Epoch(0, 0, 2, 5, 5, 0)), one.pool.clients[0])
    assert state.spent == spent
    assert state.answering(0, 1).spent == spent


# --- noise that is given away counts --------------------------------------------------------------------------------


def own_charges(noise_layout: NoiseLayout, revealed: Any = ()) -> np.ndarray:
    """What a client counts: against the server with one client on its side, or against that one if that is worse."""
    told = worst_collusion(without(noise_layout, revealed), 1).mu2
    return np.maximum.reduce([charges(noise_layout, revealed=revealed), told, by_peer(noise_layout)])


def one_is_missing(request: Any, client: int) -> bool:
    return isinstance(request, Train) and client == 4


def surcharge(one: Job, missing: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """(μ² of a round, μ² when the noise shared with `missing` is known) of every client."""
    plan = one.scheme.plan
    assert plan is not None
    samples = [len(data) for data in one.pool.clients]
    reach = [one.scheme.work.sensitivity(count) for count in samples]  # type: ignore[attr-defined]
    noise_layout = plan.noise_layout(range(len(samples)), samples, reach, seed=bytes(32))
    pairs = [(a, b) for a in range(len(samples)) for b in missing if a not in missing]
    return own_charges(noise_layout), own_charges(noise_layout, revealed=pairs)


def test_a_client_that_repairs_pays_for_the_noise_it_gives_away() -> None:
    """The upload of whoever is said to be missing may have been seen: the noise shared with it is no cover."""
    one = job(scheme="nadp", loss=None, rounds=1, honest_arrivals=True)
    role = ClientRole(one.scheme, one.architecture, policy=Policy(max_epsilon=100.0))
    boundaries, states = driven(one, role, absent=one_is_missing)
    assert boundaries[0].failed == ""
    before, after = surcharge(one, {4})
    for client in range(4):
        assert after[client] > 1.001 * before[client]
        assert states[client].spent == pytest.approx(after[client], rel=1e-9)
    assert states[4].spent == 0.0


def test_a_client_does_not_give_away_noise_beyond_its_policy() -> None:
    """The policy pays for the upload and not for the repair: the client keeps its seeds, and the round fails."""
    one = job(scheme="nadp", loss=None, rounds=1, dropouts="repair", honest_arrivals=True)
    before, after = surcharge(one, {4})
    between = (epsilon_of(math.sqrt(before[:4].max()), 1e-5) + epsilon_of(math.sqrt(after[:4].min()), 1e-5)) / 2
    role = ClientRole(one.scheme, one.architecture, policy=Policy(max_epsilon=between))
    boundaries, states = driven(one, role, absent=one_is_missing)
    (done,) = boundaries
    assert sorted(done.gathered.arrived) == [0, 1, 2, 3]
    assert done.failed
    for client in range(4):
        assert "giving away noise shared with others would bring it" in done.gathered.refused[client].text
        assert states[client].spent == pytest.approx(before[client], rel=1e-9)
    state = states[0]
    with pytest.raises(ProtocolError, match="giving away noise"):
        role.handle(state, Repair(0, 0, torch.tensor([4])), one.pool.clients[0])


def test_a_limit_cannot_be_kept_where_others_give_its_noise_away_on_the_servers_word(file: File) -> None:
    """A server that tells everybody else that a client is missing is given what covers it; nobody asks the client."""
    lax = of("nadp", rounds=1, policy=file("max_epsilon = 50.0"))
    with pytest.raises(ConfigError, match="--dropouts tolerate, or accept the server's word with --honest-arrivals"):
        train_job(lax, state=fresh_state(lax))
    trusting = of("nadp", rounds=1, policy=file("max_epsilon = 50.0"), honest_arrivals=True)
    assert len(train_job(trusting, state=fresh_state(trusting)).rows) == 1
    assert any("repairs only of clients" in one for one in _assumptions(trusting))
    assert not any("repairs" in one for one in _assumptions(of("nadp", rounds=1, dropouts="tolerate")))


def _assumptions(one: Job) -> tuple[str, ...]:
    return train_job(one, state=fresh_state(one)).privacy_journal.ledger().line("server").assumptions


def test_without_a_policy_a_client_holds_the_run_to_its_target() -> None:
    one = job(scheme="nadp", loss=None, rounds=3, epsilon=1.0)
    role = ClientRole(one.scheme, one.architecture)
    boundaries, _ = driven(one, role)
    assert all(done.failed == "" for done in boundaries)
    again = replace(one, config=one.config.with_changes(rounds=4))
    boundaries, _ = driven(again, role)
    assert "takes no further part" in boundaries[3].gathered.refused[0].text


def test_a_client_counts_colluders_and_other_clients_too() -> None:
    one = job(scheme="nadp", loss=None, rounds=2, epsilon=2.0, clients=10, collusion=0.3)
    _, states = driven(one, ClientRole(one.scheme, one.architecture))
    worst = max(epsilon_of(math.sqrt(state.spent), 1e-5) for state in states.values())
    assert worst == pytest.approx(2.0, rel=1e-6)
