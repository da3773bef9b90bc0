"""Real runs on Flower for tests: a cluster, runs followed while harm is done, and the processes to do it to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fedveil.config import RunConfig
from fedveil.flower import worker_client as courier
from fedveil.flower.app_folder import create_app, prepared
from fedveil.flower.client_app import parts_of
from fedveil.flower.cluster import CONNECTION, Cluster
from fedveil.flower.commands import Submission
from fedveil.flower.server_app import serve
from fedveil.processes import descendants
from fedveil.protocol.codec import decode
from fedveil.runs import session
from flower.in_process import InProcessGrid, context_of, make_homes
from flower_desks import ORDERS

Weights = dict[str, torch.Tensor]

COMMON: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "rounds": 2,
    "seed": 1,
    "lr": 0.1,
    "batch_size": 16,
    "checkpoint_every": 1,
}
LONGEST = 400.0


def eventually(condition: Callable[[], Any], what: str, seconds: float = LONGEST) -> Any:
    """The condition's value, as soon as it is a true one."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it never came about: {what}"
        time.sleep(0.1)
    return found


class Run:
    """A run on a cluster, followed by a thread of its own. Leaving it stops one that still goes on."""

    def __init__(self, cluster: Cluster, app: Path, out: Path, **settings: Any) -> None:
        self.out = out
        self.heard: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        self._submission = Submission(CONNECTION, env=cluster.places.environment())
        changes = {"out": str(out), **settings}
        self._thread = threading.Thread(target=self._follow, args=(app, prepared(app, changes).override), daemon=True)
        self._thread.start()

    def _follow(self, app: Path, override: str) -> None:
        try:
            for event in self._submission.events(app, override):
                self.heard.append(event)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._submission.stop()
            self._thread.join(60)

    def await_round(self, number: int) -> None:
        """Until the run folder tells of this round's end."""
        self.eventually(lambda: len(rows(self.out)) >= number, f"round {number} ends")

    def eventually(self, condition: Callable[[], Any], what: str, seconds: float = LONGEST) -> Any:
        """As the function of that name, but not beyond the run's end."""

        def known() -> Any:
            going = self._thread.is_alive()  # looked at first: what comes about as the run ends has come about
            found = condition()
            assert found or going, f"the run ended before: {what}; heard {self.heard[-5:]}, {self._error!r}"
            return found

        return eventually(known, what, seconds)

    def ended(self) -> dict[str, Any]:
        """The last event, or the error of a run that ended without a word."""
        self._thread.join(LONGEST)
        assert not self._thread.is_alive(), f"the run does not end; heard {self.heard[-5:]}"
        if self._error is not None:
            raise self._error
        return self.heard[-1]

    def summary(self) -> dict[str, Any]:
        """What the run left, once it has ended well."""
        last = self.ended()
        assert last["event"] == "done", last
        written: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        assert last["summary"] == written
        return written


def made_app(folder: Path, **settings: Any) -> Path:
    """An app folder with these settings on top of the common ones."""
    create_app(folder, RunConfig(**{**COMMON, **settings}), deadline=120.0)
    return folder


def rows(out: Path) -> list[dict[str, Any]]:
    return _lines(out / "metrics.jsonl")


def events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    """What the run folder says happened; of some kinds, or all."""
    noted = [one for one in _lines(out / "events.jsonl") if not kinds or one["event"] in kinds]
    # A run's own course, and what was said before it, befell nobody.
    return [one for one in noted if one["event"] not in ("began", "ended") and not one["text"].startswith("warning: ")]


def _lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def homes_of(cluster: Cluster) -> list[Path]:
    return [cluster.places.home(node) for node in range(cluster.nodes)]


def model_of(out: Path, homes: Sequence[Path]) -> Weights:
    """The run's model: the server's, or the one that all clients hold."""
    if (out / "model.safetensors").exists():
        return load_file(out / "model.safetensors")
    lineage = json.loads((out / "attempts.json").read_text())["lineage"]
    first, *others = (load_file(home / "models" / f"{lineage}.safetensors") for home in homes)
    for one in others:
        assert_same(one, first)
    return first


def assert_same(found: Weights, expected: Weights) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_different(found: Weights, other: Weights) -> None:
    assert not all(torch.equal(found[name], other[name]) for name in other)


def local_model(folder: Path, **settings: Any) -> Weights:
    """The model of the same run with the local engine."""
    session.run(RunConfig(**{**COMMON, **settings}), folder, quiet=True)
    return load_file(folder / "model.safetensors")


def model_without(folder: Path, missing: set[tuple[int, int]], *, what: str = "Train", **settings: Any) -> Weights:
    """The model of the same run, in one process, in which (client, round) answers did not come."""

    def twist(reply: Any) -> list[Any]:
        asked = next(one for one in grid.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
        request = decode(parts_of(asked.content)["common"])
        where = (asked.metadata.dst_node_id - 100, getattr(request, "round", -1) + 1)
        return [] if type(request).__name__ == what and where in missing else [reply]

    given = {**COMMON, **settings}
    homes = make_homes(folder / "homes", given["clients"])
    grid = InProcessGrid(homes, twist=twist)
    serve(grid, context_of(out=str(folder / "run"), deadline=1.0, **given))
    return model_of(folder / "run", homes)


@contextlib.contextmanager
def ordered_worker(home: Path, *orders: tuple[str, int | None, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of this home that carries out orders (see flower_desks), in place of the one that may be there."""
    for name in ("waiting", "go"):
        (home / name).unlink(missing_ok=True)
    named = [dict(zip(("what", "round", "do"), one, strict=True)) for one in orders]
    (home / ORDERS).write_text(json.dumps(named))
    worker = eventually(lambda: _serving(home), "a worker with orders serves this home")
    try:
        yield worker
    finally:
        (home / ORDERS).unlink()
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGCONT)
        worker.kill()
        worker.wait()


def _serving(home: Path) -> subprocess.Popen[bytes] | None:
    """A worker with orders, unless a courier with an old message was quicker to start one without."""
    courier.stop(home)
    here = str(Path(__file__).parent)
    with (home / courier.LOG).open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", courier.WORKER, str(home), "--handler", "flower_desks:Ordered"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])},
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    eventually(lambda: worker.poll() is not None or courier.ping(home), "a worker listens")
    if worker.poll() is None and worker_of(home) == worker.pid:
        return worker
    worker.kill()
    worker.wait()
    return None


def is_waiting(home: Path) -> bool:
    """Whether the ordered worker has come to where it waits."""
    return (home / "waiting").exists()


def worker_of(home: Path) -> int:
    """The process id of the home's worker."""
    said = courier.ping(home)
    assert said is not None, "no worker listens"
    return int(said["pid"])


def process_of(cluster: Cluster, name: str, program: str) -> int | None:
    """The id of the process below a cluster's process that runs this program of Flower's."""
    supervisor = next(one for one in cluster.processes if one.name == name).pid
    for pid in descendants(supervisor) if supervisor is not None else ():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(Path(os.fsdecode(word)).name == program for word in words[:3]):
                return pid
    return None
