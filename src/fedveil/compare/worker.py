"""A process that does one cell after the other: jobs come in as frames, reports go out as frames.

It ends with its parent, whatever it is at; the run it was at can be resumed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from fedveil import framing
from fedveil.config import RunConfig
from fedveil.errors import FedVeilError
from fedveil.processes import channel
from fedveil.runs.callbacks import Callback
from fedveil.runs.folder import RunFolder

Report = dict[str, Any]
Tell = Callable[[Report], None]


class Frame(IntEnum):
    """What passes between a grid and a worker, each one part of JSON."""

    JOB = 1
    REPORT = 2


def perform(job: Mapping[str, Any], tell: Tell, *, catch: bool = True) -> None:
    """Do one cell and tell how that went; without `catch`, what goes wrong is raised."""
    try:
        result = _work(job)(job, tell)
    except Exception as reason:
        if not catch:
            raise
        if isinstance(reason, FedVeilError):
            tell({"kind": "failed", "code": reason.exit_code, "reason": " ".join(str(reason).split())})
            return
        traceback.print_exc(file=sys.stderr)
        tell({"kind": "failed", "code": FedVeilError.exit_code, "reason": f"{type(reason).__name__}: {reason}"})
    else:
        tell({"kind": "done", **result})


def _work(job: Mapping[str, Any]) -> Callable[[Mapping[str, Any], Tell], dict[str, Any]]:
    sys.path.extend(entry for entry in job["path"] if entry not in sys.path)
    module, _, function = job["work"].partition(":")
    work: Callable[[Mapping[str, Any], Tell], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return work


class _Reporter(Callback):
    """Tells of every round."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def begin(self, folder: RunFolder | None, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Where the run stands."""
        self._tell({"kind": "begin", "round": rows[-1]["round"] if rows else 0})

    def round(self, row: dict[str, Any]) -> None:
        """A round's figures."""
        self._tell({"kind": "round", "row": row})


def train(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one cell of a comparison, from its beginning or from its checkpoint."""
    from fedveil.own_code import OwnCode
    from fedveil.runs import session
    from fedveil.tracking import Tracked, trackers

    def say(text: str) -> None:
        tell({"kind": "say", "text": text})

    folder = RunFolder(job["folder"])
    tracked = trackers(Tracked(**job["tracked"]), folder.path, title=job["title"], say=say)
    follow: list[Callback] = [_Reporter(tell), *tracked]
    config = RunConfig.from_mapping(job["config"], where=job["title"])
    # Named by whoever started the comparison; no file says that.
    own = {name: OwnCode(getattr(config, name)) for name in job["own"]}
    config = config.with_changes(**own)
    if folder.config_file.exists():
        summary = session.resume(folder.path, changes=own, quiet=True, say=say, follow=follow)
    else:
        summary = session.run(config, folder.path, quiet=True, say=say, follow=follow)
    return {"summary": summary}


def main() -> None:
    """Work until there are no more jobs."""
    incoming, outgoing = channel()

    def tell(report: Report) -> None:
        sys.stdout.flush()  # what libraries printed: the last report may be the last thing this process does
        framing.send(outgoing, Frame.REPORT, json.dumps(report).encode())

    try:
        import torch

        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        while True:
            _, (job,) = framing.receive(incoming, Frame)
            perform(json.loads(job), tell)
    except (KeyboardInterrupt, framing.BrokenOffError):
        os._exit(130)  # nobody waits for an answer
