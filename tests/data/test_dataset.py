from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedveil.data import Dataset, Split
from fedveil.errors import ConfigError, DataError


def classes(**changes: Any) -> Dataset:
    fields: dict[str, Any] = {
        "name": "toy",
        "task": "classification",
        "x": torch.arange(12.0).reshape(4, 3),
        "y": torch.tensor([0, 1, 2, 1]),
        "outputs": 3,
    }
    return Dataset(**{**fields, **changes})


def test_knows_its_length_and_the_shape_of_a_sample() -> None:
    data = classes(x=torch.zeros(4, 1, 8, 8))
    assert len(data) == 4
    assert data.input_shape == (1, 8, 8)
    assert not data.is_text


def test_int64_samples_are_text() -> None:
    assert classes(x=torch.ones(4, 5, dtype=torch.int64), vocabulary=2).is_text


def test_subset_keeps_order_repeats_and_groups() -> None:
    data = classes(groups=torch.tensor([7, 8, 9, 9]), labels=("a", "b", "c"))
    part = data.subset(torch.tensor([2, 0, 2]))
    assert part.y.tolist() == [2, 0, 2]
    assert part.groups is not None
    assert part.groups.tolist() == [9, 7, 9]
    assert (part.labels, part.outputs) == (data.labels, 3)


def test_conversion_touches_floating_tensors_only() -> None:
    data = classes(groups=torch.tensor([0, 0, 1, 1])).to(dtype=torch.float64, device="cpu")
    assert data.x.dtype is torch.float64
    assert data.y.dtype is torch.int64
    text = classes(x=torch.ones(4, 5, dtype=torch.int64), vocabulary=2).to(dtype=torch.float64)
    assert text.is_text
    line = Dataset("line", "regression", torch.zeros(2, 1), torch.zeros(2, 1), 1).to(dtype=torch.float64)
    assert line.y.dtype is torch.float64


def test_conversion_to_integers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int32"):
        classes().to(dtype=torch.int32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_by_sample_and_column(bad: float) -> None:
    x = torch.zeros(4, 3)
    x[2, 1] = bad
    x[3, 0] = bad
    with pytest.raises(DataError, match="sample 2, column 1"):
        classes(x=x)


def test_a_pixel_that_is_not_finite_is_named_by_position() -> None:
    x = torch.zeros(4, 1, 2, 2)
    x[1, 0, 1, 0] = math.nan
    with pytest.raises(DataError, match=r"sample 1, position \(0, 1, 0\)"):
        classes(x=x)


def test_a_regression_target_that_is_not_finite_is_named() -> None:
    with pytest.raises(DataError, match="sample 1, column 0 of y"):
        Dataset("line", "regression", torch.zeros(2, 1), torch.tensor([[0.0], [math.nan]]), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.tensor([0, 1])}, "4 samples but 2 targets"),
        ({"groups": torch.tensor([0, 1])}, "4 samples but 2 groups"),
        ({"groups": torch.zeros(4)}, "groups must be int64"),
        ({"y": torch.tensor([0, 1, 3, 1])}, "sample 2 has class 3, but classes run from 0 to 2"),
        ({"y": torch.tensor([0, -1, 2, 1])}, "sample 1 has class -1"),
        ({"y": torch.zeros(4)}, "class labels must be int64"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.int64)}, "no samples"),
        ({"x": torch.zeros(4)}, "one row per sample"),
        ({"x": torch.zeros(4, 3, dtype=torch.uint8)}, "must be floating point"),
        ({"x": torch.full((4, 3), 9, dtype=torch.int64), "vocabulary": 9}, r"outside 0\.\.8"),
        ({"x": torch.full((4, 3), -1, dtype=torch.int64)}, "from -1"),
        ({"labels": ("a", "b")}, "2 class names for 3 classes"),
        ({"outputs": 0}, "outputs is 0"),
        ({"task": "regression"}, "regression targets must be floating point"),
        ({"task": "ranking"}, "'ranking'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        classes(**changes)


def test_parts_of_a_split_must_agree() -> None:
    with pytest.raises(DataError, match="input_shape"):
        Split(classes(), classes(x=torch.zeros(4, 2)))
    with pytest.raises(DataError, match="outputs"):
        Split(classes(), classes(outputs=4))
