"""The last check before training: a wrongly traced network is refused, whatever the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedveil import models
from fedveil.downlink import Architecture, Weights, draw
from fedveil.downlink.export import verify
from fedveil.errors import TraceError


def resnet() -> tuple[Architecture, Weights, torch.Tensor]:
    net = models.build("resnet20", input_shape=(3, 8, 8), outputs=10)
    x = torch.randn(2, 3, 8, 8)
    return (*draw(net, x, traced=True), x)


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet20", "densenet"])
def test_a_rightly_traced_network_passes(model: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    architecture, weights = draw(models.build(model, input_shape=(3, 8, 8), outputs=10), x, traced=True)
    verify(architecture, weights, x)


@pytest.mark.parametrize("at", [0, 5, 11, 20])
def test_a_table_that_is_wrong_in_one_place_is_refused(at: int) -> None:
    architecture, weights, x = resnet()
    table = architecture.table
    assert table is not None
    convolutions = [number for number, one in enumerate(table.parameters) if one.into is not None]
    wrong = convolutions[at % len(convolutions)]
    entry = table.parameters[wrong]
    assert entry.into is not None
    spoilt = dataclasses.replace(entry, into=torch.zeros_like(entry.into))
    if torch.equal(entry.into, spoilt.into):  # the first layer reads the input, which is not scaled
        assert entry.out is not None
        spoilt = dataclasses.replace(entry, out=torch.zeros_like(entry.out))
    parameters = tuple(spoilt if number == wrong else one for number, one in enumerate(table.parameters))
    broken = dataclasses.replace(architecture, table=dataclasses.replace(table, parameters=parameters))
    with pytest.raises(TraceError, match="Nothing was trained"):
        verify(broken, weights, x)


def test_a_forgotten_normalisation_is_refused() -> None:
    architecture, weights, x = resnet()
    assert architecture.table is not None
    table = dataclasses.replace(architecture.table, norms=architecture.table.norms[1:])
    with pytest.raises(TraceError, match="please report the model"):
        verify(dataclasses.replace(architecture, table=table), weights, x)


def test_the_check_leaves_the_weights_as_they_were() -> None:
    architecture, weights, x = resnet()
    before = weights.clone()
    verify(architecture, weights, x)
    assert torch.equal(before.parameters, weights.parameters)
    assert torch.equal(before.statistics, weights.statistics)
