"""Contributions: many clients at once equal the loop, and what arrives is finite."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.downlink import Architecture, Broadcast, HeadNoise, Rescaling, draw
from fedveil.downlink.plain import Unveiled
from fedveil.errors import NumericError
from fedveil.models import build
from fedveil.models.building import OptionValue
from fedveil.secrets import SeededSecrets
from fedveil.work import Batches, ClientData, CrossEntropy, Gradients, SquareLoss, Workspace


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        self.c.weight = self.b.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.c(F.relu(self.norm(self.b(F.relu(self.a(x)))))))))  # type: ignore[no-any-return]


MODELS = {
    "batch norms": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)
    ),
    "other norms": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "tied weights and a norm called twice": Tied,
}


def setting(
    model: nn.Module, *, groups: int = 0, weighted: bool = False, example: Tensor | None = None
) -> tuple[Architecture, Broadcast, int]:
    example = torch.randn(2, 6, dtype=torch.float64) if example is None else example
    architecture, weights = draw(model.double(), example, traced=True)
    downlink = Rescaling(head=HeadNoise(groups, weighted_outputs=weighted) if groups else None)
    veil = downlink.veil(architecture, weights, stream=SeededSecrets(1).stream("veil"), head_level=None)
    return architecture, veil.broadcast(), downlink.head_tensors(architecture)


def clients(sizes: tuple[int, ...] = (9, 9, 5, 9, 14)) -> list[ClientData]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, size in enumerate(sizes):
        x = torch.randn(size, 6, dtype=torch.float64, generator=generator)
        made.append(ClientData(number, x, torch.randint(0, 3, (size,), generator=generator)))
    return made


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("groups", "weight"), [(0, 1.0), (0, 3.0), (1, 1.0), (3, 1.0), (2, 3.0)])
@pytest.mark.parametrize("name", MODELS)
def test_many_at_once_equal_one_by_one(name: str, groups: int, weight: float, frozen: bool) -> None:
    model = MODELS[name]().train(not frozen)
    architecture, sent, tensors = setting(model, groups=groups, weighted=weight != 1.0)
    loss = SquareLoss(true_weight=weight)
    batches = Batches(6, 2)
    layout = Gradients(loss, batches).layout(architecture, tensors=tensors)
    workspace = Workspace(architecture, layout)
    together = dict(Gradients(loss, batches, vectorise=True).run_many(workspace, sent, clients(), round=3))
    assert workspace.vectorisable, "vmap was given up"
    loop = dict(
        Gradients(loss, batches, vectorise=False).run_many(Workspace(architecture, layout), sent, clients(), round=3)
    )
    assert sorted(together) == sorted(loop) == list(range(5))
    for position, data in enumerate(clients()):
        one = Gradients(loss, batches).run(Workspace(architecture, layout), sent, data, round=3)
        assert torch.equal(loop[position], one)
        scale = float(one.abs().max())
        assert float((together[position] - one).abs().max()) < 1e-12 * scale
        assert float(layout.split(one)["weight"]) == len(data)


def test_what_vmap_cannot_do_is_done_one_by_one() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x.reshape(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]

    architecture, sent, tensors = setting(Recurrent())
    work = Gradients(CrossEntropy(), Batches(0, 0))
    workspace = Workspace(architecture, work.layout(architecture, tensors=tensors))
    for _ in range(2):
        together = dict(work.run_many(workspace, sent, clients(), round=0))
        for position, data in enumerate(clients()):
            assert torch.equal(together[position], work.run(workspace, sent, data, round=0))


def test_a_client_that_selects_rows_of_a_shared_tensor_is_the_same_client() -> None:
    architecture, sent, tensors = setting(MODELS["batch norms"]())
    pool = clients((30,))[0]
    rows = torch.tensor([3, 8, 1, 29, 14, 6, 7])
    work = Gradients(SquareLoss(), Batches(4, 0))
    workspace = Workspace(architecture, work.layout(architecture, tensors=tensors))
    shared = work.run(workspace, sent, ClientData(5, pool.x, pool.y, rows), round=2)
    own = work.run(workspace, sent, ClientData(5, pool.x[rows], pool.y[rows]), round=2)
    assert torch.equal(shared, own)


def test_a_model_that_changes_its_input_in_place_does_not_change_the_data() -> None:
    architecture, sent, tensors = setting(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)))
    data = clients((8,))[0]
    before = data.x.clone()
    work = Gradients(SquareLoss(), Batches(0, 0))
    work.run(Workspace(architecture, work.layout(architecture, tensors=tensors)), sent, data, round=0)
    assert torch.equal(data.x, before)


def test_an_interrupted_step_leaves_no_statistics_behind() -> None:
    architecture, sent, tensors = setting(MODELS["batch norms"]())
    work = Gradients(SquareLoss(), Batches(0, 0))
    layout = work.layout(architecture, tensors=tensors)
    workspace = Workspace(architecture, layout)
    data = clients((8,))[0]
    workspace.module(data.x + 1.0)  # a forward pass that never got to its end
    assert torch.equal(
        work.run(workspace, sent, data, round=0), work.run(Workspace(architecture, layout), sent, data, round=0)
    )


@pytest.mark.parametrize("groups", [0, 2])
def test_a_client_whose_numbers_are_not_finite_is_named(groups: int) -> None:
    architecture, sent, tensors = setting(MODELS["batch norms"](), groups=groups)
    work = Gradients(SquareLoss(), Batches(0, 0))
    workspace = Workspace(architecture, work.layout(architecture, tensors=tensors))
    data = clients((9, 9))
    data[1].x[3, 2] = float("nan")
    healthy = work.run(workspace, sent, data[0], round=7)
    found = dict(work.run_many(workspace, sent, data, round=7))
    assert isinstance(found[1], NumericError)
    assert re.search(r"client 1 .* round 8 .*local numbers 0, 1, 2, 3, 4, …", str(found[1]))
    assert isinstance(found[0], torch.Tensor)
    assert torch.allclose(found[0], healthy, rtol=0, atol=1e-10 * float(healthy.abs().max()))
    with pytest.raises(NumericError, match="client 1 "):
        work.run(workspace, sent, data[1], round=7)


class CentredFlat(nn.Flatten):
    """One whose name promises more than it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        flat = super().forward(x)
        return (flat - flat.mean(0)).view_as(x)


def hooked() -> nn.Module:
    layer = nn.Identity()
    layer.register_forward_hook(lambda module, given, out: out - out.mean(0))
    return layer


def patched() -> nn.Module:
    layer = nn.Identity()
    layer.forward = lambda x: x - x.mean(0)  # type: ignore[method-assign, assignment, misc]
    return layer


class Centred(nn.Module):
    """What every sample gets depends on its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def pictures(between: nn.Module) -> nn.Module:
    layers = (nn.Conv2d(1, 3, 3, padding=1), between, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize(
    ("between", "apart"),
    [
        (nn.Identity, True),
        (lambda: nn.GroupNorm(1, 3), True),
        (lambda: nn.BatchNorm2d(3).eval(), True),
        (lambda: nn.BatchNorm2d(3), False),
        (Centred, False),
        (CentredFlat, False),
        (hooked, False),
        (patched, False),
        (lambda: nn.Sequential(nn.Dropout(), nn.Dropout()), False),
    ],
    ids="plain,group norm,frozen batch norm,batch norm,centred,subclass,hooked,patched,dropout".split(","),
)
def test_a_large_batch_is_taken_in_parts_where_they_give_the_same(
    between: Callable[[], nn.Module], apart: bool, groups: int
) -> None:
    if groups and between in (Centred, CentredFlat, hooked, patched):
        pytest.skip("no veil fits it")
    torch.manual_seed(0)
    x = torch.randn(300, 1, 8, 8, dtype=torch.float64)
    data = ClientData(0, x, torch.randint(0, 3, (300,)))
    if groups:
        architecture, sent, tensors = setting(pictures(between()), groups=groups, example=x[:2])
    else:
        architecture, weights = draw(pictures(between()), x[:2], traced=False)
        sent, tensors = Unveiled(architecture, weights).broadcast(), 1
    work = Gradients(SquareLoss(), Batches(0, 0))
    layout = work.layout(architecture, tensors=tensors)
    usual, parted, whole = (Workspace(architecture, layout) for _ in range(3))
    assert (usual.at_once is not None) is apart
    parted.at_once, whole.at_once = 70, None
    ours, in_parts, at_once = (work.run(one, sent, data, round=0) for one in (usual, parted, whole))
    assert torch.equal(ours, at_once), "a batch of 300 such small pictures is taken at once"
    difference = float((in_parts - at_once).abs().max() / at_once.abs().max())
    assert (difference < 1e-13) is apart, "what is not taken in parts is another function of them"
    assert torch.equal(in_parts, at_once) is False


def test_a_loss_that_is_no_mean_over_samples_is_taken_at_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 1, 8, 8, dtype=torch.float64)
    data = ClientData(0, x, torch.randint(0, 3, (300,)))
    architecture, weights = draw(pictures(nn.Identity()), x[:2], traced=False)
    sent = Unveiled(architecture, weights).broadcast()

    class Largest(CrossEntropy):
        separable = False

        def mean(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target, reduction="none").max()

    results = []
    for most in (70, None):
        work = Gradients(Largest(), Batches(0, 0))
        workspace = Workspace(architecture, work.layout(architecture, tensors=1))
        workspace.at_once = most
        results.append(work.run(workspace, sent, data, round=0))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "options", "apart"),
    [
        ("cnn", {"norm": "none"}, True),
        ("cnn", {"norm": "batch"}, False),
        ("lenet-sigmoid", {}, True),
        *((name, {"norm": "group"}, True) for name in ("resnet11", "resnet20", "resnet18", "densenet")),
        ("resnet20", {}, False),
        ("vit", {}, True),
        ("vit", {"dropout": 0.1}, False),
        ("mlp", {}, False),  # nothing is gained there
    ],
)
def test_which_networks_of_the_catalogue_take_parts(name: str, options: dict[str, OptionValue], apart: bool) -> None:
    network = build(name, input_shape=(3, 32, 32), outputs=10, **options)
    architecture, _ = draw(network, torch.randn(2, 3, 32, 32), traced=False)
    work = Gradients(CrossEntropy(), Batches(0, 0))
    at_once = Workspace(architecture, work.layout(architecture, tensors=1)).at_once
    assert at_once == (64 if apart else None)
