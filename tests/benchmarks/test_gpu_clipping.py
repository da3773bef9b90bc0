"""The rows of clipping on a GPU are made of real steps; on a CPU they run too, small and without a bound."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import gpu_clipping


@pytest.mark.slow
def test_clipped_steps_are_held_against_plain_ones_and_their_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_clipping.BATCHES, "cpu", (2,))
    (row,) = gpu_clipping.gpu_clipping(torch.device("cpu"), repeats=1)
    assert math.isfinite(row.measured.middle)
    assert row.measured.middle > 0
    assert row.holds is None
    # 4 × 269,722 numbers a sample over 3 × 2 × 41 million multiplications, which the first layer's input does not need.
    assert "FLOPs: 1.004" in row.note
