"""The command line: a file per command, or for a few that belong together."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType
from unicodedata import category

_STOPPED, _TERMINATED = 130, 143
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OBEYED = ("Cc", "Cf", "Cs")  # control, format (direction of writing) and half characters


# How long an OpenMP thread spins before it sleeps. The default lets two runs that share cores starve each
# other (over twenty times slower, seen with two runs on two cores); this costs a lone run nothing measurable.
_SPIN_COUNT = "10000"


def main() -> None:
    """Entry point: runs a command; errors of ours become one clear line and a documented exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read when torch is loaded, below
    from fedveil.cli.app import app
    from fedveil.errors import FedVeilError

    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)  # whoever ends us that way means what Ctrl-C means
    try:
        app()
    except FedVeilError as reason:
        _complain(str(reason))
        sys.exit(reason.exit_code)
    except OSError as reason:
        place = f"{reason.filename}: " if reason.filename else ""
        cure = (
            " What was written before is whole. Make room there and go on with --resume, or give another --out."
            if reason.errno in _FULL
            else ""
        )
        _complain(f"{place}{reason.strerror or reason}.{cure}")
        sys.exit(FedVeilError.exit_code)
    except MemoryError:
        _complain("The memory is not enough for that.")
        sys.exit(FedVeilError.exit_code)
    except SystemExit as stop:
        if stop.code == _STOPPED:  # what Typer makes of Ctrl-C, without a word
            again = "run, compare: go on with --resume; reproduce: with the same command"
            print(f"stopped; what was written so far is kept ({again})", file=sys.stderr)
            if told:
                sys.exit(_TERMINATED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(text: str) -> None:
    # One line, even where another library's message of several is quoted.
    print("error: " + printable(" ".join(text.split())), file=sys.stderr)


def printable(text: str) -> str:
    """A text that may be anybody's, with what a terminal would obey instead of showing it spelt out."""
    return "".join(
        character if character in "\n\t" or category(character) not in _OBEYED else ascii(character)[1:-1]
        for character in text
    )
