"""The packages FedVeil stands on: those it needs, and those of its extras."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from fedveil.doctor.finding import ADVICE, OK, PROBLEM, Finding

PURPOSES = {
    "images": "data from folders of pictures",
    "plots": "curves drawn by the benchmarks",
    "accounting": "--secret-sampling: the account of secretly drawn batches",
    "he": "CKKS: ckks-fedavg, serial, and paraaegis with --cipher ckks",
    "flower": "runs on real machines: fedveil flower",
    "report": "fedveil report and fedveil compare as pages",
    "tensorboard": "fedveil run --tensorboard",
    "mlflow": "fedveil run --mlflow",
    "docs": "building the documentation",
    "dev": "tests, linter and type checker",
}
"""What each extra is for."""

FLOWER_COMMANDS = ("flwr", "flower-superlink", "flower-supernode")
_PARTS = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?(?P<bounds>[^;]*)(;.*extra\s*==\s*['\"](?P<extra>[^'\"]+))?"
)
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

    def allows(self, found: str) -> bool:
        """Whether a version will do."""
        return all(_holds(numbers_of(found), sign, numbers_of(bound)) for sign, bound in self.bounds)


def numbers_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13)."""
    start = re.match(r"\d+(\.\d+)*", text)
    numbers = [] if start is None else [int(one) for one in start.group().split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _holds(found: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    return {">=": found >= bound, "<=": found <= bound, "==": found == bound, "<": found < bound, ">": found > bound}[
        sign
    ]


def parse(text: str) -> Requirement:
    """A requirement as a package's metadata has it."""
    parts = _PARTS.match(text)
    assert parts is not None, text
    bounds = sorted(_BOUND.findall(parts["bounds"]), key=lambda one: one[0] not in (">=", ">"))
    return Requirement(parts["name"], tuple((sign, bound) for sign, bound in bounds), parts["extra"] or "")


def requirements() -> list[Requirement]:
    """What the installed FedVeil asks for; none where it is not installed as a package."""
    try:
        return [parse(one) for one in requires("fedveil") or ()]
    except PackageNotFoundError:
        return []


def version_of(name: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def core_packages() -> Iterator[Finding]:
    """Those without which nothing works."""
    needed = [one for one in requirements() if not one.extra]
    if not needed:
        todo = "pip install . in the source's folder, for its commands and its list of packages"
        yield Finding("packages", ADVICE, "fedveil runs from source files and is not installed", todo)
        return
    wrong = [one for one in needed if (found := version_of(one.name)) is None or not one.allows(found)]
    for one in wrong:
        found = version_of(one.name)
        there = "not installed" if found is None else f"{found}; needed: {one.wanted}"
        yield Finding(f"package {one.name}", PROBLEM, there, f"pip install -U '{one.name}{_written(one)}'")
    if not wrong:
        yield Finding("packages", OK, ", ".join(f"{one.name} {version_of(one.name)}" for one in needed))


def _written(one: Requirement) -> str:
    return ",".join(f"{sign}{bound}" for sign, bound in one.bounds)


def extras() -> Iterator[Finding]:
    """One finding per extra: its packages' versions and what it is for."""
    known = requirements()
    for extra in dict.fromkeys(one.extra for one in known if one.extra):
        yield _extra(extra, [one for one in known if one.extra == extra])


def _extra(extra: str, parts: list[Requirement]) -> Finding:
    purpose, command = PURPOSES.get(extra, "see pyproject.toml"), f"pip install -U 'fedveil[{extra}]'"
    found = {one.name: version_of(one.name) for one in parts}
    told = ", ".join(f"{name} {there}" for name, there in found.items() if there is not None)
    unfit = [one for one in parts if (there := found[one.name]) is not None and not one.allows(there)]
    if unfit:
        wanted = "; ".join(f"{one.name} must be {one.wanted}" for one in unfit)
        return Finding(f"extra {extra}", PROBLEM, f"{told} ({wanted}): {purpose}", command)
    missing = [name for name, there in found.items() if there is None]
    if missing:
        lacks = f"not installed: {', '.join(missing)}" + (f"; there: {told}" if told else "")
        return Finding(f"extra {extra}", ADVICE, f"{lacks}; for {purpose}", f"if you want that: {command}")
    return Finding(f"extra {extra}", OK, f"{told}; for {purpose}")


def flower_commands() -> Iterator[Finding]:
    """Whether Flower's own commands, which `fedveil flower` starts, are found."""
    if version_of("flwr") is None:
        return
    missing = [name for name in FLOWER_COMMANDS if shutil.which(name) is None]
    if missing:
        todo = "activate the environment that flwr is installed in, so that its bin folder is on PATH"
        yield Finding("Flower's commands", ADVICE, f"not on PATH: {', '.join(missing)}", todo)
    else:
        yield Finding("Flower's commands", OK, ", ".join(str(shutil.which(name)) for name in FLOWER_COMMANDS))


def homomorphic() -> Iterator[Finding]:
    """Whether TenSEAL, which is compiled, loads on this machine."""
    there = version_of("tenseal")
    if there is None:
        return
    try:
        importlib.import_module("tenseal")
    except Exception as reason:  # a compiled module fails in many ways
        todo = "pip install --force-reinstall 'fedveil[he]'; until then use --cipher pads"
        yield Finding("TenSEAL", PROBLEM, f"{there} does not load: {reason}", todo)
    else:
        yield Finding("TenSEAL", OK, f"{there} loads")
