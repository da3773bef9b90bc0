"""Noise of an assumed size: MP-DP's units, where it goes and where it does not, and that nothing is claimed for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from federation import distance, job
from fedveil.config import RunConfig
from fedveil.downlink import noise_kinds
from fedveil.downlink.decomposed import BOUNDED
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.gaussian import mpdp_epsilon, mpdp_sigma, paper_sigma
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Ask, Gathered
from fedveil.roles.server import ServerRole
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.uplink.assumed import AssumedNoise
from fedveil.uplink.noised import Repair
from fedveil.uplink.plain import AssumedCentral
from fedveil.work.messages import Workspace


def first_round(one: Job) -> tuple[Ask, dict[int, Tensor], dict[int, Tensor], dict[int, ClientState]]:
    """The first round's ask, what clients computed, what they sent, and their states."""
    server = ServerRole(
        one.scheme,
        one.architecture,
        fresh_state(one),
        secrets=one.secrets,
        cohort=one.cohort,
        optimiser=one.optimiser,
        rounds=1,
    )
    role = client_role(one)
    states = {data.client: ClientState(data.client) for data in one.pool.clients}
    steps = server.run()
    step: Any = next(steps)
    while True:
        if isinstance(step, Ask):
            replies = []
            for client in step.to:
                states[client], reply = role.handle(states[client], step.common, one.pool.clients[client])
                replies.append(reply)
            if isinstance(step.common, Train):
                break
            for reply in replies:
                step.into.add(reply)
            step = steps.send(Gathered(step.to, {}, (), 0, 0))
        else:
            step = steps.send(None)
    layout = one.scheme.layout(one.architecture)
    workspace = Workspace(one.architecture, layout)
    bare = {
        k: one.scheme.work.run(workspace, step.common.broadcast, one.pool.clients[k], round=0).double() for k in step.to
    }
    return step, bare, {one.client: one.payload for one in replies if isinstance(one, Upload)}, states


def split(one: Job, vector: Tensor) -> dict[str, Tensor]:
    return one.scheme.layout(one.architecture).split(vector)


def noise_of(one: Job, bare: dict[int, Tensor], sent: dict[int, Tensor]) -> dict[int, Tensor]:
    return {k: split(one, sent[k] - bare[k])["gradients"][0] for k in sent}


@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive"])
def test_noise_covers_the_first_tensor_and_nothing_else(scheme: str) -> None:
    one = job(scheme=scheme, rounds=1, clients=4, **({"neighbours": 2} if scheme == "mpdp" else {}))
    _, bare, sent, _ = first_round(one)
    for k in sent:
        ours, theirs = split(one, sent[k]), split(one, bare[k])
        assert len(ours["gradients"]) > 2
        assert bool((ours["gradients"][0] != theirs["gradients"][0]).all())
        for name in ("values", "statistics", "weight"):
            assert torch.equal(ours[name], theirs[name])
        assert torch.equal(ours["gradients"][1:], theirs["gradients"][1:])


@pytest.mark.parametrize("calibration", ["equations", "tail"])
@pytest.mark.parametrize("how", ["iid", "size"])
def test_the_mean_carries_the_papers_deviation(how: str, calibration: str) -> None:
    """σ/√K on the mean of K gradients where each client adds σ (Eq. (7)), σ/K where they share it, whatever the
    clients' sizes; pair noise is gone.

    1,210 coordinates: the χ² test has a false-alarm rate of 1e-4, and so has the Kolmogorov–Smirnov test.
    """
    how_shared = {"calibration": "tail", "neighbours": 2} if calibration == "tail" else {"sensitivity": 0.25}
    one = job(scheme="mpdp-naive", rounds=1, clients=5, how=how, ratio=3.0, epsilon=2.0, **how_shared)
    _, bare, sent, _ = first_round(one)
    noise = torch.stack(list(noise_of(one, bare, sent).values())).sum(0) / sum(len(c) for c in one.pool.clients)
    wanted = paper_sigma(2.0, 1e-5) / 5 if calibration == "tail" else 0.25 * mpdp_sigma(2.0, 1e-5) / math.sqrt(5)
    count = len(noise)
    assert count == 1210
    low, high = stats.chi2(count).ppf([5e-5, 1 - 5e-5])
    assert low < float((noise / wanted).square().sum()) < high
    assert stats.kstest((noise / wanted).numpy(), "norm").pvalue > 1e-4


def test_pair_noise_is_as_strong_as_asked_for_and_cancels() -> None:
    """One upload's variance is (1 + degree·λ²)·σ²/K; χ² test with a false-alarm rate of 1e-4 for each of 5 clients."""
    one = job(scheme="mpdp-naive", rounds=1, clients=5, neighbours=4, pair_strength=3.0, calibration="tail")
    _, bare, sent, _ = first_round(one)
    noise = noise_of(one, bare, sent)
    mean_size = sum(len(c) for c in one.pool.clients) / 5
    expected = (1 + 4 * 9.0) * paper_sigma(3.0, 1e-5) ** 2 / 5 * mean_size**2
    low, high = stats.chi2(1210).ppf([5e-5, 1 - 5e-5])
    for k in sent:
        assert low < float(noise[k].square().sum()) / expected < high
    quiet = job(scheme="mpdp-naive", rounds=1, clients=5, neighbours=4, skip_cancelling=True, calibration="tail")
    _, quiet_bare, quiet_sent, _ = first_round(quiet)
    summed = torch.stack(list(noise.values())).sum(0)
    assert distance(summed, torch.stack(list(noise_of(quiet, quiet_bare, quiet_sent).values())).sum(0)) < 1e-9


def test_for_the_server_decomposed_noise_is_bounded() -> None:
    """Given the scales, what the paper calls Gaussian has a largest value, which tells neighbours apart for certain."""
    one = job(scheme="mpdp", rounds=1, clients=4, neighbours=2, skip_cancelling=True)
    _, bare, sent, _ = first_round(one)
    kinds = noise_kinds(one.architecture)
    mean_size = sum(len(c) for c in one.pool.clients) / 4
    limit = math.sqrt(2.0) * mpdp_sigma(3.0, 1e-5, math.sqrt(1000.0)) / 2 * mean_size
    for noise in noise_of(one, bare, sent).values():
        within = noise[kinds == BOUNDED].abs()
        assert len(within) > 1000
        assert 0.9 * limit < float(within.max()) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive", "mp-cdp"])
def test_nothing_is_claimed_for_it(scheme: str) -> None:
    settings = {"neighbours": 2} if scheme == "mpdp" else {}
    one = job(scheme=scheme, rounds=1, clients=4, **settings)
    assert one.scheme.plan is None
    privacy_journal = train_job(one, state=fresh_state(one)).privacy_journal
    assert privacy_journal.accountant is None
    ledger = privacy_journal.ledger()
    assert {line.verdict for line in ledger.lines} == {"none"}
    assert "upload.gradients" in ledger.line("server").why


def test_everybody_is_a_neighbour_where_fewer_clients_than_neighbours_take_part() -> None:
    noise = AssumedNoise(1.0, "gaussian", neighbours=5)
    graph = noise.graph(RoundContext(0, 0, (2, 5, 9)))
    assert [graph.neighbours(k) for k in (2, 5, 9)] == [(5, 9), (2, 9), (2, 5)]


def test_a_graph_that_falls_apart_is_refused() -> None:
    one = job(scheme="mpdp", rounds=1, clients=40, neighbours=1, seed=3)
    with pytest.raises(ConfigError, match=r"not connected\. Raise neighbours"):
        first_round(one)


def test_a_client_outside_the_cohort_and_phases_the_scheme_has_not_are_refused() -> None:
    noise = AssumedNoise(1.0, "gaussian")
    with pytest.raises(ProtocolError, match="no part"):
        noise.admit(ClientState(3), RoundContext(0, 0, (0, 1)), None)
    with pytest.raises(ProtocolError, match="Repair, which this scheme has not"):
        noise.answer(ClientState(3), Repair(0, 0, torch.tensor([1])), None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"law": "cauchy"}, "cauchy"), ({"strength": -1.0}, "pair_strength"), ({"strength": math.inf}, "pair_strength")],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        AssumedNoise(**{"sigma": 1.0, "law": "gaussian", **settings})


@pytest.mark.parametrize("settings", [{"epsilon": 0.0}, {"epsilon": -2.0}, {"delta": 0.0}, {"delta": 1.0}])
def test_impossible_targets_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        job(scheme="mpdp", rounds=1, **settings)


def test_noise_added_once_has_the_papers_deviation_over_k() -> None:
    """χ² test on 1,210 coordinates, false-alarm rate 1e-4."""
    with_noise, without = job(scheme="mp-cdp", rounds=1, clients=5, lr=1.0), job(scheme="lossless", rounds=1, lr=1.0)
    ends = [train_job(one, state=fresh_state(one)).state.weights.parameters for one in (with_noise, without)]
    central = with_noise.scheme.central
    assert isinstance(central, AssumedCentral)
    noise = (ends[1] - ends[0]) / (paper_sigma(3.0, 1e-5) / 5)
    low, high = stats.chi2(1210).ppf([5e-5, 1 - 5e-5])
    assert low < float(noise.square().sum()) < high


def test_missing_clients_leave_their_pairs_noise_and_the_round_goes_on() -> None:
    one = job(scheme="mpdp", rounds=3, clients=5, neighbours=2, simulate_dropout=0.3)
    outcome = train_job(one, state=fresh_state(one))
    assert any(row["clients"] < 5 for row in outcome.rows)
    assert not any("failed" in row for row in outcome.rows)


@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive", "mp-cdp"])
def test_clients_count_the_same_where_the_mean_is_the_papers(scheme: str) -> None:
    """Without noise to speak of the step is 1/K of the sum of clients' gradients, whoever has more samples."""
    data: dict[str, Any] = {"rounds": 1, "clients": 4, "how": "size", "ratio": 4.0, "loss": "square", "lr": 0.1}
    settings = {"scheme": scheme, "sensitivity": 1e-10, "head_noise": False}
    equal = job(**data, **settings, client_weights="equal")
    _, bare, _, _ = first_round(job(**data, scheme="fedavg"))
    gradients = [split(equal, vector / vector[-1])["gradients"][0] for vector in bare.values()]
    start = equal.weights.parameters.double()
    outcome = train_job(equal, state=fresh_state(equal))
    moved = outcome.state.weights.parameters.double()
    assert distance((start - moved) / 0.1, torch.stack(gradients).mean(0)) < 1e-4
    weighted = job(**data, **settings)
    other = train_job(weighted, state=fresh_state(weighted)).state.weights.parameters.double()
    assert distance(other, moved) > 1e-3 * distance(start, moved)
    assert any("1/K" in note for note in outcome.privacy_journal.ledger().notes)


def test_deviations_that_are_given_are_those_of_the_noise() -> None:
    """A client's bounded noise lies within √2·σ_η, that of a sum within K times as much; what pairs share cancels."""
    given = {"neighbours": 4, "sigma_own": 0.5, "sigma_pair": 2.0, "client_weights": "equal"}
    one = job(scheme="mpdp", rounds=1, clients=5, **given)
    _, bare, sent, _ = first_round(one)
    kinds = noise_kinds(one.architecture)
    noise = {k: split(one, sent[k] - bare[k] / bare[k][-1])["gradients"][0] for k in sent}
    assert isinstance(one.scheme.uplink, AssumedNoise)
    assert (one.scheme.uplink.own_sigma(5), one.scheme.uplink.own_sigma(3)) == (0.5, 0.5)
    bounded = torch.stack(list(noise.values()))[:, kinds == BOUNDED]
    assert float(bounded.sum(0).abs().max()) <= math.sqrt(2.0) * 0.5 * 5 * (1 + 1e-9)
    assert float(bounded.abs().max()) > math.sqrt(2.0) * 2.0


@pytest.mark.parametrize(
    ("given", "said"),
    [((0.5, 20.0), "for each round ε = "), ((0.5, 0.0), "gives no ε")],
)
def test_the_ledger_says_what_follows_from_deviations(given: tuple[float, float], said: str) -> None:
    one = job(scheme="mpdp", rounds=1, clients=4, neighbours=3, sigma_own=given[0], sigma_pair=given[1])
    assert said in one.scheme.caveats.paper
    if given[1]:
        follows = mpdp_epsilon(0.5 * 2.0, 1e-5, 40.0)
        assert f"ε = {follows:.4g}" in one.scheme.caveats.paper
        assert mpdp_sigma(follows, 1e-5, 40.0) == pytest.approx(1.0)


@pytest.mark.parametrize("other", [{"epsilon": 3.0}, {"pair_strength": 2.0}, {"calibration": "tail"}])
def test_deviations_and_what_would_say_them_again_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="would say it again"):
        RunConfig(scheme="mpdp", sigma_own=1.0, sigma_pair=1.0, **other)


@pytest.mark.parametrize("given", [{"sigma_own": 1.0}, {"sigma_pair": 1.0}, {"sigma_own": 0.0, "sigma_pair": 1.0}])
def test_half_a_pair_of_deviations_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="are given together"):
        job(scheme="mpdp", clients=4, neighbours=3, **given)
