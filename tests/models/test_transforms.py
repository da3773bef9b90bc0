"""The networks survive what FedVeil does to them: fx tracing, float64, functional calls, vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedveil import models

SHAPE = (2, 8, 8)
CASES = [
    ("mlp", {"norm": "group"}),
    ("cnn", {"norm": "group"}),
    ("cnn", {"norm": "batch"}),
    ("lenet-sigmoid", {}),
    ("resnet11", {"norm": "group", "width": 8}),
    ("resnet20", {"norm": "group", "width": 8}),
    ("resnet20", {"shortcut": "B", "width": 8}),
    ("resnet18", {"width": 8}),
    ("resnet18", {"width": 8, "stem": "large"}),
    ("densenet", {"depth": 10}),
    ("densenet", {"depth": 10, "norm": "group"}),
]


def sample(name: str, options: dict[str, int | str], *, seed: int = 0) -> nn.Module:
    return models.build(name, input_shape=SHAPE, outputs=3, seed=seed, **options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_traced_network_computes_the_same_in_float64(name: str, options: dict[str, int | str]) -> None:
    model = sample(name, options).double()
    x = torch.randn(4, *SHAPE, dtype=torch.float64)

    traced = torch.fx.symbolic_trace(model)

    for mode in (True, False):
        scores = model.train(mode)(x)
        assert scores.dtype == torch.float64
        torch.testing.assert_close(traced.train(mode)(x), scores)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_each_layer_is_called_once_so_that_its_edges_are_its_own(name: str, options: dict[str, int | str]) -> None:
    calls = [n.target for n in torch.fx.symbolic_trace(sample(name, options)).graph.nodes if n.op == "call_module"]
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_per_sample_gradients_by_vmap_equal_a_loop(name: str, options: dict[str, int | str]) -> None:
    model = sample(name, options).double().eval()
    x, y = torch.randn(3, *SHAPE, dtype=torch.float64), torch.tensor([0, 2, 1])
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


@pytest.mark.parametrize(("name", "options"), CASES)
def test_many_clients_models_run_at_once_by_vmap(name: str, options: dict[str, int | str]) -> None:
    clients = [sample(name, options, seed=seed).eval() for seed in range(3)]
    x = torch.randn(3, 2, *SHAPE)
    parameters, buffers = stack_module_state(clients)

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(clients[0], (parameters, buffers), (x,))

    together = vmap(run)(parameters, buffers, x)

    expected = torch.stack([client(batch) for client, batch in zip(clients, x, strict=True)])
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
