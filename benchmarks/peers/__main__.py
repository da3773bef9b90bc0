"""`python -m benchmarks.peers`: exit code 1 if a bound is broken or a peer ended in another model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.__main__ import show as show_rows
from benchmarks.peers import environments
from benchmarks.peers.contest import measured
from benchmarks.peers.table import keep, rows, show
from benchmarks.peers.workloads import WORKLOADS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="make the peers' environments, and nothing else")
    parser.add_argument("--only", nargs="+", choices=[workload.name for workload in WORKLOADS], help="these workloads")
    parser.add_argument("--turns", type=int, default=9, help="how often everybody runs its rounds")
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDVEIL_DATA"), help="a folder with mnist in it")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    options = parser.parse_args()
    if options.make:
        problems = [problem for peer in environments.PEERS if (problem := environments.make(peer))]
        print("\n".join(problems) or f"ready: {', '.join(environments.PEERS)} in {environments.FOLDER.name}/")
        return 1 if problems else 0
    before = os.getloadavg()[0]
    print(f"load before: {before:.2f}")
    cells, missing = measured(options.turns, only=options.only or (), data=options.data and Path(options.data))
    show(cells)
    for line in missing:
        print(line)
    made = rows(cells)
    show_rows("a peer's time over FedVeil's", made)
    if options.json:
        keep(options.json, cells, load_before=before, missing=missing)
    return 1 if any(row.holds is False for row in made) or not all(cell.agrees for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
