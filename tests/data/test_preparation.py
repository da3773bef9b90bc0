"""What is done to raw samples: the same numbers as ever, the same again from plain data, nothing a file could abuse."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil.data import Split, load
from fedveil.data.preparation import (
    CategoryColumn,
    Columns,
    Features,
    NumericColumn,
    Pixels,
    Preparation,
    Words,
    numbers_like,
)
from fedveil.data.tabular import read_table
from fedveil.errors import CheckpointError, ConfigError
from fedveil.plain import made


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers with gaps, words with gaps, a column that never varies, and 300 rows."""
    chance = random.Random(3)
    rows = ["age,town,pressure,steady,smoker,y"]
    for _ in range(300):
        age = chance.choice(["", "NA", str(chance.randint(20, 90))])
        town = chance.choice(["ab", "cd", "", "?", "zürich"])
        pressure = "nan" if chance.random() < 0.1 else f"{chance.gauss(130.123, 15):.3f}"
        rows.append(f"{age},{town},{pressure},7.1,{chance.choice(['yes', 'no'])},{chance.choice('012')}")
    path = tmp_path_factory.mktemp("table") / "toy.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("normalise", [True, False])
def test_tables_become_the_numbers_that_plain_formulas_give(table: Path, normalise: bool) -> None:
    split = load(table, target="y", seed=4, normalise=normalise)
    raw = read_table(table).columns
    order = np.random.default_rng([4, 1]).permutation(300)
    train, test = np.sort(order[60:]), np.sort(order[:60])
    blocks = []
    for name in ("age", "town", "pressure", "steady", "smoker"):
        if name in ("town", "smoker"):
            words = sorted({raw[name][row] for row in train})
            blocks += [np.array([float(cell == word) for cell in raw[name]]) for word in words]
            continue
        numbers = np.array([float(cell) if cell not in ("", "NA") else np.nan for cell in raw[name]])
        known = numbers[train][~np.isnan(numbers[train])]
        filled = np.where(np.isnan(numbers), known.mean(), numbers)
        if normalise and name == "steady":  # its deviation is what rounding left of zero, and divides nothing
            steady = len(blocks)
            assert float(split.train.x[:, steady].abs().max()) < 1e-12
            filled = np.zeros(300)
        elif normalise:
            filled = (filled - known.mean()) / known.std()
        blocks.append(filled)
    expected = torch.from_numpy(np.stack(blocks, axis=1).astype(np.float32))
    for part, rows in ((split.train, train), (split.test, test)):
        x = part.x.clone()
        if normalise:
            x[:, steady] = 0.0
        assert torch.equal(x, expected[rows])


def _table(place: Path, table: Path) -> tuple[Split, Callable[[Any], Tensor]]:
    split = load(table, target="y", seed=1)
    cells = read_table(table).columns
    order = np.random.default_rng([1, 1]).permutation(300)

    def apply(inputs: Any) -> Tensor:
        rows = np.sort(order[:60])
        numbers = {
            name: np.array([float(cells[name][row] or "nan") if cells[name][row] != "NA" else np.nan for row in rows])
            for name in ("age", "pressure", "steady")
        }
        return inputs.apply({name: numbers.get(name, [cells[name][row] for row in rows]) for name in cells})  # type: ignore[no-any-return]

    return split, apply


def _texts(place: Path, table: Path) -> tuple[Split, Callable[[Any], Tensor]]:
    (place / "train.csv").write_text("text,y\ngood film,1\nbad film,0\n")
    (place / "test.csv").write_text('text,y\n"a good, unseen one",1\n')
    split = load(place, target="y", text="text", max_tokens=6)
    return split, lambda inputs: inputs.apply(["a good, unseen one"])


def _arrays(*shape: int, kind: str) -> Callable[[Path, Path], tuple[Split, Callable[[Any], Tensor]]]:
    def make(place: Path, table: Path) -> tuple[Split, Callable[[Any], Tensor]]:
        rng = np.random.default_rng(2)
        x = [
            rng.integers(0, 7, (count, *shape)) if kind == "ids" else rng.integers(0, 256, (count, *shape))
            for count in (20, 5)
        ]
        stored = [part if kind == "ids" else part.astype(np.uint8) if kind == "bytes" else part / 100 for part in x]
        more = {"vocabulary": np.array(7)} if kind == "ids" else {}
        y = [np.arange(len(part)) % 3 for part in x]
        np.savez(place / "a.npz", x_train=stored[0], y_train=y[0], x_test=stored[1], y_test=y[1], **more)
        split = load(place / "a.npz")
        last = kind == "bytes" and len(shape) == 3
        return split, lambda inputs: inputs.apply(stored[1].transpose(0, 3, 1, 2) if last else stored[1])

    return make


def _tumours(place: Path, table: Path) -> tuple[Split, Callable[[Any], Tensor]]:
    raw = load("breast-cancer", seed=3, normalise=False)
    return load("breast-cancer", seed=3), lambda inputs: inputs.apply(raw.test.x.numpy())


KINDS = {
    "a table": _table,
    "texts": _texts,
    "pictures": _arrays(4, 5, 3, kind="bytes"),
    "rows of bytes": _arrays(9, kind="bytes"),
    "numbers": _arrays(6, kind="floats"),
    "ids": _arrays(6, kind="ids"),
    "numbers on one scale": _tumours,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_preparation_read_from_json_makes_of_raw_samples_what_training_saw(
    kind: str, table: Path, tmp_path: Path
) -> None:
    split, apply = KINDS[kind](tmp_path, table)
    assert split.preparation is not None
    text = json.dumps(dataclasses.asdict(split.preparation))
    again = made(Preparation, json.loads(text), where="a file")
    assert again == split.preparation
    assert again.inputs.shape == split.test.input_shape
    assert again.classes == split.train.labels
    assert torch.equal(apply(again.inputs), split.test.x)


def test_columns_that_no_input_is_made_of_are_known(tmp_path: Path) -> None:
    (tmp_path / "toy.csv").write_text("split,ward,a,y\n" + "train,N,1,no\ntest,S,2,yes\ntrain,S,3,yes\n")
    prepared = load(tmp_path / "toy.csv", target="y", group="ward").preparation
    assert prepared is not None
    assert (prepared.target, prepared.aside, prepared.classes) == ("y", ("split", "ward"), ("no", "yes"))


def test_the_largest_training_number_is_told_rounded_up() -> None:
    x, y = np.full((10, 3), 100.3), np.zeros(10, np.int64)
    assert load_arrays(x, y).inputs == Features((3,), False, 128.0)


def test_numbers_that_cannot_be_trained_on_are_left_to_who_finds_them() -> None:
    for odd in (torch.nan, torch.inf, 0.0):
        assert numbers_like(torch.full((2, 3), odd)) == Features((3,), False, 1.0)


def load_arrays(x: Any, y: Any) -> Preparation:
    from fedveil.data.arrays import Arrays, Part, assemble
    from fedveil.data.dataset import Options

    prepared = assemble(Arrays(Part("a", x, y)), Options(), name="a").preparation
    assert prepared is not None
    return prepared


NUMERIC = {"name": "a", "fill": 1.0, "mean": 1.0, "deviation": 2.0}
PIXELS = {"shape": [3, 4, 4], "resize": False, "mean": [0.0] * 3, "deviation": [1.0] * 3}
HOSTILE: dict[str, dict[str, Any]] = {
    "no number": {"columns": [{**NUMERIC, "mean": float("nan")}]},
    "divided by zero": {"columns": [{**NUMERIC, "deviation": 0.0}]},
    "a text for a number": {"columns": [{**NUMERIC, "fill": "1"}]},
    "one name twice": {"columns": [NUMERIC, NUMERIC]},
    "no columns": {"columns": []},
    "a category twice": {"columns": [{"name": "a", "categories": ["x", "x"]}]},
    "more categories than a run has": {"columns": [{"name": "a", "categories": [str(i) for i in range(1001)]}]},
    "something to call": {"columns": [{"name": "a", "categories": ["x"], "function": "os.system"}]},
    "an endless text": {"column": "a", "vocabulary": ["x"], "length": 1 << 40},
    "a word twice": {"column": "a", "vocabulary": ["x", "x"], "length": 3},
    "a picture beyond measure": {**PIXELS, "shape": [3, 1 << 20, 1 << 20]},
    "a picture of no size": {**PIXELS, "shape": [3, 0, 4]},
    "too few means": {**PIXELS, "mean": [0.0], "deviation": [1.0]},
    "numbers without end": {"shape": [4], "whole": False, "largest": float("inf")},
}


@pytest.mark.parametrize("inputs", HOSTILE.values(), ids=HOSTILE)
def test_a_strangers_preparation_is_refused_before_anything_is_made_of_it(inputs: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="a file is damaged"):
        made(Preparation, {"inputs": inputs}, where="a file")


@pytest.mark.parametrize(
    "inputs",
    [
        Columns((NumericColumn("a", 1.0, 1.0, 2.0), CategoryColumn("b", ("x", "y")))),
        Words("t", ("film",), 3),
        Pixels((3, 4, 4), True, (0.0,) * 3, (1.0,) * 3),
        Features((4,), False, 8.0),
    ],
)
def test_what_the_hostile_ones_were_made_from_is_taken(inputs: Any) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(Preparation(inputs))))
    assert made(Preparation, plain, where="a file").inputs == inputs


def test_pictures_are_resized_as_they_are_read_where_that_is_said(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, size in enumerate([(6, 4), (9, 9), (12, 5), (4, 4)]):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        image.new("L", size, 40 * number).save(folder / f"{number}.png")
    split = load(tmp_path, picture_size=5, test_fraction=0.5)
    assert split.train.input_shape == (1, 5, 5)
    assert split.preparation is not None
    assert isinstance(split.preparation.inputs, Pixels)
    assert split.preparation.inputs.resize


@pytest.mark.parametrize(("source", "size"), [("digits", 8), ("table", 8), ("digits", 0), ("digits", 1 << 20)])
def test_only_folders_of_pictures_are_resized_and_to_a_size_that_can_be(source: str, size: int, table: Path) -> None:
    with pytest.raises(ConfigError, match="picture_size"):
        load(table if source == "table" else source, target="y" if source == "table" else None, picture_size=size)
