"""Under every family the server ends in the model of plain averaging; local training where it is exact, only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedveil
from federation import distance, job, trained
from fedveil import models
from fedveil.errors import Code, ConfigError
from fedveil.runs.job import ADAM as ADAM_NOTE
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
        ({"scheme": "lossless", **OPEN, "local_steps": 2, "client_optimiser": "adam"}, "signed"),
        ({"scheme": "pbpfl", **OPEN}, "full"),
        ({"scheme": "veil-secagg"}, "scale"),
        ({"scheme": "veil-secagg", **OPEN}, "full"),
        ({"scheme": "veil-secagg", **OPEN, "local_epochs": 1}, "isometry"),
        ({"scheme": "veil-secagg", **OPEN, "local_epochs": 1, "client_optimiser": "adam"}, "signed"),
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
    local = {"local_steps": 2, "loss": "cross-entropy"}
    for scheme, kind, told in (("lossless", "adam", True), ("lossless", "sgd", False), ("fedavg", "adam", False)):
        veil = {"head_noise": False} if scheme == "lossless" else {}
        assert (ADAM_NOTE in job(scheme=scheme, client_optimiser=kind, **veil, **local).notes) is told


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


ADAM: dict[str, Any] = {
    "local_epochs": 2,
    "batch_size": 16,
    "client_lr": 0.005,
    "client_optimiser": "adam",
    "client_weight_decay": 1e-2,
    "lr": 1.0,
    "rounds": 6,
}


@pytest.mark.parametrize("scheme", ["lossless", "pbpfl", "veil-secagg"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_adam_of_clients_under_orders_and_signs_is_that_of_plain_averaging(scheme: str, norm: str) -> None:
    """Before a normalisation the gradient of a bias is 0 but for rounding, which Adam divides by little more than τ:
    10⁻¹⁶ of a gradient is up to 10⁻⁸ of a step, and that is what is left."""
    options = {**NORMED, "norm": norm}
    plain, rounds = trained(job(scheme="fedavg", bn_eps="public", loss="cross-entropy", options=options, **ADAM))
    veiled, _ = trained(job(scheme=scheme, options=options, **OPEN, **ADAM))
    # Masks are for whole numbers: 2⁻³⁹ of the range is what they round to.
    assert distance(veiled.weights.parameters, plain.weights.parameters) < (1e-6 if scheme == "veil-secagg" else 1e-9)
    assert rounds[-1].loss < 0.7 * rounds[0].loss  # type: ignore[operator]
    by_sgd, _ = trained(
        job(
            scheme="fedavg",
            bn_eps="public",
            loss="cross-entropy",
            options=options,
            **ADAM | {"client_optimiser": "sgd"},
        )
    )
    assert distance(by_sgd.weights.parameters, plain.weights.parameters) > 1e-2


def ended(scheme: str, dtype: str = "float64", **settings: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A Transformer of the catalogue after 30 rounds of clients' own AdamW, and what it says of some texts."""
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(1, 20, (3, 12, 6), generator=generator)
    clients = [(x, (x > 10).sum(1) % 3) for x in texts]
    net = models.build("transformer", input_shape=(6,), outputs=3, seed=1, vocabulary=20, width=8, depth=1, heads=2)
    given = {"local_steps": 2, "batch_size": 6, "client_lr": 0.003, "client_optimiser": "adam", "rounds": 30, "seed": 1}
    given |= {"client_weight_decay": 1e-2, "loss": "cross-entropy", "progress": False, "public_start": False}
    end = fedveil.train(net, clients, scheme=scheme, dtype=dtype, **given, **settings)
    with torch.no_grad():
        return dict(end.model.state_dict()), end.model(texts.flatten(0, 1))


def test_thirty_rounds_of_a_transformer_with_clients_own_adam_are_those_of_plain_averaging() -> None:
    """In double precision every number. In single precision those wander whose gradient is 0 but for rounding, a key's
    bias: what the model says does not."""
    (plain, said), (veiled, _) = ended("fedavg"), ended("lossless", head_noise=False)
    for name, value in plain.items():
        assert distance(veiled[name], value) < 1e-9, name
    (single, close), (other, near) = ended("fedavg", "float32"), ended("lossless", "float32", head_noise=False)
    off = {name: distance(other[name], value) for name, value in single.items()}
    assert [name for name, far in off.items() if far > 1e-4] == ["blocks.0.attention.key.bias"]
    assert distance(near, close) < 1e-4
    assert distance(close, said) < 1e-4


@pytest.mark.parametrize(("tau", "most"), [(1e-8, 0.1), (1e-5, 1e-3)])
def test_in_single_precision_adam_moves_biases_before_a_normalisation_by_rounding_veil_or_not(
    tau: float, most: float
) -> None:
    """Under a veil at most three times as far from double precision as without; a larger τ holds them."""
    settings: dict[str, Any] = {**ADAM, "options": NORMED, "loss": "cross-entropy", "client_tau": tau, "rounds": 10}
    truth, _ = trained(job(scheme="fedavg", bn_eps="public", **settings))
    plain, _ = trained(job(scheme="fedavg", bn_eps="public", dtype="float32", **settings))
    veiled, _ = trained(job(scheme="lossless", head_noise=False, dtype="float32", **settings))
    far, farther = (distance(end.weights.parameters, truth.weights.parameters) for end in (plain, veiled))
    assert farther < 3.0 * far < most
    assert tau > 1e-6 or far > 1e-3


@pytest.mark.parametrize("family", ["isometry", "full", "scale"])
@pytest.mark.parametrize("scheme", ["lossless", "pbpfl", "veil-secagg"])
def test_adam_of_clients_is_refused_under_all_but_orders_and_signs(scheme: str, family: str) -> None:
    with pytest.raises(ConfigError, match="--family signed") as caught:
        job(scheme=scheme, family=family, **OPEN, local_steps=2, client_optimiser="adam")
    assert caught.value.code is Code.SETTINGS
    with pytest.raises(ConfigError, match="exactly one gradient per round"):
        job(scheme=scheme, family="signed", local_steps=2, client_optimiser="adam")  # under head noise


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
