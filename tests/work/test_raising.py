"""Code of the caller's own that raises for one sample: that moves no other, and is told to nobody by a refusal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedveil
from fedveil.downlink import Plain, draw
from fedveil.errors import Code, ConfigError, NumericError
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, Workspace
from fedveil.work.clipping import ClippedSamples
from fedveil.work.losses import CrossEntropy, Loss, SquareLoss

CLIP = 1.0


class Whitened(nn.Module):
    """Tokens are whitened by their own covariance; where that is singular they stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(1, keepdim=True)
        covariance = apart.transpose(1, 2) @ apart / apart.shape[1]
        try:
            lower = torch.linalg.cholesky(covariance)
            apart = torch.linalg.solve_triangular(lower, apart.transpose(1, 2), upper=False).transpose(1, 2)
        except torch.linalg.LinAlgError:
            pass
        return self.head(apart.flatten(1))  # type: ignore[no-any-return]


class WordDropout(nn.Module):
    """Words are left out by a generator that is not torch's, a draw for each that is no padding."""

    def __init__(self, drawn: Callable[[], float]) -> None:
        super().__init__()
        self.table, self.head, self.drawn = nn.Embedding(20, 8), nn.Linear(8, 3), drawn

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.tensor([[float(word != 0 and self.drawn() > 0.5) for word in row] for row in x.tolist()])
        return self.head((self.table(x) * keep[..., None]).sum(1))  # type: ignore[no-any-return]


class Balanced(nn.Module):
    """What comes back is divided by a running norm: nothing of that shows in outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.usual = nn.Embedding(50, 8), nn.Linear(8, 3), 0.05

    def forward(self, x: Tensor) -> Tensor:
        mean = self.table(x).mean(1)
        if mean.requires_grad:
            mean.register_hook(self.scaled)
        return self.head(mean)  # type: ignore[no-any-return]

    def scaled(self, grad: Tensor) -> Tensor:
        self.usual = 0.9 * self.usual + 0.1 * float(grad.detach().norm())
        return grad / (self.usual + 1e-6)


class Picky(nn.Module):
    """Takes no number beyond 100."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise ValueError("that is too much")
        return self.layer(x)  # type: ignore[no-any-return]


def contribution(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, *, loss: Loss | None = None, **more: Any
) -> Tensor:
    torch.manual_seed(0)
    architecture, weights = draw(make(), x[:2], traced=False)
    work = ClippedSamples(loss or CrossEntropy(), Batches(0, 1), CLIP, **more)
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(1).stream("veil"), head_level=None).broadcast()
    random.seed(0)
    np.random.seed(0)
    return work.run(workspace, sent, ClientData(0, x, y), round=0)


def moved(make: Callable[[], nn.Module], x: Tensor, other: Tensor, y: Tensor) -> float:
    return float((contribution(make, x, y) - contribution(make, other, y)).norm())


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Samples, the same with an empty one among them, and targets."""
    x = torch.randn(32, 8, 4, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 1.0, 30.0, 30.0])
    other = x.clone()
    other[5] = 0.0
    return x, other, torch.arange(32) % 3


@torch.jit.script
def scripted(covariance: Tensor) -> Tensor:
    return torch.linalg.cholesky(covariance)


class Scripted(Whitened):
    """The same by a script, which no mode of torch's sees."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(1, keepdim=True)
        try:
            lower = scripted(apart.transpose(1, 2) @ apart / apart.shape[1])
            apart = torch.linalg.solve_triangular(lower, apart.transpose(1, 2), upper=False).transpose(1, 2)
        except RuntimeError:
            pass
        return self.head(apart.flatten(1))  # type: ignore[no-any-return]


class Dropping(Whitened):
    """Whole tokens are dropped before: what raises among others need not raise alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * nn.functional.dropout(torch.ones_like(x[:, :, :1]), 0.3))


class Hooked(Whitened):
    """It is on the way back that something is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x)

        def scaled(grad: Tensor) -> Tensor:
            try:
                return grad @ torch.linalg.cholesky(x.detach().transpose(1, 2) @ x.detach() / x.shape[1])
            except RuntimeError:
                return -grad

        if given.requires_grad:
            given.register_hook(scaled)
        return self.head(given.flatten(1))  # type: ignore[no-any-return]


def activation(hidden: Tensor) -> Tensor:
    square = hidden.transpose(-1, -2) @ hidden / hidden.shape[-2]
    try:
        return hidden @ torch.linalg.cholesky(square)
    except RuntimeError:
        return hidden.relu()


def activated() -> nn.Module:
    """A layer of PyTorch's with somebody's function in it."""
    layer = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, activation=activation, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))


def overwritten() -> nn.Module:
    """A layer of PyTorch's with a method put over its own."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    network[2].forward = lambda hidden: activation(hidden.reshape(-1, 8, 4)).reshape(-1, 32)  # type: ignore[method-assign]
    return network


@pytest.mark.parametrize("make", [Whitened, Scripted, Dropping, Hooked, activated, overwritten])
def test_an_operation_that_raises_for_one_sample_changes_the_branch_of_no_other(make: Callable[[], nn.Module]) -> None:
    """Taken together it raises for all of them at once."""
    x, other, y = tokens()
    assert moved(make, x, other, y) <= 2.0 * CLIP


def test_whoever_says_that_together_is_the_same_has_that_in_the_ledger() -> None:
    settings: dict[str, Any] = {"scheme": "ldp", "rounds": 1, "seed": 1, "progress": False}
    data = people(extreme=False)
    said = [json.dumps(fedveil.train(Own(), data, vectorise=how, **settings).ledger["lines"]) for how in (None, True)]
    assert ["among others what it does with it alone" in text for text in said] == [False, True]


@pytest.mark.parametrize(("vectorise", "told"), [(None, True), (True, False), (False, False)])
def test_whose_code_goes_one_by_one_is_told_why_it_is_slow(
    vectorise: bool | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fedveil")
    settings: dict[str, Any] = {"scheme": "ldp", "rounds": 1, "seed": 1, "progress": False, "vectorise": vectorise}
    fedveil.train(Own(), people(extreme=False), **settings)
    assert ("which vectorise=True asks for" in caplog.text) is told
    caplog.clear()
    fedveil.train(nn.Sequential(nn.Linear(4, 2)), people(extreme=False), **settings)
    assert "one by one" not in caplog.text


class Own(nn.Sequential):
    """Somebody's, and well behaved."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2))


def test_the_rest_round_as_they_do_without_a_sample_that_raises() -> None:
    """On a model that is made for it rounding is all there is: not a bit of the others may move."""
    _, other, y = tokens()
    third = other.clone()
    third[5] = 1.0  # singular, too
    alone = [contribution(Whitened, one[5:6], y[5:6]) for one in (other, third)]
    both = [contribution(Whitened, one, y) for one in (other, third)]
    apart = (both[0] - both[1]) - (alone[0] - alone[1])
    assert torch.equal(alone[0], alone[1])  # what remains of either is nothing
    assert not apart.any()


def test_where_all_samples_raise_each_is_computed_by_itself() -> None:
    _, _, y = tokens()
    empty = torch.zeros(32, 8, 4)
    apart = contribution(Whitened, empty, y)
    assert torch.allclose(apart, contribution(Whitened, empty, y, vectorise=False), rtol=1e-6)


DRAWN: dict[str, Callable[[], float]] = {"random": lambda: random.random(), "numpy": lambda: float(np.random.rand())}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_how_often_one_sample_draws_from_any_generator_is_nothing_to_the_next(drawn: Callable[[], float]) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(1, 20, (64, 6), generator=generator), torch.randint(0, 3, (64,), generator=generator)
    other = x.clone()
    other[0, 3:] = 0  # a shorter text
    assert moved(lambda: WordDropout(drawn), x, other, y) <= 2.0 * CLIP


def test_state_that_acts_on_the_way_back_alone_is_found_in_a_network_of_words() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(1, 50, (64, 6), generator=generator), torch.randint(0, 3, (64,), generator=generator)
    with pytest.raises(ConfigError) as refused:
        contribution(Balanced, x, y, loss=SquareLoss())
    assert refused.value.code is Code.STATEFUL


def people(*, extreme: bool) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for client in range(3):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(client))
        parts.append((x, (x[:, 0] > 0).long()))
    if extreme:
        parts[0][0][7] = 1e3
    return parts


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("ldp", {}),
        ("ldp", {"vectorise": False}),
        ("nadp", {}),
        ("dp-fedavg", {}),
        ("ckks-fedavg", {"cipher": "pads"}),
        ("secagg", {}),
        ("secagg", {"local_steps": 2}),
        ("secagg", {"client_test_fraction": 0.3}),
    ],
)
def test_no_client_is_silent_since_a_record_of_its_has_code_of_the_callers_own_raise(
    scheme: str, more: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"rounds": 2, "seed": 1, "progress": False, "loss": "cross-entropy", **more}
    for extreme in (False, True):
        done = fedveil.train(Picky(), people(extreme=extreme), scheme=scheme, **settings)
        assert [row["clients"] for row in done.metrics] == [3, 3]


@pytest.mark.parametrize("more", [{}, {"local_steps": 2}])
def test_without_a_promise_the_refusal_names_client_and_round(more: dict[str, Any]) -> None:
    done = fedveil.train(Picky(), people(extreme=True), scheme="fedavg", rounds=1, seed=1, progress=False, **more)
    assert done.metrics[0]["clients"] == 2
    assert done.metrics[0]["refused"] == {
        "0": "Client 0, round 1: the network or the loss raised ValueError: that is too much"
    }


def test_of_all_clients_it_is_an_error() -> None:
    parts = [(x, y) for x, y in people(extreme=True)]
    for x, _ in parts:
        x[3] = 1e3
    with pytest.raises(NumericError, match="the network or the loss raised ValueError: that is too much"):
        fedveil.train(Picky(), parts, scheme="fedavg", rounds=1, seed=1, progress=False)
