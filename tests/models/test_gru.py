"""The hand-written GRU is a GRU, ignores padding, and gives per-sample gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedveil import models
from fedveil.models.networks import GRUClassifier

STEPS, WORDS = 7, 11


@pytest.fixture
def model() -> GRUClassifier:
    built = models.build("gru", input_shape=(STEPS,), outputs=3, vocabulary=WORDS, embedding=5, hidden=4)
    assert isinstance(built, GRUClassifier)
    return built.double()


def tokens(batch: int, *, low: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(low, WORDS, (batch, STEPS), generator=torch.Generator().manual_seed(seed))


def test_it_equals_the_gru_of_pytorch(model: GRUClassifier) -> None:
    reference = nn.GRU(5, 4, batch_first=True).double()
    # PyTorch's z keeps the state where our u replaces it: u = 1 - z, so its logits change sign.
    sign = torch.ones(12, dtype=torch.float64)
    sign[4:8] = -1
    with torch.no_grad():
        reference.weight_ih_l0.copy_(model.from_input.weight * sign[:, None])
        reference.bias_ih_l0.copy_(model.from_input.bias * sign)
        reference.weight_hh_l0.copy_(model.from_state.weight * sign[:, None])
        reference.bias_hh_l0.copy_(model.from_state.bias * sign)
    x = tokens(6)

    states, _ = reference(model.embedding(x))

    torch.testing.assert_close(model(x), model.head(states.mean(1)))


def test_padding_does_not_matter_on_either_side(model: GRUClassifier) -> None:
    text = tokens(4)[:, :3]
    padding = torch.zeros(4, STEPS - 3, dtype=torch.long)
    behind, before = torch.cat([text, padding], 1), torch.cat([padding, text], 1)
    torch.testing.assert_close(model(behind), model(before))
    assert not torch.allclose(model(behind), model(tokens(4)))


def test_a_text_of_padding_alone_gives_the_bias(model: GRUClassifier) -> None:
    scores = model(torch.zeros(2, STEPS, dtype=torch.long))
    torch.testing.assert_close(scores, model.head.bias.expand(2, -1))


def test_per_sample_gradients_by_vmap_equal_a_loop(model: GRUClassifier) -> None:
    x, y = tokens(5, low=0), torch.tensor([0, 1, 2, 1, 0])
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        scores = functional_call(model, parameters, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(scores, y.unsqueeze(0))

    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)

    for i in range(len(x)):
        alone = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        for key, expected in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[key][i], expected)


def test_it_can_be_traced(model: GRUClassifier) -> None:
    traced = torch.fx.symbolic_trace(model)
    for batch in (1, 4):
        torch.testing.assert_close(traced(tokens(batch, low=0)), model(tokens(batch, low=0)))


def test_it_learns_which_word_occurs() -> None:
    model = models.build("gru", input_shape=(STEPS,), outputs=2, vocabulary=WORDS, embedding=8, hidden=8)
    x = tokens(200, low=2, seed=1)
    y = (torch.arange(200) % 2).long()
    x[y == 1, 3] = 1
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert (model(x).argmax(1) == y).float().mean() > 0.95
