"""Clipped work: equal to a loop written out by hand, and never moved further than its sensitivity says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedveil
from fedveil import models
from fedveil.downlink import Architecture, Broadcast, HeadNoise, Plain, Rescaling, draw
from fedveil.downlink.decomposed import transitional
from fedveil.errors import ConfigError
from fedveil.secrets import SeededSecrets
from fedveil.work import (
    Batches,
    ClientData,
    CrossEntropy,
    Gradients,
    LocalSteps,
    LocalWork,
    Loss,
    Schedule,
    SquareLoss,
    Workspace,
)
from fedveil.work import clipping as clipped_module
from fedveil.work.clipping import ClippedSamples, ClippedUpdate, looped, refuse_batch_norm
from fedveil.work.per_sample import PerSample, Recorded, RecordedConvolution, trained_names

WORDS = 12


class Tied(nn.Module):
    """A table that is also the last layer's weight, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(WORDS, 5), nn.Linear(5, 5), nn.Linear(5, WORDS)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.middle(self.table(x))))).mean(1))  # type: ignore[no-any-return]


class ReadTwice(nn.Module):
    """A layer whose weight is read outside its call too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(torch.tanh(self.a(x)), self.a.weight))
        return self.head(self.b(h) + h)  # type: ignore[no-any-return]


class Overwriting(nn.Module):
    """Changes a layer's input after the layer has read it, which no backward pass survives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + 1.0
        read = self.b(h)
        return self.head(read + h.mul_(2.0))  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """Lets the samples of a batch look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.head(torch.tanh(h + h.mean(0)))  # type: ignore[no-any-return]


class Opaque(nn.Module):
    """A recurrent kernel for which vmap has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.reshape(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


class HiddenDropout(nn.Module):
    """Dropout that no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(F.relu(self.a(x)), 0.5, self.training))  # type: ignore[no-any-return]


class PreActivation(nn.Module):
    """A residual block as many write it: what a norm gives, and what a block gives, is changed in place."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.relu, self.inner = norm, nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x)
        out += 0.5 * x
        out = self.inner(self.relu(out))
        out += x
        return out  # type: ignore[no-any-return]


def in_place(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(1, (4, 3)), PreActivation(norm()), nn.Flatten(), nn.Linear(12, 3)
    )


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def frozen_head() -> nn.Module:
    net = small()
    net[2].weight.requires_grad_(False)
    return net


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: models.build("mlp", input_shape=(6,), outputs=3, width=8), (6,)),
    "mlp with layer norms": (lambda: models.build("mlp", input_shape=(6,), outputs=3, width=8, norm="layer"), (6,)),
    "cnn": (lambda: models.build("cnn", input_shape=(1, 8, 8), outputs=3, width=4), (1, 8, 8)),
    "cnn with group norms": (
        lambda: models.build("cnn", input_shape=(1, 8, 8), outputs=3, width=4, norm="group"),
        (1, 8, 8),
    ),
    "gru": (
        lambda: models.build("gru", input_shape=(7,), outputs=3, vocabulary=WORDS, embedding=4, hidden=5),
        (7,),
    ),
    "lstm": (
        lambda: models.build("lstm", input_shape=(7,), outputs=3, vocabulary=WORDS, embedding=4, hidden=5),
        (7,),
    ),
    "transformer": (
        lambda: models.build("transformer", input_shape=(7,), outputs=3, vocabulary=WORDS, width=8, heads=2, depth=1),
        (7,),
    ),
    "decoder": (
        lambda: models.build("decoder", input_shape=(7,), outputs=3, vocabulary=WORDS, width=8, depth=1, hidden=12),
        (7,),
    ),
    "vit": (
        lambda: models.build("vit", input_shape=(1, 8, 8), outputs=3, width=8, heads=2, depth=1, pool="class"),
        (1, 8, 8),
    ),
    "resnet": (
        lambda: models.build("resnet20", input_shape=(3, 8, 8), outputs=3, norm="group", width=4),
        (3, 8, 8),
    ),
    "linear layers on sequences": (
        lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (6,),
    ),
    "no biases": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)), (6,)),
    "padded": (lambda: nn.Sequential(nn.Embedding(WORDS, 4, padding_idx=0), nn.Flatten(), nn.Linear(28, 3)), (7,)),
    "tied": (Tied, (7,)),
    "read twice": (ReadTwice, (6,)),
    "mixing": (Mixing, (6,)),
    "frozen head": (frozen_head, (6,)),
    "in place after a group norm": (in_place(lambda: nn.GroupNorm(2, 4)), (6,)),
    "in place after a layer norm": (in_place(lambda: nn.LayerNorm(3)), (6,)),
}


def is_text(name: str) -> bool:
    return name in ("gru", "lstm", "transformer", "decoder", "padded", "tied")


def clients(
    name: str = "small", shape: tuple[int, ...] = (6,), sizes: tuple[int, ...] = (9, 9, 5, 9)
) -> list[ClientData]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, size in enumerate(sizes):
        if is_text(name):
            x = torch.randint(0, WORDS, (size, *shape), generator=generator)
        else:
            x = torch.randn(size, *shape, dtype=torch.float64, generator=generator)
        made.append(ClientData(number, x, torch.randint(0, 3, (size,), generator=generator)))
    return made


def opened(model: nn.Module, example: Tensor) -> tuple[Architecture, Broadcast]:
    with torch.random.fork_rng():
        architecture, weights = draw(model.double().train(), example[:2], traced=False)
    veil = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None)
    return architecture, veil.broadcast()


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return factory()


def workbench(work: LocalWork, architecture: Architecture) -> Workspace:
    return Workspace(architecture, work.layout(architecture, tensors=1))


def by_hand(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """The mean of clipped per-sample gradients, as anyone would write it."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for number in range(len(y)):
        model.zero_grad()
        loss.mean(model(x[number : number + 1]), y[number : number + 1]).backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat(
            [torch.zeros(p.numel()).double() if p.grad is None else p.grad.reshape(-1) for p in model.parameters()]
        )
        total += gradient / max(1.0, float(gradient.norm()) / clip)
    return total / len(y)


def typical(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> float:
    """A bound that clips some samples and leaves others."""
    norms = []
    for number in range(len(y)):
        model.zero_grad()
        loss.mean(model(x[number : number + 1]), y[number : number + 1]).backward()  # type: ignore[no-untyped-call]
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
    assert min(norms) < sorted(norms)[len(norms) // 2] < max(norms)
    return sorted(norms)[len(norms) // 2]


@pytest.mark.parametrize("loss", [CrossEntropy(), SquareLoss(2.0, 3.0)])
@pytest.mark.parametrize("name", NETS)
def test_a_contribution_is_the_mean_of_clipped_per_sample_gradients(name: str, loss: Loss) -> None:
    factory, shape = NETS[name]
    model, data = made(factory).double(), clients(name, shape)[0]
    architecture, sent = opened(model, data.x)
    clip = typical(model, loss, data.x, data.y)
    truth = by_hand(model, loss, data.x, data.y, clip)
    for vectorise in (None, False):
        work = ClippedSamples(loss, Batches(0, 0), clip, vectorise)
        workspace = workbench(work, architecture)
        parts = workspace.layout.split(work.run(workspace, sent, data, round=0))
        found = parts["gradients"][0] / len(data)
        assert float((found - truth).abs().max()) < 1e-12 * max(1.0, float(truth.abs().max()))
        assert float(parts["weight"]) == len(data)
        assert workspace.vectorisable


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gru", "lstm", "transformer", "decoder", "vit", "resnet"])
def test_the_built_in_models_are_run_under_vmap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("a loop over samples")

    monkeypatch.setattr(clipped_module, "looped", forbidden)
    factory, shape = NETS[name]
    data = clients(name, shape)
    architecture, sent = opened(made(factory), data[0].x)
    work = ClippedSamples(CrossEntropy(), Batches(0, 0), 0.1)
    workspace = workbench(work, architecture)
    assert len(list(work.run_many(workspace, sent, data, round=0))) == len(data)
    assert workspace.vectorisable


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("mlp", 3), ("gru", 4), ("transformer", 8), ("decoder", 9)),
        *(("linear layers on sequences", 2), ("tied", 1), ("read twice", 2)),
    ],
)
def test_layers_are_recorded_only_where_their_calls_tell_their_gradients(name: str, expected: int) -> None:
    factory, shape = NETS[name]
    data = clients(name, shape)[0]
    architecture, _ = opened(made(factory), data.x)
    engine = PerSample(architecture, CrossEntropy())
    engine(data.x, data.y, clients=1, clip=1.0)
    assert sum(isinstance(one, Recorded) for one in engine.module.modules()) == expected


class Pictures(nn.Module):
    """Convolutions of every form that patches can be taken for, one of them called twice, one on a picture alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding=(1, 2))
        self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.point = nn.Conv2d(4, 2, 1, stride=2)
        self.spread = nn.Conv2d(2, 4, 2, dilation=2, padding=1)  # left to vmap, and so is the next
        self.grouped = nn.Conv2d(4, 2, 1, groups=2)
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.wide(x)).relu()).relu()
        x = torch.stack([self.point(picture) for picture in x])
        return cast(Tensor, self.head(self.grouped(self.spread(x)).flatten(1)))


def test_convolutions_by_patches_have_the_gradients_of_a_loop() -> None:
    torch.manual_seed(5)
    x, y = torch.randn(8, 3, 9, 8, dtype=torch.float64), torch.randint(3, (8,))
    net = Pictures().double()
    net(x)
    architecture, _ = opened(net, x)
    engine = PerSample(architecture, CrossEntropy(), patches=True)
    module = architecture.new_skeleton()
    with torch.no_grad():
        for first, second in zip(engine.module.parameters(), module.parameters(), strict=True):
            second.copy_(first.normal_(generator=torch.Generator().manual_seed(first.numel())))
    clip = 0.5
    seen = engine(x, y, clients=2, clip=clip)
    assert sum(isinstance(layer, RecordedConvolution) for layer in engine.module.modules()) == 3
    for client in range(2):
        span = slice(4 * client, 4 * client + 4)
        alone = looped(module, trained_names(architecture), CrossEntropy(), x[span], y[span], clip)
        assert torch.allclose(seen.sums[client], alone.sums[0], rtol=1e-11, atol=1e-14)
        assert torch.allclose(seen.norms[client], alone.norms[0], rtol=1e-12)
    assert bool((seen.norms > clip).any())


@pytest.mark.parametrize("name", NETS)
def test_many_clients_are_the_single_ones(name: str) -> None:
    factory, shape = NETS[name]
    data = clients(name, shape)
    architecture, sent = opened(made(factory), data[0].x)
    work = ClippedSamples(CrossEntropy(), Batches(7, 4), 0.3)
    workspace = workbench(work, architecture)
    together = dict(work.run_many(workspace, sent, data, round=2))
    assert sorted(together) == [0, 1, 2, 3]
    for position, one in enumerate(data):
        alone, many = work.run(workbench(work, architecture), sent, one, round=2), together[position]
        assert isinstance(many, Tensor)
        assert float((many - alone).abs().max()) < 1e-12 * float(alone.abs().max())


@pytest.mark.parametrize("name", ["cnn", "gru"])
@pytest.mark.parametrize("samples", [1, 4, 9, 20])
def test_how_many_samples_fit_into_memory_makes_no_difference(name: str, samples: int) -> None:
    factory, shape = NETS[name]
    data = clients(name, shape, (9, 9, 9))
    architecture, _ = opened(made(factory), data[0].x)
    engine = PerSample(architecture, CrossEntropy())
    with torch.no_grad():
        for one in engine.module.parameters():
            one.normal_(generator=torch.Generator().manual_seed(one.numel()))
    x, y = torch.cat([one.x for one in data]), torch.cat([one.y for one in data])
    whole = engine(x, y, clients=3, clip=0.5)
    (plan,) = engine._plans.values()
    taken: list[int] = []
    chunk = engine._chunk
    engine._chunk = lambda plan, x, y, *rest: taken.append(len(y)) or chunk(plan, x, y, *rest)  # type: ignore[method-assign,assignment,func-returns-value]
    parts = engine(x, y, clients=3, clip=0.5, budget=samples * plan.numbers * 8)
    assert taken == {1: [1] * 27, 4: [4, 4, 1] * 3, 9: [9] * 3, 20: [18, 9]}[samples]
    assert torch.allclose(parts.sums, whole.sums, rtol=1e-12, atol=1e-13)
    assert torch.allclose(parts.norms, whole.norms, rtol=1e-12)
    assert torch.allclose(parts.losses, whole.losses, rtol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gru", "frozen head"])
def test_a_bound_that_no_gradient_reaches_gives_the_plain_gradient(name: str) -> None:
    factory, shape = NETS[name]
    data = clients(name, shape)[0]
    architecture, sent = opened(made(factory), data.x)
    batches = Batches(6, 1)
    work, plain = ClippedSamples(CrossEntropy(), batches, 1e6), Gradients(CrossEntropy(), batches)
    workspace = workbench(plain, architecture)
    truth = workspace.layout.split(plain.run(workspace, sent, data, round=3))["gradients"][0] * architecture.trainable
    found = work.run(workbench(work, architecture), sent, data, round=3)
    assert torch.allclose(found[:-1], truth, rtol=1e-11, atol=1e-13)


def test_frozen_parameters_are_zero_and_do_not_count_towards_the_norm() -> None:
    model, data = made(frozen_head).double(), clients()[0]
    architecture, sent = opened(model, data.x)
    clip = 1e-3
    for vectorise in (True, False):
        work = ClippedSamples(CrossEntropy(), Batches(0, 0), clip, vectorise)
        one = ClientData(0, data.x[:1], data.y[:1])
        found = work.run(workbench(work, architecture), sent, one, round=0)[:-1]
        assert not found[~architecture.trainable].any()
        assert float(found.norm()) == pytest.approx(clip, rel=1e-12)


SIZES = st.integers(2, 9)


@settings(deadline=None, max_examples=60)
@given(
    samples=SIZES,
    batch=st.integers(0, 9),
    which=st.integers(0, 8),
    clip=st.sampled_from([1e-3, 0.1, 1.0, 5.0]),
    scale=st.sampled_from([0.0, 1.0, 1e3]),
    text=st.booleans(),
    label=st.integers(0, 2),
    round=st.integers(0, 5),
)
def test_replacing_one_record_moves_no_contribution_further_than_its_sensitivity(
    samples: int, batch: int, which: int, clip: float, scale: float, text: bool, label: int, round: int
) -> None:
    name = "gru" if text else "mixing"
    factory, shape = NETS[name]
    data = clients(name, shape, (samples,))[0]
    architecture, sent = opened(made(factory), data.x)
    work = ClippedSamples(CrossEntropy(), Batches(batch, 7), clip)
    workspace = workbench(work, architecture)
    before = work.run(workspace, sent, data, round=round)
    x, y = data.x.clone(), data.y.clone()
    x[which % samples] = 1 if text else scale
    y[which % samples] = label
    after = work.run(workspace, sent, ClientData(0, x, y), round=round)
    assert float((after - before).norm()) <= work.sensitivity(samples) * (1 + 1e-12)


def test_the_sensitivity_is_reached() -> None:
    """Two opposite gradients of length C: the bound is not a loose one."""
    model = nn.Linear(1, 1, bias=False)
    x, y = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    architecture, sent = opened(model, x)
    for batch in (0, 2):
        work = ClippedSamples(SquareLoss(), Batches(batch, 0), 0.5)
        workspace = workbench(work, architecture)
        chosen = int(work.batches.indices(client=0, samples=4, step=0)[0])
        results = []
        for target in (1e3, -1e3):
            replaced = y.clone()
            replaced[chosen] = target
            results.append(work.run(workspace, sent, ClientData(0, x, replaced), round=0))
        moved = float((results[0] - results[1]).norm())
        assert moved == pytest.approx(work.sensitivity(4), rel=1e-12)
        assert work.sensitivity(4) == pytest.approx(2 * 0.5 * (1 if batch == 0 else 2))


@pytest.mark.parametrize("factory", [Opaque, HiddenDropout])
def test_what_vmap_cannot_do_is_done_one_by_one_with_the_same_numbers(factory: Callable[[], nn.Module]) -> None:
    data = clients()
    architecture, sent = opened(made(factory), data[0].x)
    work = ClippedSamples(CrossEntropy(), Batches(0, 0), 0.2, vectorise=True)
    looping = ClippedSamples(CrossEntropy(), Batches(0, 0), 0.2, vectorise=False)
    workspace, other = workbench(work, architecture), workbench(looping, architecture)
    for _ in range(2):  # before and after the workspace learnt it
        together = dict(work.run_many(workspace, sent, data, round=0))
        assert not workspace.vectorisable
        for position, one in enumerate(data):
            assert torch.equal(together[position], looping.run(other, sent, one, round=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("vectorise", [None, False])
def test_dropout_is_a_function_of_seed_client_and_round(vectorise: bool | None) -> None:
    data = clients(sizes=(9, 9))
    architecture, sent = opened(made(dropping), data[0].x)

    def run(*, client: int = 0, round: int = 0, seed: int = 1) -> Tensor:
        work = ClippedSamples(SquareLoss(), Batches(0, seed), 0.2, vectorise)
        one = ClientData(client, data[0].x, data[0].y)
        return work.run(workbench(work, architecture), sent, one, round=round)

    state = torch.get_rng_state()
    first = run()
    assert torch.equal(first, run())
    assert all(not torch.equal(first, other) for other in (run(client=1), run(round=1), run(seed=2)))
    assert torch.equal(torch.get_rng_state(), state)
    work = ClippedSamples(SquareLoss(), Batches(0, 1), 0.2, vectorise)
    workspace = workbench(work, architecture)
    for position, found in work.run_many(workspace, sent, data, round=0):
        assert torch.equal(found, work.run(workspace, sent, data[position], round=0))  # type: ignore[arg-type]
    assert workspace.vectorisable


def test_every_sample_has_a_dropout_mask_of_its_own() -> None:
    data = clients()[0]
    same = ClientData(0, data.x[:1].repeat(6, 1), data.y[:1].repeat(6))
    architecture, sent = opened(made(dropping), data.x)
    engine_work = ClippedSamples(SquareLoss(), Batches(0, 0), 1e-6)
    workspace = workbench(engine_work, architecture)
    engine_work.run(workspace, sent, same, round=0)
    (engine,) = workspace.captured.values()
    assert isinstance(engine, PerSample)
    assert len(engine(same.x, same.y, clients=1, clip=1.0).losses.unique()) > 1


@pytest.mark.parametrize("vectorise", [None, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_sample_without_a_finite_gradient_counts_as_zero_and_is_not_told(
    value: float, vectorise: bool | None
) -> None:
    """A refusal that depends on one record would tell about it, whatever noise covers the uploads."""
    model = nn.Linear(6, 3)
    data = clients(sizes=(9, 9))
    data[1].x[3] = value  # with the square loss, 1e300 has an infinite gradient
    architecture, sent = opened(model, data[0].x)
    work = ClippedSamples(SquareLoss(), Batches(0, 0), 0.1, vectorise)
    workspace = workbench(work, architecture)
    results = dict(work.run_many(workspace, sent, data, round=7))
    kept = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8])
    rest = ClientData(1, data[1].x[kept], data[1].y[kept])
    without = work.run(workspace, sent, rest, round=7)
    assert isinstance(results[1], Tensor)
    torch.testing.assert_close(results[1][:-1], without[:-1])
    assert float(results[1][-1]) == 9
    data[1].x[:] = value
    nothing = work.run(workspace, sent, data[1], round=7)
    assert float(nothing[:-1].abs().max()) == 0.0


@pytest.mark.parametrize("update", [False, True])
def test_a_model_that_is_no_number_is_refused_whatever_the_data(update: bool) -> None:
    data = clients(sizes=(9, 9))
    architecture, sent = opened(nn.Linear(6, 3), data[0].x)
    sent.parameters[0] = float("nan")
    local = LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=2)
    work = ClippedUpdate(local, 0.1) if update else ClippedSamples(SquareLoss(), Batches(0, 0), 0.1)
    results = dict(work.run_many(workbench(work, architecture), sent, data, round=7))
    assert [str(one) for one in results.values()] == [str(results[0])] * 2
    assert "model of round 8 holds numbers that are not finite" in str(results[0])


def test_a_long_but_finite_gradient_is_clipped_and_not_refused() -> None:
    data = clients(sizes=(9,))[0]
    data.x[3] = 1e8
    architecture, sent = opened(nn.Linear(6, 3), data.x)
    work = ClippedSamples(SquareLoss(), Batches(0, 0), 0.1)
    found = work.run(workbench(work, architecture), sent, data, round=0)
    assert float(found[:-1].norm()) <= 0.1 * 9 * (1 + 1e-12)


def test_nothing_but_the_gradient_and_the_count_leaves() -> None:
    architecture, _ = opened(small(), clients()[0].x)
    local = LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=1)
    for work in (ClippedSamples(SquareLoss(), Batches(0, 0), 1.0), ClippedUpdate(local, 1.0)):
        layout = work.layout(architecture, tensors=1)
        assert dict(layout.sections) == {
            "gradients": (1, architecture.size),
            "values": (0,),
            "statistics": (0,),
            "weight": (1,),
        }


def test_head_noise_is_refused() -> None:
    data = clients()[0]
    architecture, weights = draw(small().double(), data.x[:2], traced=True)
    downlink = Rescaling(head=HeadNoise(2))
    sent = downlink.veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=1.0).broadcast()
    local = LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=1)
    for work in (ClippedSamples(SquareLoss(), Batches(0, 0), 1.0), ClippedUpdate(local, 1.0)):
        with pytest.raises(ConfigError, match="head noise"):
            work.layout(architecture, tensors=downlink.head_tensors(architecture))
        with pytest.raises(ConfigError, match=r"[Hh]ead noise"):
            work.run(workbench(work, architecture), sent, data, round=0)


def test_a_layer_that_remembers_its_input_is_clipped_like_any_other() -> None:
    """A traced architecture has such a layer even where no head noise is used."""
    data = clients()[0]
    model = made(small).double()
    architecture, weights = draw(model, data.x[:2], traced=True)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    work = ClippedSamples(SquareLoss(), Batches(0, 0), 0.2)
    found = work.run(workbench(work, architecture), sent, data, round=0)[:-1] / len(data)
    assert torch.allclose(found, by_hand(model, SquareLoss(), data.x, data.y, 0.2), rtol=1e-11, atol=1e-14)


def test_transitional_layers_are_part_of_what_is_differentiated() -> None:
    data = clients()[0]
    model = made(lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    architecture, weights = draw(model.double(), data.x[:2], traced=True)
    plain = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    assert architecture.table is not None
    generator = torch.Generator().manual_seed(0)
    numbers = 0.5 + torch.rand(sum(transitional(architecture.table).sizes), dtype=torch.float64, generator=generator)
    sent = dataclasses.replace(plain, multipliers=numbers)
    results = []
    for vectorise in (None, False):
        work = ClippedSamples(SquareLoss(), Batches(0, 0), 0.2, vectorise)
        workspace = workbench(work, architecture)
        results.append(work.run(workspace, sent, data, round=0))
        assert workspace.vectorisable
        assert not torch.allclose(results[-1], work.run(workspace, plain, data, round=0), rtol=1e-3)
    assert torch.allclose(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scheme", ["ldp", "fedavg"])
def test_a_model_that_overwrites_what_a_layer_read_is_refused_before_anything_is_sent(scheme: str) -> None:
    data = [(torch.randn(12, 6), torch.arange(12) % 3) for _ in range(3)]
    with pytest.raises(ConfigError, match="modified by an inplace operation"):
        fedveil.train(Overwriting(), data, scheme=scheme, rounds=1, seed=1, progress=False)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="positive number"):
        ClippedSamples(SquareLoss(), Batches(0, 0), clip)
    with pytest.raises(ConfigError, match="positive number"):
        ClippedUpdate(LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=1), clip)


class OwnNorm(nn.BatchNorm1d):
    """A subclass stays what it is in a architecture."""


@pytest.mark.parametrize(
    ("norm", "refused"),
    [
        (nn.BatchNorm1d(5), True),
        (nn.BatchNorm1d(5, track_running_stats=False).eval(), True),
        (nn.BatchNorm1d(5).eval(), False),
        (OwnNorm(5), True),
        (nn.GroupNorm(1, 5), False),
        (nn.LayerNorm(5), False),
    ],
)
def test_a_batch_norm_that_computes_with_its_batch_is_refused(norm: nn.Module, refused: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3))
    architecture, _ = draw(model, torch.randn(2, 6), traced=False)
    work = ClippedSamples(SquareLoss(), Batches(0, 0), 1.0)
    if not refused:
        refuse_batch_norm(architecture)
        work.layout(architecture, tensors=1)
        return
    for attempt in (lambda: refuse_batch_norm(architecture), lambda: work.layout(architecture, tensors=1)):
        with pytest.raises(ConfigError, match=r"'1' .*gradient of its own.*releases.*GroupNorm.*freeze"):
            attempt()


def test_a_frozen_batch_norm_is_clipped_per_sample() -> None:
    data = clients()[0]
    norm = nn.BatchNorm1d(5)
    norm.running_mean.uniform_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double()
    norm.eval()
    architecture, weights = draw(model, data.x[:2], traced=False)
    sent = Plain().veil(architecture, weights, stream=SeededSecrets(0).stream(), head_level=None).broadcast()
    work = ClippedSamples(SquareLoss(), Batches(0, 0), 0.2)
    workspace = workbench(work, architecture)
    found = work.run(workspace, sent, data, round=0)[:-1] / len(data)
    assert torch.allclose(found, by_hand(model, SquareLoss(), data.x, data.y, 0.2), rtol=1e-11, atol=1e-14)
    assert workspace.vectorisable


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_a_clipped_update_is_the_local_update_cut_to_its_bound(clip: float) -> None:
    data = clients()
    architecture, sent = opened(made(small), data[0].x)
    local = LocalSteps(SquareLoss(), Batches(4, 9), Schedule(0.1), steps=3)
    work = ClippedUpdate(local, clip)
    workspace = workbench(work, architecture)
    for position, found in work.run_many(workspace, sent, data, round=1):
        samples = len(data[position])
        assert isinstance(found, Tensor)
        update = local.run(workbench(local, architecture), sent, data[position], round=1)[: architecture.size] / samples
        expected = update / max(1.0, float(update.norm()) / clip)
        assert torch.allclose(found[:-1] / samples, expected, rtol=1e-12, atol=1e-15)
        assert float(found[-1]) == samples
        assert 2 * float(found[:-1].norm()) <= work.sensitivity(samples) * (1 + 1e-12)
    assert work.sensitivity(7) == pytest.approx(14 * clip)


def test_an_update_of_zero_stays_zero() -> None:
    data = clients()[0]
    architecture, sent = opened(made(small), data.x)
    work = ClippedUpdate(LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.0), steps=1), 1.0)
    found = work.run(workbench(work, architecture), sent, data, round=0)
    assert not found[:-1].any()
    assert float(found[-1]) == len(data)


def test_an_exploding_update_counts_as_zero_and_is_not_told() -> None:
    data = clients(sizes=(9, 9))
    data[1].x[:] = float("nan")
    architecture, sent = opened(made(small), data[0].x)
    work = ClippedUpdate(LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=2), 1.0)
    results = dict(work.run_many(workbench(work, architecture), sent, data, round=0))
    assert isinstance(results[0], Tensor)
    assert isinstance(results[1], Tensor)
    assert float(results[1][:-1].abs().max()) == 0.0
    assert float(results[1][-1]) == 9


def test_the_units_of_privacy_are_named() -> None:
    local = LocalSteps(SquareLoss(), Batches(0, 0), Schedule(0.1), steps=1)
    assert (ClippedSamples.unit, ClippedSamples.returns) == ("record", "gradient")
    assert (ClippedUpdate(local, 1.0).unit, ClippedUpdate.returns) == ("client", "update")
