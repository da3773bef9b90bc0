"""Interleaved timing: every repetition runs all candidates once, so that drift hits them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


def peak_bytes() -> int:
    """The most memory this process has held; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    # VmHWM, not ru_maxrss, which begins with what the process that started this one has taken.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@dataclass(frozen=True)
class Timed:
    """Seconds of one candidate, repetition by repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """Median of the repetitions' ratios, with the smallest and largest."""

    middle: float
    low: float
    high: float


def interleaved(candidates: Mapping[str, Callable[[], object]], *, repeats: int, warm_ups: int = 2) -> dict[str, Timed]:
    """Time every candidate `repeats` times, taking turns."""
    cuda = torch.cuda.is_available()

    def once(work: Callable[[], object]) -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for work in candidates.values():
        for _ in range(warm_ups):
            once(work)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, work in candidates.items():
            seconds[name].append(once(work))
    return {name: Timed(tuple(values)) for name, values in seconds.items()}


def ratio(top: Timed, bottom: Timed) -> Ratio:
    """top / bottom, repetition by repetition."""
    ratios = [a / b for a, b in zip(top.seconds, bottom.seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
