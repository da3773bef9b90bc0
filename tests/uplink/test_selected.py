"""A chosen part of a gradient under noise: what travels, what the server makes of it, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from federation import distance, job, trained
from fedveil.errors import ConfigError, ProtocolError
from fedveil.runs.loop import fresh_state
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.uplink.selected import Selected, SelectedUpload, _laplace, _uniforms

SMALL: dict[str, Any] = {"rounds": 3, "loss": "cross-entropy", "options": {"depth": 2, "width": 8}}
SEED, OTHER = bytes(range(32)), bytes(range(1, 33))


def uploads(**settings: Any) -> tuple[list[SelectedUpload], list[Any]]:
    seen: list[Any] = []
    keep = lambda replies: seen.extend(replies) or replies  # noqa: E731
    _, rounds = trained(job(scheme="ppdl", **{**SMALL, **settings}), reorder=keep)
    return [said for said in seen if isinstance(said, SelectedUpload)], rounds


@pytest.mark.parametrize("local", [{}, {"local_steps": 2}], ids=["gradient", "update"])
def test_everything_without_noise_is_plain_averaging(local: dict[str, Any]) -> None:
    ours = trained(job(scheme="ppdl", upload_share=1.0, noise_variance=0.0, **SMALL, **local))[0]
    theirs = trained(job(scheme="fedavg", **SMALL, **local))[0]
    assert distance(ours.weights.parameters, theirs.weights.parameters) < 1e-12


def test_the_largest_travel_and_no_others_and_the_model_moves_only_there() -> None:
    one = job(scheme="ppdl", upload_share=0.05, noise_variance=0.0, **{**SMALL, "rounds": 1})
    sent, _ = uploads(upload_share=0.05, noise_variance=0.0, rounds=1)
    plain: list[Any] = []
    trained(job(scheme="fedavg", **{**SMALL, "rounds": 1}), reorder=lambda replies: plain.extend(replies) or replies)
    size = one.architecture.size
    for ours, theirs in zip(sent, plain, strict=True):
        assert len(ours.places) == math.ceil(0.05 * size)
        true = theirs.payload[:size]
        kept = true.abs() >= true.abs().sort(descending=True).values[len(ours.places) - 1]
        assert torch.equal(ours.places, kept.nonzero().flatten())
        torch.testing.assert_close(ours.dense(len(theirs.payload))[:size], torch.where(kept, true, 0.0))
        assert torch.equal(ours.dense(len(theirs.payload))[size:], theirs.payload[size:])
    moved = trained(one)[0].weights.parameters != fresh_state(one).weights.parameters
    touched = torch.zeros(size, dtype=torch.bool)
    for said in sent:
        touched[said.places] = True
    assert not bool(moved[~touched].any())


def test_a_random_choice_takes_what_is_above_the_threshold_and_differs_from_client_to_client() -> None:
    sent, _ = uploads(upload_choice="random", noise_variance=0.0, select_above=1e-3, rounds=1)
    for said in sent:
        weight = float(said.payload[-1])
        assert float(said.payload[: len(said.places)].abs().min()) / weight > 1e-3
    assert not torch.equal(sent[0].places, sent[1].places)


def test_noise_has_the_law_that_is_said() -> None:
    """Kolmogorov and Smirnov at 10⁻⁴ a test: a false alarm in one of 3,000 seeds."""
    mean = np.zeros(20_000)
    gaussian = Selected(1.0, variance=0.04)._gaussian(mean, _uniforms(SEED, len(mean)), OTHER)[1]
    assert kstest(gaussian / 0.2, "norm").pvalue > 1e-4
    assert kstest(_laplace(_uniforms(SEED, 20_000)), "laplace").pvalue > 1e-4
    sparse = Selected(1.0, epsilon=9.0, cut=0.5, above=0.0)
    places, values = sparse._sparse(mean, _uniforms(SEED, len(mean)), OTHER)
    # σ(ε₂) = 2·c·2γ/ε₂ = 2·20000·1/2
    assert 2_000 < len(places) <= 20_000
    assert kstest(values / 20_000, "laplace").pvalue > 1e-4


def test_the_sparse_vector_technique_finds_what_is_large_where_epsilon_is_and_stops_after_its_share() -> None:
    mean = np.zeros(1_000)
    mean[::10] = 0.9
    for epsilon, least in ((1e7, 100), (1.0, 0)):
        uplink = Selected(0.1, epsilon=epsilon, cut=1.0, above=0.5)
        places, values = uplink._sparse(mean, _uniforms(SEED, 1_000), OTHER)
        assert len(places) <= 100
        assert int((places % 10 == 0).sum()) >= least
        assert bool((np.diff(places) > 0).all())
        assert len(values) == len(places)


def test_values_are_cut_before_anything_else() -> None:
    sent, _ = uploads(cut=1e-3, noise_variance=0.0, rounds=1)
    for said in sent:
        assert float(said.payload[: len(said.places)].abs().max()) <= 1e-3 * float(said.payload[-1]) * (1 + 1e-12)


def change(**parts: Any) -> Any:
    return lambda said: replace(said, **{name: make(said) for name, make in parts.items()})


@pytest.mark.parametrize(
    "forge",
    [
        change(places=lambda said: said.places + 10**6),
        change(places=lambda said: said.places.flip(0)),
        change(places=lambda said: said.places[:-1]),
        change(places=lambda said: said.places - said.places[0] - 1),
        change(size=lambda said: said.size + 1),
        change(size=lambda said: 2**40),
        change(payload=lambda said: said.payload[:-1]),
        change(payload=lambda said: said.payload * math.nan),
        change(places=lambda said: torch.arange(said.size), payload=lambda said: torch.zeros(said.size + 2).double()),
    ],
    ids=["beyond", "backwards", "fewer", "negative", "larger", "huge", "short", "no numbers", "all"],
)
def test_a_forged_upload_is_refused_and_the_round_goes_on(forge: Any) -> None:
    def spoil(replies: list[Any]) -> list[Any]:
        return [forge(said) if isinstance(said, SelectedUpload) and said.client == 1 else said for said in replies]

    _, rounds = trained(job(scheme="ppdl", **SMALL), reorder=spoil)
    assert [done.failed for done in rounds] == ["", "", ""]
    assert all(list(done.gathered.refused) == [1] for done in rounds)


def test_clients_that_vanish_are_missing_from_the_sum_and_cost_nothing_else() -> None:
    settings = {"upload_share": 1.0, "noise_variance": 0.0}
    gone = lambda ask, client: client == 2  # noqa: E731
    ours, rounds = trained(job(scheme="ppdl", **SMALL, **settings), absent=gone)
    theirs, _ = trained(job(scheme="fedavg", **SMALL), absent=gone)
    assert all(done.gathered.arrived == (0, 1, 3, 4) for done in rounds)
    assert distance(ours.weights.parameters, theirs.weights.parameters) < 1e-12


@pytest.mark.parametrize(("settings", "said"), [({}, "no ε follows"), ({"upload_noise": "laplace"}, "ε = 3")], ids=str)
def test_the_ledger_proves_nothing_and_says_what_rounds_come_to(settings: dict[str, Any], said: str) -> None:
    ledger = PrivacyJournal(job(scheme="ppdl", **SMALL, **settings)).ledger()
    assert {line.verdict for line in ledger.lines} == {"none"}
    assert any(said in note for note in ledger.notes)
    found = {release.field: release for release in ledger.releases}
    assert found["upload.places"].about == "data"
    assert found["upload.gradients"].protection == "open"


@pytest.mark.parametrize(
    "settings",
    [
        *({"upload_share": share} for share in (0.0, 1.5, -1.0)),
        *({"noise_variance": variance} for variance in (-1.0, math.inf)),
        {"round_epsilon": 1.0},
        {"upload_noise": "laplace", "noise_variance": 1.0},
        {"upload_noise": "laplace", "upload_choice": "random"},
        {"upload_noise": "laplace", "round_epsilon": 0.0},
        {"upload_noise": "normal"},
        {"upload_choice": "smallest"},
        {"cut": 0.0},
        {"select_above": -1.0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        job(scheme="ppdl", **SMALL, **settings)


def test_an_upload_is_not_made_longer_than_is_known() -> None:
    said = SelectedUpload(0, 0, 0, torch.zeros(3), torch.tensor([1]), 5)
    assert said.dense(7).tolist() == [0.0] * 7
    for length in (5, 4, 6, 100):
        with pytest.raises(ProtocolError):
            said.dense(length)
