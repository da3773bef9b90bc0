"""The shape of the source: imports point one way, files stay short, only the command line prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedveil

ROOT = Path(fedveil.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 700

LEAVES = {"errors", "plain", "flat", "secrets", "shapes", "version", "config", "data", "models"}
# cli → api, trials, deploy → engines.flower → runs → audit, schemes, engines → protocol → downlink, work, uplink,
# ledger → crypto, leaves below. The Flower engine carries whole runs, so it stands above them; the local one below.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "plain": {"errors"},
    "version": set(),
    "flat": set(),
    "secrets": set(),
    "shapes": {"errors"},
    "config": {"errors"},
    "data": {"errors"},
    "models": {"errors", "secrets"},
    "crypto": {"errors", "secrets"},
    "ledger": {"errors"},
    "downlink": {"errors", "flat", "secrets", "shapes", "ledger", "crypto"},
    "work": {"errors", "flat", "secrets", "ledger", "crypto", "downlink"},
    "uplink": {"errors", "flat", "secrets", "ledger", "crypto"},
    "protocol": {"errors", "flat", "secrets", "shapes", "downlink", "work", "uplink", "ledger", "crypto"},
    "engines": {"errors", "flat", "protocol", "work"},
    "schemes": {"errors", "flat", "secrets", "protocol", "downlink", "work", "uplink", "ledger", "crypto"},
    "audit": LEAVES | {"protocol", "downlink", "work", "uplink", "ledger", "crypto"},
    "runs": LEAVES | {"audit", "schemes", "engines", "protocol", "downlink", "work", "uplink", "ledger", "crypto"},
    "engines.flower": LEAVES | {"runs", "schemes", "engines", "protocol", "downlink", "work", "ledger", "crypto"},
    "deploy": LEAVES | {"runs", "engines.flower"},
    "api": LEAVES | {"runs", "schemes", "engines", "protocol", "downlink", "work"},
    "trials": LEAVES | {"audit", "runs", "schemes", "engines", "protocol", "downlink", "work"},
    "tracking": LEAVES | {"runs"},
    "compare": LEAVES | {"runs", "schemes", "tracking"},
    "doctor": {"version", "api"},
    "report": LEAVES | {"trials", "runs", "ledger"},
    "cli": LEAVES
    | {"api", "audit", "trials", "runs", "schemes", "engines", "downlink", "ledger", "protocol"}
    | {"doctor", "deploy", "engines.flower", "tracking", "compare", "report"},
    "__init__": {"api", "errors", "version"},
    "__main__": {"cli"},
}
PURE = ("crypto", "ledger", "downlink", "work", "uplink", "protocol")
NOT_PURE = {"threading", "multiprocessing", "asyncio", "socket", "subprocess", "time", "datetime", "logging", "pickle"}
# Worker processes of a cipher are arithmetic on more cores: what goes in comes out, and nobody else is spoken to.
# What a client must not tell anybody else, its owner may read in the log.
ALLOWED = {"crypto/ckks/processes.py": {"subprocess", "threading"}, "uplink/fixed_point.py": {"logging"}}


def part_of(path: Path) -> str:
    names = path.relative_to(ROOT).parts
    return ".".join(names[:2]) if ".".join(names[:2]) in MAY_IMPORT else names[0].removesuffix(".py")


def modules_imported(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Dotted names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{one.name}" for one in node.names)


def parts_imported(source: str, path: Path) -> set[str]:
    package = ["fedveil", *path.relative_to(ROOT).parts[:-1]]
    names = [name.split(".") for name in modules_imported(ast.parse(source), package)]
    # The second word is the part: fedveil.models, and fedveil.errors.X for `from fedveil.errors import X`; or two.
    ours = {
        two if (two := ".".join(name[1:3])) in MAY_IMPORT else name[1]
        for name in names
        if name[0] == "fedveil" and len(name) > 1
    }
    # `from fedveil.engines.flower import X` names fedveil.engines.flower itself too, and that is enough.
    return {name for name in ours if name in MAY_IMPORT} - {part_of(path)}


def imports_by_part() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in FILES:
        found.setdefault(part_of(path), set()).update(parts_imported(path.read_text(), path))
    return found


def test_every_part_of_the_package_has_its_place() -> None:
    assert set(imports_by_part()) == set(MAY_IMPORT)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    assert imports_by_part()[part] - MAY_IMPORT[part] == set()


def test_the_allowed_directions_have_no_circle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_the_rules_that_matter_most_are_in_the_table() -> None:
    assert not MAY_IMPORT["protocol"] & {"schemes", "engines", "runs", "api", "cli"}
    assert not MAY_IMPORT["engines"] & {"downlink", "uplink", "schemes", "runs", "api", "cli"}
    for part in ("downlink", "work", "uplink"):
        assert not MAY_IMPORT[part] & {"protocol", "engines", "schemes", "runs", "api", "cli"}


@pytest.mark.parametrize(
    "line",
    [
        "import fedveil.schemes.veiled",
        "from fedveil import schemes",
        "from fedveil.schemes import find",
        "from ..schemes import find",
        "from .. import schemes",
        "def late():\n    from fedveil.schemes.registry import find",
    ],
)
def test_a_forbidden_import_is_seen(line: str) -> None:
    assert parts_imported(line, ROOT / "protocol" / "server.py") == {"schemes"}


def test_no_module_is_longer_than_a_reader_can_bear() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_nothing_prints_but_the_command_line() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if part_of(path) != "cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_the_protocol_and_what_it_stands_on_know_no_clock_no_thread_and_no_socket() -> None:
    for path in FILES:
        if part_of(path) in PURE:
            names = {name.split(".")[0] for name in modules_imported(ast.parse(path.read_text()), ["fedveil"])}
            assert names & (NOT_PURE - ALLOWED.get(str(path.relative_to(ROOT)), set())) == set(), path


def test_nothing_unpickles() -> None:
    """CIFAR comes as pickles, whose instructions we carry out ourselves; all else that is read is plain data."""
    for path in FILES:
        names = {name.split(".")[0] for name in modules_imported(ast.parse(path.read_text()), ["fedveil"])}
        assert names & {"pickle", "marshal", "shelve", "dill"} == set(), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save", "eval", "exec"):
                pytest.fail(f"{path}: {ast.unparse(node.func)}")


BLOCKED = """
import importlib, importlib.abc, sys

BLOCKED = {"rich", "typer", "click", "safetensors", "cryptography", "PIL", "matplotlib"}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Finder())
for name in BLOCKED:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is not blocked")

for name in ("models", "data", "downlink", "work", "uplink", "ledger", "protocol", "engines", "schemes", "api"):
    importlib.import_module(f"fedveil.{name}")

import torch, fedveil
from fedveil import data, models

split = data.load("digits", seed=1)
net = models.build("mlp", input_shape=split.train.input_shape, outputs=10, depth=2, width=8)
parts = data.partition(split.train, clients=3, seed=1)
clients = [(split.train.x[rows], split.train.y[rows]) for rows in parts]
result = fedveil.train(net, clients, test=(split.test.x, split.test.y), rounds=2, seed=1)
assert len(result.metrics) == 2
assert not BLOCKED & {name.split(".")[0] for name in sys.modules}
print("trained")
"""


def test_training_in_memory_needs_neither_terminal_nor_file_packages() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
