"""Commands and scripts, called in this process: as fast as a function, as honest as a shell."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import typer.main

# One process runs hundreds of commands, of one and the same application: a quarter of what a short one costs is to make
# its parser.
_made_once = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    output: str
    error: str


def fedveil(*arguments: str | int | float | Path, columns: int = 200) -> Done:
    """Run `fedveil ARGUMENTS`; standard output and error are those of no terminal."""
    from fedveil.cli import main, tables

    # A console keeps the width it was made with, whoever made it first.
    with (
        mock.patch.dict("os.environ", {"COLUMNS": str(columns), "TERM": "dumb"}),
        mock.patch.object(tables.console, "_width", columns),
        mock.patch.object(tables.complaints, "_width", columns),
        mock.patch.object(typer.main, "get_command", _made_once),
    ):
        return _heard(main, ["fedveil", *map(str, arguments)])


def script(text: str, *arguments: str | Path, folder: Path, name: str = "script.py") -> Done:
    """Run a script as `python NAME ARGUMENTS` does in `folder`; what it imports from there is forgotten."""
    code = compile(text, str(folder / name), "exec")
    main = ModuleType("__main__")
    main.__file__ = str(folder / name)
    known, path, ours = set(sys.modules), list(sys.path), sys.modules["__main__"]
    sys.path.insert(0, str(folder))
    sys.modules["__main__"] = main  # where type hints are looked up
    try:
        with contextlib.chdir(folder):
            return _heard(lambda: exec(code, main.__dict__), [name, *arguments])
    finally:
        sys.path[:] = path
        sys.modules["__main__"] = ours
        for module in set(sys.modules) - known:
            if str(getattr(sys.modules[module], "__file__", None)).startswith(str(folder)):
                del sys.modules[module]


def _heard(call: Callable[[], object], words: list[str | Path]) -> Done:
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", [str(word) for word in words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            call()
        except SystemExit as stop:
            code = stop.code or 0
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue().rstrip("\n"))
