"""Group normalisation for many samples at once is the one of each sample, there and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedveil.downlink.architecture import VectorGroupNorm, with_vector_norms
from fedveil.work import vmapped


def norm(groups: int, channels: int, dtype: torch.dtype = torch.float64) -> VectorGroupNorm:
    generator = torch.Generator().manual_seed(0)
    layer = nn.GroupNorm(groups, channels, dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randn(channels, generator=generator, dtype=dtype)
    made = with_vector_norms(layer).requires_grad_(False)
    assert isinstance(made, VectorGroupNorm)
    made.epsilon.copy_(torch.rand(groups, generator=generator, dtype=dtype) + 0.1)
    made.fused = False
    return made


def gradients(layer: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Every sample's gradients of weight, bias and input, and its value."""
    factors = torch.linspace(-1, 2, x[0].numel(), dtype=x.dtype).reshape(x.shape[1:])

    def value(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return (torch.func.functional_call(layer, values, (sample[None],))[0].square() * factors).sum()

    derived = torch.func.grad_and_value(value, argnums=(0, 1))
    (of_parameters, of_input), values = torch.vmap(derived, in_dims=(None, 0))(dict(layer.named_parameters()), x)
    return of_parameters, of_input, values


@pytest.mark.parametrize(("groups", "shape"), [(4, (8, 5, 3)), (1, (6, 4)), (6, (6, 2, 3, 2)), (2, (4,))])
def test_gradients_are_those_of_every_sample_alone(groups: int, shape: tuple[int, ...]) -> None:
    before = norm(groups, shape[0])
    after = copy.deepcopy(before)
    vmapped.install(after)
    assert type(after) is not VectorGroupNorm
    x = torch.randn(7, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(gradients(after, x), gradients(before, x))
    torch.testing.assert_close(after(x), before(x))


def test_a_sample_that_overflows_changes_no_other() -> None:
    layer = norm(2, 4, torch.float32)
    vmapped.install(layer)
    x = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    spoilt = x.clone()
    spoilt[2] = 1e38
    kept = [0, 1, 3, 4]
    for clean, dirty in zip(gradients(layer, x)[0].values(), gradients(layer, spoilt)[0].values(), strict=True):
        torch.testing.assert_close(clean[kept], dirty[kept], rtol=0, atol=0)


def test_layers_without_weights_and_subclasses_stay_as_they_are() -> None:
    class Own(VectorGroupNorm):
        pass

    bare = with_vector_norms(nn.InstanceNorm2d(4))
    own = Own(nn.GroupNorm(2, 4), 2, torch.zeros(1), channels=4)
    for layer in (bare, own):
        kind = type(layer)
        vmapped.install(layer)
        assert type(layer) is kind
