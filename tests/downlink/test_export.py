"""An export predicts what the server's model predicts, with other numbers inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federation import job, trained
from fedveil import models
from fedveil.downlink import Architecture, Weights, assemble, draw
from fedveil.downlink.architecture import VectorBatchNorm, draw_secret_epsilon
from fedveil.downlink.export import ChannelAffine, ExportShape, ShiftedLinear, export, exported_architecture
from fedveil.downlink.scales import coverage
from fedveil.errors import TraceError
from fedveil.secrets import OsSecrets, SeededSecrets

PICTURES = (3, 8, 8)
NETWORKS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "mlp": ("mlp", (1, 8, 8), {"depth": 3, "width": 24}),
    "mlp with batch norm": ("mlp", (1, 8, 8), {"depth": 3, "width": 24, "norm": "batch"}),
    "mlp with layer norm": ("mlp", (1, 8, 8), {"depth": 3, "width": 24, "norm": "layer"}),
    "cnn": ("cnn", PICTURES, {"width": 4}),
    "cnn with batch norm": ("cnn", PICTURES, {"width": 4, "norm": "batch"}),
    "cnn with group norm": ("cnn", PICTURES, {"width": 4, "norm": "group"}),
    "resnet20": ("resnet20", PICTURES, {}),
    "densenet": ("densenet", PICTURES, {}),
}


def network(name: str, *, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Architecture, Weights, Tensor]:
    """A network as after some training: no number is left at its start, statistics have moved."""
    kind, shape, options = NETWORKS[name]
    bare = models.build(kind, input_shape=shape, outputs=10, seed=3, **options).to(dtype).train()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for one in bare.parameters():
            one.mul_(1 + 0.2 * torch.rand(one.shape, generator=generator).to(one))
            one.add_(0.05 * torch.randn(one.shape, generator=generator).to(one))
        for _ in range(5):
            bare(torch.randn(16, *shape, generator=generator).to(dtype) + 0.3)
    x = torch.randn(20, *shape, generator=generator).to(dtype)
    architecture, weights = draw(bare, x[:2], traced=True)
    draw_secret_epsilon(weights, SeededSecrets(1).stream("epsilon"))
    return bare, architecture, weights, x


@pytest.mark.parametrize("name", NETWORKS)
def test_an_export_predicts_what_the_server_predicts(name: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-4)):
        _, architecture, weights, x = network(name, dtype=dtype)
        module, _ = export(architecture, weights, stream=OsSecrets().stream("export"))
        with torch.no_grad():
            truth, ours = assemble(architecture, weights).eval()(x), module(x)
        assert not module.training
        assert float((ours - truth).abs().max() / truth.abs().max()) < tolerance


@pytest.mark.parametrize("name", NETWORKS)
def test_no_hidden_number_of_an_export_is_the_servers(name: str) -> None:
    """Reported as hidden means: not one of its numbers is found in the exported tensor of that name."""
    _, architecture, weights, _ = network(name)
    assert architecture.table is not None
    module, _ = export(architecture, weights, stream=OsSecrets().stream("export"))
    truth = architecture.parameters.split(weights.parameters)
    sent = dict(module.named_parameters())
    found = coverage(architecture.table, head_noise=False)
    hidden = [one for one in found.parameters if one.hidden == one.size]
    assert len(hidden) >= len(truth) - 1
    every_sent = torch.cat([one.detach().reshape(-1) for one in sent.values()])
    every_hidden = torch.cat([truth[one.name].reshape(-1) for one in hidden])
    assert not torch.isin(every_hidden[every_hidden != 0], every_sent).any()
    for one in hidden:
        values = truth[one.name].reshape(-1)
        if one.name in sent:
            theirs = sent[one.name].detach().reshape(-1)
            relative = (theirs - values).abs() / values.abs().clamp_min(1e-12)
            assert float(relative.min()) > 1e-9, one.name


@pytest.mark.parametrize("name", NETWORKS)
def test_neither_statistics_nor_epsilon_nor_the_last_bias_travel(name: str) -> None:
    _, architecture, weights, _ = network(name)
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"))
    assert not any(isinstance(one, VectorBatchNorm) for one in module.modules())
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert not any("running" in tensor_name for tensor_name in tensors)
    everything = torch.cat([one.detach().reshape(-1).double() for one in tensors.values()])
    own = torch.cat([weights.statistics, weights.epsilon])
    assert not torch.isin(own[own != 0], everything).any()
    assert architecture.table is not None
    head = architecture.table.head
    assert head is not None
    assert head.bias is not None
    assert list(shape.shifted) == [head.path]
    assert isinstance(module.get_submodule(head.path), ShiftedLinear)
    last_bias = architecture.parameters.split(weights.parameters)[head.bias]
    assert not torch.isin(last_bias, everything).any()


def test_batch_norms_are_folded() -> None:
    _, architecture, weights, _ = network("resnet20")
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"))
    assert len(shape.folded) == 19
    assert all(isinstance(module.get_submodule(path), ChannelAffine) for path in shape.folded)


@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm", "resnet20", "densenet"])
def test_the_architecture_of_an_export_can_be_rebuilt_empty_and_filled(name: str) -> None:
    bare, architecture, weights, x = network(name)
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"))
    rebuilt = exported_architecture(bare, shape).double()
    rebuilt.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(rebuilt(x), module(x))


def test_two_exports_of_one_model_differ_in_every_number() -> None:
    _, architecture, weights, _ = network("mlp")
    first, second = (export(architecture, weights, stream=OsSecrets().stream("export"))[0] for _ in range(2))
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert (ours != theirs).all()


def test_an_export_leaves_the_servers_weights_as_they_were() -> None:
    _, architecture, weights, _ = network("resnet20")
    before = weights.clone()
    export(architecture, weights, stream=OsSecrets().stream("export"))
    assert torch.equal(before.parameters, weights.parameters)
    assert torch.equal(before.statistics, weights.statistics)


def test_a_plain_blueprint_cannot_be_exported() -> None:
    bare, *_, x = network("mlp")
    architecture, weights = draw(bare, x[:2], traced=False)
    with pytest.raises(TraceError, match="traced"):
        export(architecture, weights, stream=OsSecrets().stream("export"))


def test_more_outputs_than_features_keep_the_bias_where_it_is() -> None:
    """Then W·d = b has no solution in general; the predictions stay exact."""
    net = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 8)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    architecture, weights = draw(net, x, traced=True)
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"))
    assert shape == ExportShape({}, {})
    torch.testing.assert_close(module(x), net(x), rtol=1e-10, atol=1e-12)


def test_the_model_of_a_trained_run_exports_exactly() -> None:
    one = job(rounds=10, options={"depth": 3, "width": 12, "norm": "batch"})
    state, _ = trained(one)
    assert one.test is not None
    module, _ = export(one.architecture, state.weights, stream=OsSecrets().stream("export"))
    with torch.no_grad():
        truth = assemble(one.architecture, state.weights).eval()(one.test.x)
        torch.testing.assert_close(module(one.test.x), truth, rtol=1e-9, atol=1e-10)
