"""The command line: one file per command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: runs a command; errors of ours become one clear line and a documented exit code."""
    from fedveil.cli.app import app
    from fedveil.errors import FedVeilError

    try:
        app()
    except FedVeilError as reason:
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(reason.exit_code)
    except KeyboardInterrupt:
        print("stopped; checkpoints written so far are kept (continue with --resume)", file=sys.stderr)
        sys.exit(130)
