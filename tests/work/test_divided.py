"""What is clipped and noised of a divided update: by how much data can move it, and how much noise lies on it.

Statistical tests use fixed seeds; each raises a false alarm with probability 1e-6 at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from client_held.relaying import Covered, Recording, watch_uploads
from federation import held_run, job
from fedveil.client_held import divided as parallel
from fedveil.client_held.ciphers import Pads
from fedveil.client_held.divided import Parallel, divided, put_together
from fedveil.client_held.messages import Divided
from fedveil.downlink import Broadcast
from fedveil.errors import ConfigError, NumericError
from fedveil.ledger.gaussian import mu_of
from fedveil.ledger.policy import Policy
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.secrets import SeededSecrets
from fedveil.uplink.grid import ROUNDING, FixedPoint
from fedveil.uplink.noised import gridded
from fedveil.uplink.vote import Ratio
from fedveil.work.clipping import RAN_AWAY, DividedUpdate
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.messages import ClientData, Workspace

FALSE_ALARM = 1e-6
SETTINGS: dict[str, Any] = {
    "scheme": "paraaegis",
    "loss": "cross-entropy",
    "lr": 0.1,
    "batch_size": 16,
    "clients": 4,
    "rounds": 2,
    "how": "size",
    "ratio": 3.0,
    "cipher": "pads",
    "share": 0.1,
}


def of(**changes: Any) -> Job:
    return job(**{**SETTINGS, **changes})


# ---- the work


def bench_of(one: Job, work: Any) -> tuple[Workspace, Broadcast]:
    layout = work.layout(one.architecture, tensors=1)
    veil = one.scheme.downlink.veil(one.architecture, one.weights, stream=one.secrets.stream("v"), head_level=None)
    return Workspace(one.architecture, layout, SeededSecrets(1)), veil.broadcast()


@pytest.mark.parametrize("reports", [True, False])
def test_it_is_the_update_of_local_steps_not_yet_clipped(reports: bool) -> None:
    one = of()
    local = one.scheme.work.local  # type: ignore[attr-defined]
    work = DividedUpdate(local, 0.01, reports=reports)
    (workspace, broadcast), (own, _) = bench_of(one, work), bench_of(one, local)
    for data in one.pool.clients:
        ours = work.run(workspace, broadcast, data, round=1)
        theirs = local.run(own, broadcast, data, round=1)
        length = len(ours) - 1
        assert length == one.architecture.size + reports
        assert torch.allclose(ours[:length], theirs[:length], rtol=1e-12, atol=1e-12)
        assert float(ours[-1]) == len(data)
        assert float(ours[: one.architecture.size].norm()) > 0.01 * len(data)


def test_a_training_that_runs_away_has_moved_nothing_and_one_on_a_broken_model_is_refused() -> None:
    one = of()
    work = one.scheme.work
    assert isinstance(work, DividedUpdate)
    workspace, broadcast = bench_of(one, work)
    data = one.pool.clients[1]
    x, y = data.take(torch.arange(len(data)))
    wild = ClientData(1, torch.full_like(x, float("nan")), y)
    found = work.run(workspace, broadcast, wild, round=0)
    size = one.architecture.size
    assert not found[:size].any()
    assert float(found[size]) == RAN_AWAY * len(data)
    assert not found[size + 1 : -1].any()
    assert float(found[-1]) == len(data)
    broken = replace(broadcast, parameters=torch.full_like(broadcast.parameters, float("inf")))
    with pytest.raises(NumericError, match="The model of round 1 holds numbers that are not finite"):
        work.run(workspace, broken, data, round=0)
    (_, reason), (_, other) = work.run_many(workspace, broken, [data, data], round=0)
    assert isinstance(reason, NumericError)
    assert isinstance(other, NumericError)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_is_none_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="clipping bound must be a positive number"):
        DividedUpdate(of().scheme.work.local, clip)  # type: ignore[attr-defined]


def test_the_reach_of_a_client_is_twice_theta_times_its_samples() -> None:
    work = of(clip=0.7).scheme.work
    assert work.sensitivity(30) == 2 * 0.7 * 30  # type: ignore[attr-defined]
    assert work.unit == "client"  # type: ignore[attr-defined]


# ---- dividing


def test_dividing_and_putting_together_are_inverse() -> None:
    numbers = np.random.default_rng(3)
    for size, more, count in ((10, 2, 3), (10, 0, 0), (10, 1, 10), (1, 0, 1), (1000, 7, 100)):
        whole = torch.from_numpy(numbers.normal(size=size + more))
        winners = torch.from_numpy(np.sort(numbers.permutation(size)[:count]))
        rest, hidden = divided(whole, winners, size)
        assert (len(rest), len(hidden)) == (size - count, count + more)
        assert torch.equal(hidden[:count], whole[winners])
        again = torch.full_like(whole, math.nan)
        put_together(again, winners, size, rest=rest, hidden=hidden)
        assert torch.equal(again, whole)


def test_what_is_not_hidden_needs_noise_and_what_is_needs_a_cipher() -> None:
    with pytest.raises(ConfigError, match="there is no cipher to hide them with"):
        Parallel(Ratio(0.1), None, of().scheme.plan)
    with pytest.raises(ConfigError, match="without noise, share must be 1"):
        Parallel(Ratio(0.1), of().scheme.uplink.cipher)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="without noise, share must be 1"):
        Parallel(Ratio(1.0, 0.9), of().scheme.uplink.cipher)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="strategy"):
        of(strategy="most")


# ---- clipping and noise, as the server sees them


def observed(monkeypatch: pytest.MonkeyPatch, one: Job) -> list[tuple[Covered, Divided]]:
    """Every upload of a run beside what it covers."""
    seen, kept = watch_uploads(monkeypatch), []

    def through(role: Any) -> Recording:
        kept.append(Recording(role))
        return kept[0]

    steps: set[float] = {1.0}

    def noting(*facts: Any) -> FixedPoint:
        codec = gridded(*facts)
        steps.clear()
        steps.add(codec.step)
        return codec

    monkeypatch.setattr(parallel, "gridded", noting)
    held_run(one, through=through)
    (step,) = steps  # the cohort is the same in every round
    uploads = {
        (each.round, each.client): replace(each, rest=each.rest.double() * step)
        for each in kept[0].replied
        if isinstance(each, Divided)
    }
    return [(each, uploads[each.round, each.client]) for each in seen]


def clipped_rest(one: Job, covered: Covered, clip: float) -> Tensor:
    """n_k·u[W̄]·min(1, θ/‖u[W̄]‖), by the formula."""
    size, samples = one.architecture.size, len(one.pool.clients[covered.client])
    outside = np.setdiff1d(np.arange(size), covered.winners.numpy())
    update = covered.contribution[:size][outside] / samples
    return samples * update * min(1.0, clip / float(update.norm()))


@pytest.mark.parametrize("clip", [1e-3, 0.05, 50.0])
def test_the_rest_is_clipped_to_theta_times_samples_and_the_winners_are_not(
    monkeypatch: pytest.MonkeyPatch, clip: float
) -> None:
    monkeypatch.setattr(parallel, "add_residual", lambda *noise, **named: None)
    one = of(clip=clip)
    pairs = observed(monkeypatch, one)
    assert len(pairs) == 8
    for covered, upload in pairs:
        bound = clip * len(one.pool.clients[covered.client])
        # Rounded to a grid on which that lengthens nothing by more than 2⁻²⁰.
        assert float((upload.rest - clipped_rest(one, covered, clip)).norm()) <= ROUNDING * bound
        assert float(upload.rest.norm()) <= bound * (1 + ROUNDING)
        assert float(upload.rest.norm()) == pytest.approx(bound, rel=ROUNDING) or clip == 50.0
        assert float(covered.contribution[covered.winners].norm()) > 0.0


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_replacing_all_of_a_clients_data_moves_its_rest_by_two_theta_samples_at_most(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Without the noise, which the other tests measure, and given the winners."""
    monkeypatch.setattr(parallel, "add_residual", lambda *noise, **named: None)
    clip, one = 0.02, of(clip=0.02, share=share, rounds=1, strategy="random")
    first = {covered.client: upload.rest for covered, upload in observed(monkeypatch, one)}
    data = one.pool.clients[1]
    x, y = data.take(torch.arange(len(data)))
    moved = []
    for other in (
        ClientData(1, -5.0 * x, (y + 5) % 10),
        ClientData(1, 100.0 * x, 9 - y),
        ClientData(1, x, (y + 1) % 10),
    ):
        clients = (one.pool.clients[0], other, *one.pool.clients[2:])
        neighbour = replace(one, pool=replace(one.pool, clients=clients))
        second = {covered.client: upload.rest for covered, upload in observed(monkeypatch, neighbour)}
        moved.append(float((first[1] - second[1]).norm()))
        assert all(torch.equal(first[client], second[client]) for client in (0, 2, 3))
    bound = one.scheme.work.sensitivity(len(data))  # type: ignore[attr-defined]
    assert bound == 2 * clip * len(data)
    assert 0.5 * bound < max(moved) <= bound * (1 + ROUNDING)  # and the bound is not idle


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("scheme", ["paraaegis", "nothing hidden"])
def test_the_noise_on_the_rest_has_the_planned_size_and_is_gaussian(
    monkeypatch: pytest.MonkeyPatch, scheme: str, epsilon: float
) -> None:
    """σ = 2θ·n_k·√T/μ(ε, δ) for each client, fresh for every client and round."""
    one = of(epsilon=epsilon, clip=0.05, options={"depth": 2, "width": 32}, share=0.0 if scheme != "paraaegis" else 0.1)
    pairs = observed(monkeypatch, one)
    drawn: list[np.ndarray] = []
    for covered, upload in pairs:
        samples = len(one.pool.clients[covered.client])
        sigma = 2 * 0.05 * samples * math.sqrt(one.config.rounds) / mu_of(epsilon, 1e-5)
        noise = (upload.rest - clipped_rest(one, covered, 0.05)).numpy() / sigma
        squares = float((noise**2).sum())
        low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(noise))
        assert low < squares < high
        assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM
        drawn.append(noise[:2400])
    together = np.concatenate(drawn)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(together)) / len(together)
    assert low < float((together**2).mean()) < high
    assert 0.94 < low < high < 1.06
    assert len({len(one.pool.clients[client]) for client in range(4)}) > 1  # sizes, hence noise, differ
    for number, first in enumerate(drawn):
        for second in drawn[number + 1 :]:
            assert abs(float(first @ second)) / math.sqrt(len(first)) < 6.0


def test_by_the_papers_formula_the_noise_is_smaller_by_the_largest_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """σ = (2θ/max|D|)·n_k·√(2T·ln(1/δ))/ε in the units of an n_k-weighted sum."""
    one = of(accounting="paper", epsilon=1.0, clip=0.05, options={"depth": 2, "width": 32})
    most = max(len(data) for data in one.pool.clients)
    for covered, upload in observed(monkeypatch, one):
        samples = len(one.pool.clients[covered.client])
        sigma = 2 * 0.05 * samples / most * math.sqrt(2 * one.config.rounds * math.log(1e5)) / 1.0
        noise = (upload.rest - clipped_rest(one, covered, 0.05)).numpy() / sigma
        low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(noise))
        assert low < float((noise**2).sum()) < high


def test_serial_noise_lies_on_everything_and_everything_is_clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[Tensor] = []
    hide = Pads.hide

    def noting(self: Any, state: Any, values: Tensor, context: Any, **named: Any) -> Any:
        hidden.append(values.clone())
        return hide(self, state, values, context, **named)

    monkeypatch.setattr(Pads, "hide", noting)
    one = job(
        **{name: value for name, value in SETTINGS.items() if name != "share"} | {"scheme": "serial", "clip": 0.05}
    )
    pairs = observed(monkeypatch, one)
    total = sum(len(data) for data in one.pool.clients)
    for (covered, upload), values in zip(pairs, hidden, strict=True):
        assert len(upload.rest) == 0
        nobody = replace(covered, winners=torch.empty(0, dtype=torch.int64))
        samples = len(one.pool.clients[covered.client])
        sigma = 2 * 0.05 * samples * math.sqrt(one.config.rounds) / mu_of(one.scheme.plan.target.epsilon, 1e-5)  # type: ignore[union-attr]
        noise = (values * total - clipped_rest(one, nobody, 0.05)).numpy() / sigma
        low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(noise))
        assert low < float((noise**2).sum()) < high


def test_local_steps_are_what_everything_hidden_trains_with() -> None:
    assert isinstance(of(share=1.0).scheme.work, LocalSteps)
    assert isinstance(of(share=1.0, share_decay=0.9).scheme.work, DividedUpdate)


# ---- batch normalisations where accounting is the paper's

BATCH_NORM = {"depth": 2, "width": 8, "norm": "batch"}


def by_paper(scheme: str, **settings: Any) -> Job:
    given = {"loss": "cross-entropy", "lr": 0.1, "local_steps": 2, "batch_size": 16, "accounting": "paper", **settings}
    return job(scheme=scheme, options=BATCH_NORM, clients=4, rounds=3, **given)


@pytest.mark.parametrize("scheme", ["dp-fedavg", "varying-dp", "ldp", "nadp"])
def test_batch_norm_trains_under_the_papers_noise_and_nothing_is_claimed(scheme: str) -> None:
    one = by_paper(scheme, epsilon=1.0, clip=0.1)
    outcome = train_job(one, state=fresh_state(one))
    assert not any("failed" in row for row in outcome.rows)
    assert bool(outcome.state.weights.statistics.isfinite().all())
    assert outcome.privacy_journal.accountant is None
    ledger = outcome.privacy_journal.ledger(rounds=3)
    assert {line.verdict for line in ledger.lines} == {"none"}
    assert all(line.epsilon is None for line in ledger.lines)
    assert "upload.statistics" in ledger.line("server").why
    assert any(note.startswith("not a DP guarantee: batch normalisations") for note in ledger.notes)


def test_with_next_to_no_noise_statistics_and_model_are_those_of_plain_averaging() -> None:
    ours = by_paper("dp-fedavg", epsilon=1e9, clip=1e3)
    plain = by_paper("fedavg", accounting=None)
    models = [train_job(one, state=fresh_state(one)).state.weights for one in (ours, plain)]
    assert float((models[0].statistics - models[1].statistics).abs().max()) < 1e-4
    assert float((models[0].parameters - models[1].parameters).abs().max()) < 1e-4
    assert float((models[0].statistics - fresh_state(ours).weights.statistics).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "dp-fedavg", "accounting": "exact"},
        {"scheme": "ldp", "local_steps": None},
        {"scheme": "cdp"},
        {"scheme": "dp-fedavg", "adaptive_clip": True},
    ],
    ids=str,
)
def test_batch_norm_is_still_refused_elsewhere(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be trained under a differential-privacy claim"):
        by_paper(**settings)


def test_a_client_with_a_limit_takes_no_part_where_nothing_bounds_what_leaves() -> None:
    one = by_paper("dp-fedavg")
    with pytest.raises(ConfigError, match="no noise of its own that would bound ε"):
        client_role(replace(one, guard=replace(one.guard, policy=Policy(max_epsilon=1.0))))
