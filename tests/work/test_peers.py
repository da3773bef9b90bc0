"""Our figures beside those of the field's own packages: gradients (Opacus), integer noise (OpenDP), accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

from fedveil.downlink import draw
from fedveil.downlink.plain import Unveiled
from fedveil.ledger.gaussian import epsilon_of, sigma_of
from fedveil.uplink.grid import discrete_gaussian, parameter_of
from fedveil.work.losses import CrossEntropy
from fedveil.work.messages import prepare
from fedveil.work.per_sample import PerSample


class Reader(nn.Module):
    """An embedding whose words share a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


def cnn(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *norms, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


NETWORKS = {"cnn": cnn, "group norm": lambda: cnn(nn.GroupNorm(2, 4)), "embedding": Reader}


@pytest.mark.parametrize("name", NETWORKS)
def test_clipped_sums_are_those_of_opacus_per_sample_gradients(name: str) -> None:
    opacus = pytest.importorskip("opacus", reason="needs opacus")
    torch.manual_seed(3)
    net, samples, clip = NETWORKS[name]().double(), 7, 0.3
    x = torch.randint(0, 9, (samples, 5)) if name == "embedding" else torch.randn(samples, 1, 6, 6).double()
    y = torch.randint(0, 3, (samples,))
    wrapped = opacus.GradSampleModule(net, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
    theirs = torch.cat([p.grad_sample.flatten(1) for p in wrapped.parameters()], dim=1)
    norms = theirs.norm(dim=1, keepdim=True)
    assert (norms > clip).any()
    expected = (theirs * (clip / norms).clamp(max=1.0)).sum(0)
    net = wrapped._module
    wrapped.remove_hooks()
    for parameter in net.parameters():
        parameter.grad = None
        del parameter.grad_sample
    architecture, weights = draw(net, x[:2], traced=False)
    engine = PerSample(architecture, CrossEntropy())
    prepare(architecture, engine.module, Unveiled(architecture, weights).broadcast())
    ours = engine(x, y, clients=1, clip=clip).sums[0]
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sigma", [2.5, 6.0])
def test_integer_noise_has_the_law_of_opendps(sigma: float) -> None:
    """Chi-square of two samples of 20,000; OpenDP draws from the system, so a false alarm has a chance of 10⁻⁶."""
    dp = pytest.importorskip("opendp.prelude", reason="needs opendp")
    dp.enable_features("contrib")
    count = 20_000
    space = dp.vector_domain(dp.atom_domain(T="i64"), size=count), dp.l2_distance(T="f64")
    theirs = np.asarray(dp.m.make_gaussian(*space, scale=parameter_of(sigma))([0] * count))
    ours = discrete_gaussian(count, sigma=sigma, seed=bytes(range(32)))
    edges = np.concatenate([[-np.inf], np.arange(-math.floor(2.5 * sigma), 2.5 * sigma) - 0.5, [np.inf]])
    tables = [np.histogram(drawn, bins=edges)[0] for drawn in (ours, theirs)]
    both = tables[0] + tables[1]
    assert both.min() > 50
    distance = float(((tables[0] - tables[1]) ** 2 / both).sum())
    assert distance < chi2.isf(1e-6, len(both) - 1)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_gaussian_accounting_is_that_of_dp_accounting(epsilon: float) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra accounting")
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    delta, rounds = 1e-5, 5
    sigma = sigma_of(epsilon, delta)
    for relation, reach in ((NeighboringRelation.REPLACE_ONE, 2.0), (NeighboringRelation.ADD_OR_REMOVE_ONE, 1.0)):
        theirs = PLDAccountant(relation, 1e-4)
        theirs.compose(GaussianDpEvent(sigma * math.sqrt(rounds)), rounds)
        assert epsilon_of(reach / sigma, delta) == pytest.approx(theirs.get_epsilon(delta), rel=2e-3)
