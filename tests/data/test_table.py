from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from fedveil.data.tabular import read_table
from fedveil.errors import DataError


def table(tmp_path: Path, text: str | bytes, name: str = "toy.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(tmp_path: Path, delimiter: str) -> None:
    rows = [["name", "size", "note"], ["a", "1", '"x, y; z"'], ["b", "2", '"u | v"']]
    read = read_table(table(tmp_path, "\n".join(delimiter.join(row) for row in rows)))
    assert read.columns == {"name": ["a", "b"], "size": ["1", "2"], "note": ["x, y; z", "u | v"]}


def test_quoted_fields_may_hold_line_breaks_and_quotes(tmp_path: Path) -> None:
    read = read_table(table(tmp_path, 'text,y\n"one\ntwo ""2""",1\n\nlast,0\n'))
    assert read.columns == {"text": ['one\ntwo "2"', "last"], "y": ["1", "0"]}
    assert read.place(1).endswith("row 2 (line 5)")


@pytest.mark.parametrize(("name", "pack"), [("toy.csv.gz", gzip.compress), ("toy.csv.xz", lzma.compress)])
def test_compressed_tables_are_read_and_damaged_ones_named(tmp_path: Path, name: str, pack: object) -> None:
    packed = pack(b"a,b\n1,2\n" * 50)  # type: ignore[operator]
    assert len(read_table(table(tmp_path, packed, name))) == 99
    for damaged in (packed[: len(packed) // 2], b"plain"):
        with pytest.raises(DataError, match=name):
            read_table(table(tmp_path, damaged, name))


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    assert list(read_table(table(tmp_path, b"\xef\xbb\xbfa,b\n1,2\n")).columns) == ["a", "b"]


def test_numbered_columns_are_a_header(tmp_path: Path) -> None:
    assert list(read_table(table(tmp_path, "0,1,2\n5,6,7\n")).columns) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("a,b\n", "no rows"),
        ("1.5,2.5\n3.5,4.5\n", "Add a header line"),
        ("5,0,0\n4,0,0\n", "0 occur more than once.*header"),
        ("a,b\n1,2\n3\n", r"row 2 \(line 3\): 1 fields where the header has 2"),
        (b"a,b\n\xff\xfe,2\n", "UTF-8"),
        ("a,b\n" + "x" * 200_000 + ",2\n", "not a readable CSV"),
    ],
)
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"toy\.csv.*{message}"):
        read_table(table(tmp_path, content))
