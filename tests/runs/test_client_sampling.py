"""Rounds whose clients are drawn one by one: who may be asked, what is charged, and when a client sits out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from federation import job, next_ask, server_of, trained
from fedveil.config import RunConfig
from fedveil.engine import LocalEngine
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.ledger.gaussian import epsilon_of
from fedveil.protocol import directory
from fedveil.protocol.messages import Train
from fedveil.runs import session
from fedveil.runs.folder import read_ledger
from fedveil.runs.job import Job
from fedveil.runs.loop import Outcome, client_role, conduct, fresh_state, privacy_journal_of, train_job
from fedveil.runs.planning import Question, plan_run
from fedveil.schemes.registry import schemes

Interrupted = Callable[..., Path]


def sampled(scheme: str = "nadp", **changes: Any) -> Job:
    given: dict[str, Any] = {"clients": 8, "rounds": 8, "sampling_rate": 0.5, "loss": None, "secrets": "os"}
    return job(scheme=scheme, **{**given, **changes})


def ran(one: Job, **how: Any) -> Outcome:
    return train_job(one, state=fresh_state(one), **how)


_SLOW = {"hybridalpha": pytest.mark.slow}  # an exponentiation a number


@pytest.mark.parametrize("name", [pytest.param(info.name, marks=_SLOW.get(info.name, ())) for info in schemes()])
def test_every_scheme_trains_with_clients_drawn_by_chance(name: str) -> None:
    """Nobody's seed: of 12 clients fewer than three are drawn in all four rounds with a chance of 2·10⁻⁷."""
    # Keys of the length that secrets of a real run call for take long to make.
    one = sampled(name, rounds=4, clients=12, **({"secrets": None} if name in ("pile", "tp-smc") else {}))
    outcome = ran(one)
    assert outcome.state.round == 4
    sizes = [row["clients"] for row in outcome.rows if "failed" not in row]
    assert all(one.cohort.least <= size <= one.cohort.size for size in sizes)
    assert all("skipped" in row for row in outcome.rows if "failed" in row)
    ledger = outcome.privacy_journal.ledger(rounds=4)
    plan = one.scheme.plan
    if plan is not None and plan.accounting == "exact":
        told = [line.epsilon for line in ledger.lines if line.epsilon is not None]
        assert max(told) <= plan.target.epsilon * (1 + 1e-9)
        assert any("with probability 0.5; nothing is claimed for that" in note for note in ledger.notes)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that clients outgrow: noise for one round fewer than a client is drawn for on average."""
    monkeypatch.setattr(directory, "_usual", lambda trials, rate, times: (1, _most(trials, rate)))


def _most(trials: int, rate: float) -> int:
    return trials if trials == 8 else max(round(trials * rate) - 1, 1)


@pytest.mark.parametrize("scheme", ["ldp", "nadp", "veil-dp"])
def test_a_client_that_was_drawn_as_often_as_noise_is_made_for_sits_out(often: None, scheme: str) -> None:
    given = {"cover": "masks"} if scheme == "veil-dp" else {}
    one = sampled(scheme, rounds=12, secrets=None, **given)
    planned = one.cohort.most_participations(12)
    drawn = Counter(client for round in range(12) for client in one.cohort.draw(round))
    assert max(drawn.values()) > planned == 5
    outcome = ran(one)
    accountant, plan = outcome.privacy_journal.accountant, one.scheme.plan
    assert accountant is not None
    assert plan is not None
    assert plan.target.participations == planned
    asked: Counter[int] = Counter()
    for spent in accountant.spent.values():
        assert epsilon_of(float(spent.max()) ** 0.5, plan.target.delta) <= plan.target.epsilon * (1 + 1e-9)
        asked.update(int(client) for client in spent.nonzero()[0])
    assert set(asked) == set(drawn)
    assert any("failed" not in row for row in outcome.rows)


@pytest.mark.parametrize("scheme", ["ldp", "nadp"])
def test_clients_leave_by_their_own_account_where_the_server_keeps_none(often: None, scheme: str) -> None:
    one = sampled(scheme, rounds=12, secrets=None)
    _, boundaries = trained(one)  # this server has no accountant
    took_part = Counter(client for done in boundaries for client in done.gathered.arrived)
    refusals = [refusal.code for done in boundaries for refusal in done.gathered.refused.values()]
    assert max(took_part.values()) == one.cohort.most_participations(12) == 5
    assert refusals
    assert set(refusals) == {Code.ENDED}


@pytest.mark.parametrize("change", ["without", "beside", "empty"])
def test_clients_refuse_a_round_of_others_than_the_beacon_has_drawn(change: str) -> None:
    one = sampled("secagg", clients=10, sampling_rate=0.6, secrets=None)  # a round of 10 of 10 has nobody beside it
    engine, steps = LocalEngine(client_role(one), one.pool), server_of(one).run()
    ask = next_ask(steps)
    while not isinstance(ask.common, Train):
        ask = next_ask(steps, engine.gather(ask))
    assert ask.common.cohort is not None
    cohort = ask.common.cohort.tolist()
    named = {
        "without": cohort[1:],
        "beside": sorted({*cohort, next(client for client in range(10) if client not in cohort)}),
        "empty": [],
    }[change]
    lied = replace(ask, common=replace(ask.common, cohort=torch.tensor(named, dtype=torch.int64)))
    answer = engine.gather(lied)
    assert not answer.arrived
    assert all("names other clients than the epoch's schedule" in why.text for why in answer.refused.values())
    assert engine.gather(ask).arrived == tuple(cohort)


def test_a_round_that_draws_too_few_is_skipped_with_a_word_and_not_charged(tmp_path: Path) -> None:
    """Fixed seed: of 12 rounds of 6 clients at q = 0.3, some have fewer than the three that a sum must have."""
    said: list[str] = []
    one = sampled("veil-dp", cover="masks", clients=6, rounds=12, sampling_rate=0.3, secrets=None)
    outcome = ran(one, journal=tmp_path / "privacy.jsonl", say=said.append)
    skipped = [row["round"] for row in outcome.rows if "skipped" in row]
    held = [row["round"] for row in outcome.rows if "skipped" not in row]
    assert skipped
    assert held
    assert all(f"Round {round} is skipped, and costs nothing" in "".join(said) for round in skipped)
    lines = [json.loads(line) for line in (tmp_path / "privacy.jsonl").read_text().splitlines()]
    assert [entry["skipped"] + 1 for entry in lines if "skipped" in entry] == skipped
    assert [entry["begin"][0] + 1 for entry in lines if "begin" in entry and "arrived" not in entry] == held
    accountant = outcome.privacy_journal.accountant
    assert accountant is not None
    assert accountant.rounds == 12
    price = one.scheme.plan.target.mu**2 / one.cohort.most_participations(12)  # type: ignore[union-attr]
    drawn = Counter(client for round in held for client in one.cohort.draw(round - 1))
    for client in range(6):
        most = max(float(spent[client]) for spent in accountant.spent.values())
        assert most <= drawn[client] * price * (1 + 1e-9)
        assert (most > 0) == (drawn[client] > 0)


@pytest.mark.parametrize("drawn", [(0, 1, 2, 3), ()])
def test_a_run_stops_where_no_draw_could_be_large_enough(
    drawn: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether chance would have made its first round one of everybody, or of nobody."""
    monkeypatch.setattr(directory.Cohort, "_sampled", lambda *_: drawn)
    one = sampled("secagg", clients=4, sampling_rate=0.9)
    gone = {2, 3}
    engine = LocalEngine(client_role(one), one.pool, absent=lambda request, client: client in gone)
    server = server_of(one)
    with pytest.raises(ProtocolError, match="2 clients are there, and a round must have 3"):
        conduct(one, engine, server, privacy_journal_of(one, None, server.state), state=server.state)


def test_a_run_with_skipped_rounds_goes_on_where_it_was_stopped(interrupted: Interrupted, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "scheme": "nadp",
        "model_options": {"depth": 1, "width": 4},
        "momentum": 0.0,
        "clients": 5,
        "sampling_rate": 0.4,
        "checkpoint_every": 1,
        "seed": 2,
    }
    whole = session.run(RunConfig.from_mapping({**SMALL, **settings}), tmp_path / "whole", quiet=True)
    assert whole["skipped_rounds"] > 0
    skipped = [row for row in rows_of(tmp_path / "whole") if "skipped" in row]
    run = interrupted(tmp_path / "run", after=skipped[0]["round"], **settings)
    again = session.resume(run, quiet=True)
    assert again["rounds"] == whole["rounds"] == 10
    assert [row["round"] for row in rows_of(run)] == list(range(1, 11))
    assert read_ledger(run).lines == read_ledger(tmp_path / "whole").lines


def test_rounds_that_the_clients_policy_would_refuse_are_not_asked_for(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("min_cohort = 5\n")
    one = sampled("nadp", policy=str(policy), secrets=None)
    outcome = ran(one)
    assert one.cohort.least == 5
    assert {row["clients"] for row in outcome.rows} - {0} == {5, 6} - {0}
    assert not any("refused" in row for row in outcome.rows)


def test_sampled_rounds_go_on_without_those_that_drop_out() -> None:
    one = sampled("veil-dp", cover="masks", clients=12, sampling_rate=0.7, simulate_dropout=0.05, secrets=None, seed=4)
    outcome = ran(one)
    assert any("failed" not in row and row["clients"] < len(one.cohort.draw(row["round"] - 1)) for row in outcome.rows)
    ledger = outcome.privacy_journal.ledger(rounds=8)
    plan = one.scheme.plan
    assert plan is not None
    assert max(line.epsilon or 0.0 for line in ledger.lines) <= plan.target.epsilon * (1 + 1e-9)


def test_the_masks_bound_is_said_of_the_smallest_round_that_is_held() -> None:
    few, all_ = (sampled("secagg", clients=20, collusion=0.3, **how) for how in ({}, {"sampling_rate": None}))
    said = [next(text for text in one.scheme.caveats.assumptions if "clients collude" in text) for one in (few, all_)]
    assert "surround nobody" in said[1]
    assert "not bounded" in said[0]
    assert "of all 20 clients" in said[0]


def test_noise_for_a_sampling_rate_is_planned_for_the_rounds_of_whoever_is_drawn_most() -> None:
    samples, options = (100,) * 50, {"epsilon": 1.0}
    fixed = plan_run(Question(scheme="ldp", samples=samples, rounds=200, cohort=10, options=options))
    chance = plan_run(Question(scheme="ldp", samples=samples, rounds=200, sampling_rate=0.2, options=options))
    everybody = plan_run(Question(scheme="ldp", samples=samples, rounds=200, options=options))
    assert chance.participations == 61  # of which a client of 50 is drawn more often with a chance of 1 % at most
    assert chance.cohort == fixed.cohort == 10
    assert chance.exact is not None
    assert everybody.exact is not None
    assert chance.exact.own[0] == pytest.approx(everybody.exact.own[0] * (61 / 200) ** 0.5, rel=1e-6)
    assert chance.ledger.line("server").epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cohort": 3}, "not both"),
        ({"sampling_rate": 0.0}, "above 0"),
        ({"sampling_rate": 1.5}, "at most 1"),
        ({"scheme": "secagg", "clients": 4, "sampling_rate": 0.01}, "--sampling-rate 0.01 of 4 clients a round has 1"),
        ({"scheme": "mpdp", "sigma_own": 1.0, "sigma_pair": 1.0}, "sizes differ"),
        ({"scheme": "secagg", "robust_groups": 4, "clients": 16}, "ask everybody, not some"),
    ],
)
def test_what_does_not_go_with_a_sampling_rate_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sampled(**given)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SMALL: dict[str, Any] = {"rounds": 10, "evaluate_every": 0, "batch_size": 30, "lr": 0.05}
