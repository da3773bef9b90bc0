"""The walk of a round: through which files of the package it goes. `python -m tools.round_walk [SCHEME ...]`.

Every function that Python enters between the boundaries of a run's first and second round is noted by its file; the
first round is left out because it builds what later rounds find. `--write` puts the walk of `fedavg` into
docs/architecture.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType

import fedveil
from fedveil import data, models
from fedveil.protocol.phases import RoundDone

ROOT = Path(fedveil.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST = {"fedavg": 22, "veil-secagg": 34, "paraaegis": 46}
"""How many files a round of a scheme may cross."""
_BEGIN, _END = "<!-- walk: python -m tools.round_walk --write -->\n", "<!-- end of the walk -->"


def walk(scheme: str) -> list[str]:
    """The files that the second round of a small run passes through, in the order of their first step."""
    split = data.load("digits", seed=1)
    net = models.build("mlp", input_shape=split.train.input_shape, outputs=10, depth=2, width=8)
    parts = data.partition(split.train, clients=6, seed=1)
    clients = [(split.train.x[rows], split.train.y[rows]) for rows in parts]
    crossed: dict[str, None] = {}
    boundaries: set[int] = set()

    def note(frame: FrameType, event: str, value: object) -> None:
        here = frame.f_code.co_filename
        if not here.startswith(str(ROOT)):
            return
        if len(boundaries) == 1:
            crossed.setdefault(str(Path(here).relative_to(ROOT)))
        # What a generator yields, Python calls its return.
        if event == "return" and isinstance(value, RoundDone):
            boundaries.add(value.round)

    sys.setprofile(note)
    try:
        fedveil.train(net, clients, scheme=scheme, rounds=3, seed=1, progress=False, workers=1)
    finally:
        sys.setprofile(None)
    return list(crossed)


def page(files: list[str]) -> str:
    """docs/architecture.md with this walk in it."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    lines = "".join(f"{number}. `{name}`\n" for number, name in enumerate(files, 1))
    return before + _BEGIN + lines + _END + rest.partition(_END)[2]


def main() -> None:
    """Print the walks, or write one into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", default=list(MOST))
    parser.add_argument("--write", action="store_true", help="put the walk of fedavg into docs/architecture.md")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(page(walk("fedavg")), encoding="utf-8")
        return
    for scheme in given.schemes:
        files = walk(scheme)
        limit = f" (at most {MOST[scheme]})" if scheme in MOST else ""
        print(f"{scheme}: {len(files)} files{limit}")
        for name in files:
            print(f"  {name}")


if __name__ == "__main__":
    main()
