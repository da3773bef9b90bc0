"""The command line: one file per command."""

from __future__ import annotations

import sys

_STOPPED = 130


def main() -> None:
    """Entry point: runs a command; errors of ours become one clear line and a documented exit code."""
    from fedveil.cli.app import app
    from fedveil.errors import FedVeilError

    try:
        app()
    except FedVeilError as reason:
        _complain(str(reason))
        sys.exit(reason.exit_code)
    except OSError as reason:
        place = f"{reason.filename}: " if reason.filename else ""
        _complain(f"{place}{reason.strerror or reason}.")
        sys.exit(FedVeilError.exit_code)
    except SystemExit as stop:
        if stop.code == _STOPPED:  # what Typer makes of Ctrl-C, without a word
            print("stopped; checkpoints written so far are kept (continue with --resume)", file=sys.stderr)
        raise


def _complain(text: str) -> None:
    # One line, even where another library's message of several is quoted.
    print("error: " + " ".join(text.split()), file=sys.stderr)
