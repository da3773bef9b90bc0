"""docs/results/peers.md from kept figures: `python -m benchmarks.peers.page docs/results/peers.json`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.contest import APART, Cell
from benchmarks.peers.table import kept, marks, rows
from benchmarks.tables import markdown

_ABOUT = """# Beside pfl, Flower and Opacus

`python -m benchmarks.peers --json docs/results/peers.json`, then `python -m benchmarks.peers.page
docs/results/peers.json`, which wrote this page. {machine}; load before: {load_before:.2f}. One thread a process.
Candidates take turns (A-B-C-A-B-C): figures are seconds a round, the median of {turns} turns, with the least and the
most. The load is the highest one-minute average at the end of a turn; a cell taken while the machine had more to do
than the benchmark makes is marked.

All get the same samples, cohorts, batches and first model. *Apart* is ‖w − w₁‖ / ‖w₁ − w₀‖: how far from the first
candidate's last model, over the way that one went (more than {apart:g} is marked). What differs: FedVeil checks and
sums contributions exactly; pfl adds up tensors in the process that made them, and between two processes once a round;
Flower makes messages of the model, and its server looks for replies every tenth of a second. FedVeil's
clipping bound is set so that it clips to the same length as the others, who leave no room for rounding. Where clipping
is compared, no noise is drawn.
"""


def page(facts: dict[str, object], cells: Sequence[Cell]) -> str:
    """The page."""
    turns = max(len(cell.seconds) for cell in cells)
    parts = [_ABOUT.format(**facts, turns=turns, apart=APART)]
    if facts["missing"]:
        parts.append("Not there: " + "; ".join(str(line) for line in facts["missing"]) + ".\n")  # type: ignore[attr-defined]
    for what in dict.fromkeys(cell.what for cell in cells):
        chosen = [cell for cell in cells if cell.what == what]
        parts.append(f"## {what}\n\n{_table(chosen)}\n")
    bounds = [
        [row.what, row.against, f"{row.measured.middle:.2f}", f"≥ {row.bound:.2f}", "held" if row.holds else "broken"]
        for row in rows(cells)
        if row.bound is not None
    ]
    columns = ["a peer's time", "over", "ratio", "bound", ""]
    parts.append(f"## Bounds\n\n{markdown(columns, bounds)}\n")
    return "\n".join(parts)


def _table(cells: Sequence[Cell]) -> str:
    lines = []
    for cell in cells:
        spread = f"{min(cell.seconds):.4f}–{max(cell.seconds):.4f}"
        apart = "another model by design" if cell.apart is None else f"{cell.apart:.0e}"
        figures = [f"{cell.median:.4f}", spread, f"{cell.load:.2f}", apart]
        lines.append([cell.candidate, *figures, marks(cell).removeprefix(", ")])
    return markdown(["candidate", "seconds", "range", "load", "apart", ""], lines)


def main() -> int:
    file = Path(sys.argv[1])
    facts, cells = kept(file)
    file.with_suffix(".md").write_text(page(facts, cells), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
