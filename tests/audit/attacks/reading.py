"""Recorded runs whose clients upload gradients of few samples, and how well a reconstruction reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from audit.recorded import recorded_once
from fedveil.audit.metrics import psnr
from fedveil.audit.record import Record
from fedveil.audit.views import View, from_bytes, to_bytes
from fedveil.runs.job import Job

QUICK: dict[str, Any] = {"quick": True, "box": [0.0, 1.0]}
PICTURES: dict[str, Any] = {"reshape": (1, 8, 8), "min_coverage": 0.0}
VICTIMS = (0, 1, 2)

Attempt = Callable[[View, Mapping[str, Any], Callable[[float], None]], Mapping[str, Tensor]]


def run_of(scheme: str, **more: Any) -> tuple[Job, Record]:
    """Three clients, two rounds, one sample a step unless the settings say otherwise."""
    return recorded_once(**{"scheme": scheme, "batch_size": 1, **more})


def batch_of(job: Job, client: int, *, round: int = 1) -> tuple[Tensor, Tensor]:
    """The samples on which a client really computed."""
    own = job.pool.clients[client]
    batches: Any = job.scheme.work.batches if hasattr(job.scheme.work, "batches") else None
    if batches is None:
        return own.take(torch.arange(len(own)))
    return own.take(batches.indices(client=client, samples=len(own), step=round - 1))


def tried(attempt: Attempt, view: View, **settings: Any) -> Mapping[str, Tensor]:
    """What an attempt makes of a view that went through bytes, as it does on its way to a process."""
    heard: list[float] = []
    found = attempt(from_bytes(to_bytes(view)), {**QUICK, **settings}, heard.append)
    assert heard
    assert all(0 <= one <= 1 for one in heard)
    return found


def decibels(found: Mapping[str, Tensor], x: Tensor) -> float:
    """PSNR, samples in the order that fits them best (greedily)."""
    assert found["inputs"].shape == x.shape
    left, values = list(range(len(x))), []
    for one in x:
        scores = {k: float(psnr(found["inputs"][k : k + 1].double(), one[None].double())) for k in left}
        best = max(scores, key=lambda k: scores[k])
        left.remove(best)
        values.append(scores[best])
    return sum(values) / len(values)


def by_chance(x: Tensor, *, seed: int = 0) -> float:
    """Mean PSNR of pictures drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    guesses = (torch.rand(x.shape, generator=generator, dtype=torch.float64) for _ in range(50))
    return sum(float(psnr(one, x.double())) for one in guesses) / 50
