from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import load
from fedveil.errors import DataError

PIXELS = 3072


def records(count: int, *, labels: int, top: int) -> np.ndarray:
    rows = np.random.default_rng(count).integers(0, 256, (count, labels + PIXELS)).astype(np.uint8)
    rows[:, :labels] = (np.arange(count) % top)[:, None]
    return rows


def write_ten(folder: Path) -> np.ndarray:
    rows = records(6, labels=1, top=10)
    for batch in (1, 2, 10):
        (folder / f"data_batch_{batch}.bin").write_bytes(rows[:2].tobytes() if batch == 1 else rows.tobytes())
    (folder / "test_batch.bin").write_bytes(records(4, labels=1, top=10).tobytes())
    return rows


def test_reads_the_binary_batches_of_cifar_10_in_order(tmp_path: Path) -> None:
    rows = write_ten(tmp_path)
    split = load(tmp_path, normalise=False)
    assert (len(split.train), len(split.test)) == (14, 4)
    assert (split.train.input_shape, split.train.outputs) == ((3, 32, 32), 10)
    assert split.train.y.tolist() == [0, 1, *range(6), *range(6)]
    first = torch.from_numpy(rows[0, 1:].reshape(3, 32, 32).astype(np.float32) / 255)
    assert torch.allclose(split.train.x[0], first)


def test_every_channel_is_standardised_by_itself(tmp_path: Path) -> None:
    write_ten(tmp_path)
    x = load(tmp_path).train.x
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4)


def test_one_batch_stands_for_its_folder(tmp_path: Path) -> None:
    write_ten(tmp_path)
    assert len(load(tmp_path / "data_batch_1.bin").train) == 14


def test_reads_the_fine_labels_of_cifar_100(tmp_path: Path) -> None:
    rows = records(6, labels=2, top=100)
    rows[:, 0] = 19
    (tmp_path / "train.bin").write_bytes(rows.tobytes())
    (tmp_path / "test.bin").write_bytes(rows[:3].tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"c{i}" for i in range(100)) + "\n")
    split = load(tmp_path)
    assert (split.train.outputs, split.train.y.tolist()) == (100, list(range(6)))
    assert split.train.labels[99] == "c99"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("binary_keys", [False, True])
def test_reads_the_pickled_batches_of_cifar_10(tmp_path: Path, protocol: int, binary_keys: bool) -> None:
    rows = records(6, labels=1, top=10)
    for name, part in (("data_batch_1", rows), ("data_batch_2", rows), ("test_batch", rows[:3])):
        content = {
            "data": part[:, 1:].copy(),
            "labels": part[:, 0].tolist(),
            "filenames": ["a.png"] * len(part),
        }
        keyed = {key.encode() if binary_keys else key: value for key, value in content.items()}
        (tmp_path / name).write_bytes(pickle.dumps(keyed, protocol=protocol))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"c{i}" for i in range(10)]}))
    split = load(tmp_path, normalise=False)
    assert (len(split.train), len(split.test)) == (12, 3)
    assert split.train.labels[0] == "c0"
    assert torch.allclose(split.test.x.flatten(1) * 255, torch.from_numpy(rows[:3, 1:].astype(np.float32)))


def test_reads_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    # The official files are pickles of Python 2, where text and bytes are one type (opcode U or T).
    pixels = bytes(range(256)) * 12
    raw = b"T" + len(pixels).to_bytes(4, "little") + pixels
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x01M\x00\x0ct" + dtype + b"\x89" + raw + b"tb"
    )
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07eu."
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(batch)
    split = load(tmp_path, normalise=False)
    assert split.train.y.tolist() == [7]
    assert (split.train.x.flatten() * 255).round().tolist()[:300] == [*range(256), *range(44)]


def test_reads_the_pickled_batches_of_cifar_100(tmp_path: Path) -> None:
    rows = records(6, labels=2, top=100)
    for name in ("train", "test"):
        content = {"data": rows[:, 2:].copy(), "fine_labels": [99, 1, 2, 3, 4, 5], "coarse_labels": [0] * 6}
        (tmp_path / name).write_bytes(pickle.dumps(content))
    split = load(tmp_path)
    assert (split.train.outputs, split.train.y.tolist()) == (100, [99, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("size", [0, 3072, 3074, 2 * 3073 + 1])
def test_a_short_record_is_refused_by_name(tmp_path: Path, size: int) -> None:
    write_ten(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"data_batch_2\.bin.*3073"):
        load(tmp_path)


def test_a_class_beyond_ten_is_refused_by_name(tmp_path: Path) -> None:
    write_ten(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes([10]) + bytes(PIXELS))
    with pytest.raises(DataError, match=r"test_batch\.bin: class 10"):
        load(tmp_path)


def test_a_test_batch_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(bytes(1 + PIXELS))
    with pytest.raises(DataError, match="no training batch"):
        load(tmp_path / "test_batch.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"labels": [1]}, "needs 'data' and 'labels'"),
        ({"data": np.zeros((2, PIXELS), np.uint8), "labels": [1]}, "1 labels"),
        ({"data": np.zeros((1, 7), np.uint8), "labels": [1]}, r"shape \(1, 7\)"),
        ({"data": np.zeros((1, PIXELS)), "labels": [1]}, "float64"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": ["cat"]}, "not whole numbers"),
        ({"data": np.zeros((1, PIXELS), np.uint8), "labels": [-1]}, "damaged"),
        ([1, 2], "a pickled list"),
    ],
)
def test_a_pickled_batch_that_is_no_batch_is_refused(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=f"data_batch_1.*{message}"):
        load(tmp_path)


def test_class_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_ten(tmp_path)
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"batches\.meta\.txt.*10 classes"):
        load(tmp_path)
