"""Data sets from strangers: nothing they hold is run, and what they claim costs no more than they are large."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.data import load
from fedveil.errors import DataError

_X, _Y = np.zeros((10, 4), np.float32), np.arange(10) % 2
_TOKENS = np.zeros((10, 4), np.int64)


def _npy(header: str) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _npz(path: Path, **members: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if not isinstance(content, bytes):
                stream = io.BytesIO()
                np.save(stream, content)
                content = stream.getvalue()
            archive.writestr(f"{name}.npy", content)
    return path


def test_a_picture_that_is_postscript_is_handed_to_no_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    (tools / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    for name in "ab":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.png").write_text(
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
        )
    with pytest.raises(DataError, match="not a readable picture"):
        load(tmp_path / "pictures")
    assert not (tmp_path / "ran").exists()


def test_pictures_that_are_far_larger_than_their_files_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        (tmp_path / name).mkdir()
    image.new("RGB", (8000, 8000)).save(tmp_path / "a" / "1.png")  # 0.2 MB that hold 192 MB
    shutil.copy(tmp_path / "a" / "1.png", tmp_path / "b" / "1.png")
    with pytest.raises(DataError, match="too many for its size"):
        load(tmp_path)


def test_many_members_together_are_no_way_around_the_limit(tmp_path: Path) -> None:
    empty = np.zeros(30 << 20, np.uint8)
    file = _npz(tmp_path / "x.npz", x=_X, y=_Y, one=empty, two=empty, three=empty)
    assert file.stat().st_size < 1 << 20
    with pytest.raises(DataError, match="too many for its size"):
        load(file)


@pytest.mark.parametrize(
    "members",
    [
        {"x": _npy("((((("), "y": _Y},
        {"x": _TOKENS, "y": _Y, "vocabulary": np.zeros(0)},
        {"x": _TOKENS, "y": _Y, "vocabulary": np.array(np.inf)},
        {"x": _TOKENS, "y": _Y, "vocabulary": np.array("many")},
        {"x": _TOKENS, "y": _Y, "vocabulary": np.array(1j)},
        {"x": _X, "y": np.array([b"\xff"] * 10)},
        {"x": _X, "y": np.array([["a", "b"]] * 10)},
    ],
    ids=["header", "no vocabulary", "infinite", "text", "complex", "bytes", "two labels"],
)
def test_odd_arrays_are_refused_with_our_own_error(tmp_path: Path, members: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        load(_npz(tmp_path / "x.npz", **members))


@pytest.mark.parametrize("shape", [(1,) * 100, (0, *((1 << 32) - 1,) * 4)], ids=["dimensions", "nothing"])
def test_an_idx_header_of_no_array_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(head + b"\0" * int(np.prod(shape, dtype=object)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 1) + b"\0")
    with pytest.raises(DataError, match="no data"):
        load(tmp_path)


@pytest.mark.parametrize("labels", [["a" * 10**6] + ["b"] * 10**4, [1 << 100, 1], [1.5, 0], [-1, 0]])
def test_labels_of_a_pickled_batch_are_whole_numbers_before_numpy_sees_them(tmp_path: Path, labels: list[Any]) -> None:
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": labels}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match="not whole numbers below 10"):
        load(tmp_path)


@pytest.mark.parametrize("name", [1 << 20_000, None], ids=["number", "nothing"])
def test_class_names_that_are_no_texts_are_refused(tmp_path: Path, name: object) -> None:
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": [name] * 10}, protocol=2))
    with pytest.raises(DataError):
        load(tmp_path)


def test_a_table_whose_words_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    head = "y," + ",".join(f"c{column}" for column in range(300))
    rows = (f"{row % 2}," + ",".join([f"w{row % 999}"] * 300) for row in range(2000))
    (tmp_path / "x.csv").write_text("\n".join([head, *rows]) + "\n")  # 3 MB, 4.6 GB when every word is a column
    with pytest.raises(DataError, match="one-hot"):
        load(tmp_path / "x.csv", target="y")


def test_one_long_name_of_a_group_does_not_make_all_of_them_long(tmp_path: Path) -> None:
    rows = "".join(f"{row % 2},1,{row % 7}\n" for row in range(20_000))
    (tmp_path / "x.csv").write_text(f"y,a,g\n0,1,{'q' * 100_000}\n{rows}")  # 8 GB as one array of texts
    split = load(tmp_path / "x.csv", target="y", group="g")
    assert split.train.groups is not None
    assert split.test.groups is not None
    assert {*split.train.groups.tolist(), *split.test.groups.tolist()} == set(range(8))


def test_one_long_name_beside_pictures_does_not_make_all_of_them_long(tmp_path: Path) -> None:
    """400 pictures: 210 MB and ten seconds as one array of texts, nothing to speak of as they are."""
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        image.new("L", (2, 2)).save(tmp_path / name / "0.png")
        for number in range(1, 200):
            os.link(tmp_path / name / "0.png", tmp_path / name / f"{number}.png")
    owners = [f"{name}/{number}.png,{number % 9}" for name in "ab" for number in range(200)]
    table = "\n".join(["file_name,patient", f"a/0.png,{'q' * 131_000}", *owners[1:]])
    (tmp_path / "metadata.csv").write_text(table)
    tracemalloc.start()
    split = load(tmp_path, group="patient")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(split.train.group_names) == 10
    assert most < 20 << 20


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a system's own folders")
def test_a_folder_that_is_no_folder_of_data_is_refused_with_our_own_error() -> None:
    with pytest.raises(DataError):
        load("/proc")


def test_a_header_of_many_columns_is_compared_once_each(tmp_path: Path) -> None:
    """Four times the columns take four times the work, of a processor alone; column by column it would be sixteen."""

    def work(columns: int) -> float:
        names = [f"{column:x}" for column in range(columns)]
        (tmp_path / "x.csv").write_text(",".join(names) + "\n" + ",".join("1" * columns) + "\n1\n")
        begun = time.process_time()
        with pytest.raises(DataError, match="1 fields"):
            load(tmp_path / "x.csv", target="0")
        return time.process_time() - begun

    assert work(25_000) < 8 * max(work(6_250), 0.05)
