"""kill -9 at any moment, then --resume: the same model, bit for bit, and one line of metrics per round."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shell import fedveil

ROUNDS = 30
SETTINGS = [
    *("--scheme", "lossless", "--dataset", "digits", "--model", "mlp", "-o", "depth=2", "-o", "width=12"),
    *("-o", "norm=batch", "--clients", "4", "--cohort", "3", "--batch-size", "30", "--momentum", "0.9", "--lr", "0.05"),
    *("--rounds", str(ROUNDS), "--seed", "5", "--checkpoint-every", "3", "--no-vectorise", "--head-groups", "2"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert fedveil("run", *SETTINGS, "--out", folder).code == 0
    return folder


def lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


KILLED = """
import os, runpy, signal, sys

rows, operations = int(sys.argv.pop(1)), int(sys.argv.pop(1))

def watch(event, args):
    global rows, operations
    if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
        return
    if rows > 0:
        rows -= event == "open" and str(args[0]).endswith("metrics.jsonl") and args[1] == "a"
        return
    if operations == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    operations -= 1

sys.addaudithook(watch)
runpy.run_module("fedveil", run_name="__main__", alter_sys=True)
"""
"""A process that is killed as it begins the operation on files after so many others, once it has begun some rows."""


def killed(*words: object, rows: int, operations: int = 0) -> None:
    command = [sys.executable, "-c", KILLED, str(rows), str(operations), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def start_and_kill(folder: Path, *, after: int, operations: int = 0) -> int:
    """Start a run in its own process, killed soon after the row of round `after`; returns how many rows it wrote."""
    killed("run", *SETTINGS, "--out", folder, rows=after + 1, operations=operations)
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


# Before the first round, before the first checkpoint, just after one, between two (which the default suite takes),
# and late.
LONGER = [pytest.param(after, marks=pytest.mark.slow) for after in (0, 1, 3, 20, 25)]


@pytest.mark.parametrize("after", [11, *LONGER])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, uninterrupted: Path, after: int) -> None:
    folder = tmp_path / "run"
    written = start_and_kill(folder, after=after, operations=random.Random(after).randrange(12))
    assert after <= written < ROUNDS
    done = fedveil("run", "--resume", "--out", folder)
    assert done.code == 0, done.error
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "run"
    start_and_kill(folder, after=5)
    for operations in range(4):
        killed("run", "--resume", "--out", folder, rows=10, operations=operations)
    assert fedveil("run", "--resume", "--out", folder).code == 0
    check_equal(folder, uninterrupted)
