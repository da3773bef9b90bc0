"""How long the accountant takes for many clients, and how tight its bounds are.

OMP_NUM_THREADS=1 python -m benchmarks.accountant
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fedveil.ledger.correlated import NoiseGraph, NoiseLayout, charges, worst, worst_candidate, worst_collusion
from fedveil.ledger.gaussian import mu_of, sampled_epsilon

T = TypeVar("T")


def rows(*, clients: int = 10_000, neighbours: int = 5, ratio: float = 1000.0) -> list[tuple[str, float, str]]:
    """(what, value, unit); θ is the worst client's μ² in units of the central limit."""
    graph, sensitivity = n_out(clients, neighbours, ratio), np.ones(clients)
    name = f"{clients} clients, {neighbours}-out, pair/residual variance {ratio:g}"
    seconds, candidate = timed(lambda: worst_candidate(graph, sensitivity))
    found = [
        (f"{name}: worst candidate", seconds, "s"),
        (f"{name}: its θ, at least", candidate.lower * clients, ""),
    ]
    seconds, everyone = timed(lambda: worst(graph, sensitivity))
    found += [
        (f"{name}: certified bound over all clients", seconds, "s"),
        (f"{name}: θ of every client, at most", everyone.upper * clients, ""),
    ]
    sparse = covering_of(graph)
    seconds, mu2 = timed(lambda: charges(sparse))
    found += [
        (f"{name}: every client's own charge", seconds, "s"),
        (f"{name}: largest of them (θ)", float(mu2.max()) * clients, ""),
    ]
    complete = complete_covering(1500, pair=100.0)
    seconds, _ = timed(lambda: charges(complete))
    found.append(("1500 clients, complete graph: every client's own charge", seconds, "s"))
    seconds, _ = timed(lambda: worst_collusion(complete, 450))
    found.append(("1500 clients, complete graph: bound over every set of 450 colluders", seconds, "s"))
    seconds, _ = timed(lambda: mu_of(1.0, 1e-5))
    found.append(("largest μ for a target (ε, δ)", 1e3 * seconds, "ms"))
    seconds, _ = timed(lambda: sampled_epsilon(noise_multiplier=1, sampling_rate=0.1, rounds=100, delta=1e-5))
    found.append(("100 rounds of secretly sampled records, with the package's import", seconds, "s"))
    return found


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def n_out(size: int, out: int, ratio: float) -> NoiseGraph:
    random = np.random.default_rng(0)
    first = np.repeat(np.arange(size), out)
    second = np.concatenate([random.choice(size - 1, out, replace=False) for _ in range(size)])
    second += second >= first
    keys = np.unique(np.minimum(first, second) * size + np.maximum(first, second))
    return NoiseGraph(np.ones(size), keys // size, keys % size, np.full(len(keys), ratio))


def covering_of(graph: NoiseGraph) -> NoiseLayout:
    return NoiseLayout(
        tuple(range(graph.size)), np.ones(graph.size), graph.residual, graph.first, graph.second, graph.pairs
    )


def complete_covering(size: int, *, pair: float) -> NoiseLayout:
    first, second = np.triu_indices(size, 1)
    return NoiseLayout(tuple(range(size)), np.ones(size), np.ones(size), first, second, np.full(len(first), pair))


if __name__ == "__main__":
    for what, value, unit in rows():
        print(f"{what:<90} {value:10.4f} {unit}")
