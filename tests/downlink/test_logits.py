"""A secret number on all logits: softmax cross-entropy does not see it, and no other loss gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedveil
from downlink.modern import TOKENS, Decoder, Vit, mlp
from downlink.networks import IMAGE, VECTOR
from downlink.test_symmetries import EXACT, made
from fedveil.downlink import Mean, Rescaling, draw
from fedveil.downlink.architecture import assemble, load_parameters
from fedveil.downlink.scales import coverage
from fedveil.secrets import SeededSecrets
from fedveil.tensors import flatten
from fedveil.work.losses import CrossEntropy, SquareLoss

NOTHING = torch.empty(0, dtype=torch.float64)
SHIFTED = Rescaling(family="full", shifted=True)


def error(loss: CrossEntropy | SquareLoss, model: nn.Module, x: Tensor) -> float:
    """How far the recovered gradient is off, over all parameters; the head that is sent must be another one."""
    architecture, weights = draw(model, x, traced=True, family="full")
    table, y = architecture.table, torch.arange(len(x)) % 3
    assert table is not None
    assert table.head is not None
    plain, veil = (
        how.veil(architecture, weights, stream=SeededSecrets(3).stream("veil"), head_level=None)
        for how in (Rescaling(family="full"), SHIFTED)
    )
    sent = veil.broadcast().parameters
    by = architecture.parameters.part(sent - plain.broadcast().parameters, table.head.weight)
    torch.testing.assert_close(by, by[:1].expand_as(by))  # 1·uᵀ
    assert float(by.std(1).min()) > 0.01

    def gradient(parameters: Tensor) -> Tensor:
        module = assemble(architecture, weights).train()
        load_parameters(module, parameters)
        return flatten(torch.autograd.grad(loss.mean(module(x), y), list(module.parameters()), materialize_grads=True))

    true = gradient(weights.parameters)
    found = veil.recover(Mean(gradient(sent)[None], NOTHING, NOTHING)).gradient
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy((1.0, 3.0, 0.5)), CrossEntropy((1.0, 3.0, 0.5), 0.1)])
def test_cross_entropy_has_the_same_gradient(loss: CrossEntropy) -> None:
    assert error(loss, *made(lambda: mlp(nn.GELU), VECTOR)) < EXACT


def test_a_network_of_many_groups_has_the_same_gradient() -> None:
    assert error(CrossEntropy(), *made(Vit, IMAGE)) < EXACT


def test_the_square_loss_has_another_one() -> None:
    assert error(SquareLoss(), *made(lambda: mlp(nn.GELU), VECTOR)) > 1e-3


def test_without_a_head_nothing_is_added() -> None:
    """The head is the embedding's table."""
    model, x = made(lambda: Decoder(tied=True), TOKENS)
    architecture, weights = draw(model, x, traced=True, family="full")
    sent = [
        how.veil(architecture, weights, stream=SeededSecrets(3).stream("veil"), head_level=None).broadcast().parameters
        for how in (Rescaling(family="full"), SHIFTED)
    ]
    assert torch.equal(*sent)


def test_coverage_counts_one_number_for_every_input_of_the_head() -> None:
    """Differences inside a column stay: of a bias of three, two are seen."""
    architecture, _ = draw(*made(lambda: mlp(nn.GELU), VECTOR), traced=True, family="full")
    table = architecture.table
    assert table is not None
    assert table.head is not None
    plain, shifted = (coverage(table, head_noise=False, shifted=shifted) for shifted in (False, True))
    assert shifted.reals == plain.reals + table.head.features + 1
    hidden = [{cover.name: cover.hidden for cover in each.parameters} for each in (plain, shifted)]
    assert (hidden[0][str(table.head.bias)], hidden[1][str(table.head.bias)]) == (0, 1)


def test_runs_with_cross_entropy_have_it_under_full_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    clients = [
        (torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(2)
    ]
    given: dict[str, Any] = {"rounds": 2, "seed": 3, "lr": 0.1, "progress": False, "dtype": "float64"}

    def result(**how: Any) -> fedveil.Result:
        torch.manual_seed(0)
        return fedveil.train(mlp(nn.GELU), clients, **given, **how)

    def hiding(run: fedveil.Result) -> str:
        return str(run.ledger)

    plain = result(scheme="fedavg", loss="cross-entropy").model.state_dict()
    veiled = result(scheme="lossless", loss="cross-entropy", head_noise=False)
    assert "on all logits" in hiding(veiled)
    for name, value in plain.items():
        torch.testing.assert_close(veiled.model.state_dict()[name], value, rtol=1e-9, atol=1e-11)
    for how in ({"loss": "square"}, {"loss": "cross-entropy", "family": "isometry"}):
        assert "on all logits" not in hiding(result(scheme="lossless", head_noise=False, **how))
