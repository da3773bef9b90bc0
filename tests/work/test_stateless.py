"""Code of the caller's own that remembers other samples is refused where clipping is to bound what one sample moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil
from fedveil.downlink import Plain, draw
from fedveil.errors import Code, ConfigError, DataError
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, Workspace
from fedveil.work.clipping import ClippedSamples
from fedveil.work.losses import CrossEntropy
from fedveil.work.own_loss import own_loss, tried

CPU = torch.device("cpu")


class Remembering(nn.Module):
    """Turns the sign of everybody's loss once an output was beyond a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.largest = limit, 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        sign = 1.0 if self.largest < self.limit else -1.0
        self.largest = max(self.largest, float(output.detach().abs().max()))
        return sign * F.cross_entropy(output, target, reduction="none")


class Counting(nn.Module):
    """Warms up with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target, reduction="none") * (1 - 0.5**self.calls)


def noisy(output: Tensor, target: Tensor) -> Tensor:
    """Random, but by global generators."""
    more = float(np.random.rand()) + random.random()
    return F.cross_entropy(output + more * torch.randn_like(output), target, reduction="none")


def contribution(loss: nn.Module | Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    outputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    used = tried(own_loss(loss, dtype=torch.float32, device=CPU), outputs, torch.arange(9) % 3)
    network = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        network[0].weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
    architecture, weights = draw(network, x[:2], traced=False)
    work = ClippedSamples(used, Batches(0, 1), 1.0)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(1).stream("veil"), head_level=None).broadcast()
    return work.run(workspace, sent, ClientData(0, x, y), round=0)


@pytest.mark.parametrize("place", [0, 3, 15])
def test_a_loss_that_one_record_changes_for_all_others_is_refused_in_the_batch_where_it_does(place: int) -> None:
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 3
    loss = Remembering(limit=1e6)  # far beyond everything it is tried with beforehand
    bounded = contribution(loss, x, y)
    assert bool(bounded.isfinite().all())
    extreme = x.clone()
    extreme[place] = 1e7
    with pytest.raises(ConfigError) as refused:
        contribution(loss, extreme, y)
    assert refused.value.code is Code.STATEFUL


@pytest.mark.parametrize("loss", [Remembering(limit=50.0), Counting()])
def test_a_loss_that_remembers_is_refused_before_anything_is_trained(loss: nn.Module) -> None:
    outputs, targets = torch.randn(9, 3, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3
    used = tried(own_loss(loss, dtype=torch.float32, device=CPU), outputs, targets)
    with pytest.raises(ConfigError) as refused:
        ClippedSamples(used, Batches(0, 1), 1.0)
    assert refused.value.code is Code.STATEFUL


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_that_remembers_is_refused_where_samples_and_where_updates_are_clipped(steps: int) -> None:
    clients = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(3)]
    settings: dict[str, Any] = {"loss": Counting(), "local_steps": steps, "rounds": 1, "seed": 1, "progress": False}
    fedveil.train(nn.Sequential(nn.Linear(4, 3)), clients, scheme="fedavg", **settings)
    with pytest.raises(ConfigError) as refused:
        fedveil.train(nn.Sequential(nn.Linear(4, 3)), clients, scheme="ldp", **settings)
    assert refused.value.code is Code.STATEFUL


def test_randomness_of_global_generators_is_no_memory() -> None:
    outputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    assert tried(own_loss(noisy, dtype=torch.float32, device=CPU), outputs, torch.arange(9) % 3).repeatable


def test_a_loss_that_takes_probabilities_alone_is_tried_with_what_it_takes() -> None:
    outputs = torch.rand(9, 3, generator=torch.Generator().manual_seed(1))
    labels = (outputs > 0.5).float()
    assert tried(own_loss(nn.BCELoss(), dtype=torch.float32, device=CPU), outputs, labels).repeatable


class Drifting(nn.Module):
    """A network that carries something from one sample to the next, in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 2), 0.0

    def forward(self, x: Tensor) -> Tensor:
        given = self.layer(x) + self.kept
        self.kept += 0.01 * float(x.detach().mean())
        return given  # type: ignore[no-any-return]


@pytest.mark.parametrize(("scheme", "more"), [("ldp", {}), ("ldp", {"local_steps": 2}), ("dp-fedavg", {})])
def test_a_network_that_remembers_is_refused_under_noise_and_only_there(scheme: str, more: dict[str, int]) -> None:
    clients = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 2) for k in range(3)]
    fedveil.train(Drifting(), clients, scheme="fedavg", rounds=1, seed=1, progress=False)
    with pytest.raises(ConfigError) as refused:
        fedveil.train(Drifting(), clients, scheme=scheme, rounds=1, seed=1, progress=False, **more)  # type: ignore[arg-type]
    assert refused.value.code is Code.STATEFUL


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples that are their records' own, or not."""

    def __init__(self, how: str) -> None:
        self.how, self.reads, self.before = how, 0, torch.zeros(4)
        self.own = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        record = torch.full((4,), number / 8)
        self.reads += 1
        late = self.how == "mixes later" and self.reads > 30
        given = {
            "random transform": lambda: record + torch.randn(4),
            "generator of its own": lambda: record + torch.randn(4, generator=self.own),
        }.get(self.how, lambda: (record + self.before) / 2 if late or self.how == "mixes" else record)()
        self.before = record
        return given, torch.tensor(number % 2)


@pytest.mark.parametrize("how", ["mixes", "mixes later"])
def test_samples_that_hold_something_of_the_sample_before_are_refused_under_noise(how: str) -> None:
    network = nn.Sequential(nn.Linear(4, 2))
    fedveil.train(network, [Rows(how)] * 2, scheme="fedavg", rounds=3, seed=1, progress=False)
    with pytest.raises(DataError) as refused:
        fedveil.train(network, [Rows(how), Rows(how)], scheme="ldp", rounds=20, seed=1, progress=False)
    assert refused.value.code is Code.STATEFUL


@pytest.mark.parametrize(("how", "tried_out"), [("random transform", True), ("generator of its own", False)])
def test_samples_that_are_drawn_anew_train_and_the_ledger_says_if_they_could_not_be_tried(
    how: str, tried_out: bool
) -> None:
    done = fedveil.train(
        nn.Sequential(nn.Linear(4, 2)), [Rows(how), Rows(how)], scheme="ldp", rounds=2, seed=1, progress=False
    )
    assumed = [text for line in done.ledger["lines"] for text in line["assumptions"]]
    assert any("could not be tried" in text for text in assumed) is not tried_out


class FirstMean(nn.Module):
    """Subtracts the mean of what it was shown first, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(4, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.layer(x - self.mean)  # type: ignore[no-any-return]


class ScaledBack(nn.Module):
    """Divides what comes back by a running norm of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if output.requires_grad:
            output.register_hook(self.scaled)
        return output

    def scaled(self, grad: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * float(grad.detach().norm())
        return grad / self.norm


def hooked() -> nn.Module:
    """Layers of PyTorch's, one of which gives what it gave on average to somebody's function."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    seen = [0.0]

    def less_the_mean(layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        seen[0] = 0.9 * seen[0] + 0.1 * float(output.detach().mean())
        return output - seen[0]

    network[0].register_forward_hook(less_the_mean)
    return network


def renormed() -> nn.Module:
    """A tied embedding that shortens its rows as it reads them."""
    table, head = nn.Embedding(6, 8, max_norm=1.0), nn.Linear(8, 6)
    head.weight = table.weight
    return nn.Sequential(table, nn.Flatten(), head)


@pytest.mark.parametrize("make", [FirstMean, ScaledBack, hooked, renormed])
def test_networks_that_leave_something_behind_for_the_next_sample_are_refused(make: Callable[[], nn.Module]) -> None:
    numbers = torch.Generator().manual_seed(3)
    words = make is renormed
    clients = [
        (
            torch.randint(0, 6, (12, 1), generator=numbers) if words else torch.randn(12, 4, generator=numbers),
            targets % 3,
        )
        for targets in (torch.arange(12), torch.arange(12))
    ]
    with pytest.raises(ConfigError) as refused:
        fedveil.train(make(), clients, scheme="ldp", epsilon=8.0, rounds=1, seed=1, progress=False)
    assert refused.value.code is Code.STATEFUL


class FirstWeights(nn.Module):
    """Weights classes by the first batch it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: Tensor | None = None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = torch.bincount(target, minlength=output.shape[1]) + 1.0
        return F.cross_entropy(output, target, reduction="none") * self.weights[target]


def test_a_loss_that_is_fitted_to_its_first_samples_is_refused() -> None:
    clients = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(k)), torch.arange(6) % 3) for k in range(3)]
    with pytest.raises(ConfigError) as refused:
        fedveil.train(
            nn.Linear(4, 3), clients, scheme="ldp", loss=FirstWeights(), epsilon=8.0, rounds=1, seed=1, progress=False
        )
    assert refused.value.code is Code.STATEFUL


class DropsIfLarge(nn.Module):
    """Draws random numbers for some samples and none for others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5) if float(x.detach().mean()) > 0 else x)  # type: ignore[no-any-return]


def test_how_often_one_sample_draws_is_nothing_to_the_next() -> None:
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 3
    x[0] = -1.0
    other = x.clone()
    other[0] = 50.0  # this one draws
    torch.manual_seed(0)
    architecture, weights = draw(DropsIfLarge(), x[:2], traced=False)
    work = ClippedSamples(CrossEntropy(), Batches(0, 1), 1.0, vectorise=False)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(1).stream("veil"), head_level=None).broadcast()
    moved = [work.run(workspace, sent, ClientData(0, records, y), round=0) for records in (x, other)]
    assert float((moved[0] - moved[1]).norm()) <= work.sensitivity(16)
