"""The tests of the Flower part against every minor version of Flower that FedVeil says it works with.

`python -m tools.flower_versions [--lenient] [VERSION …] [-- PYTEST ARGUMENTS]` (`make test-flower-versions`): an
environment for each version, `.peers/flower-VERSION`, made once; exit code 1 where one cannot be made or a test fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from typing import Any

from benchmarks.peers.environments import FOLDER, ROOT, interpreter, made, make

_BESIDES = ("pytest", "hypothesis", "pyyaml", "hatchling", "editables", "coincurve")
_MINUTES = 15


def window() -> list[str]:
    """The minor versions that pyproject.toml lets in."""
    (asked,) = _project()["optional-dependencies"]["flower"]
    bounds = re.fullmatch(r"flwr>=(\d+)\.(\d+),<(\d+)\.(\d+)", asked)
    if bounds is None or bounds[1] != bounds[3]:
        raise SystemExit(f"pyproject.toml asks for {asked!r}: a window of minor versions was expected.")
    return [f"{bounds[1]}.{minor}" for minor in range(int(bounds[2]), int(bounds[4]))]


def pins(version: str) -> str:
    """What an environment holds: this version of Flower, and what FedVeil needs in the versions tested here."""
    tested = dict(
        line.strip().split("==", 1)
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
        if re.match(r"[\w.-]+==", line)
    )
    needed = [re.split(r"[<>=\[ ]", line, maxsplit=1)[0].lower() for line in _project()["dependencies"]]
    lines = [f"{name}=={tested[name]}" if name in tested else name for name in (*needed, *_BESIDES)]
    return "\n".join([f"flwr=={version}.*", *lines, ""])


def prepare(version: str, *, lenient: bool) -> str | None:
    """Make a version's environment; what went wrong, where something did."""
    name, asked = f"flower-{version}", pins(version)
    less = f"{asked}# without all that Flower asks for\n"
    if lenient and made(name, less):
        return None
    wrong = make(name, asked)
    if wrong is not None and lenient:
        # What Flower asks for may be newer than the index has: then with what an earlier version asked for.
        wrong = make(name, pins(window()[0])) or _pip(name, "--no-deps", f"flwr=={version}.*")
        if wrong is None:
            sys.stdout.write(f"flwr {version}: installed without all that it asks for\n")
            (FOLDER / name / "requirements.txt").write_text(less, encoding="utf-8")
    return wrong or _pip(name, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def main(arguments: list[str]) -> int:
    """Every version, one after the other."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, further = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tools.flower_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", help="only these (default: all that pyproject.toml lets in)")
    parser.add_argument("--lenient", action="store_true", help="accept older dependencies than Flower asks for")
    given = parser.parse_args(own)
    failed = []
    for version in given.versions or window():
        if (wrong := prepare(version, lenient=given.lenient)) is not None:
            sys.stdout.write(f"flwr {version}: {wrong}\n")
            failed.append(version)
            continue
        python = str(interpreter(f"flower-{version}"))
        shown = subprocess.run([python, "-c", "import flwr; print(flwr.__version__)"], capture_output=True, text=True)
        sys.stdout.write(f"flwr {shown.stdout.strip()}\n")
        sys.stdout.flush()
        tests = further or ["tests/flower", "-m", "not slow"]
        if subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT).returncode:
            failed.append(version)
    sys.stdout.write(f"failed: {', '.join(failed)}\n" if failed else "every version passed\n")
    return 1 if failed else 0


def _pip(name: str, *arguments: str) -> str | None:
    command = [str(interpreter(name)), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES)
    said = [line.strip() for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()
    return None if done.returncode == 0 else f"{name}: {' '.join(said[-3:])}"


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
