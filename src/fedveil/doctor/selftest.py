"""A second of real work: two rounds under veil and masks must end in plain averaging's model."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fedveil.doctor.finding import OK, PROBLEM, Finding

CLOSE = 1e-4
"""The largest relative difference that float32 and fixed-point numbers explain."""

_CLIENTS, _SAMPLES, _INPUTS, _CLASSES, _WIDTH = 4, 20, 8, 3, 16


def same_model() -> Iterator[Finding]:
    """Train on made-up data with and without protection, and compare."""
    import fedveil.api  # noqa: F401  (loading it is not what is timed)

    started = time.perf_counter()
    apart = difference("veil-secagg")
    took = time.perf_counter() - started
    yield judged(apart, took)


def judged(apart: float, seconds: float) -> Finding:
    """What a relative difference between the two models means."""
    found = f"two rounds of veil-secagg end {apart:.1e} from fedavg (relative), in {seconds:.1f} s"
    if apart <= CLOSE:  # not for NaN
        return Finding("self-test", OK, found)
    todo = "this installation computes wrongly: reinstall torch and numpy, then report it with this table"
    return Finding("self-test", PROBLEM, f"{found}; at most {CLOSE:g} is rounding", todo)


def difference(scheme: str) -> float:
    """How far a scheme's model ends from that of plain averaging, relative to its length."""
    import torch

    from fedveil.api import train

    samples = torch.Generator().manual_seed(1)
    inputs = [torch.randn(_SAMPLES, _INPUTS, generator=samples) for _ in range(_CLIENTS)]
    clients = [(x, x[:, :_CLASSES].argmax(1)) for x in inputs]
    ends = []
    for name in ("fedavg", scheme):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            net = torch.nn.Sequential(
                torch.nn.Linear(_INPUTS, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _CLASSES)
            )
        done = train(net, clients, scheme=name, rounds=2, lr=0.1, seed=1, loss="square", progress=False)
        ends.append(torch.cat([one.detach().double().flatten() for one in done.model.parameters()]))
    return float((ends[0] - ends[1]).norm() / ends[0].norm())
