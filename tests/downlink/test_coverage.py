"""Facts about the catalogue: its networks are hidden entirely but for the last bias, and exactly."""

from __future__ import annotations

import pytest
import torch

from downlink.exactness import TOLERANCE, assert_within, free_sides, scramble, trial
from fedveil import models
from fedveil.downlink import trace

CATALOGUE = [
    ("mlp", (64,), {}),
    ("mlp", (64,), {"norm": "batch"}),
    ("mlp", (64,), {"norm": "layer"}),
    ("mlp", (64,), {"norm": "group"}),
    ("cnn", (1, 8, 8), {"feature_scale": 2.0}),
    ("cnn", (3, 16, 16), {"norm": "batch"}),
    ("cnn", (3, 16, 16), {"norm": "group"}),
    ("resnet11", (3, 16, 16), {}),
    ("resnet20", (3, 16, 16), {}),
    ("resnet20", (3, 16, 16), {"shortcut": "B"}),
    ("resnet20", (3, 16, 16), {"norm": "group", "feature_scale": 0.25}),
    ("resnet32", (3, 16, 16), {}),
    ("resnet56", (3, 16, 16), {}),
    ("resnet18", (3, 16, 16), {"width": 16}),
    ("resnet18", (3, 72, 72), {"stem": "large", "width": 8}),
    ("densenet", (3, 16, 16), {"feature_scale": 0.5}),
    ("densenet", (3, 16, 16), {"norm": "group", "growth": 8}),
]


@pytest.mark.parametrize(("name", "shape", "options"), CATALOGUE)
def test_every_parameter_is_hidden_on_a_side_but_the_heads_bias(
    name: str, shape: tuple[int, ...], options: dict[str, int | float | str]
) -> None:
    table = trace(models.build(name, input_shape=shape, outputs=10, **options), torch.randn(2, *shape))
    assert {parameter for parameter, sides in free_sides(table).items() if not sides} == {"head.bias"}
    assert table.pins == ()
    assert table.head is not None


SMALL = [
    ("mlp", (12,), {"width": 8, "norm": "layer"}),
    ("cnn", (1, 8, 8), {"width": 4, "norm": "group"}),
    ("resnet20", (3, 8, 8), {"width": 4}),
    ("resnet18", (3, 8, 8), {"width": 4, "feature_scale": 0.25}),
    ("densenet", (3, 8, 8), {"growth": 4, "depth": 10}),
]


@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_the_catalogues_networks_are_exact(
    name: str, shape: tuple[int, ...], options: dict[str, int | float | str], groups: int
) -> None:
    model = models.build(name, input_shape=shape, outputs=4, **options).double()
    scramble(model)
    found = trial(model, torch.randn(2, *shape, dtype=torch.float64), groups=groups)
    assert_within(found, TOLERANCE)
    assert found.hidden > 0.5
