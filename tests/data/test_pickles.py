from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil.data.pictures import read_pickle
from fedveil.errors import DataError


class Calls:
    """Pickles as a call of ``function`` with ``arguments``: what a hostile file does."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_file_runs_nothing(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "batch"
    for function, argument in (
        (os.system, f"touch {trace}"),
        (eval, f"open({str(trace)!r}, 'w')"),
        (os.mkdir, trace),
    ):
        path.write_bytes(pickle.dumps({"data": Calls(function, argument)}, protocol=protocol))
        with pytest.raises(DataError, match=r"batch: names .*nothing was run"):
            read_pickle(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "named", ["builtins\ngetattr", "builtins\nexec", "numpy\nload", "numpy\nfromfile", "operator\nattrgetter"]
)
def test_even_naming_something_else_is_refused(tmp_path: Path, named: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"c" + named.encode() + b"\n.")
    with pytest.raises(DataError, match=named.replace("\n", ".")):
        read_pickle(path)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": np.array([{}, []], dtype=object)}))
    with pytest.raises(DataError, match="batch"):
        read_pickle(path)


def test_a_forged_record_type_is_refused(tmp_path: Path) -> None:
    # numpy's own reader would take these eight bytes for the address of an object.
    field = b"U\x01f(cnumpy\ndtype\n(U\x02O8K\x00K\x01tRK\x00t"
    dtype = b"cnumpy\ndtype\n(U\x02V8K\x00K\x01tR(K\x03U\x01|N(U\x01ft}" + field + b"sK\x08K\x01K\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x01t"
        + dtype
        + b"\x89U\x08AAAAAAAAtb"
    )
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}U\x04data" + array + b"s.")
    with pytest.raises(DataError, match="arrays of type"):
        read_pickle(path)


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"p2147483647\n"])
def test_a_memo_that_claims_gigabytes_is_refused(tmp_path: Path, put: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"}" + put + b".")
    with pytest.raises(DataError, match="memo index 2147483647"):
        read_pickle(path)


def test_a_file_cannot_change_the_stand_ins(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    for named in (
        b"numpy\ndtype",
        b"numpy\nndarray",
        b"_codecs\nencode",
        b"numpy.core.multiarray\n_reconstruct",
    ):
        path.write_bytes(b"\x80\x02c" + named + b"\nN}U\x05arrayK\x01s\x86b.")
        with pytest.raises(DataError):
            read_pickle(path)
    path.write_bytes(pickle.dumps({"data": np.arange(3)}))
    assert np.array_equal(read_pickle(path)["data"], np.arange(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(5, dtype=">i4"),
    ],
)
def test_honest_arrays_survive_every_protocol(tmp_path: Path, protocol: int, array: np.ndarray) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": array, "name": "first"}, protocol=protocol))
    content = read_pickle(path)
    assert content["name"] == "first"
    assert np.array_equal(content["data"], array)  # type: ignore[arg-type]


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    whole = pickle.dumps({"data": np.arange(9, dtype=np.uint8), "labels": [1, 2, 3]}, protocol=2)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="batch"):
            read_pickle(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=60))
def test_noise_never_escapes_as_another_error(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(noise)
    with pytest.raises(DataError):
        read_pickle(path)


@pytest.mark.parametrize("key", [False, True], ids=["a list of lists", "a key that takes forever"])
def test_a_few_bytes_that_stand_for_billions_are_refused_before_they_are_made(tmp_path: Path, key: bool) -> None:
    if key:
        content = _dumped_key(40)
    else:
        shared: list[object] = [1]
        for _ in range(40):
            shared = [shared, shared]
        content = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": shared}, protocol=2)
    assert len(content) < 10_000
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(DataError, match="data_batch_1"):
        read_pickle(path)


def _dumped_key(levels: int) -> bytes:
    """{(((1, 1), (1, 1)), …): 1}, written by hand: Python itself would take forever to hash it."""
    body = b"K\x01"
    for level in range(levels):
        where = bytes([level])
        body += b"q" + where + b"h" + where + b"\x86"
    return b"\x80\x02}" + body + b"K\x01s."


def test_bytes_named_again_and_again_are_not_copied_each_time(tmp_path: Path) -> None:
    """5 kB, made into an array 1,500 times."""
    array = b"cnumpy._core.numeric\n_frombuffer\n(h\x00h\x01(M\x88\x13tU\x01CtR"
    text, kind = b"T\x88\x13\x00\x00" + bytes(5000) + b"q\x00", b"cnumpy\ndtype\n(U\x02u1tRq\x01"
    content = b"\x80\x02" + text + kind + array * 1500 + b"}."
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(DataError, match="many times its own size"):
        read_pickle(path)


@pytest.mark.parametrize("instruction", [b"}", b"\x85", b"("], ids=["dictionaries", "tuples in tuples", "marks"])
def test_a_file_of_nothing_but_instructions_is_refused_before_it_costs_anything(
    tmp_path: Path, instruction: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.data.pickles._MOST_STEPS", 1000)
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}" + instruction * 998 + b".")
    with pytest.raises(DataError) as enough:
        read_pickle(path)
    assert "instructions" not in str(enough.value)
    path.write_bytes(b"\x80\x02}" + instruction * 999 + b".")
    with pytest.raises(DataError, match="more than 1,000 instructions"):
        read_pickle(path)


@pytest.mark.parametrize("content", [b"c%s\nB\n.", b"\x80\x02cnumpy\ndtype\n(S'%s'\ntR."], ids=["name", "type"])
def test_a_long_name_makes_no_long_message(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(content % (b"A" * 50_000))
    with pytest.raises(DataError, match="AAA…") as refused:
        read_pickle(path)
    assert len(str(refused.value)) < 300 + len(str(path))


def test_a_length_that_is_not_there_is_refused_without_allocating(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "batch"
    for opcode in (b"\x96", b"\x8e", b"\x8d"):
        path.write_bytes(b"\x80\x05" + opcode + (1 << 33).to_bytes(8, "little") + b"x.")
        tracemalloc.start()
        with pytest.raises(DataError):
            read_pickle(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()
