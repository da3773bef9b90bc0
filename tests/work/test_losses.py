"""The identity behind the recovery, sample by sample: L = φ₀ − Σ γ_s·φ_s + Σ γ_s²·φ_β,s."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.downlink.messages import PublicHead
from fedveil.downlink.rescaling import HeadSecret
from fedveil.errors import ConfigError, DataError
from fedveil.work import CrossEntropy, SquareLoss, make_loss

numbers = st.floats(-10, 10, allow_nan=False)
PROFILE = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def situations(draw: st.DrawFn) -> tuple[SquareLoss, Tensor, Tensor, Tensor, HeadSecret]:
    """A loss, true outputs, targets, α and a head secret, all random."""
    outputs = draw(st.integers(1, 6))
    samples = draw(st.integers(1, 4))
    groups = draw(st.integers(1, outputs))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weighted = draw(st.booleans())
    loss = SquareLoss(draw(st.floats(0.1, 10)), draw(st.floats(0.1, 20)) if weighted else 1.0)
    regression = draw(st.booleans())
    target = normal(samples, outputs) if regression else torch.randint(0, outputs, (samples,), generator=generator)
    member = torch.randperm(outputs, generator=generator) % groups
    public = PublicHead(normal(outputs), member, groups, per_group=weighted)
    return loss, normal(samples, outputs), target, normal(samples), HeadSecret(public, normal(groups))


@PROFILE
@given(situations())
def test_the_basis_combines_into_the_true_loss_sample_by_sample(
    situation: tuple[SquareLoss, Tensor, Tensor, Tensor, HeadSecret],
) -> None:
    loss, true, target, alpha, secret = situation
    seen = true + alpha[:, None] * secret.noise()
    coefficients = secret.coefficients()
    for place in range(len(true)):
        one = slice(place, place + 1)
        phi = loss.basis(seen[one], alpha[one], target[one], secret.public)
        expected = loss.mean(true[one], target[one])
        size = float((coefficients.abs() * phi.abs()).sum()) + 1.0
        assert abs(float(coefficients @ phi - expected)) < 1e-12 * size
        assert len(phi) == secret.public.tensors


@PROFILE
@given(situations())
def test_the_gradient_with_respect_to_the_features_combines_too(
    situation: tuple[SquareLoss, Tensor, Tensor, Tensor, HeadSecret],
) -> None:
    loss, true, target, alpha, secret = situation
    # y and α both move with the features; here through a random direction.
    direction = torch.linspace(-1, 1, true.shape[1], dtype=torch.float64)
    move = torch.zeros((), dtype=torch.float64, requires_grad=True)
    y, a = true + move * direction, alpha + 0.7 * move
    (plain,) = torch.autograd.grad(loss.mean(y, target), move, retain_graph=True)
    phi = loss.basis(y + a[:, None] * secret.noise(), a, target, secret.public)
    parts = torch.stack([torch.autograd.grad(one, move, retain_graph=True)[0] for one in phi])
    coefficients = secret.coefficients()
    size = float((coefficients.abs() * parts.abs()).sum()) + 1.0
    assert abs(float(coefficients @ parts - plain)) < 1e-12 * size


def test_the_square_loss_weighs_and_scales_the_true_class() -> None:
    output, target = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0, 1])
    # ½[3·(1−5)² + 2²] and ½[0² + 3·(−1−5)²]
    assert float(SquareLoss(target_scale=5.0, true_weight=3.0).mean(output, target)) == pytest.approx((26 + 54) / 2)


def test_cross_entropy_is_torchs() -> None:
    output, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    assert torch.equal(CrossEntropy().mean(output, target), torch.nn.functional.cross_entropy(output, target))


def test_regression_targets_of_another_shape_are_refused() -> None:
    # (3,) against (3, 3) would broadcast to something else.
    with pytest.raises(DataError, match="must be equal"):
        SquareLoss().mean(torch.randn(3, 3), torch.randn(3))


def test_losses_are_found_by_name() -> None:
    assert make_loss("square", true_weight=2.0) == SquareLoss(1.0, 2.0)
    assert make_loss("cross-entropy") == CrossEntropy()
    for arguments in (
        {"name": "hinge"},
        {"name": "cross-entropy", "true_weight": 2.0},
        {"name": "square", "target_scale": 0.0},
    ):
        with pytest.raises(ConfigError):
            make_loss(**arguments)  # type: ignore[arg-type]
