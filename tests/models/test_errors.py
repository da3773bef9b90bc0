"""What does not fit is refused with a message that says what would."""

from __future__ import annotations

import pytest

from fedveil import models
from fedveil.errors import ConfigError

IMAGE = (1, 8, 8)


def test_an_unknown_name_suggests_the_nearest_and_the_users_own() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'resnet20'\?.*package\.module:factory"):
        models.build("resnet-20", input_shape=IMAGE, outputs=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"dept": 2}, r"no option 'dept'\. Did you mean 'depth'\? It takes: depth, width, norm, "),
        ("mlp", {"feature_scale": 0.0}, "'feature_scale' must be a positive number, not 0"),
        ("resnet20", {"feature_scale": -1.0}, "'feature_scale' must be a positive number"),
        ("lenet-sigmoid", {"width": 2}, "It takes no options"),
        ("mlp", {"depth": 0}, "'depth' must be at least 1, not 0"),
        ("cnn", {"width": "16"}, "'width' of model 'cnn' must be of type int"),
        ("cnn", {"width": True}, "must be of type int"),
        ("cnn", {"width": 2.0}, "must be of type int"),
        ("cnn", {"norm": "layer"}, "must be one of 'none', 'batch', 'group', not 'layer'"),
        ("mlp", {"width": 1, "norm": "layer"}, "set width to 2 or more"),
        ("resnet20", {"shortcut": "C"}, "must be one of 'A', 'B'"),
        ("resnet18", {"stem": "tiny"}, "must be one of 'auto', 'small', 'large'"),
        ("densenet", {"depth": 23}, "not 23: take 22 or 25"),
        ("densenet", {"depth": 4}, "not 4: take 7 or 10"),
        ("densenet", {"compression": 0.0}, r"in \(0, 1\]"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, int | float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, input_shape=IMAGE, outputs=2, **options)


def test_a_whole_number_is_a_fine_compression() -> None:
    models.build("densenet", input_shape=IMAGE, outputs=2, depth=7, compression=1)


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "message"),
    [
        ("cnn", (64,), None, r"not \(64,\)\. 'mlp' takes"),
        ("cnn", (8, 8), None, r"Grey images have the shape \(1, 8, 8\)"),
        ("cnn", (1, 3, 8), None, "needs 4×4 pixels or more, not 3×8"),
        ("resnet20", (64,), None, "'mlp' takes"),
        ("gru", (20,), None, "needs vocabulary="),
        ("gru", (3, 8, 8), 10, "'cnn', 'vit' and the ResNets take images"),
        ("gru", (20,), 1, "give at least 2"),
        ("mlp", (20,), 100, "not token ids. 'gru', 'lstm', 'transformer' and 'decoder' take"),
        ("mlp", (), None, "positive sizes"),
        ("mlp", (3, 0), None, "positive sizes"),
    ],
)
def test_data_that_does_not_fit_names_the_model_that_does(
    name: str, shape: tuple[int, ...], vocabulary: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, input_shape=shape, outputs=2, vocabulary=vocabulary)


def test_a_model_needs_an_output() -> None:
    with pytest.raises(ConfigError, match="outputs must be at least 1"):
        models.build("mlp", input_shape=IMAGE, outputs=0)
