"""Clients in captured groups: which samples they take, on any device; on a GPU, every client's own vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fedveil
from fedveil.downlink import Plain, draw
from fedveil.secrets import SeededSecrets
from fedveil.tensors import ExactSum
from fedveil.work import Batches, ClientData, CrossEntropy, LocalSteps, Schedule, Workspace, groups
from fedveil.work.batches import LocalOptimiser, PictureAugmentation
from fedveil.work.gradients import collect_statistics
from fedveil.work.groups import GroupDescent, Orders, Task

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("size", "samples"), [(4, 11), (4, 12), (0, 5), (7, 5)])
def test_kept_orders_are_the_batches_of_every_step(size: int, samples: int) -> None:
    batches, orders = Batches(size, seed=3), Orders()
    x = torch.arange(40.0)
    rows = torch.randperm(40)[:samples]
    data = [ClientData(0, x, x, rows), ClientData(1, x[:samples], x[:samples])]
    for step in (0, 1, 2, 3, 7, 1, 0):
        for client in data:
            chosen = batches.indices(client=client.client, samples=samples, step=step)
            numbers, places = orders.batch(batches, client, step=step)
            assert torch.equal(numbers, chosen)
            assert torch.equal(client.x[places], client.take(chosen)[0])


def test_draws_under_a_key_each_are_those_of_every_client() -> None:
    how = PictureAugmentation(5, (8, 8), crop=2, flip=True, cutout=3)
    numbers, steps = torch.arange(12), [(0, 4), (1, 4), (2, 9)]
    keys = torch.tensor([how.key(client, step) for client, step in steps]).repeat_interleave(4)
    apart = [how.draw(part, client=c, step=s) for part, (c, s) in zip(numbers.split(4), steps, strict=True)]
    assert torch.equal(how.drawn(numbers, keys[:, None]), torch.cat(apart))


class _Net(nn.Module):
    """Views its pictures in the order they lie in, waits for the device, drops at random, or works in place."""

    def __init__(self, *, waits: bool = False, drops: float = 0.0, in_place: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), in_place or nn.BatchNorm2d(4)
        self.in_place = in_place is not None
        self.drop, self.head = nn.Dropout(drops), nn.Linear(4 * 64, 3)
        self.waits = waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(x))
        if self.in_place:
            hidden += x
        hidden = torch.relu_(hidden) if self.in_place else torch.relu(hidden)
        if self.waits and float(hidden.detach().sum()) > 1e30:
            hidden = 2 * hidden
        return self.head(self.drop(hidden.view(len(hidden), -1)))  # type: ignore[no-any-return]


_RECIPES: list[dict[str, Any]] = [
    {},
    {"local_steps": 3},
    {"local_epochs": 2, "client_lr": 0.05, "client_momentum": 0.9, "client_weight_decay": 1e-3},
    {"local_epochs": 2, "client_lr": 0.005, "client_optimiser": "adam", "client_weight_decay": 1e-3},
    {"augment": "crop:1,flip"},
    {"augment": "crop:1,flip,cutout:2", "local_epochs": 1},
]


class _Repeated:
    """What stands for a captured graph where no GPU is: the same work once more, into the places of the first."""

    def __init__(self, work: Callable[[], groups.Result]) -> None:
        for _ in range(3):  # as a capture warms up, so that nothing may rest on what was there before
            self.places = work()
        self._work = work

    def replay(self) -> None:
        for place, value in zip(self.places, self._work(), strict=True):
            place.copy_(value)


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups step by step on the CPU, one client after the other: all of their arithmetic, without a GPU's graphs."""

    def recorded(work: Callable[[], groups.Result]) -> tuple[_Repeated, groups.Result]:
        made = _Repeated(work)
        return made, made.places

    def put(place: torch.Tensor, numbers: list[float]) -> None:
        place.copy_(torch.tensor(numbers, dtype=place.dtype))

    def branches(count: int) -> Iterator[int]:
        yield from range(count)

    for name, stands_in in (("recorded", recorded), ("put", put), ("branches", branches)):
        monkeypatch.setattr(groups, name, stands_in)


@pytest.mark.parametrize(
    "optimiser",
    [
        LocalOptimiser(),
        LocalOptimiser("sgd", 0.9, 0.1),
        LocalOptimiser("adam"),
        LocalOptimiser("adam", weight_decay=0.3, beta1=0.5, beta2=0.9, tau=1e-6),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_group_trains_every_client_as_it_would_alone(
    optimiser: LocalOptimiser, dtype: torch.dtype, uncaptured: None
) -> None:
    """Also those that are done earlier, in a second round as in the first, and with another rate."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)).to(dtype)
    net[0].bias.requires_grad_(False)
    clients = [
        ClientData(number, torch.randn(samples, 6, dtype=dtype), torch.randint(0, 3, (samples,)))
        for number, samples in enumerate((8, 14, 22))
    ]
    architecture, weights = draw(net, clients[0].x[:2], traced=False)
    work = LocalSteps(CrossEntropy(), Batches(4, 9), Schedule(0.01, decay=0.5), epochs=2, optimiser=optimiser)
    layout = work.layout(architecture, tensors=1)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    task = Task(architecture, work.loss, layout.length, work.batches, sent)
    group = GroupDescent(collect_statistics, task, clients, channels_last=False, optimiser=optimiser)
    group.weigh(clients)
    counts, orders = [work.count(len(data)) for data in clients], Orders()
    assert counts == [4, 6, 10]
    for round in range(2):

        def fill(step: int, round: int) -> None:
            steps = [round * count + min(step, count - 1) for count in counts]
            group.fill(clients, work.batches, orders, steps)

        vectors, _ = group.run(sent, partial(fill, round=round), counts, work.schedule.at(round))
        for data, found in zip(clients, vectors, strict=True):
            alone = work.run(Workspace(architecture, layout), sent, data, round=round)
            assert float((found - alone).abs().max()) < (1e-12 if dtype == torch.float64 else 1e-4)
            assert float(alone[: architecture.size].abs().max()) > 0.01


@needs_cuda
@pytest.mark.parametrize("recipe", _RECIPES, ids=lambda recipe: " ".join(recipe) or "one gradient")
@pytest.mark.parametrize(
    "net",
    [_Net(), _Net(waits=True), _Net(in_place=nn.BatchNorm2d(4)), _Net(in_place=nn.GroupNorm(2, 4))],
    ids=["captured", "waits", "in place after batch norm", "in place after group norm"],
)
def test_groups_on_a_gpu_end_in_the_model_of_the_cpu(net: nn.Module, recipe: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (90,), generator=generator)
    clients = list(zip(x.split([20, 33, 17, 20]), y.split([20, 33, 17, 20]), strict=True))
    given: dict[str, Any] = {"rounds": 3, "batch_size": 8, "seed": 1, "dtype": "float64", "lr": 0.05, "progress": False}
    ends = []
    for device in ("cpu", "cuda"):
        end = fedveil.train(net, clients, scheme="fedavg", loss="cross-entropy", device=device, **given, **recipe)
        ends.append(torch.cat([value.double().cpu().flatten() for value in end.model.state_dict().values()]))
    assert float((ends[0] - ends[1]).abs().max()) < 1e-12


@needs_cuda
def test_a_client_that_runs_away_is_named_and_the_others_of_its_group_are_not() -> None:
    x, y = torch.randn(3, 6, 4), torch.zeros(3, 6, 2)
    x[1] = 1e30
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    done = fedveil.train(
        net, list(zip(x, y, strict=True)), scheme="fedavg", rounds=1, seed=1, device="cuda", progress=False
    )
    assert set(done.metrics[0]["refused"]) == {"1"}


@needs_cuda
def test_what_draws_at_random_and_what_waits_leave_the_devices_numbers_alone() -> None:
    x, y = torch.randn(2, 8, 1, 8, 8), torch.randint(0, 3, (2, 8))
    clients = list(zip(x, y, strict=True))
    for net in (_Net(waits=True), _Net(drops=0.5)):
        fedveil.train(net, clients, scheme="fedavg", rounds=2, seed=1, device="cuda", progress=False)
    torch.rand(3, device="cuda")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_one_tensor_are_added_exactly_and_a_changed_one_is_looked_at_again(dtype: torch.dtype) -> None:
    rows = (torch.randn(5, 1000, dtype=dtype) * 1e6).cuda()
    together, apart = ExactSum(1000, device="cuda"), ExactSum(1000)
    for row in rows:
        together.add(row)
        apart.add(row.cpu())
    assert torch.equal(together.total().cpu(), apart.total())
    again = ExactSum(1000, device="cuda")
    again.add(rows[0])
    rows[1, 7] = float("nan")
    with pytest.raises(fedveil.errors.ProtocolError, match="NaN"):
        again.add(rows[1])


def test_samples_read_one_by_one_are_augmented_once() -> None:
    how = PictureAugmentation(5, (8, 8), crop=2)
    x = torch.randn(6, 1, 8, 8)
    data = replace(ClientData(0, x, torch.zeros(6)), augment=how)
    numbers = torch.tensor([4, 1])
    assert torch.equal(data.read(numbers, step=3)[0], x[numbers])
    assert torch.equal(data.take(numbers, step=3)[0], how(x[numbers], numbers, client=0, step=3))
