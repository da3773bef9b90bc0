"""Plain FedAvg on Flower's simulation (Ray) against the local engine, 10 and 100 clients."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.flower_rounds import APPS, COMMON, dealt, rounds_here
from benchmarks.flower_store import Measured, Store
from fedveil.flower.commands import parse_event

SIZES = (10, 100)
_SCRIPT = """
import sys
from flwr.simulation import run_simulation
from plain_fedavg.client_app import client_app
from plain_fedavg.server_app import server_app
run_simulation(server_app, client_app, num_supernodes=int(sys.argv[1]),
               backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
"""
"""One core per client, so that Ray works on as many clients at a time as there are cores."""


def simulation(store: Store, *, rounds: int) -> None:
    """Ray and the local engine in turns."""
    for clients in SIZES:
        rounds_here(store, clients=clients, rounds=rounds, where=f"beside/{clients}")
        name = f"simulation/{clients}"
        if importlib.util.find_spec("ray") is None:
            if store.get(name) is None:
                reason = "ray is not installed: pip install 'flwr[simulation]', then run this part again"
                store.put(name, {"skipped": reason})
            continue
        store.measure(name, lambda clients=clients: _simulated(clients, rounds))


def _simulated(clients: int, rounds: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        folder = dealt(Path(scratch) / "dealt", clients=clients)
        settings = {"data": str(folder), "clients": clients, "rounds": rounds, "lr": COMMON["lr"], "seed": 1}
        settings |= {"evaluate": False, "prompt": False}
        env = {
            **os.environ,
            "PLAIN_FEDAVG": json.dumps(settings),
            "PYTHONPATH": os.pathsep.join([str(APPS / "plain"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-c", _SCRIPT, str(clients)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    events = [event for line in done.stdout.splitlines() if (event := parse_event(line))]
    finished = [event for event in events if event["event"] == "done"]
    if not finished:
        raise RuntimeError(f"the simulation ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    seconds = [event["seconds"] for event in events if event["event"] == "round"]
    return {"seconds": seconds, "losses": finished[0]["summary"]["losses"]}
