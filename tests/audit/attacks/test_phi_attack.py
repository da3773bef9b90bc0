"""Ψ and Φ travel bare: what they give away, and to whom."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from audit.attacks.reading import PICTURES, VICTIMS, batch_of, by_chance, decibels, run_of, tried
from fedveil.audit.attacks.phi import UNREAD
from fedveil.audit.attacks.phi import phi_attack as phi
from fedveil.audit.record import outsider_view, server_view
from fedveil.audit.views import ServerView
from fedveil.errors import NotApplicableError

MARGIN = 3.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["mpdp", "mpdp-naive", "lossless", "pbpfl"])
def test_the_server_and_the_wire_read_a_sample(scheme: str, dtype: str) -> None:
    job, record = run_of(scheme, dtype=dtype)
    for victim in VICTIMS:
        for round in (1, 2):
            x, y = batch_of(job, victim, round=round)
            for found in (
                tried(phi, server_view(record, victim, round=round)),
                tried(phi, outsider_view(record), client=victim, round=round),
            ):
                assert decibels(found, x) >= 60
                assert found["labels"].tolist() == y.tolist()
                assert float(found["loss"]) < 1e-3


@pytest.mark.parametrize("scheme", [pytest.param("mpdp", marks=pytest.mark.slow), "lossless"])
def test_it_is_searched_for_where_no_layer_reads_the_input(scheme: str) -> None:
    job, record = run_of(scheme, model="lenet-sigmoid", **PICTURES)
    x, y = batch_of(job, 0)
    found = tried(phi, server_view(record, 0, round=1))
    assert decibels(found, x) > 20
    assert found["labels"].tolist() == y.tolist()


def test_several_samples_come_row_by_row_and_labels_stay_unread() -> None:
    """A ReLU layer with a unit for one sample alone gives that one exactly: at least one of the two is."""
    job, record = run_of("lossless", batch_size=2)
    best = []
    for victim in VICTIMS:
        x, _ = batch_of(job, victim)
        found = tried(phi, server_view(record, victim, round=1))
        assert found["labels"].tolist() == [UNREAD] * 2
        best.append(decibels(found, x))
    assert max(best) > 60


def test_masks_cover_them() -> None:
    job, record = run_of("veil-secagg")
    for victim in VICTIMS:
        x, _ = batch_of(job, victim)
        view = server_view(record, victim, round=1)
        assert decibels(tried(phi, view), x) < by_chance(x) + MARGIN
        assert float(tried(phi, view)["loss"]) > 0.5


def test_numbers_as_targets_leave_labels_unread() -> None:
    job, record = run_of("lossless")
    view = server_view(record, 0, round=1)
    numbers: ServerView = dataclasses.replace(view, facts=dataclasses.replace(view.facts, task="regression"))
    found = tried(phi, numbers)
    assert decibels(found, batch_of(job, 0)[0]) >= 60
    assert found["labels"].tolist() == [UNREAD]


def test_what_cannot_be_tried_says_why() -> None:
    _, bare = run_of("fedavg")
    _, noised = run_of("nadp")
    _, large = run_of("lossless", batch_size=16)
    cases: list[tuple[Any, str]] = [
        (server_view(bare, 0, round=1), r"^there is no head noise"),
        (server_view(noised, 0, round=1), r"^there is no head noise"),
        (server_view(large, 0, round=1), r"^a gradient of 16 samples"),
    ]
    for view, why in cases:
        with pytest.raises(NotApplicableError, match=why):
            tried(phi, view)
