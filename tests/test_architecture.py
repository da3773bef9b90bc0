"""The shape of the source: imports point one way, files stay short, only the command line prints."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedveil
from federation import job
from fedveil.schemes import schemes

ROOT = Path(fedveil.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 700

LEAVES = {*"errors own_code plain framing processes tensors secrets shapes version config data models".split()}
PARTS = {"downlink", "work", "noise", "uplink", "ledger", "crypto", "protocol", "roles", "client_held"}
# Two rooms stand on two floors: what both roles must know of noise lies below the protocol, the uplinks that make it
# above; and what a run writes down for an audit lies below runs, the audit that reads it above.
FLOORS = {
    "noise": {f"uplink.{one}" for one in "noise_plan graph grid".split()},
    "record": {"audit.record", "audit.views"},
}
# cli → api, audit, flower → runs → record, schemes, engine → roles, client_held → uplink → protocol → noise, downlink,
# work → ledger → crypto, leaves below. Flower carries whole runs, so it stands above them; the local engine below.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "own_code": {"errors"},
    "plain": {"errors"},
    "framing": {"errors"},
    "processes": {"errors", "framing"},
    "version": set(),
    "tensors": {"errors"},
    "secrets": set(),
    "shapes": {"errors"},
    "config": {"errors", "own_code", "plain"},
    "data": {"errors", "own_code"},
    "models": {"errors", "own_code", "secrets"},
    "crypto": {"errors", "secrets", "framing", "processes"},
    "ledger": {"errors"},
    "noise": {"errors", "tensors", "ledger", "crypto"},
    "downlink": {"errors", "tensors", "secrets", "shapes", "ledger", "crypto"},
    "work": {"errors", "tensors", "secrets", "ledger", "crypto", "downlink"},
    "protocol": {"errors", "framing", "tensors", "secrets", "shapes", "downlink", "work", "noise", "ledger", "crypto"},
    "uplink": {"errors", "tensors", "secrets", "shapes", "downlink", "noise", "protocol", "ledger", "crypto"},
    "roles": {"errors", "tensors", "secrets", "shapes", "protocol", "downlink", "work", "ledger", "crypto"},
    "client_held": {"errors", "tensors", "secrets", "shapes"} | (PARTS - {"client_held"}),
    "engine": {"errors", "processes", "tensors", "protocol", "roles", "client_held", "work"},
    "schemes": {"errors", "own_code", "plain", "tensors", "secrets"} | PARTS,
    "record": LEAVES | PARTS,
    "runs": LEAVES | PARTS | {"record", "schemes", "engine"},
    "flower": LEAVES | PARTS | {"runs", "schemes", "engine"},
    "settings": set(),
    "api": LEAVES | PARTS | {"runs", "schemes", "engine", "settings", "tracking"},
    "audit": LEAVES | PARTS | {"record", "runs", "schemes", "engine"},
    "tracking": LEAVES | {"runs"},
    "compare": LEAVES | {"audit", "runs", "schemes", "tracking"},
    "doctor": {"version", "processes", "api"},
    "report": LEAVES | {"audit", "runs", "ledger"},
    "cli": LEAVES
    | {"api", "audit", "record", "runs", "schemes", "engine", "downlink", "ledger", "protocol"}
    | {"doctor", "flower", "tracking", "compare", "report"},
    "__init__": {"runs", "api", "data", "errors", "models", "schemes", "version"},
    "__main__": {"cli"},
}
PURE = ("crypto", "ledger", "downlink", "work", "noise", "uplink", "protocol", "roles", "client_held")
NOT_PURE = {"threading", "multiprocessing", "asyncio", "socket", "subprocess", "time", "datetime", "logging", "pickle"}
# What a client must not tell anybody else, its owner may read in the log.
ALLOWED = {"uplink/grid.py": {"logging"}}


def part(module: str) -> str:
    """The part that a module below fedveil belongs to: its first word, or the floor it stands on."""
    names = module.split(".")
    return next((floor for floor, there in FLOORS.items() if ".".join(names[:2]) in there), names[0])


def part_of(path: Path) -> str:
    return part(".".join(path.relative_to(ROOT).with_suffix("").parts))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Everything in a module's tree."""
    return tuple(ast.walk(ast.parse(source)))


def modules_imported(source: str, package: list[str]) -> Iterator[str]:
    """Dotted names of everything imported, wherever in the file."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{one.name}" for one in node.names)


def parts_imported(source: str, path: Path) -> set[str]:
    package = ["fedveil", *path.relative_to(ROOT).parts[:-1]]
    # The word after fedveil is the part: fedveil.models, and fedveil.errors.X for `from fedveil.errors import X`.
    names = modules_imported(source, package)
    ours = {part(name.removeprefix("fedveil.")) for name in names if name.startswith("fedveil.")}
    return ours & set(MAY_IMPORT) - {part_of(path)}


@cache
def imports_by_part() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in FILES:
        found.setdefault(part_of(path), set()).update(parts_imported(path.read_text(), path))
    return found


def test_every_part_of_the_package_has_its_place() -> None:
    assert set(imports_by_part()) == set(MAY_IMPORT)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_point_one_way(name: str) -> None:
    assert imports_by_part()[name] - MAY_IMPORT[name] == set()


def test_the_allowed_directions_have_no_circle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_the_rules_that_matter_most_are_in_the_table() -> None:
    above = {"schemes", "engine", "flower", "runs", "api", "cli"}
    for name in ("protocol", "roles", "client_held", "uplink"):
        assert not MAY_IMPORT[name] & above
    assert not MAY_IMPORT["engine"] & {"downlink", "uplink", "schemes", "runs", "flower", "api", "cli"}
    for name in ("downlink", "work", "noise"):
        assert not MAY_IMPORT[name] & {"protocol", "roles", *above}


@pytest.mark.parametrize(
    "line",
    [
        "import fedveil.schemes.server_held",
        "from fedveil import schemes",
        "from fedveil.schemes import find",
        "from ..schemes import find",
        "from .. import schemes",
        "def late():\n    from fedveil.schemes.registry import find",
    ],
)
def test_a_forbidden_import_is_seen(line: str) -> None:
    assert parts_imported(line, ROOT / "protocol" / "server.py") == {"schemes"}


# What a class must have to be a part of a scheme; the classes themselves are found, not listed.
PART_METHODS = {
    "uplink": {"protect", "releases"},
    "downlink": {"veil", "head_tensors"},
    "work": {"run", "run_many", "layout"},
    "central": {"on_sum", "on_gradient"},
    "cipher": {"hide", "read"},
}
WHERE_PARTS_LIVE = {"uplink", "downlink", "work", "client_held", "schemes"}


@cache
def concrete_parts() -> dict[str, type]:
    """Every class below these packages that is a part and no mere interface, by its dotted name."""
    found = {}
    for path in FILES:
        names = path.relative_to(ROOT).with_suffix("").parts
        if names[0] not in WHERE_PARTS_LIVE - {"schemes"}:
            continue
        module = importlib.import_module(".".join(("fedveil", *names)))
        for name, one in vars(module).items():
            own = (
                isinstance(one, type) and one.__module__ == module.__name__ and not getattr(one, "_is_protocol", False)
            )
            if own and any(methods <= set(dir(one)) for methods in PART_METHODS.values()):
                found[f"{module.__name__}.{name}"] = one
    return found


def test_the_parts_of_every_scheme_are_found() -> None:
    used = set()
    for info in schemes():
        made = job(scheme=info.name).scheme
        used |= {type(made.downlink), type(made.work), type(made.uplink)}
        used |= set() if made.central is None else {type(made.central)}
    assert used <= set(concrete_parts().values())


def parts_named(source: str, path: Path) -> set[str]:
    """The concrete parts that a module imports."""
    package = ["fedveil", *path.relative_to(ROOT).parts[:-1]]
    return set(modules_imported(source, package)) & set(concrete_parts())


def test_parts_answer_for_themselves() -> None:
    """Nobody but those who build schemes knows a part by its class: what others must know they ask of it."""
    outside = [path for path in FILES if path.relative_to(ROOT).parts[0] not in WHERE_PARTS_LIVE]
    named = {str(path.relative_to(ROOT)): parts_named(path.read_text(), path) for path in outside}
    assert {name: found for name, found in named.items() if found} == {}


def test_a_part_that_is_named_is_seen() -> None:
    line = "def late():\n    from fedveil.uplink.masked import Masked, pair_seed"
    assert parts_named(line, ROOT / "runs" / "loop.py") == {"fedveil.uplink.masked.Masked"}


def test_no_module_is_longer_than_a_reader_can_bear() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_one_name_means_one_thing() -> None:
    """Every public class has a name of its own in the whole package."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        module = nodes_of(path.read_text())[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_nothing_prints_but_the_command_line() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if part_of(path) != "cli"
        for node in nodes_of(path.read_text())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_the_protocol_and_what_it_stands_on_know_no_clock_no_thread_and_no_socket() -> None:
    for path in FILES:
        if part_of(path) in PURE:
            names = {name.split(".")[0] for name in modules_imported(path.read_text(), ["fedveil"])}
            assert names & (NOT_PURE - ALLOWED.get(str(path.relative_to(ROOT)), set())) == set(), path


def test_nothing_unpickles() -> None:
    """CIFAR batches and state_dicts are pickles, whose instructions we carry out ourselves; all else that is read is
    plain data."""
    for path in FILES:
        names = {name.split(".")[0] for name in modules_imported(path.read_text(), ["fedveil"])}
        assert names & {"pickle", "marshal", "shelve", "dill"} == set(), path
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save", "eval", "exec"):
                if (path.name, ast.unparse(node.func)) == ("model_file.py", "torch.save"):
                    continue  # `fedveil export --format torch` writes what torch reads; nothing of ours reads it
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

for name in ("models", "data", "downlink", "work", "uplink", "ledger", "protocol", "roles", "engine", "schemes", "api"):
    importlib.import_module(f"fedveil.{name}")

import torch, fedveil
from fedveil import data, models

split = data.load("digits", seed=1)
net = models.build("mlp", input_shape=split.train.input_shape, outputs=10, depth=2, width=8)
parts = data.partition(split.train, clients=3, seed=1)
clients = [(split.train.x[rows], split.train.y[rows]) for rows in parts]
result = fedveil.train(net, clients, test=(split.test.x, split.test.y), rounds=2, seed=1, vectorise=False)
assert len(result.metrics) == 2
assert not (BLOCKED | {"sklearn", "pandas", "sympy"}) & {name.split(".")[0] for name in sys.modules}
fedveil.train(net, clients, rounds=1, seed=1, progress=False, vectorise=True)
architecture, _ = fedveil.downlink.draw(net, split.train.x[:2], traced=False)
per_sample = fedveil.work.per_sample.PerSample(architecture, fedveil.work.losses.CrossEntropy())
assert per_sample(split.train.x[:4], split.train.y[:4], clients=2, clip=1.0).sums.shape[0] == 2
assert not {"torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"} & set(sys.modules)
assert torch._dynamo.compiled_autograd._disable  # whoever wants the compiler gets it
from torch.fx.experimental.symbolic_shapes import ShapeEnv
print("trained")
"""


def test_training_in_memory_needs_neither_terminal_nor_file_packages() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
