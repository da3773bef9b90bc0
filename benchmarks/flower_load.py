"""Twenty clients on one machine through real Flower processes: seconds per phase, and whose memory grows."""

from __future__ import annotations

import os
import re
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.flower_memory import Watch, available
from benchmarks.flower_rounds import ours, watched
from benchmarks.flower_store import Measured, Store
from fedveil.flower.cluster import Cluster

_ANSWERED = re.compile(r"^(\S+ \S+) INFO fedveil\.worker: (a parcel of (\d+) bytes is in work|answered with (\d+))")
_SCHEME = "veil-secagg, always"
_BEFORE_ROUNDS = ("RollCall", "Hello", "Directory", "Nonces")
_IN_ROUNDS = ("Train", "Unmask")
_PER_NODE = 800 << 20
"""Bytes that a node, its app processes and its worker may take together."""


def load(store: Store, *, clients: int, rounds: int) -> None:
    """One run on a cluster of its own, politely: other work goes first."""
    name = f"load/{clients}"
    if store.has(name):
        return
    if available() < clients * _PER_NODE:
        reason = f"{clients} nodes take up to {clients * _PER_NODE >> 30} GiB, and {available() >> 30} GiB are free"
        store.put(name, {"skipped": reason})
        return
    os.nice(5)
    store.measure(name, lambda: _loaded(clients, rounds))


def _loaded(clients: int, rounds: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        folder = Path(scratch)
        began = time.perf_counter()
        with Cluster(folder / "cluster", nodes=clients, deadline=600.0, say=print) as cluster, watched(cluster):
            started = time.perf_counter() - began
            with Watch(folder / "cluster") as watch:
                began, at = time.perf_counter(), time.time()
                found = ours(cluster, folder / "run", _SCHEME, clients=clients, rounds=rounds)
                whole = time.perf_counter() - began
            logs = [cluster.places.home(node) / "worker.log" for node in range(clients)]
            phases = phases_of(logs)
            disk = {
                "SuperLink's database": cluster.places.database.stat().st_size,
                "clients' homes": _bytes_under(folder / "cluster" / "homes"),
                "logs": _bytes_under(folder / "cluster" / "logs"),
            }
    return {
        **found,
        "started": started,
        "whole": whole,
        "at": at,
        "phases": phases,
        "disk": disk,
        "memory": watch.samples,
    }


def phases_of(logs: list[Path]) -> list[Measured]:
    """Phases as the workers' logs tell them: from the last answer to the phase before to the last to this one."""
    told = [_parcels(log) for log in logs]
    count = min(map(len, told))
    phases, ended = [], None
    for number in range(count):
        arrived = [one[number][0] for one in told]
        answered = [one[number][1] for one in told]
        phases.append(
            {
                "what": phase_name(number, count),
                "seconds": None if ended is None else max(answered) - ended,
                "until the first": None if ended is None else min(arrived) - ended,
                "in workers": sum(b - a for a, b in zip(arrived, answered, strict=True)),
                "ended": max(answered),
            }
        )
        ended = max(answered)
    return phases


def phase_name(number: int, count: int) -> str:
    """Which request the run's n-th phase is."""
    if number < len(_BEFORE_ROUNDS):
        return _BEFORE_ROUNDS[number]
    return _IN_ROUNDS[(number - len(_BEFORE_ROUNDS)) % len(_IN_ROUNDS)]


def _parcels(log: Path) -> list[tuple[float, float]]:
    """When each parcel came and when it was answered."""
    came, parcels = 0.0, []
    for line in log.read_text(encoding="utf-8").splitlines():
        found = _ANSWERED.match(line)
        if found is None:
            continue
        at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if found[3] is not None:
            came = at
        else:
            parcels.append((came, at))
    return parcels


def _bytes_under(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
