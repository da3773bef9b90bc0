"""Many clients on one machine through real Flower processes: seconds per phase, and whose memory grows."""

from __future__ import annotations

import re
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.flower_memory import Watch, available
from benchmarks.flower_rounds import APPS, FLOOR, PLAIN, dealt, ours, submitted, watched
from benchmarks.flower_split import floor_app
from benchmarks.flower_store import Measured, Store
from fedveil.flower.cluster import Cluster

_ANSWERED = re.compile(r"^(\S+ \S+) INFO fedveil\.worker: (a parcel of (\d+) bytes is in work|answered with (\d+))")
OURS_HERE, PLAIN_HERE = "veil-secagg, always", "plain, our polling"
ORDER = (OURS_HERE, FLOOR, PLAIN_HERE)
_BESIDE = 3
"""Rounds of what ours is held against."""
_BYTES = "105911/2508402,1258/453"
"""What a round of ours sends a client and gets from it, in its two phases."""
_BEFORE_ROUNDS = ("RollCall", "Hello", "Directory", "Nonces")
_IN_ROUNDS = ("Train", "Unmask")
_PER_NODE = 560 << 20
"""Bytes that a node, its app processes and its worker may take together."""


def load(store: Store, *, sizes: list[int], rounds: int) -> None:
    """A cluster for every size: `rounds` of ours on it, then three of Flower alone and of plain FedAvg."""
    todo = [clients for clients in sizes if not store.has(*(f"load/{clients}/{name}" for name in ORDER))]
    if todo:
        minutes = sum(clients * _minutes(store, clients, rounds) for clients in todo)
        print(f"load: about {minutes:.0f} minutes on two quiet cores", flush=True)
    for clients in todo:
        if available() < clients * _PER_NODE:
            reason = f"{clients} nodes take up to {clients * _PER_NODE >> 30} GiB, and {available() >> 30} GiB are free"
            store.put(f"load/{clients}/{OURS_HERE}", {"skipped": reason})
            continue
        _loaded(store, clients, rounds)


def _minutes(store: Store, clients: int, rounds: int) -> float:
    """Of a client, by its processes' processor time: 5 s to start, 2.1 s a phase, 3 s more to load torch."""
    phases = {FLOOR: 2 * _BESIDE, PLAIN_HERE: _BESIDE * 5.1 / 2.1, OURS_HERE: len(_BEFORE_ROUNDS) + 2 * rounds}
    left = sum(phases[name] for name in ORDER if not store.has(f"load/{clients}/{name}"))
    return (5.0 + 2.1 * left) / (2 * 60)


def _loaded(store: Store, clients: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        folder = Path(scratch)
        floor_app(folder / FLOOR)
        shared = {"data": str(dealt(folder / "dealt", clients=clients)), **PLAIN[PLAIN_HERE][1]}
        began = time.perf_counter()
        with Cluster(folder / "cluster", nodes=clients, deadline=900.0, say=print) as cluster, watched(cluster):
            started = time.perf_counter() - began
            # Our run first: a client's log holds no other, and it is what the machine may have no time for later.
            store.measure(f"load/{clients}/{OURS_HERE}", lambda: _ours(cluster, folder, clients, rounds, started))
            asked: dict[str, Any] = {"clients": clients, "rounds": _BESIDE}
            store.measure(
                f"load/{clients}/{FLOOR}",
                lambda: submitted(cluster, folder / FLOOR, {**asked, "phases": _BYTES}),
            )
            store.measure(
                f"load/{clients}/{PLAIN_HERE}", lambda: submitted(cluster, APPS / "plain", {**asked, **shared})
            )


def _ours(cluster: Cluster, folder: Path, clients: int, rounds: int, started: float) -> Measured:
    with Watch(folder / "cluster") as watch:
        began, at = time.perf_counter(), time.time()
        found = ours(cluster, folder / "run", OURS_HERE, clients=clients, rounds=rounds)
        whole = time.perf_counter() - began
    phases = phases_of([cluster.places.home(node) / "worker.log" for node in range(clients)])
    disk = {
        "SuperLink's database": cluster.places.database.stat().st_size,
        "clients' homes": _bytes_under(folder / "cluster" / "homes"),
        "logs": _bytes_under(folder / "cluster" / "logs"),
    }
    own = {"started": started, "whole": whole, "at": at, "phases": phases, "disk": disk, "memory": watch.samples}
    return {**found, **own}


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
