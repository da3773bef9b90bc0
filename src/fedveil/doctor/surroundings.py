"""The machine and the shell FedVeil runs in."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedveil.doctor.finding import ADVICE, OK, PROBLEM, Finding
from fedveil.version import __version__

DATA_VARIABLE, WORKERS_VARIABLE = "FEDVEIL_DATA", "FEDVEIL_WORKERS"
VARIABLES = (DATA_VARIABLE, WORKERS_VARIABLE)
DATA_SETS = ("bank", "cifar10", "fashion-mnist", "ham10000", "imagenette", "imdb", "mnist")
"""Folders that entries of `fedveil reproduce` and benchmarks look for."""

OLDEST_PYTHON = (3, 11)
_GIGABYTE = 1e9
_LITTLE_MEMORY = 2.0
_LITTLE_DISK, _NO_DISK = 2.0, 0.1


def python() -> Iterator[Finding]:
    """Python's and our own version."""
    found = f"{sys.version.split()[0]} ({sys.executable}), fedveil {__version__} ({Path(__file__).parents[1]})"
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("Python", PROBLEM, found, "use Python 3.11 or newer")
    else:
        yield Finding("Python", OK, found)


def torch_and_device() -> Iterator[Finding]:
    """Whether torch loads, and what it can compute on."""
    try:
        import torch
    except Exception as reason:  # a compiled package fails in many ways
        yield Finding("torch", PROBLEM, f"does not load: {reason}", "pip install -U torch")
        return
    yield Finding("torch", OK, torch.__version__)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count()))
        yield Finding("device", OK, f"cpu, and cuda: {names} (use it with --device cuda)")
    elif shutil.which("nvidia-smi"):
        todo = "install a build of torch for CUDA (pytorch.org says which), or go on with the CPU"
        yield Finding("device", ADVICE, "cpu; there is an NVIDIA driver, but this torch does not reach a GPU", todo)
    else:
        yield Finding("device", OK, "cpu")


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> Iterator[Finding]:
    """Whether torch starts as many threads as there are cores."""
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    found = f"{threads} threads of torch on {cores} cores"
    if threads > cores:
        yield Finding("threads", ADVICE, found, f"more threads than cores wait for each other: OMP_NUM_THREADS={cores}")
    else:
        yield Finding("threads", OK, found)


def folders() -> Iterator[Finding]:
    """Whether the working folder and the one for temporary files can be written to."""
    for what, place in (("working folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        yield folder(what, place)


def folder(what: str, place: Path) -> Finding:
    """Whether a file can be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"fedveil")
    except OSError as reason:
        todo = "set TMPDIR to a folder of yours" if what.startswith("temp") else "go elsewhere, or give --out"
        return Finding(what, PROBLEM, f"{place}: {reason.strerror or reason}", todo)
    return Finding(what, OK, f"{place} can be written to")


def memory() -> Iterator[Finding]:
    """What is left of the memory; nothing where the system does not say."""
    free = free_memory(Path("/proc/meminfo"))
    if free is None:
        return
    found = f"{free:.1f} GB free"
    if free < _LITTLE_MEMORY:
        yield Finding("memory", ADVICE, found, "close other programs, or use smaller models and fewer clients a round")
    else:
        yield Finding("memory", OK, found)


def free_memory(file: Path) -> float | None:
    """Gigabytes that can be had, by Linux's own estimate."""
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / _GIGABYTE
    return None


def disk() -> Iterator[Finding]:
    """What is left of the disk the working folder lies on."""
    yield disk_finding(shutil.disk_usage(Path.cwd()).free / _GIGABYTE)


def disk_finding(free: float) -> Finding:
    """What so many free gigabytes mean."""
    found = f"{free:.1f} GB free for {Path.cwd()}"
    if free < _LITTLE_DISK:
        todo = "make room: a run keeps checkpoints, and --record every message of some rounds"
        return Finding("disk", PROBLEM if free < _NO_DISK else ADVICE, found, todo)
    return Finding("disk", OK, found)


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """FedVeil's own variables, and those that look like them."""
    for name in sorted(one for one in environment if one.startswith("FEDVEIL_")):
        value = environment[name]
        if name == DATA_VARIABLE:
            yield _data(Path(value).expanduser())
        elif name == WORKERS_VARIABLE:
            fine = value.strip().isdecimal() and int(value) > 0
            todo = "" if fine else "set it to a whole number of processes from 1 on, or unset it"
            yield Finding(name, OK if fine else PROBLEM, value, todo)
        else:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            todo = f"did you mean {near[0]}?" if near else f"FedVeil reads {' and '.join(VARIABLES)} only"
            yield Finding(name, ADVICE, f"{value} (FedVeil knows no such variable)", todo)
    if DATA_VARIABLE not in environment:
        todo = f"for `fedveil reproduce`: set {DATA_VARIABLE}, or give --data"
        yield Finding(DATA_VARIABLE, ADVICE, "not set: digits and breast-cancer are embedded, no other data", todo)


def _data(place: Path) -> Finding:
    if not place.is_dir():
        return Finding(
            DATA_VARIABLE, PROBLEM, f"{place} is no folder", "set it to the folder of the data sets' folders"
        )
    found = [name for name in DATA_SETS if (place / name).is_dir()]
    if not found:
        todo = f"put data sets there, each in a folder of its own: {', '.join(DATA_SETS)}"
        return Finding(DATA_VARIABLE, ADVICE, f"{place}: no data set of a known name", todo)
    return Finding(DATA_VARIABLE, OK, f"{place}: {', '.join(found)}")
