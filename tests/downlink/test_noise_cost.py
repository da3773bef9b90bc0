"""What honest noise costs under a veil: the deviation of the recovered noise over plain DP's, at the same (ε, δ).

Noise is as large as the clipping bound, and both are clipped at the median of their own samples' gradient norms.
Recovery multiplies the noise by R. So the cost is (median norm under the veil / median norm without) × the root
mean square of R; batch sizes, rounds, ε and δ drop out.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedveil import data
from fedveil.downlink import Architecture, Broadcast, Mean, Plain, Rescaling, Weights, assemble, draw
from fedveil.secrets import SeededSecrets
from fedveil.work.losses import make_loss
from fedveil.work.messages import prepare
from fedveil.work.per_sample import PerSample

DRAWS = 20
SAMPLES = 200


@cache
def digits() -> tuple[Tensor, Tensor]:
    train = data.load("digits", seed=0).train.to(dtype=torch.float64)
    return train.x.flatten(1), train.y


@cache
def network(steps: int) -> tuple[Architecture, Weights]:
    """64-128-64-10 with ReLU, after `steps` full-batch steps of the square loss."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=(2 / layer.in_features) ** 0.5, generator=random)
            nn.init.zeros_(layer.bias)
    x, y = digits()
    architecture, weights = draw(model, x[:2], traced=True)
    trained, loss = assemble(architecture, weights), make_loss("square")
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        loss.mean(trained(x), y).backward()
        optimiser.step()
    parameters = torch.cat([one.detach().reshape(-1) for one in trained.parameters()])
    weights.parameters.copy_(parameters)
    return architecture, weights


def median_norm(architecture: Architecture, broadcast: Broadcast, loss: str) -> float:
    engine = PerSample(architecture, make_loss(loss))
    prepare(architecture, engine.module, broadcast)
    x, y = digits()
    return float(engine(x[:SAMPLES], y[:SAMPLES], clients=1, clip=1.0).norms.median())


def cost(spread: float, *, steps: int, loss: str) -> float:
    """The mean over 20 draws of scales."""
    architecture, weights = network(steps)
    source = SeededSecrets(1)
    bare = Plain().veil(architecture, weights, stream=source.stream("bare"), head_level=None)
    plain = median_norm(architecture, bare.broadcast(), loss)
    found = []
    for number in range(DRAWS):
        stream = source.stream("veil", number)
        veil = Rescaling(spread).veil(architecture, weights, stream=stream, head_level=None)
        ones, nothing = torch.ones(1, architecture.size, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
        factors = veil.recover(Mean(ones, nothing, nothing)).gradient
        found.append(median_norm(architecture, veil.broadcast(), loss) / plain * float(factors.square().mean().sqrt()))
    return sum(found) / len(found)


@pytest.mark.parametrize("steps", [0, 100, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", ["square", "cross-entropy"])
def test_veiled_noise_is_a_sixth_larger_than_plain_noise_at_the_default_spread(loss: str, steps: int) -> None:
    assert cost(1.5, steps=steps, loss=loss) == pytest.approx(1.17, rel=0.05)


@pytest.mark.parametrize(("spread", "wanted", "within"), [(1.2, 1.04, 0.03), (2.0, 1.55, 0.05), (4.0, 5.2, 0.1)])
@pytest.mark.parametrize("loss", ["square", "cross-entropy"])
def test_the_cost_grows_with_the_spread(loss: str, spread: float, wanted: float, within: float) -> None:
    assert cost(spread, steps=100, loss=loss) == pytest.approx(wanted, rel=within)
