"""The networks are those of the literature, and take the shapes they promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedveil import models
from fedveil.models.networks import groups_for

CIFAR = (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet11", {}, 84_762),
        ("resnet20", {}, 269_722),
        ("resnet32", {}, 464_154),
        ("resnet56", {}, 853_018),
        ("resnet20", {"shortcut": "B"}, 272_474),
        ("resnet18", {"stem": "small"}, 11_173_962),
        ("densenet", {"depth": 40, "growth": 12, "compression": 1.0}, 1_019_722),
    ],
)
def test_parameter_counts_are_those_of_the_literature(
    name: str, options: dict[str, int | float | str], expected: int
) -> None:
    assert parameters(models.build(name, input_shape=CIFAR, outputs=10, **options)) == expected


@pytest.mark.parametrize("layers", [11, 20, 32])
def test_cifar_resnets_have_as_many_layers_as_their_names_say(layers: int) -> None:
    model = models.build(f"resnet{layers}", input_shape=CIFAR, outputs=10)
    assert sum(isinstance(part, nn.Conv2d | nn.Linear) for part in model.modules()) == layers


def test_resnet18_with_the_large_stem_has_the_imagenet_count() -> None:
    assert parameters(models.build("resnet18", input_shape=(3, 72, 72), outputs=1000)) == 11_689_512


def test_lenet_has_the_768_features_of_the_dlg_code() -> None:
    model = models.build("lenet-sigmoid", input_shape=CIFAR, outputs=100)
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    assert head.in_features == 768
    assert all(p.abs().max() <= 0.5 for p in model.parameters())


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet-sigmoid", "resnet20", "densenet"])
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 8), (3, 28, 20), (2, 7, 9)])
def test_image_models_take_many_sizes_and_end_in_a_linear_head(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, input_shape=shape, outputs=7)

    scores = model(torch.randn(3, *shape))

    assert scores.shape == (3, 7)
    last = list(model.children())[-1]
    assert isinstance(last, nn.Linear)


@pytest.mark.parametrize(
    ("size", "stem", "pools"),
    [(32, "auto", False), (64, "auto", False), (65, "auto", True), (32, "large", True), (96, "small", False)],
)
def test_resnet18_pools_in_its_stem_only_for_large_images(size: int, stem: str, pools: bool) -> None:
    model = models.build("resnet18", input_shape=(3, size, size), outputs=2, stem=stem, width=8)
    assert any(isinstance(m, nn.MaxPool2d) for m in model.modules()) == pools


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_mlp_depth_counts_linear_layers_with_biases(depth: int) -> None:
    model = models.build("mlp", input_shape=(4, 5), outputs=3, depth=depth, width=6)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linear) == depth
    assert linear[0].in_features == 20
    assert all(m.bias is not None for m in linear)
    assert sum(isinstance(m, nn.ReLU) for m in model.modules()) == depth - 1


@pytest.mark.parametrize("info", models.describe(), ids=lambda info: info.name)
def test_every_choice_of_norm_is_the_only_norm_in_the_network(info: models.ModelInfo) -> None:
    kinds = {"batch": (nn.BatchNorm1d, nn.BatchNorm2d), "layer": (nn.LayerNorm,), "group": (nn.GroupNorm,)}
    for norm in info.choices.get("norm", ()):
        width = {"width": 8} if "width" in info.options else {}
        model = models.build(info.name, input_shape=(1, 8, 8), outputs=2, norm=norm, **width)
        for kind, types in kinds.items():
            assert any(isinstance(m, types) for m in model.modules()) == (kind == norm)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "resnet18", "densenet"])
def test_veil_friendly_models_have_no_nonlinearity_but_relu(name: str) -> None:
    model = models.build(name, input_shape=CIFAR, outputs=10)
    plain = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Flatten, nn.Identity)
    pooling = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
    leaves = [m for m in model.modules() if not list(m.children())]
    strangers = {type(m).__name__ for m in leaves if not isinstance(m, (*plain, *pooling))}
    assert strangers <= {"PadShortcut"}


def test_shortcut_a_thins_the_image_and_pads_zero_channels_on_both_sides() -> None:
    model = models.build("resnet20", input_shape=(1, 5, 5), outputs=2, width=4)
    x = torch.randn(2, 4, 5, 5)

    out = model.get_submodule("stage2.block1.shortcut")(x)

    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


@pytest.mark.parametrize(("channels", "groups"), [(64, 8), (32, 8), (16, 4), (24, 6), (13, 1), (3, 1), (1, 1)])
def test_group_norm_keeps_at_least_four_channels_per_group(channels: int, groups: int) -> None:
    assert groups_for(channels) == groups


@pytest.mark.parametrize("name", [info.name for info in models.describe() if "feature_scale" in info.options])
def test_a_feature_scale_multiplies_what_the_head_reads_and_changes_no_parameter(name: str) -> None:
    plain, scaled = (
        models.build(name, input_shape=(1, 8, 8), outputs=3, seed=1, feature_scale=scale).eval()
        for scale in (1.0, 0.25)
    )
    assert [key for key, _ in plain.named_modules() if key == "scale"] == []
    assert all(torch.equal(value, scaled.state_dict()[key]) for key, value in plain.state_dict().items())
    x, bias = torch.randn(4, 1, 8, 8), plain.get_parameter("head.bias")
    with torch.no_grad():
        torch.testing.assert_close(scaled(x) - bias, 0.25 * (plain(x) - bias))
