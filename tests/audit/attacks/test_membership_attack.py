"""Membership inference by a client, on views of runs that are fitted to 40 digits until little loss is left.

Three runs are judged together, 40 candidates each: an area of one half has a standard error of 0.053, so one above
0.65 or below 0.35 is a false alarm in less than 1 % of seeds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.attacks.digit_runs import Run, digits_run
from fedveil.audit.attack import Attack
from fedveil.audit.attacks.likelihood import likelihood_attack as likelihood
from fedveil.audit.attacks.membership import LAYERS
from fedveil.audit.attacks.membership import membership_attack as membership
from fedveil.audit.attacks.membership import membership_layers_attack as membership_layers
from fedveil.audit.metrics import area_under_curve, success_rate
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import ClientView, to_bytes
from fedveil.errors import ConfigError, NotApplicableError

ATTEMPTS: dict[str, Attack] = {"membership": membership, "layers": membership_layers, "likelihood": likelihood}
SAMPLES = 40
FEW = {"quick": True, "shadows": 4}


def quiet(_: float) -> None:
    pass


def overfitted(scheme: str, seed: int) -> Run:
    options = {"depth": 3, "width": 64}
    return digits_run(samples=SAMPLES, options=options, scheme=scheme, rounds=60, lr=0.1, momentum=0.9, seed=seed)


def member() -> Tensor:
    return torch.arange(2 * SAMPLES) < SAMPLES


def shown() -> Tensor:
    """Every second candidate's membership is known."""
    return torch.where(torch.arange(2 * SAMPLES) % 2 == 0, member().long(), -1)


def asked(scheme: str, seed: int = 1) -> ClientView:
    run = overfitted(scheme, seed)
    return run.view(
        candidates__x=torch.cat([run.members.x, run.others.x[:SAMPLES]]),
        candidates__y=torch.cat([run.members.y, run.others.y[:SAMPLES]]),
        candidates__membership=shown(),
        public__x=run.others.x[100:180],
        public__y=run.others.y[100:180],
    )


@cache
def judged(scheme: str, attempt: str, **settings: Any) -> tuple[float, float]:
    """Success rate and area under the curve over three runs."""
    results = [ATTEMPTS[attempt](asked(scheme, seed), {**FEW, **settings}, quiet) for seed in (1, 2, 3)]
    scores = torch.cat([one["scores"] - one["threshold"] for one in results])
    truth = member()[shown() == -1].repeat(3)
    return success_rate(scores, member=truth, threshold=0.0).value, area_under_curve(scores, member=truth).value


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_without_protection_an_overfitted_model_gives_its_members_away(attempt: str) -> None:
    success, area = judged("fedavg", attempt)
    assert success > 0.6
    assert area > 0.65


@pytest.mark.parametrize("attempt", ["membership", pytest.param("likelihood", marks=pytest.mark.slow)])
def test_head_noise_confuses_whoever_takes_the_outputs_as_they_are(attempt: str) -> None:
    assert judged("lossless", attempt)[1] < judged("fedavg", attempt)[1] - 0.2


@pytest.mark.parametrize(
    "attempt", ["membership", *(pytest.param(one, marks=pytest.mark.slow) for one in ("layers", "likelihood"))]
)
def test_whoever_calibrates_first_does_as_well_as_without_protection(attempt: str) -> None:
    assert judged("lossless", attempt, adaptive=True)[1] == pytest.approx(judged("fedavg", attempt)[1], abs=0.05)


@pytest.mark.parametrize(
    "layer", [one if one == "second" else pytest.param(one, marks=pytest.mark.slow) for one in LAYERS]
)
def test_hidden_layers_say_the_same_whatever_their_scales(layer: str) -> None:
    """Standardised activations do not know the secret scales, so not even the naive attack is hindered by them."""
    hidden = layer in ("second", "third")
    settings = {} if hidden else {"adaptive": True}
    area = judged("lossless", "layers", layer=layer, **settings)[1]
    assert area == pytest.approx(judged("fedavg", "layers", layer=layer)[1], abs=0.01 if hidden else 0.05)


@pytest.mark.slow
def test_the_nearer_a_layer_is_to_the_end_the_more_it_says() -> None:
    areas = {layer: judged("fedavg", "layers", layer=layer)[1] for layer in LAYERS}
    assert min(areas["last"], areas["three"]) > areas["second"] > 0.65
    assert areas["second"] > areas["third"]


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_same() -> None:
    view = asked("lossless")
    done: list[float] = []
    with AttackProcess("membership-layers") as process:
        found = process.run(to_bytes(view), settings={"adaptive": True}, on_progress=done.append)
    here = membership_layers(view, {"adaptive": True}, quiet)
    assert found["scores"].shape == (SAMPLES,)
    assert torch.allclose(found["scores"], here["scores"], atol=1e-4)
    assert found["threshold"].shape == ()
    assert done[-1] == 1.0


def test_features_and_seeds_can_be_chosen() -> None:
    view = asked("lossless")
    results = [
        membership(view, {"adaptive": True, **more}, quiet)["scores"]
        for more in ({}, {"seed": 0}, {"seed": 1}, {"features": "classes"}, {"features": "gradients"})
    ]
    assert torch.equal(results[0], results[1])
    assert not any(torch.equal(results[0], one) for one in results[2:])


def test_batch_norms_do_not_stand_in_the_way() -> None:
    options = {"depth": 2, "width": 64, "norm": "batch"}
    run = digits_run(samples=SAMPLES, options=options, scheme="lossless", rounds=60, lr=0.1, momentum=0.9)
    view = run.view(
        candidates__x=torch.cat([run.members.x, run.others.x[:SAMPLES]]),
        candidates__y=torch.cat([run.members.y, run.others.y[:SAMPLES]]),
        candidates__membership=shown(),
    )
    scores = membership(view, {"adaptive": True}, quiet)["scores"]
    assert area_under_curve(scores, member=member()[shown() == -1]).value > 0.65
    assert membership(view, {"features": "gradients"}, quiet)["scores"].isfinite().all()


def test_what_cannot_be_tried_is_refused() -> None:
    view = asked("fedavg")
    for attempt in ATTEMPTS.values():
        with pytest.raises(NotApplicableError, match="no head noise"):
            attempt(view, {"adaptive": True}, quiet)
        with pytest.raises(ConfigError, match=r"no candidates\.x"):
            attempt(overfitted("fedavg", 1).view(), {}, quiet)
    with pytest.raises(ConfigError, match="Did you mean 'second'"):
        membership_layers(view, {"layer": "secnd"}, quiet)
    with pytest.raises(ConfigError, match="at least 1"):
        likelihood(view, {"shadows": 0}, quiet)
