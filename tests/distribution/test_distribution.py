"""What is built can be installed, holds what it should, and its tests pass away from the sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedveil import __version__

ROOT = Path(__file__).parents[2]
NEEDED_BY_TESTS = (
    "README.md",
    "Makefile",
    "constraints.txt",
    "pyproject.toml",
    "mkdocs.yml",
    "docs/reproduction.md",
    "docs/results/bank.json",
    "benchmarks/tables.py",
    "tools/command_page.py",
    "tests/shell.py",
    "tests/test_architecture.py",
    ".ci/run",
    "LICENSE",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "CHANGELOG.md",
)
SUBSET = (
    "tests/test_config.py",
    "tests/test_tensors.py",
    "tests/test_secrets.py",
    "tests/uplink/test_exact_sum.py",
    "tests/schemes",
    "tests/papers/test_page.py",
    "tests/distribution/test_citation.py",
    "tests/test_readme.py::test_the_two_commands_are_targets_of_the_makefile",
)

needs_builder = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed: pip install 'fedveil[dev]'"
)


def build(source: Path, out: Path, *targets: str) -> Path:
    """Build with what is installed, so that no network is asked."""
    options = [part for target in targets for part in ("-t", target)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out), *options],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel")


def sdist(built: Path) -> Path:
    return built / f"fedveil-{__version__}.tar.gz"


def wheel(built: Path) -> Path:
    return built / f"fedveil-{__version__}-py3-none-any.whl"


def members(built: Path) -> set[str]:
    with tarfile.open(sdist(built)) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@needs_builder
def test_the_source_distribution_holds_what_the_tests_read(built: Path) -> None:
    assert set(NEEDED_BY_TESTS) - members(built) == set()


@needs_builder
def test_the_source_distribution_holds_every_file_under_version_control(built: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    assert tracked - members(built) == set()


@needs_builder
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"fedveil", f"fedveil-{__version__}.dist-info"}
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "fedveil").rglob("*") if path.is_file()}
    wanted = {name for name in ours if "__pycache__" not in name}
    assert wanted - set(names) == set()


@needs_builder
def test_the_wheel_needs_the_core_packages_only_and_brings_the_command(built: Path) -> None:
    with zipfile.ZipFile(wheel(built)) as archive:
        about = message_from_bytes(archive.read(f"fedveil-{__version__}.dist-info/METADATA"))
        entry = archive.read(f"fedveil-{__version__}.dist-info/entry_points.txt").decode()
    needed = [Requirement(str(one)) for one in about.get_all("Requires-Dist", [])]
    always = {one.name for one in needed if one.marker is None}
    core = {"torch", "numpy", "scipy", "scikit-learn", "safetensors", "rich", "typer", "click", "cryptography"}
    assert always == core
    assert "fedveil = fedveil.cli:main" in entry


@needs_builder
@pytest.mark.slow
def test_tests_pass_from_an_unpacked_source_distribution_installed_elsewhere(built: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist(built)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    made = wheel(build(unpacked, tmp_path / "again", "wheel"))
    site = tmp_path / "site"
    with zipfile.ZipFile(made) as archive:  # what pip does with a pure wheel, but for the command
        archive.extractall(site)
    shutil.rmtree(unpacked / "src")
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import fedveil; print(fedveil.__file__)"],
        cwd=unpacked,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(where.strip()).is_relative_to(site)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SUBSET],
        cwd=unpacked,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
