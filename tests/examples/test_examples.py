"""The examples run, at small settings, and say what their pages promise."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT
from shell import Done, script


def example(name: str, *arguments: str | Path, folder: Path) -> Done:
    return script((ROOT / "examples" / name).read_text(encoding="utf-8"), *arguments, folder=folder, name=name)


def test_three_hospitals(tmp_path: Path) -> None:
    done = example("three_hospitals.py", "--rounds", "4", "--out", tmp_path / "run", folder=tmp_path)
    assert done.code == 0, done.error
    page = (DOCS / "examples" / "three-hospitals.md").read_text(encoding="utf-8")
    sizes = re.findall(r"(\d+) records, +(\d+) of them malignant", done.output)
    assert sizes == re.findall(r"(\d+) records, +(\d+) of them malignant", page)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert max(line["epsilon"] for line in ledger["lines"]) <= 3.0
    assert not ledger["simulation"]
    for text in ledger["unprotected"]:
        assert f"– {text}" in done.output
    assert "The server cannot rebuild what a client trained on by these attacks" in done.output
    assert "The server with 2 of 3 clients cannot rebuild" in done.output


def test_three_hospitals_policy_is_the_one_the_page_shows() -> None:
    page = (DOCS / "examples" / "three-hospitals.md").read_text(encoding="utf-8")
    script = (ROOT / "examples" / "three_hospitals.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (used,) = re.findall(r'POLICY = """\\\n(.*?)"""', script, flags=re.DOTALL)
    assert tomllib.loads(shown) == tomllib.loads(used)


@pytest.mark.slow
def test_three_hospitals_keep_to_their_own_limit(tmp_path: Path) -> None:
    """A server that asks for more than a hospital's file allows gets what the file allows."""
    done = example(
        "three_hospitals.py",
        "--epsilon",
        "8",
        "--rounds",
        "12",
        "--no-audit",
        "--out",
        tmp_path / "run",
        folder=tmp_path,
    )
    assert done.code == 0, done.error
    assert "its policy allows 3" in done.output
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert 2.0 < max(line["epsilon"] for line in ledger["lines"]) <= 3.0


def table_of(text: str) -> dict[str, list[str]]:
    rows = [line.split() for line in text.splitlines() if line.startswith(("fedavg", "lossless", "veil-secagg"))]
    return {row[0]: row[1:] for row in rows}


def check_banks(output: str) -> None:
    rows = table_of(output)
    assert set(rows) == {"fedavg", "lossless", "veil-secagg"}
    assert len({error for error, *_ in rows.values()}) == 1  # to five decimals
    assert float(rows["lossless"][1]) > 2 * float(rows["lossless"][0])
    assert rows["veil-secagg"][-2:] == ["aggregate", "only"]
    (largest,) = re.findall(r"largest difference between the three errors: (\S+)", output)
    assert float(largest) < 1e-5


def test_a_bank_consortium_on_a_made_up_table_says_so(tmp_path: Path) -> None:
    done = example("bank_consortium.py", "--rounds", "2", folder=tmp_path)
    assert done.code == 0, done.error
    assert done.output.startswith("NOT REAL DATA")
    check_banks(done.output)


@pytest.mark.data
def test_a_bank_consortium_on_the_real_table(tmp_path: Path) -> None:
    folder = Path(os.environ.get("FEDVEIL_DATA", "")) / "bank"
    found = sorted(folder.glob("bank-additional-full.csv*"))
    if not os.environ.get("FEDVEIL_DATA") or not found:
        pytest.skip("FEDVEIL_DATA names no folder with bank/bank-additional-full.csv")
    done = example("bank_consortium.py", "--data", found[0], "--rounds", "5", "--out", "run", folder=tmp_path)
    assert done.code == 0, done.error
    assert "NOT REAL DATA" not in done.output
    check_banks(done.output)


def test_a_bank_consortium_without_the_file_it_is_told_of(tmp_path: Path) -> None:
    done = example("bank_consortium.py", "--data", "gone.csv", folder=tmp_path)
    assert done.code == 3
    assert done.error.startswith("error: ")
    assert "Traceback" not in done.error
