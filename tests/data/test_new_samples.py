"""Samples to predict for: whatever they come as gives the same numbers, and what does not fit is refused by name."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data.new_samples import Expected, NewSamples, read_samples
from fedveil.data.preparation import CategoryColumn, Columns, Features, NumericColumn, Pixels, Preparation, Words
from fedveil.errors import ConfigError, DataError

TABLE = Expected(
    Preparation(
        Columns((NumericColumn("age", 50.0, 50.0, 10.0), CategoryColumn("town", ("A", "B")))),
        ("no", "yes"),
        "ill",
        ("ward",),
    ),
    "classification",
    2,
)
TEXTS = Expected(Preparation(Words("note", ("good", "bad"), 3), ("0", "1"), "y"), "classification", 2, 4)
GREY = Expected(Preparation(Pixels((1, 4, 6), False, (0.5,), (0.25,)), ("cat", "dog")), "classification", 2)
COLOUR = Expected(Preparation(Pixels((3, 4, 4), True), ("cat", "dog")), "classification", 2)
NUMBERS = Expected(Preparation(Features((5,), False, 1.0)), "regression", 1)
IDS = Expected(Preparation(Features((5,), True, 8.0)), "classification", 2, 7)
ROWS = [{"age": 60, "town": "B"}, {"age": None, "town": "C"}, {"age": 45.5, "town": "A"}]
PREPARED = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-0.45, 1.0, 0.0]]


def taken(source: object, expected: Expected, **more: Any) -> tuple[NewSamples, torch.Tensor]:
    samples = read_samples(source, expected, **more)
    return samples, samples.prepared(0, samples.count)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("form", ["file", "folder", "parquet", "rows", "columns", "arrays", "tensors"])
def test_a_table_gives_the_same_numbers_however_it_comes(form: str, tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    numbers = np.array([60, np.nan, 45.5])
    source: Any = {"rows": ROWS, "columns": columns, "arrays": {**columns, "age": numbers}, "folder": tmp_path}.get(
        form
    )
    if form in ("file", "folder"):
        write(tmp_path / "new.csv", ROWS)
    if form == "tensors":
        source = {"town": columns["town"], "age": torch.from_numpy(numbers)}
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), tmp_path / "new.parquet")
    samples, x = taken(source or str(tmp_path / f"new.{'csv' if form == 'file' else 'parquet'}"), TABLE)
    assert x.tolist() == torch.tensor(PREPARED).tolist()
    assert samples.y is None
    assert samples.notes == (
        "column 'age': 1 of 3 rows are empty and get 50, the training rows' mean",
        "column 'town': 1 of 3 rows hold what training never saw ('C'); they count as none of its 2 categories",
    )


def test_a_single_row_is_a_table_too() -> None:
    _, x = taken(ROWS[0], TABLE)
    assert x.tolist() == PREPARED[:1]


def test_targets_groups_and_kept_columns_may_be_there(tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "ward": "N", "ill": ill, **ROWS[0]} for i, ill in enumerate(["yes", "", "no"])]
    samples, x = taken(write(tmp_path / "new.csv", rows), TABLE, keep=["id"])
    assert x.shape == (3, 3)
    assert samples.y is not None
    assert samples.y.tolist() == [1, -1, 0]
    assert samples.beside == {"id": ["p0", "p1", "p2"]}
    assert read_samples([{**row, "ill": ""} for row in rows], TABLE, keep=["id"]).y is None


def test_numbered_classes_go_by_their_value() -> None:
    samples = read_samples({"note": ["a", "b"], "y": ["1.0", 0]}, TEXTS)
    assert samples.y is not None
    assert samples.y.tolist() == [1, 0]


@pytest.mark.parametrize("source", [["good dog", ""], {"note": ["good dog", ""]}, [{"note": "good dog"}, {"note": ""}]])
def test_texts_become_ids(source: object) -> None:
    assert taken(source, TEXTS)[1].tolist() == [[2, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"age": 1}], r"lacks column 'town'.*has column 'age'"),
        ([{"age": 1, "town": "A", "id": 4, "ip": 5}], r"without columns 'id', 'ip'.*--keep id"),
        ([{"age": 1, "town": "A"}, {"age": "forty", "town": "A"}], r"row 2 \(line 3\): column 'age' holds 'forty'"),
        ([{"age": "1e999", "town": "A"}], r"row 1 \(line 2\): column 'age' holds '1e999'"),
        ([{"age": 1, "town": "A", "ill": "perhaps"}], r"row 1 \(line 2\): the target 'ill' is 'perhaps'.*\(no, yes\)"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_column_and_row(
    rows: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        read_samples(write(tmp_path / "new.csv", rows), TABLE)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "no table"),
        ([{"age": 1, "town": "A"}, {"age": 1}], "some have 'town'"),
        ([{"age": 1, "town": "A"}, {"age": 1, "town": "A", "x": 1}], "some have 'x'"),
        ({"age": [1, 2], "town": ["A"]}, "equally many"),
        ({"age": [[1]], "town": ["A"]}, "a list in a cell"),
        (np.zeros((2, 3)), r"ndarray is no table.*age, town"),
    ],
)
def test_rows_from_python_that_are_no_table_are_refused(source: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_samples(source, TABLE)


def test_a_column_to_keep_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Unknown column to keep 'aga'\. Did you mean 'age'"):
        read_samples(ROWS, TABLE, keep=["aga"])


BYTES = np.random.default_rng(1).integers(0, 256, (3, 4, 6)).astype(np.uint8)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number, pixels in enumerate(BYTES):
        image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def test_pictures_give_the_same_numbers_however_they_come(pictures: Path) -> None:
    from PIL import Image

    expected = torch.from_numpy(BYTES.astype(np.float32))[:, None].div(255).sub(0.5).div(0.25)
    np.savez(pictures / "new.npz", x=BYTES)
    np.save(pictures / "new.npy", BYTES[..., None])
    files = [Image.open(pictures / f"{number}.png") for number in range(3)]
    for source in (pictures, pictures / "new.npz", pictures / "new.npy", BYTES, BYTES[:, None], list(BYTES), files):
        assert torch.equal(taken(source, GREY)[1], expected)
    for source in (pictures / "1.png", BYTES[1], files[1]):
        assert torch.equal(taken(source, GREY)[1], expected[1:2])
    assert read_samples(pictures, GREY).beside["file"][2].endswith("2.png")


def test_pictures_are_resized_where_the_preparation_says_so(pictures: Path) -> None:
    from PIL import Image

    small = np.stack(
        [np.asarray(Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR)) for pixels in BYTES]
    )
    expected = torch.from_numpy(np.stack([small] * 3, axis=1).astype(np.float32)).div(255)
    for source in (pictures, BYTES, [Image.open(pictures / f"{number}.png") for number in range(3)]):
        assert torch.equal(taken(source, COLOUR)[1], expected)


def test_class_folders_are_known_classes(pictures: Path) -> None:
    (pictures / "dog").mkdir()
    (pictures / "0.png").rename(pictures / "dog" / "0.png")
    with pytest.raises(DataError, match="pictures lie in it and in folders"):
        read_samples(pictures, GREY)
    for left in pictures.glob("*.png"):
        left.rename(pictures / "dog" / left.name)
    samples = read_samples(pictures, GREY)
    assert samples.y is not None
    assert samples.y.tolist() == [1, 1, 1]
    (pictures / "dog").rename(pictures / "wolf")
    with pytest.raises(DataError, match=r"folder 'wolf' is none of the model's classes \(cat, dog\)"):
        read_samples(pictures, GREY)


@pytest.mark.parametrize(
    ("size", "colour", "words"),
    [((7, 4), 3, r"0\.png: 7×4 pixels, and the model takes 6×4.*--picture-size"), ((6, 4), (1, 2, 3), "in colour")],
)
def test_a_picture_of_another_kind_is_refused_by_name(
    size: tuple[int, int], colour: Any, words: str, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(tmp_path / "0.png")
    with pytest.raises(DataError, match=words):
        taken(tmp_path, GREY)


def test_a_folder_without_pictures_and_a_table_for_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pictures"):
        read_samples(tmp_path, GREY)
    with pytest.raises(DataError, match=r"takes pictures.*\.npz"):
        read_samples(write(tmp_path / "new.csv", ROWS), GREY)
    for nowhere in (tmp_path / "absent.csv", "x" * 9999, "a\0b", "~nobody/new.csv"):
        with pytest.raises(DataError, match="no such file"):
            read_samples(nowhere, TABLE)
    with pytest.raises(ConfigError, match="takes pictures"):
        read_samples(tmp_path, GREY, keep=["id"])


RAW = np.linspace(0, 255, 30).reshape(6, 5)


@pytest.mark.parametrize(
    ("x", "expected", "words"),
    [
        (BYTES.astype(np.float32), GREY, r"float32, from 5 to 251.*Give bytes.*--inputs"),
        (BYTES / 255, GREY, r"float64.*Give bytes"),
        (BYTES.astype(np.int64), GREY, r"int64.*Give bytes"),
        (BYTES[:, :3], GREY, r"samples have shape \(3, 6\), the model takes \(1, 4, 6\)"),
        (RAW, NUMBERS, "look like raw pixels.*divide by 255"),
        (RAW.astype(np.uint8), NUMBERS, "bytes, and this model was trained on numbers up to 1"),
        (RAW[:, :4], NUMBERS, r"shape \(4,\), the model takes \(5,\)"),
        (np.full((1, 5), np.nan), NUMBERS, "sample 0, column 0 of x is nan"),
        (np.full((1, 5), 7), IDS, "ids from 7 to 7, outside"),
        (np.zeros((1, 5)), IDS, "ids, which are whole"),
        (np.array([["a"]]), NUMBERS, "takes arrays of numbers"),
        (np.zeros((0, 5)), NUMBERS, "no samples"),
    ],
)
def test_numbers_on_another_scale_are_never_taken_silently(
    x: Any, expected: Expected, words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "new.npz", x=x)
    for source in (x, tmp_path / "new.npz"):
        with pytest.raises(DataError, match=words):
            read_samples(source, expected)


def test_numbers_on_the_training_scale_are_taken_as_they_are(tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 10).reshape(2, 5)
    np.savez(tmp_path / "new.npz", features=x, y=np.array([0.5, np.nan]))
    samples, ready = taken(tmp_path / "new.npz", NUMBERS)
    assert torch.equal(ready, torch.from_numpy(x).float())
    assert samples.y is not None
    assert samples.y.shape == (2, 1)
    assert torch.equal(taken(x[0], NUMBERS)[1], ready[:1])
    # What is far beyond the training numbers and below zero is some outlier, and nobody's pixels.
    assert taken(x * 60, NUMBERS)[1].max() == 180


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.array([0, 2, 1]), "not the model's classes, 0 to 1"),
        (np.array(["cat", "wolf", "dog"]), "'wolf' is none of the model's classes"),
        (np.array([0, 1]), "3 samples but 2 targets"),
        (np.zeros((3, 2)), "2 targets a sample"),
    ],
)
def test_targets_of_arrays_are_the_models_or_refused(y: Any, words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=BYTES, y=y)
    with pytest.raises(DataError, match=words):
        read_samples(tmp_path / "new.npz", GREY)
    np.savez(tmp_path / "good.npz", x=BYTES, y=np.array(["dog", "cat", "dog"]))
    samples = read_samples(tmp_path / "good.npz", GREY)
    assert samples.y is not None
    assert samples.y.tolist() == [1, 0, 1]
