"""Local steps are torch's SGD, Adam and AdamW, run beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from fedveil.downlink import Plain, draw
from fedveil.errors import NumericError
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, LocalSteps, Loss, Schedule, SquareLoss, Workspace
from fedveil.work.batches import LocalOptimiser


def data(samples: int = 14, client: int = 3) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator)
    return ClientData(client, x, torch.randint(0, 3, (samples,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def run(model: nn.Module, work: LocalSteps, client: ClientData, round: int) -> dict[str, Tensor]:
    architecture, weights = draw(model, client.x[:2], traced=False)
    layout = work.layout(architecture, tensors=1)
    veil = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None)
    vector = work.run(Workspace(architecture, layout), veil.broadcast(), client, round=round)
    return {name: part / len(client) for name, part in layout.split(vector).items()}


def by_hand(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    client: ClientData,
    batches: list[Tensor],
    lr: float,
    torchs: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **how: Any,
) -> tuple[Tensor, float]:
    trained = copy.deepcopy(model)
    optimiser = torchs([p for p in trained.parameters() if p.requires_grad], lr=lr, **how)
    losses = []
    for chosen in batches:
        optimiser.zero_grad()
        value = loss(trained(client.x[chosen]), client.y[chosen])
        value.backward()
        optimiser.step()
        losses.append(float(value.detach()))
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    after = torch.cat([p.detach().reshape(-1) for p in trained.parameters()])
    return before - after, sum(losses) / len(losses)


@pytest.mark.parametrize("loss", [SquareLoss(), CrossEntropy()])
@pytest.mark.parametrize(("steps", "epochs", "expected"), [(1, None, 1), (5, None, 5), (None, 1, 3), (None, 2, 6)])
def test_local_training_is_sgd(loss: Loss, steps: int | None, epochs: int | None, expected: int) -> None:
    model, client, batches, round = network(), data(), Batches(4, 9), 2
    work = LocalSteps(loss, batches, Schedule(0.1, decay=0.5), steps=steps, epochs=epochs)
    assert work.count(len(client)) == expected
    chosen = [batches.indices(client=3, samples=14, step=round * expected + step) for step in range(expected)]
    moved, value = by_hand(model, loss.mean, client, chosen, lr=0.1 * 0.5**round)
    found = run(model, work, client, round)
    assert torch.allclose(found["gradients"][0], moved, rtol=1e-11, atol=1e-13)
    assert float(found["values"]) == pytest.approx(value, rel=1e-12)
    assert float(found["weight"]) == 1.0


@pytest.mark.parametrize("how", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_momentum_and_weight_decay_of_clients_are_torchs_and_begin_anew_every_round(how: dict[str, float]) -> None:
    model, client, batches = network(), data(), Batches(4, 9)
    model[0].bias.requires_grad_(False)
    work = LocalSteps(SquareLoss(), batches, Schedule(0.1), steps=4, optimiser=LocalOptimiser(**how))
    for round in range(2):
        chosen = [batches.indices(client=3, samples=14, step=round * 4 + step) for step in range(4)]
        moved, _ = by_hand(model, SquareLoss().mean, client, chosen, lr=0.1, **how)
        assert torch.allclose(run(model, work, client, round)["gradients"][0], moved, rtol=1e-11, atol=1e-13)


ADAMS: list[tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    ({}, torch.optim.Adam, {}),
    ({"weight_decay": 0.3}, torch.optim.AdamW, {"weight_decay": 0.3}),
    ({"beta1": 0.5, "beta2": 0.9, "tau": 1e-3}, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    ({"beta1": 0.0, "beta2": 0.0}, torch.optim.Adam, {"betas": (0.0, 0.0)}),
]
"""A client's own, torch's, and what torch's is told."""


@pytest.mark.parametrize(("how", "torchs", "told"), ADAMS, ids=lambda part: str(part) if isinstance(part, dict) else "")
def test_adam_of_clients_is_torchs_and_begins_anew_every_round(
    how: dict[str, Any], torchs: Callable[..., torch.optim.Optimizer], told: dict[str, Any]
) -> None:
    model, client, batches = network(), data(), Batches(4, 9)
    model[0].bias.requires_grad_(False)  # before a normalisation its gradient is 0 but for rounding
    work = LocalSteps(SquareLoss(), batches, Schedule(0.01), steps=20, optimiser=LocalOptimiser("adam", **how))
    for round in range(2):
        chosen = [batches.indices(client=3, samples=14, step=round * 20 + step) for step in range(20)]
        moved, value = by_hand(model, SquareLoss().mean, client, chosen, lr=0.01, torchs=torchs, **told)
        found = run(model, work, client, round)
        assert float((found["gradients"][0] - moved).abs().max()) < 1e-12
        assert float(found["values"]) == pytest.approx(value, rel=1e-12)
        assert float(moved.abs().max()) > 0.03
        assert not found["gradients"][0][30:35].any()  # what is frozen does not decay either


@pytest.mark.parametrize(("how", "torchs", "told"), ADAMS, ids=lambda part: str(part) if isinstance(part, dict) else "")
def test_adam_of_many_clients_together_is_torchs_of_each(
    how: dict[str, Any], torchs: Callable[..., torch.optim.Optimizer], told: dict[str, Any]
) -> None:
    model, batches, clients = small_network(), Batches(4, 9), [data(14, client) for client in range(8)]
    work = LocalSteps(CrossEntropy(), batches, Schedule(0.01), epochs=4, optimiser=LocalOptimiser("adam", **how))
    sizes, pairs = side_by_side(work, clients, model)
    assert sizes == [8]
    for client, (together, alone) in zip(clients, pairs, strict=True):
        chosen = [batches.indices(client=client.client, samples=14, step=12 + step) for step in range(12)]
        moved, _ = by_hand(model, CrossEntropy().mean, client, chosen, lr=0.01, torchs=torchs, **told)
        for found in (together, alone):
            assert isinstance(found, Tensor)
            assert float((found[: len(moved)] / 14 - moved).abs().max()) < 1e-12


def test_an_epoch_sees_every_whole_batch_once() -> None:
    batches = Batches(4, 9)
    work = LocalSteps(SquareLoss(), batches, Schedule(0.1), epochs=1)
    count = work.count(14)
    for round in range(3):
        taken = torch.cat([batches.indices(client=0, samples=14, step=round * count + step) for step in range(count)])
        assert len(taken.unique()) == 12


def test_frozen_parameters_do_not_move_locally() -> None:
    model, client = network(), data()
    model[0].weight.requires_grad_(False)
    batches = Batches(4, 9)
    chosen = [batches.indices(client=3, samples=14, step=step) for step in range(4)]
    moved, _ = by_hand(model, SquareLoss().mean, client, chosen, lr=0.1)
    found = run(model, LocalSteps(SquareLoss(), batches, Schedule(0.1), steps=4), client, 0)
    assert not found["gradients"][0][:30].any()
    assert torch.allclose(found["gradients"][0], moved, rtol=1e-11, atol=1e-13)


def test_batch_statistics_are_the_mean_over_the_steps() -> None:
    model, client, batches = network(), data(), Batches(4, 9)
    trained = copy.deepcopy(model)
    means = []
    for step in range(3):
        x, y = client.take(batches.indices(client=3, samples=14, step=step))
        means.append(trained[0](x).mean(0).detach())
        grads = torch.autograd.grad(SquareLoss().mean(trained(x), y), list(trained.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(trained.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
    found = run(model, LocalSteps(SquareLoss(), batches, Schedule(0.1), steps=3), client, 0)
    assert torch.allclose(found["statistics"][:5], torch.stack(means).mean(0), rtol=1e-11)


def test_an_exploding_client_is_named() -> None:
    work = LocalSteps(SquareLoss(), Batches(4, 9), Schedule(1e200), steps=6)
    with pytest.raises(NumericError, match=r"client 3 .* round 1 "):
        run(network(), work, data(), 0)


def test_many_clients_are_the_single_ones_in_turn() -> None:
    model = network()
    clients = [data(14, 0), data(9, 1)]
    work = LocalSteps(SquareLoss(), Batches(4, 9), Schedule(0.1), steps=2)
    architecture, weights = draw(model, clients[0].x[:2], traced=False)
    layout = work.layout(architecture, tensors=1)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    workspace = Workspace(architecture, layout)
    together = dict(work.run_many(workspace, sent, clients, round=1))
    for position, client in enumerate(clients):
        assert torch.equal(together[position], work.run(Workspace(architecture, layout), sent, client, round=1))


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)).double()


def side_by_side(
    work: LocalSteps, clients: list[ClientData], model: nn.Module | None = None
) -> tuple[list[int], list[tuple[Tensor | NumericError, Tensor | NumericError]]]:
    """The sizes of the units, and every client's contribution as computed in its unit and alone."""
    architecture, weights = draw(model or small_network(), clients[0].x[:2], traced=False)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    units = work.units(workspace, sent, clients)
    together = dict(work.run_units(workspace, sent, clients, units, round=1))
    alone = {
        position: contribution
        for position in range(len(clients))
        for _, contribution in work.run_units(workspace, sent, [clients[position]], [(0,)], round=1)
    }
    return [len(unit) for unit in units], [(together[position], alone[position]) for position in range(len(clients))]


@pytest.mark.parametrize(
    "how",
    [{"steps": 4}, {"epochs": 2}, {"steps": 3, "optimiser": LocalOptimiser("sgd", 0.9, 0.1)}, {"steps": 1}],
    ids=str,
)
def test_small_steps_of_many_clients_are_taken_together(how: dict[str, Any]) -> None:
    model = small_network()
    model[0].bias.requires_grad_(False)
    clients = [data(9 if client % 3 == 0 else 14, client) for client in range(20)]
    work = LocalSteps(CrossEntropy(), Batches(4, 9), Schedule(0.1), **how)
    sizes, pairs = side_by_side(work, clients, model)
    assert sorted(sizes) == ([7, 13] if "epochs" in how else [20])
    for together, alone in pairs:
        assert torch.allclose(together, alone, rtol=1e-10, atol=1e-12)
        assert together[30:35].eq(0).all()  # the frozen bias


@pytest.mark.filterwarnings("error")
def test_operations_that_vmap_runs_one_by_one_warn_nobody() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [(torch.randn(12, 4), torch.randint(2, (12,)))] * 3
    for local in ({}, {"local_steps": 2}):
        fedveil.train(net, data, loss=nn.MultiMarginLoss(), scheme="fedavg", rounds=1, seed=1, progress=False, **local)


def test_what_cannot_be_taken_together_is_computed_one_by_one() -> None:
    class Steep(CrossEntropy):
        """A loss that looks at its values, which vmap does not bear."""

        def mean(self, output: Tensor, target: Tensor) -> Tensor:
            return super().mean(output, target) * (2.0 if float(output.detach().sum()) > 0 else 1.0)

    clients = [data(14, client) for client in range(6)]
    sizes, pairs = side_by_side(LocalSteps(Steep(), Batches(4, 9), Schedule(0.1), steps=2), clients)
    assert sizes == [6]
    assert all(torch.equal(together, alone) for together, alone in pairs)
    for model in (network(), nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()):
        assert side_by_side(LocalSteps(CrossEntropy(), Batches(4, 9), Schedule(0.1)), clients, model)[0] == [1] * 6


def test_one_exploding_client_of_many_is_named_and_costs_nobody_else() -> None:
    clients = [data(14, client) for client in range(6)]
    clients[4].x[3] = float("nan")
    _, pairs = side_by_side(LocalSteps(SquareLoss(), Batches(0, 9), Schedule(0.1), steps=2), clients)
    (broken, _), sound = pairs[4], pairs[:4] + pairs[5:]
    assert isinstance(broken, NumericError)
    assert "client 4" in str(broken)
    assert all(torch.equal(together, alone) for together, alone in sound)


@pytest.mark.parametrize("size", [4, 14])
def test_many_clients_take_the_batches_that_each_would_take_alone(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    whole, order = data(90), torch.randperm(90)
    clients = [ClientData(number, whole.x, whole.y, rows=order[14 * number : 14 * (number + 1)]) for number in range(3)]
    clients += [data(client=number) for number in (3, 4, 5)]
    work = LocalSteps(CrossEntropy(), Batches(size, 9), Schedule(0.1), steps=19)  # beyond one look-up, and one epoch
    architecture, weights = draw(model, whole.x[:2], traced=False)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    workspace = Workspace(architecture, work.layout(architecture, tensors=1))
    assert [len(unit) for unit in work.units(workspace, sent, clients)] == [6]
    together = dict(work.run_many(workspace, sent, clients, round=2))
    for position, client in enumerate(clients):
        alone = work.run(workspace, sent, client, round=2)
        found = together[position]
        assert isinstance(found, Tensor)
        assert torch.allclose(found, alone, rtol=1e-11, atol=1e-12)
        assert float(alone[:-2].abs().max()) > 0.1
