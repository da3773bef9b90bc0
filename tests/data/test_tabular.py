from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fedveil.data import load
from fedveil.errors import ConfigError, DataError


def write(path: Path, header: str, rows: Sequence[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Two files: the mean of size in training is 2, its deviation 1; blue occurs in the test part only."""
    write(tmp_path / "train.csv", "size,colour,y", ["1,red,no", "3,green,yes", "1,red,no", "3,green,yes"])
    write(tmp_path / "test.csv", "y,colour,size", ["yes,blue,4", "no,red,"])
    return tmp_path


def test_every_statistic_comes_from_the_training_part(parts: Path) -> None:
    split = load(parts, target="y")
    # size, colour=green, colour=red
    assert split.train.x.tolist() == [[-1, 0, 1], [1, 1, 0], [-1, 0, 1], [1, 1, 0]]
    assert split.test.x.tolist() == [[2, 0, 0], [0, 0, 1]]
    assert (split.train.labels, split.test.y.tolist()) == (("no", "yes"), [1, 0])


def test_normalise_false_keeps_the_numbers_and_fills_gaps_with_the_mean(parts: Path) -> None:
    split = load(parts, target="y", normalise=False)
    assert split.test.x[:, 0].tolist() == [4, 2]


def test_a_two_valued_target_can_be_regressed_on(parts: Path) -> None:
    train = load(parts, target="y", task="regression").train
    assert (train.task, train.outputs, train.y.tolist()) == ("regression", 1, [[0], [1], [0], [1]])


def test_a_constant_column_becomes_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,b,y", [f"7,{i},{i % 2}" for i in range(10)])
    assert load(path, target="y").train.x[:, 0].abs().max() == 0


def test_a_split_column_decides_and_is_no_feature(tmp_path: Path) -> None:
    rows = ["train,1,0", "test,9,1", "train,3,1", "TEST,8,0"]
    split = load(write(tmp_path / "toy.csv", "split,a,y", rows), target="y", normalise=False)
    assert split.train.x.tolist() == [[1], [3]]
    assert split.test.x.tolist() == [[9], [8]]


def test_a_split_column_with_a_third_part_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "split,a,y", ["train,1,0", "test,9,1", "unsup,3,1"])
    with pytest.raises(DataError, match=r"row 3 \(line 4\).*'unsup'"):
        load(path, target="y")


def test_a_column_called_split_that_names_no_parts_is_a_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "split,a,y", [f"{'ab'[i % 2]},{i},{i % 2}" for i in range(10)])
    assert load(path, target="y").train.input_shape == (3,)


def test_a_group_column_gives_groups_and_is_no_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "ward,a,y", [f"{'NES'[i % 3]},{i},{i % 2}" for i in range(12)])
    split = load(path, target="y", group="ward", normalise=False)
    for part in (split.train, split.test):
        assert part.input_shape == (1,)
        assert part.groups is not None
        expected = [{"E": 0, "N": 1, "S": 2}["NES"[int(a) % 3]] for a in part.x[:, 0]]
        assert part.groups.tolist() == expected


def test_a_text_column_becomes_tokens_of_the_training_words(tmp_path: Path) -> None:
    rows = ['train,5,"Good, good film",1', "train,6,bad film,0", "test,7,good unseen,1"]
    path = write(tmp_path / "toy.csv", "split,rating,text,y", rows)
    split = load(path, target="y", text="text", max_tokens=4)
    assert (split.train.is_text, split.train.vocabulary) == (True, 5)
    assert split.train.x.tolist() == [[3, 3, 2, 0], [4, 2, 0, 0]]
    assert split.test.x.tolist() == [[3, 1, 0, 0]]
    assert load(path, target="y", text="text", vocabulary=3).train.vocabulary == 3


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["yes", "no"], "classification"),
        (["0", "1", "2"], "classification"),
        (["1.0", "2.0"], "classification"),
        ([str(i) for i in range(30)], "regression"),
        (["0.5", "1.5"], "regression"),
        (["-1", "1"], "classification"),
    ],
)
def test_the_task_follows_from_the_target(tmp_path: Path, values: list[str], task: str) -> None:
    path = write(tmp_path / "toy.csv", "a,y", [f"{i},{values[i % len(values)]}" for i in range(60)])
    assert load(path, target="y").train.task == task


def test_a_whole_number_in_every_row_is_a_measurement(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,y", [f"{i},{i * 7}" for i in range(10)])
    assert load(path, target="y").train.task == "regression"


def test_numbered_classes_are_ordered_by_value_whatever_their_spelling(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "a,y", ["1,10", "2,2", "3,2"])
    write(tmp_path / "test.csv", "a,y", ["1,2.0", "1,10.0"])
    split = load(tmp_path, target="y", task="classification")
    assert (split.train.labels, split.test.y.tolist()) == (("2", "10"), [0, 1])


def test_a_random_split_knows_the_classes_of_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,y", [f"{i},{'rare' if i == 0 else 'usual'}" for i in range(10)])
    assert all(load(path, target="y", seed=seed).train.outputs == 2 for seed in range(10))


@pytest.mark.parametrize("name", ["toy.csv", "toy.csv.gz"])
def test_a_folder_with_one_table_among_other_files_is_read(tmp_path: Path, name: str) -> None:
    text = ("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(10))).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (tmp_path / "names.txt").write_text("what the columns mean")
    assert len(load(tmp_path, target="y").train) == 8
    assert load(tmp_path / name, target="y").train.name == "toy"


def test_several_unnamed_tables_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.csv", "a,y", ["1,0", "2,1"])
    with pytest.raises(DataError, match=r"one\.csv, two\.csv"):
        load(tmp_path, target="y")


def test_without_a_target_the_columns_are_listed(parts: Path) -> None:
    with pytest.raises(ConfigError, match=r"--target.*size, colour, y"):
        load(parts)


@pytest.mark.parametrize("role", ["target", "group", "text"])
def test_an_unknown_column_suggests_the_nearest(parts: Path, role: str) -> None:
    columns = {"target": "y", role: "color"}
    with pytest.raises(ConfigError, match=f"Unknown {role} column 'color'. Did you mean 'colour'"):
        load(parts, **columns)  # type: ignore[arg-type]


def test_one_column_cannot_play_two_roles(parts: Path) -> None:
    with pytest.raises(ConfigError, match="different columns"):
        load(parts, target="y", group="y")


@pytest.mark.parametrize("gap", ["", "NA", "?", " "])
def test_a_missing_target_is_refused_by_row(tmp_path: Path, gap: str) -> None:
    path = write(tmp_path / "toy.csv", "a,y", ["1,0", "2,1", f"3,{gap}", "4,0"])
    with pytest.raises(DataError, match=r"toy\.csv, row 3 \(line 4\): the target 'y' is missing"):
        load(path, target="y")


def test_further_missing_targets_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,y", ["1,0", "2,", "3,1", "4,NA", "5,?"])
    with pytest.raises(DataError, match=r"row 2 \(line 3\): .* So it is in 2 more of 5 rows\."):
        load(path, target="y")


def test_a_missing_group_is_refused_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,g,y", ["1,n,0", "2,,1", "3,s,1"])
    with pytest.raises(DataError, match=r"row 2 \(line 3\): the group 'g' is missing"):
        load(path, target="y", group="g")


@pytest.mark.parametrize("value", ["inf", "-Infinity", "1e999", "1e39"])
def test_a_number_that_is_not_finite_is_refused_by_row_and_column(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "toy.csv", "a,b,y", ["1,2,0", f"1,{value},1", "1,2,1"])
    with pytest.raises(DataError, match=r"row 2 \(line 3\): column 'b'"):
        load(path, target="y")


def test_nan_is_a_gap(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "a,y", ["1,0", "3,1", "nan,1"])
    write(tmp_path / "test.csv", "a,y", ["2,1"])
    train = load(tmp_path, target="y", normalise=False).train
    assert not any(math.isnan(value) for value in train.x[:, 0].tolist())
    assert train.x[2, 0] == 2


def test_a_test_class_that_training_lacks_is_refused_by_row(parts: Path) -> None:
    write(parts / "test.csv", "size,colour,y", ["1,red,no", "1,red,maybe"])
    with pytest.raises(DataError, match=r"test\.csv, row 2 \(line 3\): class 'maybe'"):
        load(parts, target="y")


def test_a_column_missing_from_the_test_file_is_named(parts: Path) -> None:
    write(parts / "test.csv", "size,colour", ["1,red"])
    with pytest.raises(DataError, match=r"test\.csv: column\(s\) y"):
        load(parts, target="y")


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("y", ["1", "0", "1"], "no column is left"),
        ("a,y", [",0", ",1", "?,0"], "column 'a' holds no value at all"),
        ("a,y", [f"name{i},{i % 2}" for i in range(2000)], "text='a'"),
        ("a,y", ["1,0"], "cannot be split"),
    ],
)
def test_a_table_without_anything_to_learn_from_is_refused(
    tmp_path: Path, header: str, rows: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "toy.csv", header, rows), target="y")


def test_a_column_without_training_values_is_refused(parts: Path) -> None:
    write(parts / "train.csv", "size,colour,y", [",red,no", ",green,yes"])
    with pytest.raises(DataError, match="'size' holds no value in the training part"):
        load(parts, target="y")


def test_three_words_cannot_be_regressed_on(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,y", ["1,low", "2,mid", "3,high"])
    with pytest.raises(DataError, match=r"3 different words.*task='classification'"):
        load(path, target="y", task="regression")


def test_regression_targets_are_kept_in_their_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "toy.csv", "a,price", [f"{i},{1000.5 + i}" for i in range(10)])
    split = load(path, target="price")
    together = torch.cat([split.train.y, split.test.y]).flatten().sort().values
    assert torch.allclose(together, 1000.5 + torch.arange(10.0))
