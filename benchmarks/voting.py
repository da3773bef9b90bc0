"""What ParaAegis' vote costs at 11 million parameters, r = 1 % and ten clients, against what it may cost.

`OMP_NUM_THREADS=1 python -m benchmarks.voting` shows these rows alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from benchmarks.rows import Row
from benchmarks.timing import Ratio, Timed, peak_bytes
from fedveil.uplink import vote
from fedveil.uplink import vote as ratio

PARAMETERS = 11_000_000
RATIO = 0.01
CLIENTS = 10
MOST_SECONDS = 10.0
MOST_MEGABYTES = 200.0
KEY, LABEL = bytes(range(32)), vote.vote_label(0, 0)
T = TypeVar("T")


@dataclass
class Cost:
    """Seconds of one election, and megabytes of memory at its peak beyond the updates themselves."""

    choosing: float = 0.0
    tagging: float = 0.0
    counting: float = 0.0
    opening: float = 0.0
    client_megabytes: float = 0.0
    all_megabytes: float = 0.0

    @property
    def client(self) -> float:
        """One client's seconds: choosing and tagging, and reading the result."""
        return (self.choosing + self.tagging) / CLIENTS + self.opening


def voting(*, repeats: int) -> list[Row]:
    """One client's vote and the server's count, in seconds and megabytes; each election in a fresh process."""
    found = [_measured() for _ in range(max(3, repeats // 3))]
    what = f"{PARAMETERS / 1e6:.0f} M parameters, r = {RATIO:.0%}"
    client = Timed(tuple(one.client for one in found))
    server = Timed(tuple(one.counting for one in found))
    rows = [
        Row(
            f"one client's vote ({what})",
            f"{MOST_SECONDS:.0f} s",
            _share(client.seconds, MOST_SECONDS),
            1.0,
            note=f"{client.median:.2f} s: {_parts(found)}",
        ),
        Row(
            f"server: counting {CLIENTS} votes",
            f"{MOST_SECONDS:.0f} s",
            _share(server.seconds, MOST_SECONDS),
            note=f"{server.median:.2f} s",
        ),
    ]
    if any(one.all_megabytes for one in found):
        rows += [
            _memory("memory of one client's vote", [one.client_megabytes for one in found]),
            _memory(f"memory of {CLIENTS} votes and the count in one process", [one.all_megabytes for one in found]),
        ]
    return rows


def _parts(found: list[Cost]) -> str:
    choosing, tagging = (float(np.median([getattr(one, part) for one in found])) for part in ("choosing", "tagging"))
    return f"choosing {1e3 * choosing / CLIENTS:.0f} ms, tags {1e3 * tagging / CLIENTS:.0f} ms"


def _memory(what: str, megabytes: list[float]) -> Row:
    share = _share(tuple(megabytes), MOST_MEGABYTES)
    return Row(what, f"{MOST_MEGABYTES:.0f} MB", share, 1.0, note=f"{MOST_MEGABYTES * share.middle:.0f} MB")


def _share(values: tuple[float, ...], most: float) -> Ratio:
    return Ratio(float(np.median(values)) / most, min(values) / most, max(values) / most)


def _measured() -> Cost:
    """One election in a process of its own: a process' peak memory never falls."""
    command = [sys.executable, "-m", "benchmarks.voting", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return Cost(**json.loads(done.stdout))


def election() -> Cost:
    """Ten clients vote, the server counts, one client reads the result."""
    cost = Cost()

    def timed(part: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        setattr(cost, part, getattr(cost, part) + time.perf_counter() - start)
        return result

    count = ratio.Ratio(RATIO).winners(0, PARAMETERS)
    # What all clients see alike makes their votes overlap.
    common = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))
    update = torch.zeros(PARAMETERS)
    vote.tags(torch.arange(1), key=KEY, label=LABEL)  # loads the cipher
    before = peak_bytes()
    tally = vote.Tally(most=count, winners=count)
    for client in range(CLIENTS):
        update.normal_(generator=torch.Generator().manual_seed(1 + client)).add_(common)
        indices = timed("choosing", partial(vote.choice, update, count, "max"))
        made = timed("tagging", partial(vote.tags, indices, key=KEY, label=LABEL))
        if client == 0:
            cost.client_megabytes = (peak_bytes() - before) / 1e6
        timed("counting", partial(tally.add, made))
    result = timed("counting", tally.result)
    timed("opening", partial(vote.indices_of, result, key=KEY, label=LABEL, size=PARAMETERS, winners=count))
    cost.all_megabytes = (peak_bytes() - before) / 1e6
    return cost


def main() -> int:
    from benchmarks.__main__ import show

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--once", action="store_true", help="one election in this process, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.once:
        print(json.dumps(asdict(election())))
        return 0
    rows = voting(repeats=options.repeats)
    show(f"cpu, torch {torch.__version__}, 1 thread, {max(3, options.repeats // 3)} repetitions", rows)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
