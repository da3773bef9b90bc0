"""Answers without training: the same numbers that the parts give one by one, for few clients and for very many."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from fedveil.errors import ConfigError
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER
from fedveil.ledger.correlated import charges
from fedveil.ledger.gaussian import epsilon_of, paper_sigma, sigma_of
from fedveil.runs import planning as pricing
from fedveil.runs.planning import Planned, Question, even_sizes, plan_run


def asked(
    scheme: str, *, clients: int = 10, rounds: int = 8, cohort: float | None = None, **options: float | str | None
) -> Planned:
    sizes = even_sizes(clients, mean=100, ratio=1)
    return plan_run(Question(scheme=scheme, samples=sizes, rounds=rounds, cohort=cohort, options=options))


def worst(answer: Planned) -> float:
    found = [one.epsilon for one in answer.ledger.lines if one.epsilon is not None]
    return max(found)


def test_local_noise_is_the_analytic_gaussian_mechanisms() -> None:
    answer = asked("ldp", rounds=25, epsilon=1.0, clip=0.5)
    assert answer.exact is not None
    assert answer.paper is not None
    # S = 2·C = 1 on a full batch, √25 rounds.
    assert answer.exact.own[0] == pytest.approx(5 * sigma_of(1.0, 1e-5), rel=1e-6)
    assert answer.paper.own[0] == pytest.approx(5 * paper_sigma(1.0, 1e-5), rel=1e-12)
    assert answer.exact.shared is None
    assert worst(answer) == pytest.approx(1.0, abs=1e-6)


def test_a_batch_instead_of_everything_multiplies_the_noise() -> None:
    sizes = even_sizes(10, mean=100, ratio=1)
    full, batch = (
        plan_run(Question(scheme="nadp", samples=sizes, rounds=4, batch_size=size)).exact for size in (0, 10)
    )
    assert full is not None
    assert batch is not None
    assert batch.in_sum == pytest.approx(10 * full.in_sum)


def test_the_papers_noise_is_charged_for_what_it_really_proves() -> None:
    """Pairs by the paper cover two queries where θ is 2k/(k + 1) at most: its ε is not reached."""
    answer = asked("nadp", epsilon=1.0, accounting="paper")
    server = answer.ledger.line(SERVER).epsilon
    sigma = paper_sigma(1.0, 1e-5, 2 * 8)
    # θ of a complete graph of k = 10 with pairs as strong as a client's own noise: 2·10/11.
    assert server == pytest.approx(epsilon_of(math.sqrt(8 * 20 / 11) / sigma, 1e-5), rel=1e-5)
    assert answer.accounting == "paper"
    assert answer.exact is not None
    assert answer.exact.strength == 10


def test_a_cohort_costs_a_client_only_the_rounds_it_is_drawn_for() -> None:
    answer = asked("nadp", rounds=20, cohort=0.5, epsilon=1.0)
    assert answer.cohort == 5
    assert answer.participations == 10  # the beacon's cohorts go around in turn
    assert worst(answer) == pytest.approx(1.0, rel=0.02)
    assert worst(answer) <= 1.0 + 1e-9


def test_one_round_taken_for_all_is_what_rounds_one_by_one_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = asked("ldp", clients=12, cohort=0.5, rounds=30)
    monkeypatch.setattr(pricing, "ROUND_BY_ROUND_UP_TO", 1)
    bound = asked("ldp", clients=12, cohort=0.5, rounds=30)
    assert any("taken" in note for note in bound.ledger.notes)
    for adversary in (SERVER, CLIENTS):
        ours, theirs = bound.ledger.line(adversary).epsilon, one_by_one.ledger.line(adversary).epsilon
        assert theirs is not None
        assert theirs * (1 - 1e-9) <= ours <= theirs * 1.1  # type: ignore[operator]
    assert bound.ledger.rounds == one_by_one.ledger.rounds == 30


def test_shuffled_cohorts_are_planned_for_the_client_with_the_busiest_seats() -> None:
    answer = asked("nadp", clients=100, cohort=10, rounds=100, epsilon=1.0)
    assert answer.participations == 7 + 4  # of 64 and of 36 rounds
    assert "the worst client of one round, taken 11 times" in answer.ledger.notes
    assert asked("ldp", clients=100, cohort=10, rounds=100, epsilon=1.0).participations > 11  # by the seed


def test_a_large_sparse_graph_is_bounded_as_it_would_be_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Mapping[str, float | str] = {"neighbours": 4, "accounting": "paper", "pair_strength": 30.0}
    exactly = asked("nadp", clients=80, rounds=1, **options)
    monkeypatch.setattr(pricing, "DENSE_UP_TO", 50)
    bound = asked("nadp", clients=80, rounds=1, **options)
    assert any("certified bound" in note for note in bound.ledger.notes)
    for adversary in (SERVER, CLIENTS):
        ours, theirs = bound.ledger.line(adversary), exactly.ledger.line(adversary)
        assert theirs.epsilon is not None
        assert ours.epsilon == pytest.approx(theirs.epsilon, rel=1e-3)
        assert ours.epsilon >= theirs.epsilon * (1 - 1e-6)  # type: ignore[operator]
    assert bound.ledger.line(SERVER).worst_client == exactly.ledger.line(SERVER).worst_client


def test_colluders_on_a_large_sparse_graph_are_an_estimate_where_there_is_no_limit_to_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pricing, "DENSE_UP_TO", 50)
    told = asked("nadp", clients=80, rounds=1, neighbours=4, collusion=0.2, accounting="paper").ledger.line(COLLUSION)
    assert "an estimate, not a proof" in told.why
    held = asked("nadp", clients=80, rounds=1, neighbours=4, collusion=0.2)
    line, alone = held.ledger.line(COLLUSION), asked("ldp", clients=80, rounds=1)
    assert "each client's own noise is all that counts" in line.why
    assert line.verdict == "differential privacy"
    assert line.epsilon == pytest.approx(3.0, abs=1e-6)
    assert held.exact is not None
    assert alone.exact is not None
    assert held.exact.in_sum == pytest.approx(alone.exact.in_sum, rel=1e-3)


@pytest.mark.slow
def test_ten_thousand_clients_on_a_sparse_graph_need_no_dense_matrix() -> None:
    answer = asked("nadp", clients=10_000, rounds=200, neighbours=5, epsilon=1.0)
    assert worst(answer) == pytest.approx(1.0, abs=1e-6)
    assert answer.exact is not None
    assert answer.paper is not None
    assert answer.exact.in_sum > 0


def test_the_first_round_is_charged_by_the_covering_it_shows() -> None:
    sizes = even_sizes(9, mean=50, ratio=3)
    answer = plan_run(Question(scheme="nadp", samples=sizes, rounds=1, options={"epsilon": 1.0}))
    from fedveil.protocol.directory import Cohort
    from fedveil.uplink.noise_plan import NoisePlan, Target

    plan = NoisePlan(Target(1.0, 1e-5, 1, 1), "pairs")
    members = Cohort(9, 9, 0).draw(0)
    noise_layout = plan.noise_layout(members, sizes, [2.0] * 9, seed=b"any: the graph is complete")
    mu = math.sqrt(float(charges(noise_layout).max()))
    assert answer.ledger.line(SERVER).epsilon == pytest.approx(epsilon_of(mu, 1e-5), rel=1e-9)
    assert answer.exact is not None
    assert answer.exact.own[1] == pytest.approx(float(np.sqrt(noise_layout.residual.max())), rel=1e-9)


def test_sizes_run_evenly_from_least_to_most() -> None:
    sizes = even_sizes(5, mean=300, ratio=2)
    assert sizes == (200, 250, 300, 350, 400)
    assert even_sizes(1, mean=7, ratio=1) == (7,)


def test_secret_sampling_needs_less_noise_and_only_where_nobody_sees_the_sample() -> None:
    pytest.importorskip("dp_accounting")
    answer = asked("ldp", clients=3, rounds=50, epsilon=1.0, secret_sampling=0.1)
    assert answer.sampled is not None
    assert answer.sampled.relation == "replace-one"
    assert answer.sampled.multiplier < 0.2 * answer.sampled.multiplier_without
    assert worst(answer) == pytest.approx(1.0, rel=0.01)
    with pytest.raises(ConfigError, match="drawn by the server"):
        asked("cdp", secret_sampling=0.1)
