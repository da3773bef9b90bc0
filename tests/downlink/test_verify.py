"""The last check before training: a wrongly traced network is refused, whatever the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil
from downlink.networks import Net
from fedveil import models
from fedveil.downlink import Architecture, Rescaling, Weights, draw
from fedveil.downlink.architecture import assemble, load_parameters
from fedveil.downlink.export import verified, verify
from fedveil.downlink.limits import LIMITED
from fedveil.downlink.slots import SlotSet
from fedveil.downlink.symmetry import FAMILIES, STEP_BY_STEP
from fedveil.errors import TraceError
from fedveil.secrets import SeededSecrets


def resnet() -> tuple[Architecture, Weights, torch.Tensor]:
    net = models.build("resnet20", input_shape=(3, 8, 8), outputs=10)
    x = torch.randn(2, 3, 8, 8)
    return (*draw(net, x, traced=True), x)


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet20", "densenet"])
def test_a_rightly_traced_network_passes(model: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    architecture, weights = draw(models.build(model, input_shape=(3, 8, 8), outputs=10), x, traced=True)
    verify(architecture, weights, x)


@pytest.mark.parametrize("at", [0, 5, 11, 20])
def test_a_table_that_is_wrong_in_one_place_is_refused(at: int) -> None:
    architecture, weights, x = resnet()
    table = architecture.table
    assert table is not None
    convolutions = [number for number, one in enumerate(table.parameters) if one.into is not None]
    wrong = convolutions[at % len(convolutions)]
    entry = table.parameters[wrong]
    assert entry.into is not None
    spoilt = dataclasses.replace(entry, into=torch.zeros_like(entry.into))
    if torch.equal(entry.into, spoilt.into):  # the first layer reads the input, which is not scaled
        assert entry.out is not None
        spoilt = dataclasses.replace(entry, out=torch.zeros_like(entry.out))
    parameters = tuple(spoilt if number == wrong else one for number, one in enumerate(table.parameters))
    broken = dataclasses.replace(architecture, table=dataclasses.replace(table, parameters=parameters))
    with pytest.raises(TraceError, match="Nothing was trained"):
        verify(broken, weights, x)


def test_a_forgotten_normalisation_is_refused() -> None:
    architecture, weights, x = resnet()
    assert architecture.table is not None
    table = dataclasses.replace(architecture.table, norms=architecture.table.norms[1:])
    with pytest.raises(TraceError, match="please report the model"):
        verify(dataclasses.replace(architecture, table=table), weights, x)


def test_the_check_leaves_the_weights_as_they_were() -> None:
    architecture, weights, x = resnet()
    before = weights.clone()
    verify(architecture, weights, x)
    assert torch.equal(before.parameters, weights.parameters)
    assert torch.equal(before.statistics, weights.statistics)


class Shuffled(nn.Module):
    """Channels are added to themselves in another order: each is tied to others by a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixed = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = x + F.channel_shuffle(F.relu(self.norm(self.mixed(x))), 2)
        x = F.gelu(x) + F.channel_shuffle(x, 2)
        return self.last((F.channel_shuffle(x, 2) + x).mean((2, 3)))


class Folded(nn.Module):
    """One place of a unit is multiplied by the other place of another: view, transpose, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.flatten(1)[:, :6]))
        return self.last(x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) * x)


class Rolled(nn.Module):
    """Places of several channels are shifted as if they were one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 3, 3, padding=1), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.flatten(1)[:, None, :6])).flatten(1)
        return self.last(x.roll(2, 1))


@pytest.mark.parametrize("family", STEP_BY_STEP["sgd"])
@pytest.mark.parametrize("network", [Shuffled, Folded, Rolled])
def test_units_with_several_places_move_only_where_these_lie_alike(network: type[nn.Module], family: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    module = network().double()
    architecture, weights = draw(module, x, traced=True, family=family)
    assert architecture.table is not None
    assert architecture.table.symmetry is not None
    downlink = Rescaling(family=family)
    verify(architecture, weights, x, downlink=downlink)
    for number in range(10):  # and every other secret
        veil = downlink.veil(architecture, weights, stream=SeededSecrets(number).stream("round"), head_level=None)
        veiled = assemble(architecture, weights)
        load_parameters(veiled, veil.broadcast().parameters)
        torch.testing.assert_close(veiled(x), module(x), rtol=1e-9, atol=1e-12)


class BehindZeros(nn.Module):
    """A branch that begins with zeros twice in a row, so that neither outputs nor gradients tell of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.zeros(8))
        nn.init.zeros_(self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.gain * self.inner(x.cumsum(1)))


def test_a_wrong_rule_behind_zeros_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITED, "cumsum", lambda tracing, out, input, *_: LIMITED["tanh"](tracing, out, input))
    torch.manual_seed(0)
    x = torch.randn(2, 6)
    architecture, weights = draw(BehindZeros(), x, traced=True, family="signed")
    before = weights.clone()
    with pytest.raises(TraceError, match="differs from the true one"):
        verify(architecture, weights, x, downlink=Rescaling(family="signed"))
    assert torch.equal(before.parameters, weights.parameters)


def test_a_network_that_is_none_at_other_values_is_checked_at_its_own() -> None:
    net = Net(lambda net, x: net.last((net.first(x) - 30.0).asin()), first=nn.Linear(6, 8), last=nn.Linear(8, 3))
    with torch.no_grad():
        net.first.weight.zero_()
        net.first.bias.fill_(30.0)  # asin is not defined a little further off
    x = torch.randn(2, 6)
    architecture, weights = draw(net, x, traced=True, family="full")
    verify(architecture, weights, x, downlink=Rescaling(family="full"))


def test_the_check_never_takes_the_identity_and_always_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotSet, "moved", lambda *_: None)  # places are forgotten: the orders are wrong
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    for seed in range(5):
        torch.manual_seed(seed)
        architecture, weights = draw(Rolled().double(), x, traced=True, family="signed")
        with pytest.raises(TraceError, match="differs from the true one"):
            verify(architecture, weights, x, downlink=Rescaling(family="signed"))
        table = verified(architecture, weights, x, downlink=Rescaling(family="signed")).table
        assert table is not None
        assert table.symmetry is not None
        assert not table.symmetry.orders
        assert "verification" in {pin.operation for pin in table.pins}


class TrainOnly(nn.Module):
    """A sigmoid that only training sees, and dropout by the layer and by the function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        x = torch.sigmoid(x) if self.training else torch.relu(x)
        return self.last(F.dropout(self.dropout(x), 0.3, self.training))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_training_runs_is_compared_too(family: str) -> None:
    x = torch.randn(2, 1, 4, 4)
    architecture, weights = draw(TrainOnly(), x, traced=True, family=family)
    verify(architecture, weights, x, downlink=Rescaling(family=family))
    architecture, weights = draw(TrainOnly().eval(), x, traced=True, family="scale")
    with pytest.raises(TraceError, match="in training mode"):
        verify(dataclasses.replace(architecture, skeleton=architecture.skeleton.train()), weights, x)


class BySize(nn.Module):
    """Normalises or not by how many samples there are; the trace sees one number of them."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.bound = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3), bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        return self.last(torch.relu(self.norm(x) if x.shape[0] > self.bound else x))


@pytest.mark.parametrize(("bound", "sizes"), [(1, ()), (4, ()), (20, (32,))])
def test_a_branch_by_the_number_of_samples_is_refused_or_has_no_secrets(bound: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 4, 4)
    architecture, weights = draw(BySize(bound), x, traced=True, family="full")
    with pytest.raises(TraceError, match="for a batch of"):
        verify(architecture, weights, x, downlink=Rescaling(family="full"), sizes=sizes)
    kept = verified(architecture, weights, x, downlink=Rescaling(family="full"), sizes=sizes)
    assert kept.table is not None
    assert kept.table.sized
    assert "verification" in {pin.operation for pin in kept.table.pins}


def test_a_network_that_takes_no_single_sample_passes() -> None:
    x = torch.randn(2, 16)
    architecture, weights = draw(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), x, traced=True)
    verify(architecture, weights, x)


class HardtanhByFunction(nn.Module):
    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardtanh(x, self.low, self.high)


@pytest.mark.parametrize("kind", [nn.Hardtanh, HardtanhByFunction])
@pytest.mark.parametrize(("high", "odd"), [(60.0, True), (120.0, False)])
def test_hardtanh_lets_signs_pass_only_between_opposite_bounds(
    kind: Callable[[float, float], nn.Module], high: float, odd: bool
) -> None:
    net = nn.Sequential(nn.Linear(6, 8), kind(-60.0, high), nn.Linear(8, 3))  # no example reaches the bounds
    architecture, _ = draw(net, torch.randn(2, 6), traced=True, family="signed")
    assert architecture.table is not None
    assert architecture.table.symmetry is not None
    assert bool(architecture.table.symmetry.signs.any()) is odd


class Counting(nn.Module):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.counts, self.step, self.seen = counts, 0, [0, "warm"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.step += 1
        return self.last(torch.relu(self.first(x)) if self.step < 7 else self.first(x))


def test_a_network_that_counts_its_calls_is_refused_under_a_veil() -> None:
    clients = [(torch.randn(4, 6), torch.arange(4) % 3) for _ in range(2)]
    given: dict[str, Any] = {"rounds": 1, "seed": 1, "progress": False}
    with pytest.raises(TraceError, match="'step'"):
        fedveil.train(Counting(counts=True), clients, scheme="lossless", **given)
    for scheme, counts in (("lossless", False), ("fedavg", True)):
        assert fedveil.train(Counting(counts=counts), clients, scheme=scheme, **given).model is not None
