"""Dropout is seeded per client and round, and the global generator does not notice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink import HeadNoise, Plain, Rescaling, draw
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, Gradients, LocalSteps, Schedule, SquareLoss, Workspace
from fedveil.work.batches import has_random_layers, seeded_dropout


class Functional(nn.Module):
    """Dropout that no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(F.relu(self.a(x)), 0.5, self.training))  # type: ignore[no-any-return]


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


MODELS = [layered, Functional]
X = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (10,), generator=torch.Generator().manual_seed(1))


def contribution(model: nn.Module, *, client: int = 0, round: int = 0, seed: int = 5, local: bool = False) -> Tensor:
    architecture, weights = draw(model, X[:2], traced=False)
    work = (
        LocalSteps(SquareLoss(), Batches(0, seed), Schedule(0.1), steps=2)
        if local
        else Gradients(SquareLoss(), Batches(0, seed))
    )
    layout = work.layout(architecture, tensors=1)
    veil = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None)
    return work.run(Workspace(architecture, layout), veil.broadcast(), ClientData(client, X, Y), round=round)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_dropout_is_a_function_of_seed_client_and_round(make: type[nn.Module], local: bool) -> None:
    torch.manual_seed(1)
    model = make()
    first = contribution(model, local=local)
    torch.rand(7)
    assert torch.equal(first, contribution(model, local=local))
    others = [
        contribution(model, client=1, local=local),
        contribution(model, round=1, local=local),
        contribution(model, seed=6, local=local),
    ]
    assert all(not torch.equal(first, other) for other in others)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_the_global_generator_is_left_alone(make: type[nn.Module], local: bool) -> None:
    model = make()
    state = torch.get_rng_state()
    contribution(model, local=local)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("vectorise", [None, True])
@pytest.mark.parametrize("make", MODELS)
def test_many_clients_draw_what_each_would_draw_alone(make: type[nn.Module], vectorise: bool | None) -> None:
    architecture, weights = draw(make().double(), X[:2].double(), traced=True)
    downlink = Rescaling(head=HeadNoise(2))
    work = Gradients(SquareLoss(), Batches(0, 5), vectorise)
    layout = work.layout(architecture, tensors=downlink.head_tensors(architecture))
    sent = downlink.veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=1.0).broadcast()
    clients = [ClientData(number, X.double(), Y) for number in range(3)]
    together = dict(work.run_many(Workspace(architecture, layout), sent, clients, round=0))
    for number, client in enumerate(clients):
        assert torch.equal(together[number], work.run(Workspace(architecture, layout), sent, client, round=0))


def test_layers_that_draw_random_numbers_are_known() -> None:
    assert has_random_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.1)))
    assert has_random_layers(nn.Sequential(nn.AlphaDropout(0.1)))
    assert has_random_layers(nn.GRU(3, 3, num_layers=2, dropout=0.1))
    assert has_random_layers(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert not has_random_layers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


def test_a_seed_is_undone_even_if_the_step_fails() -> None:
    def failing() -> None:
        with seeded_dropout(nn.Dropout(), 1, 2):
            torch.rand(3)
            raise ZeroDivisionError

    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        failing()
    assert torch.equal(torch.get_rng_state(), state)
