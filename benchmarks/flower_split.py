"""A round on Flower, taken apart: what Flower takes for as many phases and bytes, and what FedVeil adds to it.

Every candidate has a floor: an app without FedVeil that sends as many messages of as many bytes. Both are timed by the
same clock (`flower_traced`) on a cluster of three nodes. With `--before SRC`, another copy of FedVeil's source has a
cluster of its own, in a process of its own, and takes its turns between those of this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.flower_store import Measured, Store

NODES = 3
CANDIDATES: dict[str, dict[str, Any]] = {
    "fedavg": {"scheme": "fedavg"},
    "nadp": {"scheme": "nadp", "epsilon": 8.0, "delta": 1e-5},
    "veil-secagg": {"scheme": "veil-secagg"},
}
_ROOT = Path(__file__).parents[1]
_APP = """\
[project]
name = "floor"
version = "1.0.0"
description = "As many messages of as many bytes, and nothing else."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "benchmarks.flower_traced:floor_server_app"
clientapp = "benchmarks.flower_traced:floor_client_app"

[tool.flwr.app.config]
clients = 3
rounds = 3
phases = "104488/104488"  # of a round, each as bytes down / bytes up
"""


def split(store: Store, *, rounds: int, passes: int, before: Path | None) -> None:
    """Every candidate and its floor in turn, `passes` times; before and now alternate."""
    sources = {"now": _ROOT / "src"} if before is None else {"before": before, "now": _ROOT / "src"}
    names = [f"split/{number}/{when}/{name}" for number in range(passes) for name in CANDIDATES for when in sources]
    if store.has(*names):
        return
    with contextlib.ExitStack() as open_sides:
        sides = {when: open_sides.enter_context(_Side(source)) for when, source in sources.items()}
        for number in range(passes):
            for name in CANDIDATES:
                # The other one first in every second pass: neither always meets the quieter machine.
                for when in list(sides)[:: -1 if number % 2 else 1]:
                    # Flower alone is the same for both.
                    asked = {"name": name, "rounds": rounds, "floor": when == "now"}
                    store.measure(f"split/{number}/{when}/{name}", lambda side=sides[when], a=asked: side.taken(a))


class _Side:
    """A process that holds a cluster and measures on it, with FedVeil as it is in `source`."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __enter__(self) -> _Side:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self._source), str(_ROOT)])}
        env.pop("OMP_NUM_THREADS", None)  # as whoever types `fedveil flower up` has it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.flower_split"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # the cluster is up
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def taken(self, asked: dict[str, Any]) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Measured:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: Measured = json.loads(line)
                if "failed" in answer:
                    raise RuntimeError(answer["failed"])
                return answer
        raise RuntimeError("the process that measures has ended")


def _serve() -> None:
    """Start a cluster, and measure what standard input names until it ends."""
    from benchmarks.flower_rounds import watched
    from fedveil.flower.cluster import Cluster

    def complain(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fedveil-bench-") as scratch:
        folder = Path(scratch)
        with Cluster(folder / "cluster", nodes=NODES, deadline=300.0, say=complain) as cluster, watched(cluster):
            floor_app(folder / "floor")
            print(json.dumps({"up": True}), flush=True)
            for count, line in enumerate(sys.stdin):
                given = json.loads(line)
                try:
                    found = _both(cluster, folder, count, **given)
                except Exception as reason:
                    found = {"failed": f"{type(reason).__name__}: {reason}"}
                print(json.dumps(found), flush=True)


def _both(cluster: Any, folder: Path, count: int, *, name: str, rounds: int, floor: bool) -> Measured:
    from benchmarks.flower_rounds import COMMON, toml
    from fedveil.config import RunConfig
    from fedveil.flower.app_folder import create_app, prepared

    app, out = folder / f"app-{count}", folder / f"run-{count}"
    settings = {**COMMON, "evaluate_every": 1, **CANDIDATES[name], "clients": NODES, "rounds": rounds}
    pyproject = create_app(app, RunConfig.from_mapping(settings), deadline=180.0)
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace('"fedveil.flower:', '"benchmarks.flower_traced:'), encoding="utf-8")
    ours = _followed(cluster, app, prepared(app, {"out": str(out)}).override)
    if not floor:
        return ours
    phases = ",".join(f"{one['down'] // NODES}/{one['up'] // NODES}" for one in _last_round(ours["phases"]))
    asked = {"clients": NODES, "rounds": rounds, "phases": phases}
    override = "".join(f"{key} = {toml(value)}\n" for key, value in asked.items())
    return {**ours, "floor": _followed(cluster, folder / "floor", override)}


def floor_app(folder: Path) -> Path:
    """Write the app that sends as many messages of as many bytes."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(_APP, encoding="utf-8")
    return folder


def _followed(cluster: Any, app: Path, override: str) -> Measured:
    from benchmarks.flower_memory import processor_by_kind
    from benchmarks.flower_traced import TRACE
    from fedveil.flower.cluster import CONNECTION
    from fedveil.flower.commands import Submission

    folder = str(cluster.places.folder)
    traces = [cluster.places.home(node) / TRACE for node in range(cluster.nodes)]
    for trace in traces:
        trace.unlink(missing_ok=True)
    phases, seconds, used = [], [], [processor_by_kind(folder)]
    for event in Submission(CONNECTION, env=cluster.places.environment()).events(app, override):
        if event["event"] == "traced":
            phases.append(event)
        elif event["event"] == "round":
            if event.get("clients", cluster.nodes) != cluster.nodes:
                raise RuntimeError(f"clients were missing: {event}")
            seconds.append(event["seconds"])
            used.append(processor_by_kind(folder))
        elif event["event"] == "failed":
            raise RuntimeError(event["text"])
    clients = [json.loads(line) for trace in traces for line in trace.read_text(encoding="utf-8").splitlines()]
    return {"seconds": seconds, "used": used, "phases": phases, "clients": clients}


def _last_round(phases: list[Measured]) -> list[Measured]:
    return [one for one in phases if one["round"] == phases[-1]["round"]]


if __name__ == "__main__":
    _serve()
