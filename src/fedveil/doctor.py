"""Whether an installation works: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import difflib
import importlib
import operator
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from fedveil.processes import available_memory, usable_cores
from fedveil.version import __version__

OK, ADVICE, PROBLEM = "ok", "advice", "problem"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its state, what was found, and what to do where it is not fine."""

    what: str
    state: str
    found: str
    todo: str = ""


def _judged(what: str, told: str, wrong: bool, state: str, todo: str) -> Check:
    """What was found: fine, or else in some state with something to do about it."""
    return Check(what, state, told, todo) if wrong else Check(what, OK, told)


PURPOSES = {
    "images": "data from folders of pictures",
    "huggingface": "data sets and networks of Hugging Face in fedveil.train",
    "flwr-datasets": "partitioners of flwr-datasets in fedveil.train",
    "plots": "curves drawn by the benchmarks",
    "accounting": "--secret-sampling: the account of secretly drawn batches",
    "he": "CKKS: ckks-fedavg, serial, and paraaegis with --cipher ckks",
    "paillier": "faster tp-smc and pile, which work without it",
    "functional": "hybridalpha: functional encryption",
    "flower": "runs on real machines: fedveil flower",
    "report": "fedveil report and fedveil compare as pages",
    "tensorboard": "fedveil run --tensorboard",
    "mlflow": "fedveil run --mlflow",
    "wandb": "fedveil run --wandb",
    "parquet": "tables and predictions as .parquet",
    "onnx": "fedveil export --format onnx",
    "docs": "building the documentation",
    "dev": "tests, linter and type checker",
}
"""What each extra is for."""

FLOWER_COMMANDS = ("flwr", "flower-superlink", "flower-supernode")
_PARTS = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?(?P<bounds>[^;]*)(;.*extra\s*==\s*['\"](?P<extra>[^'\"]+))?"
)
_SIGNS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt}
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")


@dataclass(frozen=True)
class Requirement:
    """A package, the versions that will do, and the extra it belongs to (none: it is always needed)."""

    name: str
    bounds: tuple[tuple[str, str], ...]
    extra: str = ""

    @property
    def wanted(self) -> str:
        """The versions that will do, in words."""
        return ", ".join(f"{sign} {bound}" for sign, bound in self.bounds)

    def allows(self, installed: str) -> bool:
        """Whether a version will do."""
        return all(_SIGNS[sign](numbers_of(installed), numbers_of(bound)) for sign, bound in self.bounds)


def numbers_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13)."""
    start = re.match(r"\d+(\.\d+)*", text)
    numbers = [] if start is None else [int(part) for part in start.group().split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def parse(text: str) -> Requirement:
    """A requirement as a package's metadata has it."""
    parts = _PARTS.match(text)
    assert parts is not None, text
    bounds = sorted(_BOUND.findall(parts["bounds"]), key=lambda bound: bound[0] not in (">=", ">"))
    return Requirement(parts["name"], tuple((sign, bound) for sign, bound in bounds), parts["extra"] or "")


def requirements() -> list[Requirement]:
    """What the installed FedVeil asks for; none where it is not installed as a package."""
    try:
        return [parse(line) for line in requires("fedveil") or ()]
    except PackageNotFoundError:
        return []


def version_of(name: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def core_packages() -> Iterator[Check]:
    """Those without which nothing works."""
    needed = [package for package in requirements() if not package.extra]
    if not needed:
        todo = "pip install . in the source's folder, for its commands and its list of packages"
        yield Check("packages", ADVICE, "fedveil runs from source files and is not installed", todo)
        return
    wrong = [
        package for package in needed if (version := version_of(package.name)) is None or not package.allows(version)
    ]
    for package in wrong:
        version = version_of(package.name)
        there = "not installed" if version is None else f"{version}; needed: {package.wanted}"
        written = ",".join(f"{sign}{bound}" for sign, bound in package.bounds)
        yield Check(f"package {package.name}", PROBLEM, there, f"pip install -U '{package.name}{written}'")
    if not wrong:
        yield Check("packages", OK, ", ".join(f"{package.name} {version_of(package.name)}" for package in needed))


def extras() -> Iterator[Check]:
    """One finding per extra: its packages' versions and what it is for."""
    known = requirements()
    for extra in dict.fromkeys(package.extra for package in known if package.extra):
        yield _extra(extra, [package for package in known if package.extra == extra])


def _extra(extra: str, parts: list[Requirement]) -> Check:
    purpose, command = PURPOSES.get(extra, "see pyproject.toml"), f"pip install -U 'fedveil[{extra}]'"
    installed = {package.name: version_of(package.name) for package in parts}
    told = ", ".join(f"{name} {there}" for name, there in installed.items() if there is not None)
    unfit = [
        package for package in parts if (there := installed[package.name]) is not None and not package.allows(there)
    ]
    if unfit:
        wanted = "; ".join(f"{package.name} must be {package.wanted}" for package in unfit)
        return Check(f"extra {extra}", PROBLEM, f"{told} ({wanted}): {purpose}", command)
    missing = [name for name, there in installed.items() if there is None]
    if missing:
        lacks = f"not installed: {', '.join(missing)}" + (f"; there: {told}" if told else "")
        return Check(f"extra {extra}", ADVICE, f"{lacks}; for {purpose}", f"if you want that: {command}")
    return Check(f"extra {extra}", OK, f"{told}; for {purpose}")


def flower_commands() -> Iterator[Check]:
    """Whether Flower's own commands, which `fedveil flower` starts, are found."""
    if version_of("flwr") is None:
        return
    places = {name: shutil.which(name) for name in FLOWER_COMMANDS}
    missing = [name for name, place in places.items() if place is None]
    told = f"not on PATH: {', '.join(missing)}" if missing else ", ".join(map(str, places.values()))
    todo = "activate the environment that flwr is installed in, so that its bin folder is on PATH"
    yield _judged("Flower's commands", told, bool(missing), ADVICE, todo)


def homomorphic() -> Iterator[Check]:
    """Whether TenSEAL, which is compiled, loads on this machine."""
    there = version_of("tenseal")
    if there is None:
        return
    try:
        importlib.import_module("tenseal")
    except Exception as reason:  # a compiled module fails in many ways
        todo = "pip install --force-reinstall 'fedveil[he]'; until then use --cipher pads"
        yield Check("TenSEAL", PROBLEM, f"{there} does not load: {reason}", todo)
    else:
        yield Check("TenSEAL", OK, f"{there} loads")


CLOSE = 1e-4
"""The largest relative difference that float32 and fixed-point numbers explain."""

_CLIENTS, _SAMPLES, _INPUTS, _CLASSES, _WIDTH = 4, 20, 8, 3, 16


def same_model() -> Iterator[Check]:
    """Train on made-up data with and without protection, and compare."""
    import fedveil.api  # noqa: F401  (loading it is not what is timed)

    started = time.perf_counter()
    apart = difference("veil-secagg")
    took = time.perf_counter() - started
    yield judged(apart, took)


def judged(apart: float, seconds: float) -> Check:
    """What a relative difference between the two models means."""
    told = f"two rounds of veil-secagg end {apart:.1e} from fedavg (relative), in {seconds:.1f} s"
    wrong = not apart <= CLOSE  # also for NaN
    todo = "this installation computes wrongly: reinstall torch and numpy, then report it with this table"
    return _judged("self-test", told + f"; at most {CLOSE:g} is rounding" * wrong, wrong, PROBLEM, todo)


def difference(scheme: str) -> float:
    """How far a scheme's model ends from that of plain averaging, relative to its length."""
    import torch

    from fedveil.api import train

    samples = torch.Generator().manual_seed(1)
    inputs = [torch.randn(_SAMPLES, _INPUTS, generator=samples) for _ in range(_CLIENTS)]
    clients = [(x, x[:, :_CLASSES].argmax(1)) for x in inputs]
    ends = []
    for name in ("fedavg", scheme):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = torch.nn.Sequential(
                torch.nn.Linear(_INPUTS, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _CLASSES)
            )
        done = train(net, clients, scheme=name, rounds=2, lr=0.1, seed=1, loss="square", progress=False)
        ends.append(torch.cat([parameter.detach().double().flatten() for parameter in done.model.parameters()]))
    return float((ends[0] - ends[1]).norm() / ends[0].norm())


DATA_VARIABLE, WORKERS_VARIABLE = "FEDVEIL_DATA", "FEDVEIL_WORKERS"
VARIABLES = (DATA_VARIABLE, WORKERS_VARIABLE)
DATA_SETS = ("bank", "cifar10", "fashion-mnist", "ham10000", "imagenette", "imdb", "mnist")
"""Folders that entries of `fedveil reproduce` and benchmarks look for."""

OLDEST_PYTHON = (3, 11)
_GIGABYTE = 1e9
_LITTLE_MEMORY = 2.0
_LITTLE_DISK, _NO_DISK = 2.0, 0.1


def python() -> Iterator[Check]:
    """Python's and our own version."""
    told = f"{sys.version.split()[0]} ({sys.executable}), fedveil {__version__} ({Path(__file__).parents[1]})"
    yield _judged("Python", told, sys.version_info < OLDEST_PYTHON, PROBLEM, "use Python 3.11 or newer")


def torch_and_device() -> Iterator[Check]:
    """Whether torch loads, and what it can compute on."""
    try:
        import torch
    except Exception as reason:  # a compiled package fails in many ways
        yield Check("torch", PROBLEM, f"does not load: {reason}", "pip install -U torch")
        return
    yield Check("torch", OK, torch.__version__)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))
        yield Check("device", OK, f"cpu, and cuda: {names} (use it with --device cuda)")
    elif shutil.which("nvidia-smi"):
        todo = "install a build of torch for CUDA (pytorch.org says which), or go on with the CPU"
        yield Check("device", ADVICE, "cpu; there is an NVIDIA driver, but this torch does not reach a GPU", todo)
    else:
        yield Check("device", OK, "cpu")


def processors() -> Iterator[Check]:
    """Whether torch starts as many threads as there are cores."""
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    todo = f"more threads than cores wait for each other: OMP_NUM_THREADS={cores}"
    yield _judged("threads", f"{threads} threads of torch on {cores} cores", threads > cores, ADVICE, todo)


def folders() -> Iterator[Check]:
    """Whether the working folder and the one for temporary files can be written to."""
    for what, place in (("working folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        yield folder(what, place)


def folder(what: str, place: Path) -> Check:
    """Whether a file can be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"fedveil")
    except OSError as reason:
        todo = "set TMPDIR to a folder of yours" if what.startswith("temp") else "go elsewhere, or give --out"
        return Check(what, PROBLEM, f"{place}: {reason.strerror or reason}", todo)
    return Check(what, OK, f"{place} can be written to")


def memory() -> Iterator[Check]:
    """What is left of the memory; nothing where the system does not say."""
    available = available_memory()
    if available is None:
        return
    free = available / _GIGABYTE
    todo = "close other programs, or use smaller models and fewer clients a round"
    yield _judged("memory", f"{free:.1f} GB free", free < _LITTLE_MEMORY, ADVICE, todo)


def disk() -> Iterator[Check]:
    """What is left of the disk the working folder lies on."""
    yield disk_finding(shutil.disk_usage(Path.cwd()).free / _GIGABYTE)


def disk_finding(free: float) -> Check:
    """What so many free gigabytes mean."""
    told, state = f"{free:.1f} GB free for {Path.cwd()}", PROBLEM if free < _NO_DISK else ADVICE
    todo = "make room: a run keeps checkpoints, and --record every message of some rounds"
    return _judged("disk", told, free < _LITTLE_DISK, state, todo)


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """FedVeil's own variables, and those that look like them."""
    for name in sorted(variable for variable in environment if variable.startswith("FEDVEIL_")):
        value = environment[name]
        if name == DATA_VARIABLE:
            yield _data(Path(value).expanduser())
        elif name == WORKERS_VARIABLE:
            wrong = not value.strip().isdecimal() or int(value) == 0
            yield _judged(name, value, wrong, PROBLEM, "set it to a whole number of processes from 1 on, or unset it")
        else:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            todo = f"did you mean {near[0]}?" if near else f"FedVeil reads {' and '.join(VARIABLES)} only"
            yield Check(name, ADVICE, f"{value} (FedVeil knows no such variable)", todo)
    if DATA_VARIABLE not in environment:
        todo = f"for `fedveil reproduce`: set {DATA_VARIABLE}, or give --data"
        yield Check(DATA_VARIABLE, ADVICE, "not set: digits and breast-cancer are embedded, no other data", todo)


def _data(place: Path) -> Check:
    if not place.is_dir():
        return Check(DATA_VARIABLE, PROBLEM, f"{place} is no folder", "set it to the folder of the data sets' folders")
    names = [name for name in DATA_SETS if (place / name).is_dir()]
    if not names:
        todo = f"put data sets there, each in a folder of its own: {', '.join(DATA_SETS)}"
        return Check(DATA_VARIABLE, ADVICE, f"{place}: no data set of a known name", todo)
    return Check(DATA_VARIABLE, OK, f"{place}: {', '.join(names)}")


Checks = Sequence[Callable[[], Iterable[Check]]]

CHECKS: Checks = (
    python,
    torch_and_device,
    processors,
    core_packages,
    extras,
    flower_commands,
    homomorphic,
    folders,
    memory,
    disk,
    variables,
    same_model,
)


def examine(checks: Checks = CHECKS) -> Iterator[Check]:
    """Every finding, as soon as it is there."""
    for check in checks:
        try:
            yield from check()
        except Exception as reason:  # whatever is wrong with the installation is what this is meant to tell
            name = check.__name__.replace("_", " ")
            yield Check(name, PROBLEM, f"the check broke: {type(reason).__name__}: {reason}", "install fedveil again")
