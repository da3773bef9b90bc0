"""The command as a shell sees it: help, `python -m`, completion, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil import __version__, errors

ROOT = Path(__file__).parents[2]
AS_INSTALLED = "import sys; sys.argv[0] = 'fedveil'; from fedveil.cli import main; main()"
CODES = sorted({one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")})


def shell(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **variables}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    assert shell("-m", "fedveil", "--version").stdout.strip() == __version__


def test_help_names_the_commands_and_the_exit_codes() -> None:
    told = shell("-c", AS_INSTALLED, "--help")
    assert told.returncode == 0
    assert all(
        name in told.stdout for name in ("run", "ledger", "audit", "reproduce", "doctor", "--install-completion")
    )
    assert "Exit codes" in told.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/exit-codes.md"])
def test_every_exit_code_is_documented(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    told = text[text.index("xit codes") :]
    assert [code for code in (0, *CODES, 130) if re.search(rf"(?<!\d){code} \S", told) is None] == []


@pytest.mark.parametrize(
    ("typed", "place", "expected"),
    [("fedveil reprod", 1, {"reproduce"}), ("fedveil ledger --sch", 2, {"--scheme"}), ("fedveil doc", 1, {"doctor"})],
)
def test_bash_completes_commands_and_options(typed: str, place: int, expected: set[str]) -> None:
    done = shell("-c", AS_INSTALLED, _FEDVEIL_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(place))
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_every_shell(name: str) -> None:
    done = shell("-c", AS_INSTALLED, "--show-completion", name, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    assert "_FEDVEIL_COMPLETE" in done.stdout


def test_completion_installs_into_the_users_own_files(tmp_path: Path) -> None:
    done = shell(
        "-c",
        AS_INSTALLED,
        "--install-completion",
        "bash",
        HOME=str(tmp_path),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert done.returncode == 0, done.stderr
    assert "bash completion installed" in done.stdout
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_FEDVEIL_COMPLETE" in path.read_text() for path in written)
