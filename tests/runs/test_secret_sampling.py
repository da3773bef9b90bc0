"""Records that a client samples by its own secrets: what leaves, what is charged, and where it is refused."""

from __future__ import annotations

import pytest
import torch

from driving import drive
from federation import job, server_of
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError
from fedveil.ledger.gaussian import sampled_epsilon
from fedveil.protocol.phases import RoundDone
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.secrets import SeededSecrets
from fedveil.work.clipping import ClippedSamples
from fedveil.work.messages import Workspace

TARGET = 0.5
"""Small: the more noise, the quicker it is accounted for."""


def sampled(**settings: object) -> Job:
    given = {"scheme": "ldp", "secret_sampling": 0.2, "rounds": 4, "epsilon": TARGET, "clients": 3, "loss": None}
    return job(**{**given, **settings})  # type: ignore[arg-type]


def test_the_target_is_met_by_less_noise_than_without_sampling() -> None:
    one, whole = sampled(), sampled(secret_sampling=None)
    found = [train_job(each, state=fresh_state(each)).privacy_journal for each in (one, whole)]
    ledgers = [privacy_journal.ledger().line("server") for privacy_journal in found]
    assert all(line.epsilon is not None and line.epsilon <= TARGET for line in ledgers)
    assert ledgers[0].epsilon == pytest.approx(TARGET, rel=0.02)
    # In units of the largest change of the whole sum: sampled sums are divided by their expected size.
    noises = [
        float(privacy_journal.first.residual[0]) ** 0.5
        for privacy_journal in found
        if privacy_journal.first is not None
    ]
    assert noises[0] < 0.7 * noises[1] / 0.2


def test_epsilon_is_that_of_the_rounds_a_client_took_part_in() -> None:
    one = sampled()
    plan = one.scheme.plan
    assert plan is not None
    privacy_journal = train_job(one, state=fresh_state(one)).privacy_journal
    expected = sampled_epsilon(noise_multiplier=plan.noise_multiplier(), sampling_rate=0.2, rounds=4, delta=1e-5)
    assert privacy_journal.ledger().line("server").epsilon == expected
    assert any("batch" in one for one in privacy_journal.ledger().line("server").assumptions)


def test_a_client_answers_no_more_rounds_than_its_noise_is_made_for() -> None:
    """It has no policy of its own; a server that went on asking was answered, and no client counted."""
    one, longer = sampled(rounds=2), sampled()
    boundaries: list[RoundDone] = []
    role = client_role(one)
    role._schedule = (longer.config.rounds, longer.cohort)
    engine = LocalEngine(role, one.pool)
    drive(engine, server_of(longer).run(), on_round=boundaries.append)
    assert [len(done.gathered.arrived) for done in boundaries] == [3, 3, 0, 0]
    assert "its noise is made for 2 rounds" in boundaries[2].gathered.refused[0].text


def test_batches_follow_from_the_clients_secrets_and_not_from_the_runs_seed() -> None:
    one = sampled()
    work = one.scheme.work
    assert isinstance(work, ClippedSamples)
    data = one.pool.clients[0]
    workspaces = [
        Workspace(one.architecture, one.scheme.layout(one.architecture), SeededSecrets(seed)) for seed in (1, 1, 2)
    ]
    drawn = [work._chosen(workspace, data, 0) for workspace in workspaces]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    sizes = [len(work._chosen(workspaces[0], data, round)) for round in range(400)]
    # 40,000 draws with probability 0.2: the mean lies within 5 standard errors (false alarm 6e-7).
    error = (0.2 * 0.8 / (400 * len(data))) ** 0.5
    assert abs(sum(sizes) / 400 / len(data) - 0.2) < 5 * error


def test_the_sum_is_divided_by_its_expected_size_and_an_empty_batch_gives_zero() -> None:
    one = sampled(secret_sampling=1.0)
    whole = sampled(secret_sampling=None)
    veil = one.scheme.downlink.veil(one.architecture, one.weights, stream=one.secrets.stream("x"), head_level=None)
    data = one.pool.clients[0]
    results = []
    for each in (one, whole):
        workspace = Workspace(each.architecture, each.scheme.layout(each.architecture), SeededSecrets(1))
        results.append(each.scheme.work.run(workspace, veil.broadcast(), data, round=0))
    torch.testing.assert_close(results[0], results[1])
    rare = sampled(secret_sampling=1e-9, epsilon=1.0, rounds=1)
    workspace = Workspace(rare.architecture, rare.scheme.layout(rare.architecture), SeededSecrets(1))
    nothing = rare.scheme.work.run(workspace, veil.broadcast(), data, round=0)
    assert float(nothing[:-1].abs().max()) == 0.0
    assert float(nothing[-1]) == len(data)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accounting": "paper"}, "exact"),
        ({"local_steps": 3}, "local training"),
        ({"secret_sampling": 1.5}, "secret_sampling"),
        ({"scheme": "nadp"}, "no option"),
    ],
)
def test_where_it_proves_nothing_it_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampled(**settings)
