from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedveil.data import load
from fedveil.errors import ConfigError, DataError


def test_digits_are_pictures_between_zero_and_one() -> None:
    split = load("digits")
    assert split.train.input_shape == (1, 8, 8)
    assert (len(split.train), len(split.test)) == (1438, 359)
    assert (float(split.train.x.min()), float(split.train.x.max())) == (0.0, 1.0)
    assert (split.train.outputs, split.train.x.dtype) == (10, torch.float32)


def test_breast_cancer_is_standardised_by_its_training_part() -> None:
    split = load("breast-cancer")
    assert split.train.labels == ("malignant", "benign")
    assert torch.allclose(split.train.x.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(split.train.x.std(0, correction=0), torch.ones(30), atol=1e-4)
    assert not torch.allclose(split.test.x.mean(0), torch.zeros(30), atol=1e-3)


def test_normalise_false_keeps_the_measurements() -> None:
    assert float(load("breast-cancer", normalise=False).train.x.max()) > 1000


def test_two_classes_can_be_regressed_on() -> None:
    train = load("breast-cancer", task="regression").train
    assert (train.task, train.outputs, tuple(train.y.shape)) == ("regression", 1, (455, 1))
    assert set(train.y.flatten().tolist()) == {0.0, 1.0}


def test_ten_named_classes_cannot_be_regressed_on() -> None:
    with pytest.raises(DataError, match="task='classification'"):
        load("digits", task="regression")


def test_the_seed_and_the_fraction_decide_the_split() -> None:
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert torch.equal(one.test.x, same.test.x)
    assert not torch.equal(one.test.x, other.test.x)
    assert len(load("digits", test_fraction=0.5).test) == 898


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_an_impossible_test_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load("digits", test_fraction=fraction)


def test_an_unknown_name_suggests_the_nearest_and_that_paths_work() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'digits'.*path"):
        load("digts")


def test_an_absent_path_is_called_a_path() -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        load("nowhere/at/all")
    with pytest.raises(DataError, match="no such file or folder"):
        load("missing.csv")


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="Unknown dataset"):
        load("")


def test_an_unknown_layout_is_refused_with_the_layouts_that_exist(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to learn from")
    for source in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match=r"idx files.*CIFAR.*npz.*picture folders.*CSV"):
            load(source)


@pytest.mark.parametrize("option", ["target", "text", "group"])
def test_columns_of_something_without_columns_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='y' names a CSV column"):
        load("digits", **{option: "y"})  # type: ignore[arg-type]


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'regression'"):
        load("digits", task="regresion")  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("max_tokens", 0), ("vocabulary", 2), ("seed", -1)])
def test_a_number_out_of_range_is_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=option):
        load("digits", **{option: value})  # type: ignore[arg-type]


def test_needs_no_package_beyond_torch_numpy_scipy_and_scikit_learn() -> None:
    code = (
        "import sys\n"
        "for name in ('PIL', 'rich', 'typer', 'safetensors', 'cryptography', 'pandas', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from fedveil.data import load, partition\n"
        "partition(load('digits').train, clients=3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=600)
