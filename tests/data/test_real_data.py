from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.data import load, partition

pytestmark = pytest.mark.data


def test_mnist_with_its_writers(shared_data: Callable[[str], Path]) -> None:
    split = load(shared_data("mnist"))
    assert (len(split.train), len(split.test)) == (60_000, 10_000)
    assert (split.train.input_shape, split.train.outputs) == ((1, 28, 28), 10)
    assert float(split.train.x.mean()) == pytest.approx(0, abs=1e-3)
    assert split.train.groups is not None
    writers = len(split.train.groups.unique())
    assert writers == 539
    assert len(partition(split.train, clients=writers, how="group")) == 539
    sizes = [len(rows) for rows in partition(split.train, clients=10, how="group")]
    assert max(sizes) - min(sizes) < 200


def test_fashion_mnist(shared_data: Callable[[str], Path]) -> None:
    split = load(shared_data("fashion-mnist"), normalise=False)
    assert (len(split.train), len(split.test)) == (60_000, 10_000)
    assert float(split.train.x.mean()) == pytest.approx(0.2860, abs=1e-4)
    assert split.train.y.bincount().tolist() == [6000] * 10


def test_bank_marketing(shared_data: Callable[[str], Path]) -> None:
    split = load(shared_data("bank"), target="y")
    assert len(split.train) + len(split.test) == 41_188
    assert int(split.train.y.sum() + split.test.y.sum()) == 4_640
    assert (split.train.labels, split.train.input_shape) == (("no", "yes"), (63,))
