"""Checkpoints: exact, checksummed, bound to their run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation import job, same_bits, trained
from fedveil.errors import CheckpointError
from fedveil.roles.server import ServerState
from fedveil.runs.checkpoint import load_checkpoint, newest_good, save_checkpoint

NORM = {"depth": 2, "width": 8, "norm": "batch"}


@cache
def some_state() -> ServerState:
    return trained(job(rounds=3, momentum=0.9, lr=0.05, options=NORM))[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    state, _ = trained(job(rounds=3, momentum=0.9, dtype=dtype, options=NORM))
    state.weights = replace(state.weights, buffers={"table": torch.arange(5), "flag": torch.tensor(True)})
    path = save_checkpoint(tmp_path, state, fingerprint="ours")
    back = load_checkpoint(path, state.weights, fingerprint="ours")
    assert (back.round, back.head_level) == (3, state.head_level)
    assert same_bits(back.velocity, state.velocity)
    for name in ("parameters", "epsilon", "statistics"):
        assert same_bits(getattr(back.weights, name), getattr(state.weights, name))
    assert torch.equal(back.weights.buffers["table"], torch.arange(5))
    assert torch.equal(back.weights.buffers["flag"], torch.tensor(True))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_damaged_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    state = some_state()
    path = save_checkpoint(folder, state, fingerprint="ours")
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        back = load_checkpoint(path, state.weights, fingerprint="ours")
    except CheckpointError:
        return
    # White space in the header may be changed into other white space; numbers may not.
    assert same_bits(back.weights.parameters, state.weights.parameters)
    assert same_bits(back.velocity, state.velocity)
    assert (back.round, back.head_level) == (state.round, state.head_level)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, some_state(), fingerprint="ours")
    other = job(options={"depth": 2, "width": 9, "norm": "batch"}).weights
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_checkpoint(path, other, fingerprint="ours")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_checkpoint(path, job(options=NORM, dtype="float32").weights, fingerprint="ours")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, some_state(), fingerprint="theirs")
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        load_checkpoint(path, some_state().weights, fingerprint="ours")


def test_an_empty_folder_has_no_checkpoint_and_that_is_no_error(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none", some_state().weights, fingerprint="ours") == (None, [])


def test_half_written_files_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, some_state(), fingerprint="ours")
    (tmp_path / ".round-00000009.safetensors.123.tmp").write_bytes(b"torn")
    found, refused = newest_good(tmp_path, some_state().weights, fingerprint="ours")
    assert found is not None
    assert refused == []
