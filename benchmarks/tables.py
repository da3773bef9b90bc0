"""The tables of docs/results/README.md, as Markdown, from the stored figures: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def agreement() -> str:
    rows = []
    for name, title in (("digits.json", "digits"), ("fashion-mnist.json", "Fashion-MNIST")):
        for r in stored(name)["rows"]:
            accuracies = " / ".join(f"{r[f'{s}_accuracy']:.2%}" for s in ("fedavg", "pbpfl", "lossless"))
            differences = [f"{r[s]:.1e}" for s in ("pbpfl", "lossless", "fedavg_other_order")]
            rows.append([title, r["dtype"], accuracies, *differences])
    columns = ["data", "type", "accuracy fedavg / pbpfl / lossless", "pbpfl − fedavg", "lossless − fedavg"]
    return markdown([*columns, "fedavg, other summation order"], rows)


def bench(name: str) -> str:
    rows = []
    for r in stored(name)["rows"]:
        measured = r["measured"]
        bound = "" if r["bound"] is None else f"{'≥' if r['at_least'] else '≤'} {r['bound']:.2f}"
        figures = [f"{measured['middle']:.3f}", f"{measured['low']:.3f}–{measured['high']:.3f}"]
        rows.append([r["what"], r["against"], *figures, bound, r["note"]])
    return markdown(["what", "against", "ratio", "range", "bound", ""], rows)


def main() -> int:
    for title, table in (
        ("agreement", agreement()),
        ("bench, CPU", bench("bench-cpu.json")),
        ("bench, GPU", bench("bench-gpu.json")),
    ):
        print(f"## {title}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
