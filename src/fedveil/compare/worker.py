"""A process that does one cell after the other: jobs come as lines on standard input, reports go out as lines.

Started as `python -m fedveil.compare.worker`. It ends when its parent does, whatever it is at, and the run it was at
can be resumed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import FedVeilError
from fedveil.processes import end_with
from fedveil.runs.folder import RunFolder

Tell = Callable[[dict[str, Any]], None]


def perform(job: Mapping[str, Any], tell: Tell, *, catch: bool = True) -> None:
    """Do one cell and tell how that went; without `catch`, what goes wrong is raised."""
    try:
        result = _work(job)(job, tell)
    except BrokenPipeError:
        raise
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
    sys.path.extend(one for one in job["path"] if one not in sys.path)
    module, _, function = job["work"].partition(":")
    found: Callable[[Mapping[str, Any], Tell], dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found


class _Reporter:
    """Tells of every round."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def begin(self, folder: RunFolder, config: RunConfig, rows: Sequence[dict[str, Any]]) -> None:
        """Where the run stands."""
        self._tell({"kind": "begin", "round": rows[-1]["round"] if rows else 0})

    def round(self, row: dict[str, Any]) -> None:
        """A round's figures."""
        self._tell({"kind": "round", "row": row})

    def kept(self) -> None:
        """Nothing."""

    def end(self, summary: dict[str, Any]) -> None:
        """Nothing: the summary goes out when everybody has been told."""

    def stopped(self, reason: BaseException) -> None:
        """Nothing: the reason goes out with the failure."""


def train(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train one cell of a comparison, from its beginning or from its checkpoint."""
    from fedveil.own_code import OwnCode
    from fedveil.runs import session
    from fedveil.tracking import Tracked, trackers

    def say(text: str) -> None:
        tell({"kind": "say", "text": text})

    folder = RunFolder(job["folder"])
    follow = [_Reporter(tell), *trackers(Tracked(**job["tracked"]), folder.path, title=job["title"], say=say)]
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
    # What libraries print must not end up between the reports.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with(0)

    def tell(report: dict[str, Any]) -> None:
        channel.write(json.dumps(report) + "\n")
        channel.flush()

    import torch

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        for line in sys.stdin:
            perform(json.loads(line), tell)
    except (KeyboardInterrupt, BrokenPipeError):
        # Nobody waits for an answer; flushing what is left must not complain either.
        os._exit(130)


if __name__ == "__main__":
    main()
