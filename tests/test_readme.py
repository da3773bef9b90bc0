"""What the README shows works when it is typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_block_runs(tmp_path: Path) -> None:
    (block,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    accuracy, seen, cover = map(float, done.stdout.split())
    assert 0 <= accuracy <= 1
    assert 0 <= seen <= 1
    assert cover == 1.0
    assert (tmp_path / "server-model.pt").exists()


def test_the_fedveil_commands_run_one_after_the_other(tmp_path: Path) -> None:
    lines = [line.partition("#")[0].strip() for block in blocks("console") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("fedveil ")]
    assert len(commands) >= 5
    environment = {**os.environ, "COLUMNS": "120"}
    for command in commands:
        words = [sys.executable, "-m", "fedveil", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("target", ["run", "test"])
def test_the_two_commands_are_targets_of_the_makefile(target: str) -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
