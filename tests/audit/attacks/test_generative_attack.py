"""What a prior, learned from public pictures, adds to what the server and a client see of recorded runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.attacks.digit_runs import Run, digits_run
from audit.attacks.reading import PICTURES, QUICK, batch_of, decibels, run_of, tried
from audit.learned import DIGITS, JUDGES, PUBLIC, blind_level, digits_judge, digits_prior, generator
from fedveil.audit.attacks import generative as module
from fedveil.audit.attacks.generative import SMALLEST_SIDE, Prior
from fedveil.audit.attacks.generative import class_inversion_attack as class_inversion
from fedveil.audit.attacks.generative import generative_attack as generative
from fedveil.audit.metrics import Estimate, attack_success
from fedveil.audit.record import server_view
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import ServerView, to_bytes
from fedveil.errors import ConfigError, NotApplicableError

SIGMOID: dict[str, Any] = {"model": "lenet-sigmoid", **PICTURES}


@pytest.fixture
def learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are handed the prior that was learned from the same public pictures."""

    def handed(pictures: Tensor, *, progress: Callable[[float], None], **_: Any) -> Prior:
        assert torch.equal(pictures, DIGITS.train.x[PUBLIC])
        progress(1.0)
        return digits_prior()

    monkeypatch.setattr(module, "train_prior", handed)


def upload(scheme: str) -> tuple[ServerView, Tensor, Tensor]:
    job, record = run_of(scheme, loss="cross-entropy" if scheme == "fedavg" else "square", **SIGMOID)
    view = replace(server_view(record, 0, round=1), known={"public.x": DIGITS.train.x[PUBLIC]})
    return view, *batch_of(job, 0)


@pytest.mark.usefixtures("learned_once")
def test_a_bare_upload_gives_the_sample_away_and_a_masked_one_does_not() -> None:
    view, x, y = upload("fedavg")
    found = tried(generative, view)
    assert decibels(found, x) > 20
    assert found["labels"].tolist() == y.tolist()
    view, x, _ = upload("veil-secagg")
    blind = blind_level(digits_prior(), x.float(), generator=generator())
    assert decibels(tried(generative, view), x) < blind + 3


@cache
def trained(scheme: str) -> Run:
    return digits_run(samples=300, options={"depth": 2, "width": 32}, scheme=scheme, rounds=150, lr=0.2, momentum=0.9)


@cache
def recognised(scheme: str, *, adaptive: bool = False) -> Estimate:
    view = trained(scheme).view(public__x=DIGITS.train.x[PUBLIC])
    found = tried(class_inversion, view, adaptive=adaptive, per_class=10)
    assert found["inputs"].shape == (100, 1, 8, 8)
    assert found["labels"].tolist() == [one for one in range(10) for _ in range(10)]
    return attack_success(found["inputs"], found["labels"], classifier=digits_judge().scores)


@pytest.mark.usefixtures("learned_once")
def test_the_classes_of_a_bare_model_are_recognised() -> None:
    """Chance is 10 %."""
    assert recognised("fedavg").value > 0.8


@pytest.mark.slow
@pytest.mark.usefixtures("learned_once")
def test_head_noise_hides_the_classes_until_it_is_calibrated_away() -> None:
    bare, veiled, calibrated = recognised("fedavg"), recognised("lossless"), recognised("lossless", adaptive=True)
    assert veiled.value < bare.value - 0.3
    assert calibrated.value > bare.value - 0.15


@pytest.mark.usefixtures("learned_once")
def test_classes_and_their_number_can_be_chosen() -> None:
    view = trained("fedavg").view(public__x=DIGITS.train.x[PUBLIC])
    assert tried(class_inversion, view, classes=[7, 2], per_class=3)["labels"].tolist() == [7, 7, 7, 2, 2, 2]
    for wrong in ([], [10], [-1], [1.5], 3):
        with pytest.raises(ConfigError, match="classes must be"):
            tried(class_inversion, view, classes=wrong)


@pytest.mark.slow
def test_it_runs_in_a_process_that_gets_the_view_alone() -> None:
    view = trained("fedavg").view(public__x=DIGITS.train.x[PUBLIC][:16])
    with AttackProcess("class-inversion") as process:
        found = process.run(to_bytes(view), settings={**QUICK, "per_class": 1, "classes": [1]})
    assert found["inputs"].shape == (1, 1, 8, 8)
    assert found["labels"].tolist() == [1]


def test_what_these_attempts_cannot_be_made_on_is_said() -> None:
    view, _, _ = upload("fedavg")
    client = trained("fedavg").view()
    with pytest.raises(NotApplicableError, match="public pictures"):
        tried(generative, replace(view, known={}))
    with pytest.raises(NotApplicableError, match="public pictures"):
        tried(class_inversion, client)
    with pytest.raises(NotApplicableError, match="server"):
        tried(generative, client)
    with pytest.raises(NotApplicableError, match="client"):
        tried(class_inversion, view)
    with pytest.raises(NotApplicableError, match="no head noise"):
        tried(class_inversion, replace(client, known={"public.x": DIGITS.train.x[PUBLIC]}), adaptive=True)
    flat = replace(client, facts=replace(client.facts, input_shape=(64,)))
    with pytest.raises(NotApplicableError, match="no pictures"):
        tried(class_inversion, flat)
    side = SMALLEST_SIDE - 1
    tiny = replace(view, facts=replace(view.facts, input_shape=(3, side, side)))
    with pytest.raises(NotApplicableError, match=f"{side}×{side}"):
        tried(generative, tiny)


def test_public_judged_and_private_pictures_are_different_ones() -> None:
    """What the controls rest on: the prior's and the judge's pictures do not overlap."""
    assert set(range(*PUBLIC.indices(1438))).isdisjoint(range(*JUDGES.indices(1438)))
