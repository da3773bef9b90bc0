"""The command line, called in this process: as fast as a function, as honest as a shell."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    output: str
    error: str


def fedveil(*arguments: str | int | float | Path) -> Done:
    """Run `fedveil ARGUMENTS`; standard output and error are those of no terminal."""
    from fedveil.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["fedveil", *map(str, arguments)]),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue().rstrip("\n"))
