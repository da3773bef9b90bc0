"""The identity check bites: each deliberate mistake in the mathematics makes it fail."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from downlink.exactness import assert_exact
from downlink.networks import VECTOR, Net
from fedveil.downlink import rescaling, rules
from fedveil.downlink import scales as edges
from fedveil.downlink.rescaling import HeadSecret, ScaledVeil


def residual() -> nn.Module:
    return Net(
        lambda n, x: n.head(F.relu(n.norm(n.a(x)) + n.c(F.relu(n.b(n.a(x)))))),
        a=nn.Linear(6, 4),
        norm=nn.BatchNorm1d(4, eps=1e-3),
        b=nn.Linear(4, 5),
        c=nn.Linear(5, 4),
        head=nn.Linear(4, 3),
    )


def test_the_network_is_exact_without_a_mistake() -> None:
    assert_exact(residual(), VECTOR)
    assert_exact(residual(), VECTOR, groups=2)


def test_a_sum_that_unites_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def addition(tracing: edges.Tracing, out: Tensor, input: object, other: object, alpha: object = 1) -> Tensor:
        assert isinstance(input, edges.Edge)
        return input.ids

    monkeypatch.setitem(rules.RULES, "add", addition)
    with pytest.raises(AssertionError, match="output is off"):
        assert_exact(residual(), VECTOR)


def test_a_forgotten_epsilon_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = ScaledVeil._norm_factor
    monkeypatch.setattr(ScaledVeil, "_norm_factor", lambda self: torch.ones_like(factor(self)))
    with pytest.raises(AssertionError, match="output is off"):
        assert_exact(residual(), VECTOR)


def test_a_wrong_sign_on_gamma_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HeadSecret.coefficients

    def wrong(self: HeadSecret) -> Tensor:
        numbers = right(self)
        numbers[1 : 1 + self.public.count] *= -1
        return numbers

    monkeypatch.setattr(HeadSecret, "coefficients", wrong)
    with pytest.raises(AssertionError, match="gradient is off"):
        assert_exact(residual(), VECTOR, groups=2)
    assert_exact(residual(), VECTOR)


def test_gradients_that_are_not_scaled_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rescale = rescaling.ScaleTable.rescale
    calls: list[int] = []

    def once(self: rescaling.ScaleTable, flat: Tensor, scales: Tensor) -> Tensor:
        calls.append(1)
        return rescale(self, flat, scales if len(calls) == 1 else torch.ones_like(scales))

    monkeypatch.setattr(rescaling.ScaleTable, "rescale", once)
    with pytest.raises(AssertionError, match="gradient is off"):
        assert_exact(residual(), VECTOR)
