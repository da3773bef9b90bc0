"""What stands beside the package is not left behind when a name moves: every name it imports is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE = ("benchmarks", "examples", "papers", "tools")
FILES = [file for folder in BESIDE for file in sorted((ROOT / folder).rglob("*.py"))]


def ours(file: Path) -> Iterator[tuple[str, str]]:
    """Modules of ours and the names that a file takes from them, also where only a function does."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("fedveil", *BESIDE):
            yield from ((node.module, one.name) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, "__name__") for one in node.names if one.name.split(".")[0] == "fedveil")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_import_of_ours_is_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    for module, name in ours(file):
        try:
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{module} has no {name}"
        except ModuleNotFoundError as reason:
            missing = str(reason.name)
            assert missing.split(".")[0] not in ("fedveil", *BESIDE), f"{file.name} imports {missing}"
            pytest.skip(f"needs {missing}")
