"""``build`` is reproducible, leaves no trace, and describes what it can build."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedveil.models
from fedveil import models
from fedveil.errors import ConfigError
from fedveil.models import building, catalogue


def sample(name: str, *, seed: int = 0) -> nn.Module:
    if catalogue.CATALOGUE[name].info.inputs == "tokens":
        return models.build(name, input_shape=(5,), outputs=2, vocabulary=9, seed=seed)
    width = {"width": 8} if name.startswith("resnet") else {}
    return models.build(name, input_shape=(1, 8, 8), outputs=3, seed=seed, **width)


@pytest.mark.parametrize("name", models.names())
def test_equal_seeds_give_equal_parameters_and_other_seeds_others(name: str) -> None:
    first, same, other = sample(name, seed=1), sample(name, seed=1), sample(name, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", models.names())
def test_the_global_random_state_is_untouched_and_unused(name: str) -> None:
    torch.manual_seed(5)
    first = sample(name)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    again = sample(name)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", models.names())
def test_a_new_model_is_in_training_mode_with_fresh_statistics(name: str) -> None:
    model = sample(name)
    assert all(m.training for m in model.modules())
    assert all(not b.any() for key, b in model.named_buffers() if key.endswith("num_batches_tracked"))


def test_describe_lists_every_name_with_its_defaults() -> None:
    infos = {info.name: info for info in models.describe()}
    assert tuple(infos) == models.names()
    assert dict(infos["mlp"].options) == {"depth": 3, "width": 128, "norm": "none", "feature_scale": 1.0}
    assert dict(infos["resnet56"].options) == {"shortcut": "A", "norm": "batch", "width": 16, "feature_scale": 1.0}
    assert dict(infos["gru"].options) == {"embedding": 64, "hidden": 64}
    assert infos["resnet56"].choices["shortcut"] == ("A", "B")
    assert not infos["lenet-sigmoid"].options
    assert all(info.summary and "\n" not in info.summary for info in infos.values())


def test_the_package_needs_only_torch() -> None:
    (folder,) = fedveil.models.__path__
    imported = set()
    for path in Path(folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    outside = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert all(
        name.split(".")[0] == "torch"
        or name.startswith(("fedveil.models", "fedveil.errors", "fedveil.own_code", "fedveil.secrets"))
        for name in outside
    )


def test_a_function_builds_a_model_by_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_CATALOGUE", own := dict(catalogue.CATALOGUE))
    monkeypatch.setattr(building, "CATALOGUE", own)

    @models.register("mine")
    def mine(*, input_shape: tuple[int, ...], outputs: int, width: int = 4) -> nn.Module:
        """One hidden layer."""
        return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, outputs))

    net = models.build("mine", input_shape=(3,), outputs=2, width=5)
    assert isinstance(net, nn.Sequential)
    assert net[1].out_features == 5
    assert own["mine"].info.summary == "One hidden layer."
    with pytest.raises(ConfigError, match="Did you mean 'width'"):
        models.build("mine", input_shape=(3,), outputs=2, widht=5)
    with pytest.raises(ConfigError, match="'mlp' is a model that comes with FedVeil"):
        models.register("mlp")(mine)
