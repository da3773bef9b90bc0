"""Rounds of many clients in one process: seconds a client, and how time and memory grow with the number of clients.

At a fixed number of neighbours a client's cost is not to grow with the others. Every figure is of a process of its
own: its CPU time for one round (introductions, work, uploads, opening the sum) of a model of 9,610 parameters, and the
peak of its memory, both beyond what sixteen clients take there. `python -m benchmarks.scale` shows these alone;
`--clients 250,1000,4000,10000` takes more.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row
from benchmarks.timing import Ratio

CLIENTS = (250, 1_000, 4_000)
_MOST_EXPONENT = 1.1
_FIXED: dict[str, dict[str, Any]] = {
    "nadp": {"neighbours": 12, "honest_arrivals": True},
    "veil-secagg": {"neighbours": 24, "head_noise": False},
}
_DROPOUT = 0.02

_CHILD = """
import json, sys, time
import torch
import fedveil
from benchmarks.timing import peak_bytes

scheme, clients, width, settings = json.loads(sys.argv[1])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)

def train(clients, **settings):
    net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    x, y = torch.randn(clients, 4, 64, generator=generator), torch.randint(0, 10, (clients, 4), generator=generator)
    parts = list(zip(x, y))
    # Noise is made for two rounds, of which one is taken: with clients missing the target is spent before the last.
    return fedveil.train(net, parts, scheme=scheme, rounds=2, seed=1, lr=0.01, callbacks=[enough], **settings)

def enough(row):
    if "failed" in row:
        raise SystemExit(row["failed"])
    raise fedveil.StopTraining("one round is enough")

train(16, **{name: value for name, value in settings.items() if name not in ("neighbours", "simulate_dropout")})
least, begun = peak_bytes(), time.process_time()
train(clients, **settings)
print(json.dumps([time.process_time() - begun, peak_bytes() - least]))
"""


@dataclass(frozen=True)
class Cost:
    """What a round of so many clients takes."""

    clients: int
    seconds: float
    memory: float


def cost(scheme: str, clients: int, *, width: int = 128, **settings: Any) -> Cost:
    """A round's CPU seconds and bytes, in a process of its own."""
    told = json.dumps([scheme, clients, width, {**_FIXED[scheme], **settings}])
    done = subprocess.run([sys.executable, "-c", _CHILD, told], check=True, capture_output=True, text=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return Cost(clients, seconds, memory)


def exponent(costs: Sequence[Cost], what: str) -> float:
    """The slope of log(what) in log(clients), by least squares."""
    points = [(math.log(cost.clients), math.log(max(getattr(cost, what), 1e-9))) for cost in costs]
    x, y = (sum(point[at] for point in points) / len(points) for at in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def scale(clients: Sequence[int] = CLIENTS) -> list[Row]:
    """Seconds a client, exponents of time and memory, dropouts, and what a larger model adds."""
    rows = []
    for scheme in _FIXED:
        costs = [cost(scheme, count) for count in clients]
        for each in costs:
            milliseconds = 1e3 * each.seconds / each.clients
            note = f"peak + {each.memory / 1e6:.0f} MB"
            rows.append(
                Row(f"{scheme}, a round of {each.clients:,}: a client", "milliseconds", _exact(milliseconds), note=note)
            )
        slope = _exact(exponent(costs, "seconds"))
        rows.append(Row(f"{scheme}: CPU time of a round ∝ clients^x", "exponent", slope, _MOST_EXPONENT))
        slope = _exact(exponent(costs, "memory"))
        rows.append(Row(f"{scheme}: memory beyond 16 clients' ∝ clients^x", "exponent", slope, _MOST_EXPONENT))
        fixed = min(clients)
        whole = next(each for each in costs if each.clients == fixed)
        some = cost(scheme, fixed, simulate_dropout=_DROPOUT)
        ratio = _exact(some.seconds / whole.seconds)
        rows.append(Row(f"{scheme}, {fixed:,} clients, {_DROPOUT:.0%} drop out", "nobody does", ratio))
        rows.append(Row(f"{scheme}: memory a larger model adds a client", "bytes of it", _exact(_added(scheme)), 0.1))
    return rows


def _added(scheme: str) -> float:
    """How much more memory further clients take with a larger model, over their number × what is larger in it.

    From more clients on than are worked on at once, so that what one such group takes is in all of it.
    """
    few, many, narrow, wide = 600, 1_200, 128, 384
    grown = [cost(scheme, many, width=width).memory - cost(scheme, few, width=width).memory for width in (narrow, wide)]
    return (grown[1] - grown[0]) / ((many - few) * 8 * (64 + 1 + 10) * (wide - narrow))


def _exact(value: float) -> Ratio:
    return Ratio(value, value, value)


def main() -> int:
    """Show the rows; 1 if a bound is broken."""
    from benchmarks.__main__ import show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)), help="how many, with commas")
    rows = scale([int(count) for count in parser.parse_args().clients.split(",")])
    show("one round in one process", rows)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
