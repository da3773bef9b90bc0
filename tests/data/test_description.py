"""What was understood of data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import Dataset, Split, load, partition
from fedveil.data.description import Column, Description, describe_parts, describe_split


def described(path: Path, **options: object) -> Description:
    split = load(path, **options)  # type: ignore[arg-type]
    return describe_split(split, partition(split.train, clients=3))


def write(path: Path, rows: int = 200, **changed: str) -> Path:
    """A table with an age, a word, a number per row, a constant and an id; `changed` are cells of row 17."""
    lines = ["patientId,age,sex,score,version,ill"]
    for row in range(rows):
        cells = {"age": str(20 + row % 47), "sex": "mf"[row % 2], "score": f"{row * 0.37:.2f}"}
        cells |= changed if row == 16 else {}
        lines.append(f"a{row},{cells['age']},{cells['sex']},{cells['score']},7,{'ny'[row % 3 == 0]}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_one_word_among_numbers_is_named_with_its_row_and_what_it_costs(tmp_path: Path) -> None:
    said = described(write(tmp_path / "toy.csv", age="forty"), target="ill")
    (warning,) = (text for text in said.warnings if "'age'" in text)
    for part in ("199 of its 200 values are numbers, 1 is not", "'forty'", "row 17 (line 18)", "up to 48 inputs"):
        assert part in warning
    assert not [text for text in described(write(tmp_path / "toy.csv"), target="ill").warnings if "'age'" in text]


def test_columns_are_counted_and_what_looks_wrong_is_said(tmp_path: Path) -> None:
    said = described(write(tmp_path / "toy.csv", score=" NA "), target="ill")
    columns = {column.name: column for column in said.columns}
    assert (columns["score"].kind, columns["score"].missing, columns["score"].distinct) == ("numbers", 1, 199)
    assert (columns["sex"].kind, columns["sex"].distinct) == ("words", 2)
    assert (columns["sex"].categories, columns["age"].span) == ({"m": 100, "f": 100}, (20.0, 66.0))
    assert (columns["ill"].role, columns["age"].role) == ("target", "input")
    wrong = "\n".join(said.warnings)
    assert "'patientId' looks like ids (200 different values in 200 rows)" in wrong
    assert "'version' is the same in every row" in wrong
    assert "'score'" not in wrong
    grouped = described(tmp_path / "toy.csv", target="ill", group="patientId")
    assert not grouped.columns[0].categories
    assert "looks like ids" not in "\n".join(grouped.warnings)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1,5", "2,5", "3,25"] * 10, "decimal comma"),
        (["1", "unknown"] * 10, None),
        ([str(number) for number in range(25)] + ["unknown"] * 15, "taken for words"),
        (["", "na", "1"] * 10, "no value in 20 of 30 rows"),
        (["b", "a"] * 10, None),
    ],
)
def test_what_is_said_of_a_column(values: list[str], expected: str | None) -> None:
    column = Column.of("c", values, role="input", place=lambda row: f"row {row + 1}")
    said = "\n".join(column.warnings(len(values)))
    assert (expected in said) if expected else not said


def test_a_column_that_is_not_learned_from_is_not_judged() -> None:
    column = Column.of("id", [str(row) for row in range(50)], role="group", place=str)
    assert not list(column.warnings(50))


def toy(x: list[float], y: list[int], **more: object) -> Dataset:
    return Dataset("toy", "classification", torch.tensor(x)[:, None], torch.tensor(y), 2, ("no", "yes"), **more)  # type: ignore[arg-type]


def test_parts_clients_classes_duplicates_and_shared_groups_are_counted() -> None:
    train = toy([1, 2, 2, 4], [0, 0, 1, 1], groups=torch.tensor([5, 5, 6, 7]))
    test = toy([2, 9], [0, 0], groups=torch.tensor([7, 8]))
    validation = toy([9, 8], [1, 0], groups=torch.tensor([9, 9]))
    said = describe_split(Split(train, test, validation), [torch.tensor([0, 1]), torch.tensor([2, 3])], ("N", "S"))
    assert {name: part.rows for name, part in said.parts.items()} == {"train": 4, "validation": 2, "test": 2}
    assert (said.parts["train"].classes, said.parts["test"].classes) == ((2, 2), (2, 0))
    assert [client.classes for client in said.clients] == [(2, 0), (0, 2)]
    assert said.duplicates == {
        "train": {"train": 1},
        "validation": {"validation": 0, "train": 0},
        "test": {"test": 0, "train": 1, "validation": 1},
    }
    assert said.shared_groups == {"validation": {"train": 0}, "test": {"train": 1, "validation": 0}}
    wrong = "\n".join(said.warnings)
    assert "1 of 2 groups of the test part are in the training part too" in wrong
    assert "the test part has no sample of class yes" in wrong
    assert "clients: 2 (N 2, S 2)" in said.lines()
    assert json.loads(json.dumps(said.as_data()))["rows"] == 8


def test_data_that_come_one_set_a_client_are_described_alike() -> None:
    pieces = [toy([1, 2], [0, 1]), toy([3, 1], [1, 1])]
    said = describe_parts(pieces, test=toy([3, 7], [0, 1]))
    whole = describe_split(Split(toy([1, 2, 3, 1], [0, 1, 1, 1]), toy([3, 7], [0, 1])))
    assert (said.parts, said.duplicates, said.constant) == (whole.parts, whole.duplicates, whole.constant)
    assert [client.rows for client in said.clients] == [2, 2]


def test_regression_says_the_range_of_the_target() -> None:
    def numbers(y: list[float]) -> Dataset:
        return Dataset("toy", "regression", torch.zeros(len(y), 3), torch.tensor(y)[:, None], 1)

    said = describe_parts([numbers([1.0, 2.0]), numbers([6.0])])
    assert said.parts["train"].target == {"least": 1.0, "mean": 3.0, "most": 6.0}
    assert "3 of 3 inputs never vary in the training part." in said.warnings


def test_many_clients_are_counted_and_not_all_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.arange(3000.0)[:, None], y=np.arange(3000) % 2)
    split = load(tmp_path / "toy.npz")
    said = describe_split(split, partition(split.train, clients=1200))
    stored = said.as_data()
    assert (len(said.clients), len(stored["clients"]), stored["clients_left_out"]) == (1200, 1000, 200)
    assert len("\n".join(said.lines())) < 2000


def test_the_words_of_a_column_of_words_are_not_quoted() -> None:
    names = [f"P-{number:04d}" for number in range(40)]
    assert not Column.of("patient", names, role="group", place=str).strange
    assert not Column.of("town", ["Bonn", "Trier"] * 20, role="input", place=str).strange
    assert Column.of("age", [*map(str, range(39)), "forty"], role="input", place=str).strange == ("'forty' (39)",)


def test_groups_that_differ_only_in_case_are_named() -> None:
    codes = {"groups": torch.tensor([0, 1, 2, 3]), "group_names": ("P7", "Q1", "p7", "q2")}
    train = toy([1, 2, 3, 4], [0, 0, 1, 1], **codes)
    (told,) = [text for text in describe_split(Split(train, train)).warnings if "upper and lower case" in text]
    assert "'P7' and 'p7'" in told
    assert "Q1" not in told


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ([f"P{row % 30:03d}" for row in range(90)], True),
        ([f"{row % 30:02x}-{row % 30:04d}" for row in range(90)], True),
        ([f"ward {'abcdefghijklmnopqrstuvwxyz0123'[row % 30]}" for row in range(90)], False),
        ([f"2024-05-{row % 30 + 1:02d}" for row in range(90)], False),
        ([f"v{row % 5}" for row in range(90)], False),
    ],
    ids=["repeated patients", "repeated codes", "words", "dates", "few"],
)
def test_ids_that_repeat_are_told_with_where_they_go(values: list[str], ids: bool) -> None:
    told = "\n".join(Column.of("who", values, role="input", place=str).warnings(len(values)))
    assert ("looks like ids (30 different values in 90 rows)" in told) is ids
    assert ("stands in the model file" in told) is ids


@pytest.mark.parametrize(
    ("x", "raw"),
    [
        (torch.arange(4 * 64).reshape(4, 1, 8, 8).float(), True),
        (torch.arange(4 * 64).reshape(4, 64).float(), True),
        (torch.arange(4 * 64).reshape(4, 1, 8, 8) / 255, False),
        (torch.arange(4 * 64).reshape(4, 1, 8, 8) - 20.0, False),
        (torch.arange(4 * 5).reshape(4, 5) * 12.0, False),
    ],
    ids=["pictures", "flat pictures", "scaled", "centred", "a few measurements"],
)
def test_pixels_that_were_not_scaled_are_told(x: torch.Tensor, raw: bool) -> None:
    data = Dataset("scans", "classification", x, torch.tensor([0, 1, 0, 1]), 2)
    assert any("as pixels are stored" in text for text in describe_split(Split(data, data)).warnings) is raw
