"""Every entry runs for real: the table of nadp whole, the others by a cell or two on small data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.errors import ConfigError, DataError
from idx_folders import idx_folder
from papers import Options, nadp, reproduce
from shell import Done, fedveil


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mnist", "fashion-mnist"):
        idx_folder(tmp_path / "data" / name)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def strengths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The table of strengths, computed by the command, and what that said."""
    out = tmp_path_factory.mktemp("strengths") / "out"
    return out, fedveil("reproduce", "nadp-table3", "--out", out)


def kept(out: Path, name: str) -> dict[str, dict[str, float]]:
    cells = json.loads((out / f"{name}.json").read_text())["cells"]
    return {cell: seeds["1"]["result"] for cell, seeds in cells.items()}


def test_the_table_of_strengths_is_met_in_all_sixty_values(strengths: tuple[Path, Done]) -> None:
    report = reproduce("nadp-table3", Options(out=strengths[0]))
    assert report.verdict == "reproduced"
    assert report.checks[0].seen == "60 of 60 agree"
    assert len(report.rows) == 12


def test_one_wrong_value_in_the_table_of_strengths_is_seen(
    strengths: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = nadp.TABLE3[1.0, 25]
    monkeypatch.setitem(nadp.TABLE3, (1.0, 25), (row[0] + 1e-4, *row[1:]))
    report = reproduce("nadp-table3", Options(out=strengths[0]))
    assert report.verdict.startswith("refuted")
    assert report.checks[0].seen == "59 of 60 agree"


SOME = {
    "nadp-table1": ["fashion-mnist/n10/fedavg", "fashion-mnist/n10/eps2/nadp-exact"],
    "nadp-fig3": ["mnist/n20/q0.5/fedavg", "mnist/n20/q0.5/nadp"],
    "nadp-fig4": ["mnist/n25/d0.5/ldp", "mnist/n25/d0.5/nadp-1.0"],
    "mpdp-accuracy": ["*/eps20/mpdp", "*/eps20/mp-cdp", "*/eps20/mp-ldp"],
    "veil-dp-accuracy": ["digits/eps8/nadp", "digits/eps8/veil-dp"],
}


OFTEN = ("veil-dp-accuracy",)
"""It trains with noise, and under a veil; plain training on pictures is in the test without packages."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SOME]
)
def test_an_entry_trains_its_cells(name: str, folder: Path, tmp_path: Path) -> None:
    report = reproduce(name, Options(out=tmp_path, data=folder, quick=True, only=SOME[name]))
    figures = kept(tmp_path, f"{name}-quick")
    assert len(figures) >= 2
    assert all(0 <= one["accuracy"] <= 100 for one in figures.values())
    assert all(one["rounds"] > 0 and "stopped" not in one for one in figures.values())
    assert report.quick
    noisy = {cell: one for cell, one in figures.items() if "/ldp" in cell or "/nadp" in cell or "/veil-dp" in cell}
    assert all(one["noise"] > 0 and one["epsilon"] > 0 for one in noisy.values())


@pytest.mark.slow
def test_exact_accounting_adds_less_noise_for_the_same_epsilon(folder: Path, tmp_path: Path) -> None:
    reproduce("nadp-table1", Options(out=tmp_path, data=folder, quick=True, only=["fashion-mnist/n10/eps4/*"]))
    figures = kept(tmp_path, "nadp-table1-quick")
    start = "fashion-mnist/n10/eps4/"
    assert figures[start + "nadp-exact"]["noise"] < 0.8 * figures[start + "nadp"]["noise"]
    assert figures[start + "nadp"]["noise"] < figures[start + "ldp"]["noise"]
    assert figures[start + "nadp-exact"]["epsilon"] <= 4.0001


def test_missing_data_stop_an_entry_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No data set 'fashion-mnist'"):
        reproduce("nadp-table1", Options(out=tmp_path / "out", data=tmp_path, quick=True))
    assert not (tmp_path / "out").exists()


def test_the_command_lists_entries_runs_one_and_explains_what_is_wrong(
    strengths: tuple[Path, Done], tmp_path: Path
) -> None:
    listed = fedveil("reproduce", "--list", "--json")
    assert {"nadp-table1", "nadp-table3"} <= {row["name"] for row in json.loads(listed.output)}
    assert "nadp-table3" in fedveil("reproduce", "--list").output
    out, done = strengths
    assert done.code == 0
    assert "verdict: reproduced" in done.output
    assert "1.4446 / 1.4446" in done.output
    assert "[12/12]" in done.error
    assert "12 of 12 cells are in" in fedveil("reproduce", "nadp-table3", "--out", out).error
    nameless = fedveil("reproduce")
    assert (nameless.code, nameless.error.startswith("error: Name what to run again")) == (ConfigError.exit_code, True)
    assert "Did you mean 'nadp-table3'" in fedveil("reproduce", "nadp-tabel3").error
    wrong = fedveil("reproduce", "nadp-table1", "--data", tmp_path, "--out", tmp_path)
    assert wrong.code == DataError.exit_code
    assert f"No data set 'fashion-mnist' under {tmp_path}" in wrong.error


def test_without_a_checkout_the_command_says_where_the_tables_are_and_runs_no_code_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedveil.cli import reproduce as command

    monkeypatch.setattr(command, "_CHECKOUT", tmp_path / "installed")
    planted = tmp_path / "papers" / "__init__.py"
    planted.parent.mkdir()
    planted.write_text("raise SystemExit('code of the working folder ran')\n")
    monkeypatch.chdir(tmp_path)
    told = fedveil("reproduce", "--list")
    assert told.code == ConfigError.exit_code
    assert "--papers CHECKOUT/papers" in told.error
    here = Path(__file__).parents[2] / "papers"
    assert "nadp-table3" in fedveil("reproduce", "--list", "--papers", here).output


BARE = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"rich", "typer", "click", "safetensors", "cryptography", "PIL", "matplotlib"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Finder())
from papers import Options, run_entry

out, data = sys.argv[1:]
run_entry("nadp-table3", Options(out=out))
run_entry("nadp-table1", Options(out=out, data=data, quick=True, only=["fashion-mnist/n10/fedavg"]))
"""


def test_entries_run_and_print_without_terminal_file_and_key_packages(
    strengths: tuple[Path, Done], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(strengths[0], tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path / "out"), str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "verdict: reproduced" in done.stdout
    assert "[1/1] fashion-mnist/n10/fedavg seed 1: " in done.stdout
