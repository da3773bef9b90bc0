"""Many clients behind an in-process Grid: one round of veil-secagg, where its time goes, memory and bytes.

Every size runs in a process of its own, so that its memory is its own. Times are processor time: one thread does
the work, and other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.flower_memory import available
from benchmarks.flower_rounds import COMMON
from benchmarks.flower_store import Measured, Store
from benchmarks.timing import peak_bytes

_HEAVIEST = 40
_PER_CLIENT = 14 << 20


def crowds(store: Store, sizes: Sequence[int]) -> None:
    """Every size as it is, and a middle one under a profiler as well (whose seconds only show the shares)."""
    for clients in sizes:
        # A thousand uploads under one secret γ per output fill ten GiB: with one γ they are a quarter as long.
        for groups in (None, 1):
            if groups is None and available() < clients * _PER_CLIENT:
                store.put(f"crowd/{clients}", {"skipped": f"{available() >> 30} GiB of memory are free"})
                continue
            name = f"crowd/{clients}" if groups is None else f"crowd-m{groups}/{clients}"
            store.measure(name, lambda clients=clients, groups=groups: _in_a_process(clients, groups=groups))
    middle = sorted(sizes)[len(sizes) // 2]
    store.measure(f"profile/{middle}", lambda: _in_a_process(middle, groups=1, profiled=True))


def _in_a_process(clients: int, *, groups: int | None, profiled: bool = False) -> Measured:
    command = [sys.executable, "-m", "benchmarks.flower_crowd", str(clients), *["--profile"] * profiled]
    command += [] if groups is None else ["--groups", str(groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: Measured = json.loads(done.stdout.splitlines()[-1])
    return found


def crowd(clients: int, *, groups: int | None, profiled: bool) -> Measured:
    """One run of one round, in this process."""
    from benchmarks.flower_grid import TimedGrid, context_of
    from fedveil.flower.server_app import serve

    settings: dict[str, Any] = {**COMMON, "scheme": "veil-secagg", "clients": clients, "rounds": 1}
    settings |= {} if groups is None else {"head_groups": groups}
    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        homes = []
        for number in range(clients):
            home = Path(scratch) / f"client-{number}"
            home.mkdir()
            (home / "client.toml").write_text(f"client = {number}\n")
            homes.append(home)
        grid = TimedGrid(homes)
        before = _resident()
        profile = cProfile.Profile(time.process_time)
        began, watch = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            run = lambda: serve(grid, context_of({**settings, "out": str(Path(scratch) / "run")}))  # noqa: E731
            profile.runcall(run) if profiled else run()
        total, elapsed = time.process_time() - began, time.perf_counter() - watch
    # What lies between a phase and the next is the server's: taking replies, deciding, making the next messages.
    starts = [one.began - began for one in grid.phases] + [total]
    phases = [
        {
            "what": one.what,
            "all": later - start,
            "clients": one.clients,
            "messages": one.ended - one.began - one.clients,
            "server after": later - (one.ended - began),
            "down": one.down,
            "up": one.up,
        }
        for one, start, later in zip(grid.phases, starts, starts[1:], strict=False)
    ]
    found = {
        "clients": clients,
        "total": total,
        "elapsed": elapsed,
        "before the first phase": starts[0],
        "phases": phases,
    }
    found |= {"resident before": before, "peak": peak_bytes()}
    return {**found, "heaviest": _heaviest(profile)} if profiled else found


def _heaviest(profile: cProfile.Profile) -> list[dict[str, Any]]:
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [
        {"where": f"{Path(file).name}:{line}({name})", "calls": calls, "own": own, "within": within}
        for (file, line, name), (_, calls, own, within, _) in stats.items()
    ]
    chosen = {id(row): row for key in ("own", "within") for row in sorted(rows, key=lambda r: -r[key])[:_HEAVIEST]}
    return sorted(chosen.values(), key=lambda row: -row["within"])


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", type=int)
    parser.add_argument("--groups", type=int, help="number of secret γ (default: one per output)")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(json.dumps(crowd(given.clients, groups=given.groups, profiled=given.profile)))


if __name__ == "__main__":
    main()
