"""Under a veil the server ends in the model that plain federated averaging gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from federation import accuracy, distance, job, sizes, trained
from fedveil import models
from fedveil.tensors import flatten

ROUNDS, MANY = 6, 100
VEILED = ("lossless", "pbpfl")
ALL_SECRETS = {"lossless": {"head_groups": None}, "pbpfl": {}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 1e-3, "lr": 0.02},
    "minibatches": {"batch_size": 16},
    "partial cohorts": {"cohort": 0.4, "momentum": 0.5, "lr": 0.05},
    "size-skewed clients": {"how": "size", "ratio": 6.0},
    "target scale and true weight": {"target_scale": 3.0, "true_weight": 2.0, "lr": 0.02},
    "cosine schedule": {"lr_schedule": "cosine", "lr_decay": 0.99},
    "warm-up, steps, crops, flips and holes": {
        "warm_up": 0.2,
        "lr_schedule": "step",
        "lr_steps": "0.5,0.8",
        "augment": "crop:1,flip,cutout:3",
        "batch_size": 16,
        "momentum": 0.5,
    },
    "adam, polynomial": {"optimiser": "adam", "lr": 0.02, "weight_decay": 1e-3, "lr_schedule": "polynomial"},
    "adagrad, scaled features": {
        "optimiser": "adagrad",
        "lr": 0.02,
        "options": {"depth": 2, "width": 16, "feature_scale": 0.5},
    },
    "yogi": {"optimiser": "yogi", "lr": 0.02, "warm_up": 0.2, "lr_schedule": "cosine"},
    "batch norm": {"options": {"depth": 2, "width": 16, "norm": "batch"}, "momentum": 0.9, "weight_decay": 1e-3},
    "batch norm, cohorts, minibatches, skew": {
        "options": {"depth": 3, "width": 8, "norm": "batch"},
        "cohort": 3,
        "batch_size": 20,
        "how": "size",
        "ratio": 4.0,
    },
    "layer norm": {"options": {"depth": 2, "width": 16, "norm": "layer"}},
    "group norm": {"options": {"depth": 2, "width": 16, "norm": "group"}},
}


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rounds_under_a_veil_end_in_the_model_of_plain_averaging(case: dict[str, Any], rounds: int) -> None:
    settings = {"lr": 0.1, "rounds": rounds, **case}
    plain_job = job(scheme="fedavg", bn_eps="secret", **settings)
    plain, plain_rounds = trained(plain_job)
    for scheme in VEILED:
        # All ten secrets where it is about them; fewer elsewhere, for a quick test.
        secrets = {} if case and "true_weight" not in case else ALL_SECRETS[scheme]
        veiled, veiled_rounds = trained(job(scheme=scheme, **secrets, **settings))
        assert distance(veiled.weights.parameters, plain.weights.parameters) < 1e-9
        assert torch.equal(veiled.weights.epsilon, plain.weights.epsilon)
        if plain.weights.statistics.numel():
            assert distance(veiled.weights.statistics, plain.weights.statistics) < 1e-9
        losses = [(ours.loss, theirs.loss) for ours, theirs in zip(veiled_rounds, plain_rounds, strict=True)]
        assert all(ours == pytest.approx(theirs, rel=1e-9, abs=1e-12) for ours, theirs in losses)
    assert (
        plain_rounds[-1].loss < (0.6 if rounds == MANY else 0.98) * plain_rounds[0].loss
    )  # there was something to learn
    assert len(plain_rounds) == rounds


def test_the_batch_norm_case_really_moves_running_statistics() -> None:
    one = job(options={"depth": 2, "width": 16, "norm": "batch"}, rounds=5)
    state, _ = trained(one)
    assert one.weights.statistics.numel() == 2 * 16
    assert not torch.allclose(state.weights.statistics, one.weights.statistics, rtol=1e-2)


def test_the_skewed_case_really_has_unequal_clients() -> None:
    counts = sizes(job(how="size", ratio=6.0).pool.clients)
    assert max(counts) > 5 * min(counts)


def test_clients_count_by_their_number_of_samples() -> None:
    """Full batches: the average weighted by |D_k| is the gradient on all data, however it is dealt."""
    central = job(scheme="fedavg", clients=1, rounds=20)
    dealt = job(scheme="fedavg", clients=5, how="size", ratio=6.0, rounds=20)
    one, many = trained(central)[0], trained(dealt)[0]
    assert distance(many.weights.parameters, one.weights.parameters) < 1e-12


def test_one_client_of_plain_averaging_is_ordinary_training() -> None:
    """An oracle of its own: torch's SGD and torch's BatchNorm, running statistics included."""
    options = {"depth": 2, "width": 16, "norm": "batch"}
    settings = {"momentum": 0.9, "weight_decay": 1e-3, "lr": 0.05, "rounds": 20}
    one = job(scheme="fedavg", clients=1, options=options, **settings)
    state, boundaries = trained(one)
    net = models.build("mlp", input_shape=(1, 8, 8), outputs=10, seed=1, **options).double().train()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    x, y = one.pool.clients[0].take(torch.arange(300))
    onehot = torch.nn.functional.one_hot(y, 10).double()
    for done in boundaries:
        sgd.zero_grad()
        loss = 0.5 * (net(x) - onehot).square().sum(1).mean()
        loss.backward()
        sgd.step()
        assert done.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    assert distance(state.weights.parameters, flatten([p.detach() for p in net.parameters()])) < 1e-10
    running = flatten([net.norm1.running_mean, net.norm1.running_var])  # type: ignore[list-item]
    assert distance(state.weights.statistics, running) < 1e-10


def test_a_wrong_secret_would_be_noticed() -> None:
    """The comparison above can fail: a recovery with γ off by a millionth is far from it."""
    one, other = job(rounds=10), job(rounds=10, scheme="fedavg")
    honest = one.scheme.downlink.veil

    class Careless:
        traced = True
        head_tensors = one.scheme.downlink.head_tensors
        head_noise = one.scheme.downlink.head_noise
        covers = one.scheme.downlink.covers
        sends, spared = one.scheme.downlink.sends, one.scheme.downlink.spared

        def veil(self, *given: Any, **named: Any) -> Any:
            veil = honest(*given, **named)
            sent = veil.broadcast()
            veil._head.gamma *= 1 + 1e-6

            class Wrong:
                broadcast = staticmethod(lambda: sent)
                recover = staticmethod(veil.recover)

            return Wrong()

    object.__setattr__(one.scheme, "downlink", Careless())
    assert distance(trained(one)[0].weights.parameters, trained(other)[0].weights.parameters) > 1e-8


def test_in_float32_accuracies_agree_within_half_a_point() -> None:
    options = {"depth": 2, "width": 32}
    settings = {"dtype": "float32", "rounds": 50, "lr": 0.1, "momentum": 0.9, "options": options}
    found = {}
    for scheme in ("fedavg", *VEILED):
        one = job(scheme=scheme, **settings)
        found[scheme] = accuracy(one, trained(one)[0])
    assert found["fedavg"] > 0.6
    assert all(abs(found["fedavg"] - found[scheme]) <= 0.005 for scheme in VEILED)


def test_without_head_noise_any_loss_gives_the_same_model() -> None:
    settings = {"loss": "cross-entropy", "rounds": 20, "lr": 0.1}
    plain, _ = trained(job(scheme="fedavg", **settings))
    veiled, _ = trained(job(scheme="lossless", head_noise=False, **settings))
    assert distance(veiled.weights.parameters, plain.weights.parameters) < 1e-9
