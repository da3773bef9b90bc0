"""`python -m benchmarks`: one table of ratios; exit code 1 if a bound is broken."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.clipping import clipped_rounds, clipping
from benchmarks.encryption import encryption
from benchmarks.families import families
from benchmarks.gpu_clipping import gpu_clipping
from benchmarks.gpu_rounds import gpu_rounds
from benchmarks.hiding import hiding
from benchmarks.peers.table import peers
from benchmarks.protection import protection
from benchmarks.rows import Row, bytes_on_the_wire, client_steps, many_clients, server_work, streams
from benchmarks.scale import scale
from benchmarks.simulation import simulation
from benchmarks.voting import voting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1 gives the steadiest ratios)")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = [
        *client_steps(device, repeats=options.repeats),
        *server_work(device, repeats=options.repeats),
        *families(device, repeats=options.repeats),
        *(many_clients(device, repeats=options.repeats) if device.type == "cpu" else []),
        *(simulation(repeats=options.repeats) if device.type == "cpu" else []),
        *(clipping(device, repeats=options.repeats) if device.type == "cpu" else []),
        *(clipped_rounds(device, repeats=options.repeats) if device.type == "cpu" else []),
        *(scale() if device.type == "cpu" else []),
        *(streams(repeats=options.repeats) if device.type == "cpu" else []),
        *(protection(repeats=options.repeats) if device.type == "cpu" else []),
        *(voting(repeats=options.repeats) if device.type == "cpu" else []),
        *(encryption(repeats=options.repeats) if device.type == "cpu" else []),
        *(hiding(repeats=options.repeats) if device.type == "cpu" else []),
        *(peers(turns=options.repeats) if device.type == "cpu" else []),
        *(gpu_rounds() if device.type == "cuda" else []),
        *(gpu_clipping(device, repeats=options.repeats) if device.type == "cuda" else []),
        *bytes_on_the_wire(),
    ]
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    title = f"{machine}, torch {torch.__version__}, {options.threads} thread(s), {options.repeats} repetitions"
    show(title, rows)
    if options.json:
        data = {"machine": title, "rows": [{**dataclasses.asdict(row), "holds": row.holds} for row in rows]}
        options.json.write_text(json.dumps(data, indent=2))
    return 1 if any(row.holds is False for row in rows) else 0


def show(title: str, rows: list[Row]) -> None:
    print(title)
    print(f"{'what':58} {'against':22} {'ratio':>7}  {'range':>15}  {'bound':>8}")
    for row in rows:
        measured = row.measured
        bound = "" if row.bound is None else f"{'≥' if row.at_least else '≤'} {row.bound:.2f}"
        verdict = {True: "holds", False: "BROKEN", None: ""}[row.holds]
        spread = f"{measured.low:.3f}–{measured.high:.3f}"
        print(f"{row.what:58} {row.against:22} {measured.middle:7.3f}  {spread:>15}  {bound:>8} {verdict} {row.note}")


def alone(
    rows_of: Callable[[torch.device, int], list[Row]],
    about: str | None,
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    repeats: int,
) -> int:
    """The table of one benchmark, with its own defaults of what it runs on (the first) and how often; the exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default=devices[0], choices=devices)
    parser.add_argument("--repeats", type=int, default=repeats)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(torch.device(options.device), options.repeats)
    show(f"{options.device}, torch {torch.__version__}, one thread, {options.repeats} repetitions", rows)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
