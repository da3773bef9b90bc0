"""Pooling by channels: the very numbers of torch's own layer, and no other layer touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil.work.pooling import pool_swiftly

HOW: dict[str, dict[str, Any]] = {
    "halves": {"kernel_size": 2},
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "oblong": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    "dilated": {"kernel_size": 2, "dilation": 2},
    "rounded up": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
}


def both(how: dict[str, Any]) -> tuple[nn.MaxPool2d, nn.MaxPool2d]:
    plain, swift = nn.MaxPool2d(**how), nn.MaxPool2d(**how)
    pool_swiftly(swift)
    assert type(swift) is not nn.MaxPool2d
    return plain, swift


def passes(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    given = x.clone().requires_grad_()
    out = layer(given)
    weights = torch.arange(out.numel(), dtype=x.dtype).reshape(out.shape).cos()
    return out.detach(), torch.autograd.grad((out * weights).sum(), given)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_forward_and_backward_are_torchs_to_the_last_bit(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Behind a ReLU, where many of a window's numbers are equal and the first of them counts."""
    x = torch.randn(5, 7, 13, 11, generator=torch.Generator().manual_seed(1)).to(dtype).relu()
    for layer, other in [both(how)]:
        for ours, theirs in zip(passes(other, x), passes(layer, x), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.is_contiguous()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_under_vmap_every_sample_has_its_own_gradient(how: dict[str, Any]) -> None:
    x = torch.randn(6, 1, 3, 13, 11, generator=torch.Generator().manual_seed(3)).relu()
    plain, swift = both(how)

    def gradients(layer: nn.Module) -> Tensor:
        def loss(sample: Tensor) -> Tensor:
            return (layer(sample) * layer(sample).cos()).sum()

        return torch.vmap(torch.func.grad(loss))(x)

    assert torch.equal(gradients(swift), gradients(plain))
    alone = torch.stack([torch.func.grad(lambda one: (swift(one) * swift(one).cos()).sum())(sample) for sample in x])
    assert torch.equal(gradients(swift), alone)


def test_a_penalty_on_gradients_is_differentiated_too() -> None:
    """Second derivatives, as a loss of one's own may take them."""

    def second(layer: nn.Module) -> Tensor:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
        (first,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    plain, swift = both(HOW["overlapping"])
    assert torch.equal(second(swift), second(plain))
    assert float(second(swift).abs().max()) > 0


def test_what_is_no_number_stays_where_it_was() -> None:
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    x[0, 1, 2, 3], x[1, 2, 0, 0] = math.nan, math.inf
    plain, swift = both(HOW["halves"])
    for ours, theirs in zip(passes(swift, x), passes(plain, x), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8)])
def test_without_gradients_and_for_single_pictures_it_is_torchs_own(shape: tuple[int, ...]) -> None:
    plain, swift = both(HOW["halves"])
    x = torch.randn(shape)
    assert torch.equal(swift(x), plain(x))


def test_layers_that_return_places_and_subclasses_stay_as_they_are() -> None:
    class Own(nn.MaxPool2d):
        pass

    net = nn.Sequential(nn.MaxPool2d(2, return_indices=True), Own(2), nn.AvgPool2d(2), nn.MaxPool1d(2))
    before = [type(layer) for layer in net]
    pool_swiftly(net)
    assert [type(layer) for layer in net] == before
