"""Measurements on Flower, one JSON file: each is written as it comes, and not taken again."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedveil.errors import FedVeilError

Measured = dict[str, Any]


class Store:
    """Named measurements in a file. What is there is not measured again, unless `again` says so."""

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self.path, self._again = path, again
        self._taken: dict[str, Measured] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def has(self, *names: str) -> bool:
        """Whether there is nothing left to measure for these names."""
        return not self._again and all(name in self._taken and "skipped" not in self._taken[name] for name in names)

    def get(self, name: str) -> Measured | None:
        return self._taken.get(name)

    def named(self, start: str) -> dict[str, Measured]:
        """Measurements whose names begin so, by the rest of their names."""
        return {name.removeprefix(start): one for name, one in self._taken.items() if name.startswith(start)}

    def measure(self, name: str, work: Callable[[], Measured]) -> None:
        """Take one measurement and write it down, with the load of the machine before and after."""
        if self.has(name):
            return
        before, began = os.getloadavg()[0], time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        print(f"{name} …", flush=True)
        try:
            found = work()
        except (FedVeilError, RuntimeError) as reason:
            # The others may still be had; this one is taken the next time.
            print(f"{name} failed: {reason}", flush=True)
            return
        self.put(name, {**found, "began": began, "load": [before, os.getloadavg()[0]]})

    def put(self, name: str, found: Measured) -> None:
        self._taken[name] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._taken, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.path)
        print(f"{name}: {_short(found)}", flush=True)


def surroundings() -> Measured:
    """Machine and versions."""
    packages = {}
    for name in ("flwr", "torch", "ray", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cores": os.cpu_count(), "python": platform.python_version(), "packages": packages}


def _short(found: Measured) -> str:
    if "seconds" in found:
        return "seconds " + ", ".join(f"{one:.3g}" for one in found["seconds"])
    return found.get("skipped", "done")
