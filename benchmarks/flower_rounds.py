"""Seconds per round: the local engine, FedVeil on Flower and plain FedAvg on Flower, on one cluster in turns."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.flower_memory import processor_seconds
from benchmarks.flower_split import floor_app
from benchmarks.flower_store import Measured, Store
from fedveil import data
from fedveil.config import RunConfig
from fedveil.flower.app_folder import create_app, prepared
from fedveil.flower.cluster import CONNECTION, Cluster
from fedveil.flower.commands import Submission
from fedveil.runs.job import job_from_config
from fedveil.runs.loop import fresh_state, train_job

_DEADLINE = 600.0
APPS = Path(__file__).parent / "flower_apps"
COMMON: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "seed": 1,
    "secrets": "os",
    "lr": 0.1,
    "batch_size": 0,
    "loss": "square",
    "evaluate_every": 0,
    "checkpoint_every": 0,
}
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "fedavg": (1, {"scheme": "fedavg"}),
    "lossless": (1, {"scheme": "lossless"}),
    "veil-secagg, on-dropout": (1, {"scheme": "veil-secagg", "unmask": "on-dropout"}),
    "veil-secagg, always": (2, {"scheme": "veil-secagg", "unmask": "always"}),
}
"""By name: how many phases a round has, and the settings."""
PLAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "plain, stock polling": (1, {"evaluate": False, "prompt": False}),
    "plain, our polling": (1, {"evaluate": False, "prompt": True}),
    "plain with evaluation, stock polling": (2, {"evaluate": True, "prompt": False}),
    "plain with evaluation, our polling": (2, {"evaluate": True, "prompt": True}),
}
FLOOR = "floor"
ORDER = (
    *("veil-secagg, on-dropout", "plain, our polling"),
    *("veil-secagg, always", "plain with evaluation, our polling"),
    *(FLOOR, "fedavg", "lossless", "plain, stock polling", "plain with evaluation, stock polling"),
)
"""What is compared stands side by side, so that it meets the same load."""


def rounds_on_flower(store: Store, *, clients: int, rounds: int, passes: int) -> None:
    """Every candidate in turn, `passes` times, on one cluster."""
    names = [f"deployment/{number}/{name}" for number in range(passes) for name in ORDER]
    if store.has(*names):
        return
    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        folder = Path(scratch)
        dealt(folder / "dealt", clients=clients)
        floor_app(folder / FLOOR)
        with Cluster(folder / "cluster", nodes=clients, deadline=300.0, say=print) as cluster, watched(cluster):
            # Workers load torch and their data once in their lives: here, and not in a candidate's time.
            ours(cluster, folder / "warm", "lossless", clients=clients, rounds=1)
            for number in range(passes):
                for name in ORDER:
                    out = folder / f"run-{number}-{ORDER.index(name)}"
                    store.measure(
                        f"deployment/{number}/{name}",
                        lambda name=name, out=out: _candidate(cluster, folder, out, name, clients, rounds),
                    )


@contextlib.contextmanager
def watched(cluster: Cluster) -> Iterator[None]:
    """What ends by itself is started again: on a busy machine Flower's processes sometimes do."""
    ended = threading.Event()
    watching = threading.Thread(target=cluster.watch, args=(ended,), daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _candidate(cluster: Cluster, folder: Path, out: Path, name: str, clients: int, rounds: int) -> Measured:
    if name == FLOOR:
        return {"phases": 1, **submitted(cluster, folder / FLOOR, {"clients": clients, "rounds": rounds})}
    if name in PLAIN:
        phases, settings = PLAIN[name]
        own = {"data": str(folder / "dealt"), "clients": clients, "rounds": rounds, **settings}
        return {"phases": phases, **submitted(cluster, APPS / "plain", own)}
    return ours(cluster, out, name, clients=clients, rounds=rounds)


def ours(cluster: Cluster, out: Path, name: str, *, clients: int, rounds: int) -> Measured:
    """A run of FedVeil's on a cluster, into the folder `out`."""
    phases, settings = OURS[name]
    config = RunConfig.from_mapping({**COMMON, **settings, "clients": clients, "rounds": rounds})
    app = out.parent / f"app-{out.name}"
    create_app(app, config, deadline=_DEADLINE)
    ready = prepared(app, {"out": str(out)})
    return {"phases": phases, **_followed(cluster, app, ready.override)}


def submitted(cluster: Cluster, app: Path, settings: dict[str, Any]) -> Measured:
    """A run of another app."""
    return _followed(cluster, app, "".join(f"{name} = {toml(value)}\n" for name, value in settings.items()))


def _followed(cluster: Cluster, app: Path, override: str) -> Measured:
    rows, summary, used = [], {}, []
    folder = str(cluster.places.folder)
    for event in Submission(CONNECTION, env=cluster.places.environment()).events(app, override):
        if event["event"] == "round":
            rows.append(event)
            used.append(processor_seconds(folder))
        elif event["event"] == "done":
            summary = event["summary"]
        elif event["event"] == "failed":
            raise RuntimeError(event["text"])
    short = sum(row.get("clients", cluster.nodes) != cluster.nodes for row in rows)
    losses = summary.get("losses") or [row["loss"] for row in rows if "loss" in row]
    per_round = (used[-1] - used[0]) / (len(used) - 1) if len(used) > 1 else None
    seconds = [row["seconds"] for row in rows]
    facts = {"clients": cluster.nodes, "seconds": seconds, "processor": per_round, "losses": losses}
    return {**facts, "short": short} if short else facts


def rounds_here(store: Store, *, clients: int, rounds: int, where: str) -> None:
    """The same runs on the local engine: every client in this process, one thread."""
    for name in ("fedavg", "veil-secagg, always"):
        store.measure(f"{where}/{name}", lambda name=name: _here(OURS[name][1], clients=clients, rounds=rounds))


def _here(settings: dict[str, Any], *, clients: int, rounds: int) -> Measured:
    torch.set_num_threads(1)
    config = RunConfig.from_mapping({**COMMON, **settings, "clients": clients, "rounds": rounds})
    job = job_from_config(config)
    rows = train_job(job, state=fresh_state(job)).rows
    return {"seconds": [row["seconds"] for row in rows], "losses": [row["loss"] for row in rows]}


def dealt(folder: Path, *, clients: int) -> Path:
    """Every client's samples as a file of its own, dealt as FedVeil deals them."""
    folder.mkdir(parents=True)
    train = data.load("digits", test_fraction=RunConfig().test_fraction, seed=COMMON["seed"]).train
    for client, rows in enumerate(data.partition(train, clients=clients, how="iid", seed=COMMON["seed"])):
        np.savez(folder / f"client-{client}.npz", x=train.x[rows].numpy(), y=train.y[rows].numpy())
    return folder


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
