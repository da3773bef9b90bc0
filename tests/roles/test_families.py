"""Under every family the server ends in the model of plain averaging; local training where it is exact, only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from federation import distance, job, trained
from fedveil import models
from fedveil.errors import ConfigError
from fedveil.tensors import flatten

FAMILIES = ("signed", "isometry", "full")
NORMED = {"depth": 2, "width": 12, "norm": "batch"}
OPEN: dict[str, Any] = {"head_noise": False, "loss": "cross-entropy"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "case",
    [
        {"momentum": 0.9, "weight_decay": 1e-3},
        {"optimiser": "adam", "lr": 0.02},
        {"options": NORMED, "batch_size": 16, "cohort": 3},
        {"options": {**NORMED, "norm": "group"}},
    ],
    ids=["momentum", "adam", "batch norm", "group norm"],
)
def test_rounds_end_in_the_model_of_plain_averaging(case: dict[str, Any], family: str) -> None:
    settings = {"lr": 0.1, "rounds": 6, **case}
    plain, _ = trained(job(scheme="fedavg", bn_eps="public", loss="cross-entropy", **settings))
    veiled, rounds = trained(job(scheme="lossless", family=family, **OPEN, **settings))
    assert distance(veiled.weights.parameters, plain.weights.parameters) < 1e-10
    assert torch.equal(veiled.weights.epsilon, plain.weights.epsilon)
    if plain.weights.statistics.numel():
        assert distance(veiled.weights.statistics, plain.weights.statistics) < 1e-10
    assert rounds[-1].loss < rounds[0].loss  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({"scheme": "lossless"}, "scale"),
        ({"scheme": "lossless", **OPEN}, "full"),
        ({"scheme": "lossless", **OPEN, "local_steps": 2}, "isometry"),
        ({"scheme": "pbpfl", **OPEN}, "full"),
        ({"scheme": "veil-secagg"}, "scale"),
        ({"scheme": "veil-secagg", **OPEN}, "full"),
        ({"scheme": "veil-secagg", **OPEN, "local_epochs": 1}, "isometry"),
        ({"scheme": "veil-dp"}, "isometry"),
        ({"scheme": "veil-dp", "spread": 1.2}, "scale"),
        ({"scheme": "mpdp"}, "scale"),
        ({"scheme": "fedavg"}, "scale"),
    ],
)
def test_the_default_is_the_family_that_fits_the_scheme(settings: dict[str, Any], family: str) -> None:
    made = job(**settings)
    assert made.config.family == "auto"
    assert made.scheme.downlink.family == family


def test_a_run_says_what_its_veil_does() -> None:
    """Levels and secrets under a family; under scales, that ε is not the layers' own."""
    noted = " ".join(job(scheme="lossless", family="full", options=NORMED, **OPEN).notes)
    assert "scaled" in noted
    assert "bits" in noted
    assert "secret ε" not in noted
    assert "secret ε" in " ".join(job(scheme="lossless", options=NORMED).notes)
    assert not any("secret ε" in note for note in job(scheme="fedavg", options=NORMED).notes)


def test_head_noise_goes_with_a_family() -> None:
    plain, _ = trained(job(scheme="fedavg", rounds=4, bn_eps="public"))
    veiled, _ = trained(job(scheme="lossless", rounds=4, family="full"))
    assert distance(veiled.weights.parameters, plain.weights.parameters) < 1e-9


LOCAL: dict[str, Any] = {
    "local_steps": 3,
    "batch_size": 16,
    "client_lr": 0.05,
    "client_momentum": 0.9,
    "client_weight_decay": 1e-3,
    "lr": 1.0,
    "rounds": 4,
}


@pytest.mark.parametrize("family", ["signed", "isometry"])
@pytest.mark.parametrize("scheme", ["lossless", "veil-secagg"])
def test_local_training_under_isometries_is_that_of_plain_averaging(scheme: str, family: str) -> None:
    plain, _ = trained(job(scheme="fedavg", bn_eps="public", loss="cross-entropy", options=NORMED, **LOCAL))
    veiled, _ = trained(job(scheme=scheme, family=family, options=NORMED, **OPEN, **LOCAL))
    # Masks are for whole numbers: 2⁻³⁹ of the range is what they round to.
    assert distance(veiled.weights.parameters, plain.weights.parameters) < (1e-10 if scheme == "lossless" else 1e-7)


@pytest.mark.parametrize("case", [{"family": "scale"}, {"family": "full"}, {"family": "isometry", "head_noise": True}])
def test_local_training_is_refused_where_it_would_be_wrong(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one gradient per round"):
        job(scheme="lossless", **{"head_noise": False, **case}, local_steps=2)


@pytest.mark.parametrize(("scheme", "why"), [("fedavg", "no veil"), ("mpdp", "made for scales")])
def test_a_family_is_refused_where_there_is_none(scheme: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        job(scheme=scheme, family="full")


def test_noise_under_isometries_trains() -> None:
    state, rounds = trained(job(scheme="veil-dp", family="isometry", rounds=2, loss="cross-entropy", epsilon=8.0))
    assert len(rounds) == 2
    assert bool(torch.isfinite(state.weights.parameters).all())


def test_a_veiled_client_ends_where_torch_alone_ends() -> None:
    """torch's SGD and torch's BatchNorm with its own ε, to 1e-12: nothing of the veil is left in the model."""
    settings = {"momentum": 0.9, "weight_decay": 1e-3, "lr": 0.05, "rounds": 20}
    veiled = job(scheme="lossless", family="full", clients=1, options=NORMED, **OPEN, **settings)
    state, _ = trained(veiled)
    net = models.build("mlp", input_shape=(1, 8, 8), outputs=10, seed=1, **NORMED).double().train()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    x, y = veiled.pool.clients[0].take(torch.arange(300))
    for _ in range(20):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    assert distance(state.weights.parameters, flatten([p.detach() for p in net.parameters()])) < 1e-12
    running = flatten([net.norm1.running_mean, net.norm1.running_var])  # type: ignore[list-item]
    assert distance(state.weights.statistics, running) < 1e-12
