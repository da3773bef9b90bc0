"""A network stays its author's: with the defaults a run ends where torch alone ends, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federation import distance, trained
from fedveil.config import RunConfig
from fedveil.engine import ClientPool
from fedveil.runs.job import EPSILON, Job, ModelFacts, assemble_job
from fedveil.runs.preflight import preflight
from fedveil.tensors import flatten
from fedveil.uplink.plain import Bare

ROUNDS, LR, CLIP = 6, 0.05, 1.0
PICTURE, CLASSES = (2, 6, 6), 3
NEAR = 1e-12


def batch_norm() -> nn.Module:
    """A convolution, one for each channel by itself, and one of single pixels, with BatchNorm between them."""
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, eps=0.3), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6, eps=0.2), nn.SiLU()),
        *(nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, CLASSES)),
    )


def group_norm() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6, eps=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(96, CLASSES)),
    )


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8, eps=0.3), nn.GELU(), nn.Linear(8, CLASSES))


NETS = (batch_norm, group_norm, layer_norm)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 8, *PICTURE, generator=generator, dtype=torch.float64)
    return [(part, torch.arange(8) % CLASSES) for part in x]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make().double().train()


def started(make: Callable[[], nn.Module], **settings: Any) -> Job:
    config = RunConfig(
        **{"clients": 3, "rounds": ROUNDS, "lr": LR, "seed": 1, "dtype": "float64", "loss": "cross-entropy", **settings}
    )
    facts = ModelFacts(None, {}, PICTURE, CLASSES, "classification")
    return assemble_job(config, made(make), ClientPool.separate(batches()), None, facts)


def by_torch(make: Callable[[], nn.Module], *, clip: float | None = None) -> Tensor:
    """SGD on the mean of the clients' losses; with `clip`, of their samples' gradients, each cut to that length."""
    net, data = made(make), batches()
    sgd = torch.optim.SGD(net.parameters(), lr=LR)
    whole = [(x, y) for x, y in data]
    single = [(x[i : i + 1], y[i : i + 1]) for x, y in data for i in range(len(y))]
    for _ in range(ROUNDS):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for x, y in whole if clip is None else single:
            gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
            length = float(torch.sqrt(sum(g.square().sum() for g in gradient)))  # type: ignore[arg-type]
            factor = 1.0 if clip is None else min(1.0, clip / length)
            for part, g in zip(total, gradient, strict=True):
                part += factor * g
        for parameter, part in zip(net.parameters(), total, strict=True):
            parameter.grad = part / len(whole if clip is None else single)
        sgd.step()
    return flatten([p.detach() for p in net.parameters()])


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({"scheme": "fedavg"}, None),
        ({"scheme": "lossless", "head_noise": False}, "full"),
        ({"scheme": "lossless", "head_noise": False, "family": "isometry"}, "isometry"),
        # Masks are for whole numbers: a range no wider than the gradients leaves them 2⁻⁵⁶.
        ({"scheme": "veil-secagg", "head_noise": False, "value_range": 16.0}, "full"),
    ],
    ids=["fedavg", "lossless", "isometry", "veil-secagg"],
)
def test_a_run_ends_where_torch_alone_ends(
    make: Callable[[], nn.Module], settings: dict[str, Any], family: str | None
) -> None:
    job = started(make, **settings)
    assert (job.coverage.family if job.coverage else None) == family
    state, _ = trained(job)
    assert distance(state.weights.parameters, by_torch(make)) < NEAR


@pytest.mark.parametrize("make", [group_norm, layer_norm])
def test_noise_aside_veil_dp_ends_where_torch_alone_ends(make: Callable[[], nn.Module]) -> None:
    """Per-sample clipping in a loop of torch's own; BatchNorm mixes samples, and is refused under noise."""
    job = started(make, scheme="veil-dp", clip=CLIP)
    assert job.scheme.downlink.family == "isometry"
    state, _ = trained(replace(job, scheme=replace(job.scheme, uplink=Bare())))
    ended = by_torch(make, clip=CLIP)
    assert distance(state.weights.parameters, ended) < NEAR
    assert distance(by_torch(make), ended) > 1e-6, "nothing was clipped"


@pytest.mark.parametrize("make", NETS)
def test_scales_need_another_epsilon_and_the_run_says_so_once(make: Callable[[], nn.Module]) -> None:
    veiled = started(make, scheme="lossless", loss="square", min_coverage=0.0)
    assert veiled.scheme.downlink.family == "scale"
    assert sum(EPSILON in text for text in preflight(veiled)) == 1
    assert veiled.notes.count(EPSILON) == 1
    assert not any(EPSILON in text for text in preflight(veiled, begins=False))
    plain = started(make, scheme="fedavg", loss="square")
    assert EPSILON not in " ".join((*plain.notes, *preflight(plain)))
    end = trained(veiled)[0].weights.parameters
    assert distance(end, trained(plain)[0].weights.parameters) > 1e-6
    beside = started(make, scheme="fedavg", loss="square", bn_eps="secret")
    assert distance(end, trained(beside)[0].weights.parameters) < 1e-9


@pytest.mark.parametrize(
    ("settings", "secret"),
    [
        ({"scheme": "fedavg"}, False),
        ({"scheme": "fedavg", "bn_eps": "secret"}, True),
        ({"scheme": "nadp"}, False),
        ({"scheme": "veil-dp"}, False),
        ({"scheme": "veil-dp", "bn_eps": "secret"}, False),
        ({"scheme": "veil-dp", "family": "scale"}, True),
        ({"scheme": "veil-dp", "family": "scale", "bn_eps": "public", "min_coverage": 0.0}, False),
        ({"scheme": "mpdp", "loss": "square", "min_coverage": 0.0}, True),
    ],
)
def test_epsilon_is_secret_only_where_a_veil_of_scales_needs_it(settings: dict[str, Any], secret: bool) -> None:
    own = torch.full((2,), 0.3, dtype=torch.float64)
    assert torch.equal(started(group_norm, **settings).weights.epsilon.reshape(-1)[:2], own) is not secret
