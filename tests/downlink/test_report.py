"""What a veil hides, parameter by parameter: the report agrees with what veils really do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil import models
from fedveil.downlink import Architecture, HeadNoise, Rescaling, Weights, draw
from fedveil.downlink.scales import Coverage, coverage, require_coverage
from fedveil.errors import TraceError
from fedveil.secrets import OsSecrets


class WithSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.squash = nn.Sigmoid()
        self.second = nn.Linear(10, 5)
        self.relu = nn.ReLU()
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.second(self.squash(self.first(x)))))  # type: ignore[no-any-return]


def traced(net: nn.Module, *shape: int) -> tuple[Architecture, Weights]:
    with torch.no_grad():
        for one in net.parameters():
            one.add_(0.1 * torch.randn_like(one))  # no zeros and ones: those say nothing
    return draw(net.double(), torch.randn(2, *shape, dtype=torch.float64), traced=True)


def report(net: nn.Module, *shape: int, **how: Any) -> Coverage:
    architecture, _ = traced(net, *shape)
    assert architecture.table is not None
    return coverage(architecture.table, **{"head_noise": True, **how})


def mlp(**options: Any) -> nn.Module:
    return models.build("mlp", input_shape=(6,), outputs=3, **{"depth": 3, "width": 8, **options})


def sides(found: Coverage) -> dict[str, str]:
    return {one.name: one.sides for one in found.parameters}


def test_the_ends_are_hidden_on_one_side_and_the_middle_on_both() -> None:
    found = report(mlp(), 6)
    assert sides(found) == {
        "linear1.weight": "one",
        "linear1.bias": "one",
        "linear2.weight": "both",
        "linear2.bias": "one",
        "head.weight": "one",
        "head.bias": "one",
    }
    assert found.fraction == 1.0
    assert found.visible == ()
    assert found.pins == ()


def test_without_head_noise_the_last_bias_is_visible() -> None:
    found = report(mlp(), 6, head_noise=False)
    assert [one.name for one in found.visible] == ["head.bias"]
    assert sides(found)["head.weight"] == "one"
    assert found.fraction == 1 - 3 / sum(one.size for one in found.parameters)


def test_an_operation_without_a_rule_pins_and_is_named() -> None:
    found = report(WithSigmoid(), 6)
    assert [one.name for one in found.visible] == ["first.weight", "first.bias"]
    assert sides(found)["second.weight"] == "one"
    assert any(pin.operation == "Sigmoid" and "squash" in pin.where for pin in found.pins)


def test_too_little_cover_stops_and_names_parameters_and_operations() -> None:
    found = report(WithSigmoid(), 6)
    require_coverage(found, minimum=found.fraction)
    with pytest.raises(TraceError) as caught:
        require_coverage(found, minimum=0.9)
    message = str(caught.value)
    for part in ("first.weight", "Sigmoid", "squash", "min_coverage is 90%", "--min-coverage", "--family full"):
        assert part in message
    with pytest.raises(TraceError) as caught:
        require_coverage(dataclasses.replace(found, family="full"), minimum=0.9)
    assert "--family" not in str(caught.value)


def test_a_public_tensor_that_tells_channels_apart_is_named_with_its_line() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)
            self.register_buffer("weights", torch.linspace(0.5, 1.5, 10))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sigmoid(self.first(x) * self.weights))  # type: ignore[no-any-return]

    net = Weighed().double()
    architecture, _ = draw(net, torch.randn(2, 6, dtype=torch.float64), traced=True, family="signed")
    assert architecture.table is not None
    found = coverage(architecture.table, head_noise=False)
    with pytest.raises(TraceError, match=r"mul at .*test_report\.py.*a public tensor tells channels apart"):
        require_coverage(found, minimum=1.0)


@pytest.mark.parametrize("norm", ["batch", "layer", "group"])
def test_a_public_epsilon_lowers_the_cover(norm: str) -> None:
    architecture, _ = traced(mlp(norm=norm), 6)
    assert architecture.table is not None
    secret, public = (coverage(architecture.table, head_noise=True, secret_epsilon=one) for one in (True, False))
    assert secret.fraction == 1.0
    assert public.fraction < 1.0
    assert "linear1.weight" in [one.name for one in public.visible]


NETWORKS = {
    "mlp": (mlp, (6,)),
    "mlp with batch norm": (lambda: mlp(norm="batch"), (6,)),
    "mlp with a sigmoid": (WithSigmoid, (6,)),
    "cnn": (lambda: models.build("cnn", input_shape=(1, 8, 8), outputs=3, width=4), (1, 8, 8)),
    "resnet20": (lambda: models.build("resnet20", input_shape=(3, 8, 8), outputs=3), (3, 8, 8)),
    "densenet": (lambda: models.build("densenet", input_shape=(3, 8, 8), outputs=3), (3, 8, 8)),
}


@pytest.mark.parametrize(("build", "shape"), NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("noise", [True, False], ids=["head noise", "no head noise"])
def test_exactly_what_is_reported_hidden_differs_in_a_real_broadcast(build: Any, shape: Any, noise: bool) -> None:
    architecture, weights = traced(build(), *shape)
    assert architecture.table is not None
    downlink = Rescaling(4.0, HeadNoise(None) if noise else None)
    sent = downlink.veil(architecture, weights, stream=OsSecrets().stream("veil"), head_level=1.0).broadcast()
    theirs, ours = (architecture.parameters.split(one) for one in (sent.parameters, weights.parameters))
    for one in coverage(architecture.table, head_noise=noise).parameters:
        changed = int(((theirs[one.name] - ours[one.name]).abs() > 1e-9 * ours[one.name].abs()).sum())
        assert changed == one.hidden, one.name
        assert (one.sides == "visible") == (changed == 0)


def test_the_report_as_data_holds_every_parameter() -> None:
    data = report(WithSigmoid(), 6).as_data()
    assert data["visible"] == ["first.weight", "first.bias"]
    names = [one["name"] for one in data["parameters"]]  # type: ignore[attr-defined]
    assert names == ["first.weight", "first.bias", "second.weight", "second.bias", "last.weight", "last.bias"]
    assert data["pins"]
    assert 0 < data["coverage"] < 1  # type: ignore[operator]


def test_head_noise_hides_one_number_per_output_and_no_more() -> None:
    # r·1ᵀ is the same in every column: differences inside a row of an unscaled head are the server's.
    with_bias = report(nn.Linear(8, 3), 8)
    assert [(one.name, one.hidden, one.sides) for one in with_bias.parameters] == [
        ("weight", 0, "visible"),
        ("bias", 3, "one"),
    ]
    (weight,) = report(nn.Linear(8, 3, bias=False), 8).parameters
    assert (weight.hidden, weight.sides) == (3, "partly")
