"""Ends clients' workers once everything that could start one is gone: `python -m fedveil.flower.janitor HOME …`.

Standard input is a pipe that the cluster and its processes hold open; it closes when the last of them is gone,
whichever way that came about.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedveil.errors import FedVeilError
from fedveil.flower import worker_client as courier


def main(homes: list[str]) -> int:
    """Wait, then end the workers of these homes; 1 if one would not end."""
    sys.stdin.buffer.read()
    left = 0
    for home in homes:
        try:
            courier.stop(Path(home))
        except (FedVeilError, OSError):
            left += 1
            sys.stderr.write(f"the worker of {home} would not end\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
