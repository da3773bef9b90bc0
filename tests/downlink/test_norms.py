"""Norms with a vector ε compute what torch's own layers compute, gradients and statistics included."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from downlink.exactness import assert_exact, relative, scramble
from downlink.networks import IMAGE, Net
from fedveil.downlink.architecture import VectorBatchNorm, VectorGroupNorm, VectorNorm, batch_norms, with_vector_norms
from fedveil.errors import TraceError

MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "BatchNorm1d over series": (lambda: nn.BatchNorm1d(4, eps=0.1), (5, 4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "BatchNorm2d bare": (lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), (3, 4, 5, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (3, 4, 2, 2, 2)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4, eps=0.01), (3, 4, 5, 5)),
    "GroupNorm of vectors": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 6)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4), (3, 4, 5, 5)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), (3, 4, 2, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm((5, 5)), (3, 4, 5, 5)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(5, bias=False), (3, 4, 5)),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_a_vector_norm_is_torchs_own(name: str, training: bool, fused: bool) -> None:
    make, shape = MAKERS[name]
    stock = make().double().train(training)
    scramble(stock)
    ours = with_vector_norms(stock)
    assert isinstance(ours, VectorNorm)
    if isinstance(ours, VectorBatchNorm):
        ours.fused = fused
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    pull = torch.randn(shape, dtype=torch.float64, generator=generator)
    results = []
    for module in (stock, ours):
        into = x.clone().requires_grad_()
        out = module(into)
        grads = torch.autograd.grad((out * pull).sum(), [into, *module.parameters()])
        results.append([out.detach(), *grads])
    for found, true in zip(results[1], results[0], strict=True):
        assert relative(found, true) < 1e-10


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda out, x: nn.functional.relu(out, inplace=True),
    "add": lambda out, x: operator.iadd(out, x),
    "a view": lambda out, x: out.flatten(1).relu_().reshape(out.shape),
    "a part": lambda out, x: out.index_fill_(1, torch.tensor([0]), 0.0),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operation", IN_PLACE)
@pytest.mark.parametrize("name", MAKERS)
def test_what_a_norm_gives_may_be_changed_in_place(name: str, operation: str, training: bool) -> None:
    make, shape = MAKERS[name]
    stock = make().double().train(training)
    scramble(stock)
    generator = torch.Generator().manual_seed(0)
    x, pull = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    results = []
    for module, fused in ((stock, True), (with_vector_norms(stock), True), (with_vector_norms(stock), False)):
        if isinstance(module, VectorBatchNorm | VectorGroupNorm):
            module.fused = fused
        into = x.clone().requires_grad_()
        out = IN_PLACE[operation](module(into), into)
        grads = torch.autograd.grad((out * pull).sum(), [into, *module.parameters()])
        results.append([out.detach(), *grads])
    for result in results[1:]:
        for value, true in zip(result, results[0], strict=True):
            assert relative(value, true) < 1e-10


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda channels: nn.GroupNorm(2, channels), nn.InstanceNorm2d])
def test_a_veiled_block_that_works_in_place_is_exact(norm: Callable[[int], nn.Module]) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        x = net.get_submodule("stem")(x)
        out = net.get_submodule("norm")(x)
        out = net.get_submodule("conv")(nn.functional.relu(out, inplace=True))
        out += x
        out = net.get_submodule("last")(out)
        return net.get_submodule("head")(out.relu_().mean((2, 3)))  # type: ignore[no-any-return]

    layers = {"stem": nn.Conv2d(3, 4, 3), "norm": norm(4), "conv": nn.Conv2d(4, 4, 3, padding=1), "last": norm(4)}
    assert_exact(Net(forward, **layers, head=nn.Linear(4, 3)), IMAGE)


def test_batch_statistics_are_those_torch_puts_into_its_running_ones() -> None:
    stock = nn.BatchNorm2d(4, momentum=1.0).double()
    ours = with_vector_norms(stock)
    assert isinstance(ours, VectorBatchNorm)
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    stock(x)
    ours(x)
    mean, variance = ours.take_statistics()
    assert relative(mean, stock.running_mean) < 1e-12  # type: ignore[arg-type]
    assert relative(variance, stock.running_var) < 1e-12  # type: ignore[arg-type]
    assert ours.statistics == []


def test_epsilon_has_the_models_precision_even_without_affine_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False))
    for module in with_vector_norms(model.double()):  # type: ignore[attr-defined]
        if isinstance(module, VectorNorm):
            assert module.epsilon.dtype is torch.float64


def test_shared_norms_stay_shared_and_names_stay_as_they_were() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    ours = with_vector_norms(model)
    assert ours[1] is ours[3]  # type: ignore[index]
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [path for path, _ in batch_norms(ours)] == ["1"]


def test_the_model_is_copied_not_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    with_vector_norms(model)
    assert type(model[1]) is nn.BatchNorm1d
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_subclasses_of_norms_stay_as_they_are() -> None:
    class Odd(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return input

    class OddGroups(nn.GroupNorm):
        pass

    ours = with_vector_norms(nn.Sequential(Odd(4), OddGroups(2, 4)))
    assert [type(one) for one in ours] == [Odd, OddGroups]  # type: ignore[attr-defined]


def test_an_instance_norm_of_other_channels_is_refused() -> None:
    # torch only warns; a norm of one group would silently compute something else.
    ours = with_vector_norms(nn.InstanceNorm2d(1))
    with pytest.raises(TraceError, match="1 channels"):
        ours(torch.randn(2, 4, 3, 3))
