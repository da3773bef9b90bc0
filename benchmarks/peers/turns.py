"""A candidate's side of the contest: wait for a turn, run that many rounds, tell the seconds of each."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Turns:
    """Lines on standard input say how many rounds to run; lines on standard output say how long they took.

    Whatever else is printed goes to standard error: libraries greet, and Ray talks.
    """

    def __init__(self) -> None:
        self._told = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._left = 0
        self._seconds: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        """Ready for the first turn."""
        self._tell(ready=True)
        self._wait()

    def lap(self) -> None:
        """A round is over; returns when the next one may begin."""
        self._seconds.append(time.perf_counter() - self._since)
        self._left -= 1
        if not self._left:
            self._tell(seconds=self._seconds)
            self._seconds = []
            self._wait()
        self._since = time.perf_counter()

    def finish(self, folder: Path, parameters: Tensor) -> None:
        """All rounds are over: the model they ended in."""
        name = f"model-{os.getpid()}.npy"
        np.save(folder / name, parameters.numpy())
        self._tell(model=name)

    def _tell(self, **facts: object) -> None:
        self._told.write(json.dumps(facts) + "\n")
        self._told.flush()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:  # whoever gave the turns is gone
            raise SystemExit(1)
        self._left = int(line)
        self._since = time.perf_counter()
