"""Averaging many rounds' uploads of one client."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from audit.attacks.reading import batch_of, decibels, run_of, tried
from fedveil.audit.attacks.averaging import averaging_attack as averaging
from fedveil.audit.attacks.closed_form import closed_form_attack as closed_form
from fedveil.audit.record import server_history, server_view
from fedveil.audit.views import Opened, ServerHistory
from fedveil.errors import ConfigError, NotApplicableError

ROUNDS = 12
ONE_EACH = {"clients": 6, "samples": 6, "batch_size": 0}


@cache
def still_run() -> tuple[Any, Any]:
    """Local noise on the gradient of one sample, the same in every round, of a model that barely moves."""
    every = ",".join(map(str, range(1, ROUNDS + 1)))
    return run_of(
        "ldp",
        **ONE_EACH,
        rounds=ROUNDS,
        record_rounds=every,
        record_clients="0",
        epsilon=2e4,
        clip=1.0,
        lr=1e-6,
        evaluate_every=0,
    )


def test_the_mean_of_many_rounds_shows_what_one_round_hides() -> None:
    job, record = still_run()
    x, y = batch_of(job, 0)
    history = server_history(record, 0)
    assert len(history.rounds) == ROUNDS
    single = [decibels(tried(closed_form, one), x) for one in history.rounds]
    found = tried(averaging, history)
    assert decibels(found, x) > max(single) + 4
    assert decibels(found, x) > 20
    assert found["labels"].tolist() == y.tolist()


def test_rounds_known_to_be_noisier_count_less() -> None:
    job, record = still_run()
    x, _ = batch_of(job, 0)
    history = server_history(record, 0)
    first, *rest = history.rounds
    assert first.recovered is not None
    spoilt = first.recovered.gradient + torch.randn(
        first.recovered.gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    worse = ServerHistory((dataclasses.replace(first, recovered=Opened(spoilt, None, torch.empty(0))), *rest))
    alike = decibels(tried(averaging, worse), x)
    told = decibels(tried(averaging, worse, variances=[1e6] + [1.0] * (ROUNDS - 1)), x)
    assert told > alike + 6
    with pytest.raises(ConfigError, match="2 variances for 12 rounds"):
        tried(averaging, worse, variances=[1.0, 2.0])


def test_the_reading_attack_is_chosen_by_the_model_or_by_name() -> None:
    job, record = run_of("fedavg", **ONE_EACH, model="lenet-sigmoid", reshape=(1, 8, 8), lr=1e-6)
    x, y = batch_of(job, 0)
    history = server_history(record, 0)
    for found in (tried(averaging, history), tried(averaging, history, **{"with": "idlg"})):
        assert decibels(found, x) > 20
        assert found["labels"].tolist() == y.tolist()
    with pytest.raises(ConfigError, match=r"Unknown reading attack 'ildg'\. Did you mean 'idlg'"):
        tried(averaging, history, **{"with": "ildg"})


def test_what_cannot_be_averaged_says_why() -> None:
    _, drawn = run_of("fedavg")
    _, masked = run_of("veil-secagg")
    history = server_history(drawn, 0)
    cases: list[tuple[Any, str]] = [
        (history, r"^the client draws other samples in every round"),
        (ServerHistory(history.rounds[:1]), r"^a gradient that the server can read in 1 of the recorded rounds"),
        (server_history(masked, 0), r"^a gradient that the server can read in 0 of the recorded rounds"),
        (server_view(drawn, 0, round=1), r"^what the server sees: this attack is made on what the server over several"),
    ]
    for view, why in cases:
        with pytest.raises(NotApplicableError, match=why):
            tried(averaging, view)
    assert tried(averaging, history, batch=2)["inputs"].shape == (2, 1, 8, 8)
