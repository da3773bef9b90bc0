from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import load
from fedveil.errors import DataError


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype("u1").tobytes()


def write_part(folder: Path, part: str, count: int, *, spelling: str = "-", packed: bool = False) -> np.ndarray:
    images = np.random.default_rng(count).integers(0, 256, (count, 5, 4))
    for kind, array, dims in (("images", images, 3), ("labels", np.arange(count) % 3, 1)):
        name = f"{part}-{kind}{spelling}idx{dims}-ubyte"
        content = idx_bytes(array)
        (folder / (name + (".gz" if packed else ""))).write_bytes(gzip.compress(content) if packed else content)
    return images


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spelling", ["-", "."])
def test_reads_both_parts_under_every_usual_name(tmp_path: Path, packed: bool, spelling: str) -> None:
    images = write_part(tmp_path, "train", 12, spelling=spelling, packed=packed)
    write_part(tmp_path, "t10k", 6, spelling=spelling, packed=packed)
    split = load(tmp_path, normalise=False)
    assert (len(split.train), len(split.test)) == (12, 6)
    assert split.train.input_shape == (1, 5, 4)
    assert split.train.outputs == 3
    assert torch.allclose(split.train.x[:, 0], torch.tensor(images).float() / 255)


def test_one_of_the_files_stands_for_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    write_part(folder, "train", 12)
    split = load(folder / "train-images-idx3-ubyte")
    assert split.train.name == "letters"
    assert (len(split.train), len(split.test)) == (10, 2)


def test_pictures_are_standardised_by_the_training_part(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    write_part(tmp_path, "t10k", 6)
    split = load(tmp_path)
    assert float(split.train.x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(split.train.x.std(correction=0)) == pytest.approx(1, abs=1e-5)
    plain = load(tmp_path, normalise=False)
    mean, deviation = plain.train.x.mean(), plain.train.x.std(correction=0)
    assert torch.allclose(split.test.x, (plain.test.x - mean) / deviation, atol=1e-5)


def test_the_writers_beside_the_files_are_the_groups(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    write_part(tmp_path, "t10k", 6)
    np.savez(tmp_path / "writer_ids.npz", train_writer=np.arange(12) // 2, test_writer=np.arange(6) + 100)
    split = load(tmp_path)
    assert split.train.groups is not None
    assert split.test.groups is not None
    assert split.train.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert split.test.groups.tolist() == [100, 101, 102, 103, 104, 105]


def test_a_validation_part_leaves_the_files_own_test_part_whole(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 20)
    write_part(tmp_path, "t10k", 6)
    split, whole = load(tmp_path, validation_fraction=0.1), load(tmp_path)
    assert {name: len(part) for name, part in split.parts.items()} == {"train": 18, "validation": 2, "test": 6}
    assert torch.equal(split.test.y, whole.test.y)


def test_writers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    np.savez(tmp_path / "writer_ids.npz", train_writer=np.arange(3))
    with pytest.raises(DataError, match="12 samples but 3 groups"):
        load(tmp_path)
    np.savez(tmp_path / "writer_ids.npz", writers=np.arange(12))
    with pytest.raises(DataError, match=r"train_writer.*holds writers"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"\x89PNG....", "not an idx file"),
        (b"\0\0\x08\x03\0\0", "header is cut short"),
        (idx_bytes(np.zeros((12, 5, 4)))[:-1], "239 bytes of data where .* announces 240"),
        (idx_bytes(np.zeros((12, 5, 4))) + b"\0", "241 bytes of data"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "announces"),
        (idx_bytes(np.zeros(12)), "not images and their labels"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    write_part(tmp_path, "train", 12)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-12], lambda packed: b"plain text", lambda packed: b""])
def test_a_damaged_gzip_is_refused_by_name(tmp_path: Path, damage: object) -> None:
    write_part(tmp_path, "train", 12, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz"):
        load(tmp_path)


def test_a_flipped_byte_inside_a_gzip_is_noticed(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"images-idx3-ubyte\.gz"):
        load(tmp_path)


def test_different_counts_of_images_and_labels_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(11)))
    with pytest.raises(DataError, match=r"12 images but .* 11 labels"):
        load(tmp_path)


def test_a_missing_companion_is_named(tmp_path: Path) -> None:
    write_part(tmp_path, "t10k", 6)
    with pytest.raises(DataError, match="no train-images"):
        load(tmp_path)
    write_part(tmp_path, "train", 6)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no t10k-labels"):
        load(tmp_path)


def test_parts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    write_part(tmp_path, "t10k", 6)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((6, 4, 4))))
    with pytest.raises(DataError, match=r"shape \(1, 5, 4\).*shape \(1, 4, 4\)"):
        load(tmp_path)


def test_a_test_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 12)
    write_part(tmp_path, "t10k", 6)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([0, 1, 2, 7, 0, 1])))
    with pytest.raises(DataError, match=r"sample 3 has class 7.*3 classes"):
        load(tmp_path)


def test_two_data_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "emnist-letters-train", 6)
    write_part(tmp_path, "emnist-digits-train", 6)
    with pytest.raises(DataError, match="several idx data sets"):
        load(tmp_path)
