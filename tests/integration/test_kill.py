"""kill -9 at any moment, then --resume: the same model, bit for bit, and one line of metrics per round."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shell import fedveil

ROUNDS = 60
SETTINGS = [
    *("--scheme", "lossless", "--dataset", "digits", "--model", "mlp", "-o", "depth=2", "-o", "width=12"),
    *("-o", "norm=batch", "--clients", "4", "--cohort", "3", "--batch-size", "30", "--momentum", "0.9", "--lr", "0.05"),
    *("--rounds", str(ROUNDS), "--seed", "5", "--checkpoint-every", "3"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert fedveil("run", *SETTINGS, "--out", folder).code == 0
    return folder


def lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def start_and_kill(folder: Path, *, after: int, delay: float) -> int:
    """Start a run in its own process, kill it once `after` rounds are written; returns how many were."""
    command = [sys.executable, "-m", "fedveil", "run", *SETTINGS, "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while len(lines(folder)) < after or not (folder / "config.toml").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    assert not (folder / "summary.json").exists()
    return len(lines(folder))


def check_equal(folder: Path, reference: Path) -> None:
    ours, theirs = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value.view(torch.uint8), theirs[name].view(torch.uint8)), name
    rows = [json.loads(line) for line in lines(folder)]
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    expected = [json.loads(line) for line in lines(reference)]
    for row, other in zip(rows, expected, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


# Before the first round, before the first checkpoint, just after one, between two, and late.
LONGER = [pytest.param(after, marks=pytest.mark.slow) for after in (0, 3, 50)]


@pytest.mark.parametrize("after", [1, 14, 40, *LONGER])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, uninterrupted: Path, after: int) -> None:
    folder = tmp_path / "run"
    delay = random.Random(after).uniform(0, 0.01)
    written = start_and_kill(folder, after=after, delay=delay)
    assert after <= written < ROUNDS
    done = fedveil("run", "--resume", "--out", folder)
    assert done.code == 0, done.error
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "run"
    start_and_kill(folder, after=5, delay=0.0)
    for after in (10, 20, 30, 45):
        command = [sys.executable, "-m", "fedveil", "run", "--resume", "--out", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while len(lines(folder)) < after and process.poll() is None:
                time.sleep(0.0005)
            process.kill()
    assert fedveil("run", "--resume", "--out", folder).code == 0
    check_equal(folder, uninterrupted)
