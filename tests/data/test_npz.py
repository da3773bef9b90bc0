from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.data import load
from fedveil.errors import DataError

X = np.random.default_rng(0).normal(size=(10, 4))
Y = np.arange(10) % 3


@pytest.mark.parametrize(
    ("x", "y"), [("x", "y"), ("X", "Y"), ("data", "labels"), ("images", "labels"), ("x_train", "y_train")]
)
def test_one_file_is_split(tmp_path: Path, x: str, y: str) -> None:
    np.savez(tmp_path / "toy.npz", **{x: X, y: Y})
    for source in (tmp_path, tmp_path / "toy.npz"):
        split = load(source)
        assert (len(split.train), len(split.test)) == (8, 2)
        assert (split.train.task, split.train.outputs) == ("classification", 3)
    assert split.train.name == "toy"


@pytest.mark.parametrize("names", ["x_train y_train x_test y_test", "train_images train_labels val_images val_labels"])
def test_one_file_may_hold_both_parts(tmp_path: Path, names: str) -> None:
    np.savez(tmp_path / "toy.npz", **dict(zip(names.split(), (X, Y, X[:3], Y[:3]), strict=True)))
    split = load(tmp_path / "toy.npz")
    assert torch.equal(split.test.x, torch.from_numpy(X[:3].astype(np.float32)))
    assert len(split.train) == 10


@pytest.mark.parametrize("second", ["test", "val"])
def test_a_folder_may_hold_both_parts_with_groups_and_classes(tmp_path: Path, second: str) -> None:
    np.savez(tmp_path / "train.npz", x=X, y=Y, groups=Y + 5, classes=np.array(["a", "b", "c"]))
    np.savez(tmp_path / f"{second}.npz", x=X[:3], y=Y[:3])
    split = load(tmp_path)
    assert split.train.labels == ("a", "b", "c")
    assert split.train.groups is not None
    assert split.train.groups.tolist() == (Y + 5).tolist()
    assert split.test.groups is None


def test_groups_follow_their_samples_through_a_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.arange(10.0)[:, None], y=Y, groups=np.arange(10))
    for part in (load(tmp_path).train, load(tmp_path).test):
        assert part.groups is not None
        assert part.groups.tolist() == part.x[:, 0].tolist()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 6, 5, 3), (3, 6, 5)),
        ((10, 6, 5, 1), (1, 6, 5)),
        ((10, 3, 6, 5), (3, 6, 5)),
        ((10, 3, 3, 3), (3, 3, 3)),
        ((10, 6, 5), (1, 6, 5)),
        ((10, 30), (30,)),
    ],
)
def test_bytes_become_channel_first_pictures_between_zero_and_one(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    pictures = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    np.savez(tmp_path / "toy.npz", x=pictures, y=Y)
    train = load(tmp_path, normalise=False).train
    assert train.input_shape == expected
    assert 0.0 <= float(train.x.min()) < float(train.x.max()) <= 1.0


def test_channels_are_moved_not_reshaped(tmp_path: Path) -> None:
    pictures = np.zeros((10, 6, 5, 3), np.uint8)
    pictures[..., 1] = 255
    np.savez(tmp_path / "toy.npz", x=pictures, y=Y)
    train = load(tmp_path, normalise=False).train
    assert train.x.mean((0, 2, 3)).tolist() == [0.0, 1.0, 0.0]
    # A channel without any variation is centred and otherwise left alone.
    assert float(load(tmp_path).train.x.abs().max()) == 0.0


def test_floating_point_samples_are_taken_as_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=X, y=Y)
    np.savez(tmp_path / "test.npz", x=X, y=Y)
    assert torch.equal(load(tmp_path).train.x, torch.from_numpy(X.astype(np.float32)))


def test_floating_point_pictures_become_channel_first_where_it_is_beyond_doubt(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.zeros((10, 6, 5, 3)), y=Y)
    assert load(tmp_path).train.input_shape == (3, 6, 5)
    np.savez(tmp_path / "toy.npz", x=np.zeros((10, 3, 5, 3)), y=Y)
    assert load(tmp_path).train.input_shape == (3, 5, 3)


def test_whole_numbers_with_a_vocabulary_are_text(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.ones((10, 7), np.uint8), y=Y, vocabulary=50)
    train = load(tmp_path).train
    assert (train.is_text, train.vocabulary) == (True, 50)
    np.savez(tmp_path / "toy.npz", x=np.ones((10, 7), np.int32), y=Y)
    assert not load(tmp_path).train.is_text


def test_floating_point_targets_are_regressed_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=X, y=X[:, :2])
    train = load(tmp_path).train
    assert (train.task, train.outputs, tuple(train.y.shape)) == ("regression", 2, (8, 2))
    np.savez(tmp_path / "toy.npz", x=X, y=Y.astype(float))
    assert load(tmp_path).train.task == "regression"
    assert load(tmp_path, task="classification").train.outputs == 3


def test_named_targets_are_classes_in_alphabetical_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=X, y=np.array(["b", "a"] * 5))
    np.savez(tmp_path / "test.npz", x=X[:2], y=np.array(["a", "b"]))
    split = load(tmp_path)
    assert (split.train.labels, split.test.y.tolist()) == (("a", "b"), [0, 1])
    np.savez(tmp_path / "test.npz", x=X[:2], y=np.array(["a", "z"]))
    with pytest.raises(DataError, match=r"test\.npz: class 'z'"):
        load(tmp_path)


def test_a_column_of_labels_is_a_list_of_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=X, y=Y[:, None])
    assert tuple(load(tmp_path).train.y.shape) == (8,)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": Y[:9]}, "10 samples but 9 labels"),
        ({"x": X, "y": Y, "groups": Y[:4]}, "10 samples but 4 groups"),
        ({"x": X, "y": Y, "groups": X[:, 0]}, "groups must be one whole number"),
        ({"x": X}, "no labels; it holds x"),
        ({"pixels": X, "y": Y}, "no samples; it holds pixels, y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "no labels of the test part"),
        ({"x": X, "y": Y - 1}, "sample 0 has class -1"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "sample 2 has class 2.*2 classes"),
        ({"x": X[:, 0], "y": Y}, "one row per sample"),
        ({"x": X[:0], "y": Y[:0]}, "no samples"),
        ({"x": X[:1], "y": Y[:1]}, "cannot be split"),
        ({"x": X.astype(str), "y": Y}, "numbers are needed"),
        ({"x": X, "y": Y.astype(complex)}, "neither numbers nor names"),
        ({"x": X, "y": np.stack([Y, Y], 1)}, "one whole number per sample"),
        ({"x": np.where(X[4, 2] == X, math.nan, X), "y": Y}, "sample 4, column 2"),
        ({"x": np.where(X[4, 2] == X, 1e300, X), "y": Y}, "sample 4, column 2"),
        ({"x": X, "y": np.where(Y == 2, math.inf, Y)}, "sample 2, column 0 of y"),
        ({"x": X, "y": Y, "vocabulary": 5}, "token ids must be whole numbers"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_file(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "toy.npz", **arrays)
    with pytest.raises(DataError, match=rf"toy\.npz.*{message}"):
        load(tmp_path)


def test_fractions_are_not_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=X, y=X[:, 0])
    with pytest.raises(DataError, match="not whole numbers"):
        load(tmp_path, task="classification")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=X, y=Y, classes=np.array(["a", "b", "c"]))
    np.savez(tmp_path / "test.npz", x=X, y=Y, classes=np.array(["a", "b", "d"]))
    with pytest.raises(DataError, match=r"test\.npz.*classes"):
        load(tmp_path)
    np.savez(tmp_path / "test.npz", x=X[:, :3], y=Y)
    with pytest.raises(DataError, match=r"shape \(4,\).*shape \(3,\)"):
        load(tmp_path)
    np.savez(tmp_path / "test.npz", x=X, y=Y + 1)
    with pytest.raises(DataError, match="has class 3"):
        load(tmp_path)
    np.savez(tmp_path / "test.npz", x=X.astype(np.uint8), y=Y)
    with pytest.raises(DataError, match="store both parts alike"):
        load(tmp_path)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.array([{}, {}], dtype=object), y=Y[:2])
    with pytest.raises(DataError, match=r"toy\.npz.*allow_pickle"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_a_damaged_archive_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "toy.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"toy\.npz"):
        load(tmp_path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "toy.npz").open("wb") as stream:
        np.save(stream, X)
    with pytest.raises(DataError, match=r"numpy\.savez"):
        load(tmp_path)


def test_several_unnamed_archives_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=X, y=Y)
    with pytest.raises(DataError, match=r"a, b.*train\.npz"):
        load(tmp_path)


def _claiming(shape: str) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)


def test_a_header_that_claims_gigabytes_is_refused_before_they_are_allocated(tmp_path: Path) -> None:
    import tracemalloc
    import zipfile

    from fedveil.data.arrays import read_array, read_arrays

    with zipfile.ZipFile(tmp_path / "toy.npz", "w") as archive:
        archive.writestr("x.npy", _claiming("(2000000000,)"))
    (tmp_path / "toy.npy").write_bytes(_claiming("(2000000000,)"))
    for read, name in ((read_arrays, "toy.npz"), (read_array, "toy.npy")):
        tracemalloc.start()
        with pytest.raises(DataError, match=r"toy\.np.*more than are there"):
            read(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["npz", "gz", "xz"])
def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path, suffix: str) -> None:
    import gzip
    import lzma
    import zipfile

    from fedveil.data.arrays import read_arrays, read_bytes

    zeros, path = bytes(1 << 27), tmp_path / f"toy.{suffix}"
    if suffix == "npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", _claiming(f"({len(zeros) // 8},)") + zeros)
    else:
        path.write_bytes(gzip.compress(zeros) if suffix == "gz" else lzma.compress(zeros, preset=0))
    assert path.stat().st_size < 1 << 18
    with pytest.raises(DataError, match=rf"toy\.{suffix}"):
        (read_arrays if suffix == "npz" else read_bytes)(path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("x", "y"), ""),
        (("x_train", "y_train"), ""),
        (("images", "labels"), "images was taken as the inputs and labels as the targets"),
        (("x", "y", "age"), "x was taken as the inputs and y as the targets; age was not used"),
    ],
)
def test_arrays_that_are_not_called_x_and_y_are_said_to_have_been_taken(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    arrays = [np.ones((6, 2), dtype=np.float32), np.arange(6) % 2, np.arange(6)]
    np.savez(tmp_path / "a.npz", **dict(zip(names, arrays, strict=False)))
    remarks = load(tmp_path / "a.npz").remarks
    assert remarks == ((f"{tmp_path / 'a.npz'}: {said}",) if said else ())


def test_several_labels_have_one_name_each(tmp_path: Path) -> None:
    x, y = np.zeros((8, 2), np.float32), np.eye(8, 3, dtype=np.int64)
    np.savez(tmp_path / "d.npz", x=x, y=y, classes=np.array(["a", "b"]))
    with pytest.raises(DataError, match="2 class names for 3 classes"):
        load(tmp_path / "d.npz", task="multilabel")
