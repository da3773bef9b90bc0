"""FedVeil on Flower beside plain Flower: seconds per round, simulations, and load.

    python -m benchmarks.flower                       # everything; an hour and more
    python -m benchmarks.flower --parts load,page     # 10 and 20 clients, ten rounds each: twenty minutes on two cores
    python -m benchmarks.flower --parts split,page    # a round taken apart: ten minutes, twice that with --before
    python -m benchmarks.flower --parts rounds        # or: simulation, crowd
    python -m benchmarks.flower --parts page          # write the page from what was measured

Measurements go into one JSON file as they come; what is there is not taken again without --again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch and before any process is started: one thread each, or they starve one another.
os.environ["OMP_NUM_THREADS"] = "1"
# Flower alone is an app of this folder's, and its processes import it by name wherever they were started.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

PARTS = ("split", "rounds", "simulation", "crowd", "load", "page")
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> int:
    from benchmarks.flower_crowd import crowds
    from benchmarks.flower_load import load
    from benchmarks.flower_page import page
    from benchmarks.flower_rounds import rounds_here, rounds_on_flower
    from benchmarks.flower_simulation import simulation
    from benchmarks.flower_split import split
    from benchmarks.flower_store import Store, surroundings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "flower.json")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2, help="how often all candidates take their turns")
    parser.add_argument("--crowded", default="10,20", help="numbers of clients, each ten rounds on its own cluster")
    parser.add_argument("--crowds", default="100,300,1000", help="numbers of clients behind the in-process Grid")
    parser.add_argument("--before", type=Path, help="another copy of FedVeil's src/, to take a round apart beside this")
    parser.add_argument("--note", action="append", default=[], help="a sentence to put at the top of the page")
    parser.add_argument("--again", action="store_true", help="measure what was measured before")
    given = parser.parse_args()
    parts = given.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    store = Store(given.out, again=given.again)
    if parts != ["page"]:
        known = store.get("machine") or {}
        now = surroundings()
        now["packages"] = {**known.get("packages", {}), **now["packages"]}
        store.put("machine", now)
    if given.note:
        store.put("notes", {"texts": given.note})
    if "split" in parts:
        split(store, rounds=given.rounds, passes=given.passes, before=given.before)
    if "rounds" in parts:
        rounds_here(store, clients=given.clients, rounds=20, where=f"here/{given.clients}")
        rounds_on_flower(store, clients=given.clients, rounds=given.rounds, passes=given.passes)
    if "simulation" in parts:
        simulation(store, rounds=2 * given.rounds)
    if "crowd" in parts:
        crowds(store, [int(one) for one in given.crowds.split(",")])
    if "load" in parts:
        load(store, sizes=[int(one) for one in given.crowded.split(",")], rounds=10)
    if "page" in parts:
        given.out.with_suffix(".md").write_text(page(store), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
