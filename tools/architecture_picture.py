"""Draw docs/assets/architecture.svg from the table of allowed imports: python -m tools.architecture_picture.

The table stands in tests/test_architecture.py, where tests hold the code to it; so the picture is as true as the table.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "architecture.svg"

Table = Mapping[str, set[str]]

_WORDS = {
    "__init__": "import fedveil",
    "__main__": "python -m fedveil",
    "api": "fedveil.train",
    "audit": "attacks, judged",
    "cli": "the commands",
    "client_held": "roles, model at clients",
    "compare": "schemes side by side",
    "config": "settings of a run",
    "crypto": "keys, shares, CKKS",
    "data": "data sets, partitions",
    "doctor": "is all there?",
    "downlink": "the way down: veils",
    "engine": "messages, here",
    "errors": "what can go wrong",
    "flower": "messages, on Flower",
    "framing": "bytes told apart",
    "ledger": "what is proven",
    "models": "networks by name",
    "own_code": "your own, by name",
    "plain": "data from files, checked",
    "processes": "children, supervised",
    "protocol": "messages, phases, parts",
    "record": "audit: what was seen",
    "noise": "uplink: how much noise",
    "report": "a run as one page",
    "roles": "server and client",
    "runs": "folders, checkpoints",
    "schemes": "parts put together",
    "secrets": "secret randomness",
    "settings": "train(…), typed",
    "shapes": "what fields may be",
    "tensors": "models as one vector",
    "tracking": "TensorBoard, MLflow",
    "uplink": "the way up: sums",
    "version": "its number",
    "work": "a client's training",
}
_WIDTH, _HEIGHT, _GAP, _ROW = 148, 44, 14, 92
_MARGIN = 18


def table() -> dict[str, set[str]]:
    """The allowed imports, as the tests have them."""
    sys.path.insert(0, str(ROOT / "tests"))  # where the test's own helpers are
    found: dict[str, set[str]] = runpy.run_path(str(ROOT / "tests" / "test_architecture.py"))["MAY_IMPORT"]
    return found


def layers(allowed: Table) -> list[list[str]]:
    """The parts by height: each one above everything it may import, from the top down."""
    heights: dict[str, int] = {}

    def height(part: str) -> int:
        if part not in heights:
            heights[part] = 1 + max((height(one) for one in allowed[part]), default=-1)
        return heights[part]

    highest = max(height(part) for part in allowed)
    return [sorted(part for part in allowed if heights[part] == level) for level in range(highest, -1, -1)]


def arrows(allowed: Table) -> list[tuple[str, str]]:
    """The imports that do not follow from others: A → C is left out where A → B → … → C is there."""
    reach: dict[str, set[str]] = {}

    def below(part: str) -> set[str]:
        if part not in reach:
            reach[part] = set(allowed[part]).union(*(below(one) for one in allowed[part]))
        return reach[part]

    return sorted(
        (part, one)
        for part, imports in allowed.items()
        for one in imports
        if not any(one in below(other) for other in imports)
    )


def picture(allowed: Table) -> str:
    """The table as an SVG: a box per part, an arrow per import that does not follow from others."""
    rows = layers(allowed)
    widest = max(len(row) for row in rows)
    width = 2 * _MARGIN + widest * (_WIDTH + _GAP) - _GAP
    height = 2 * _MARGIN + (len(rows) - 1) * _ROW + _HEIGHT
    place: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (_WIDTH + _GAP) + _GAP) / 2
        for at, part in enumerate(row):
            place[part] = (left + at * (_WIDTH + _GAP), _MARGIN + level * _ROW)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img" aria-labelledby="title" font-family="system-ui, sans-serif">',
        '<title id="title">The parts of FedVeil; an arrow points to what a part may import</title>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#5b6785"/></marker></defs>',
        *(_arrow(place[one], place[other], one, other) for one, other in arrows(allowed)),
        *(_box(*place[part], part) for row in rows for part in row),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(x: float, y: float, part: str) -> str:
    middle = x + _WIDTH / 2
    words = _WORDS.get(part, "")
    height = y + (19 if words else 27)
    name = f'<text x="{middle:g}" y="{height:g}" font-size="14" font-weight="600">{escape(part)}</text>'
    about = f'<text x="{middle:g}" y="{y + 35:g}" font-size="10.5" fill="#3c4663">{escape(words)}</text>'
    about = about if words else ""
    return (
        f'<g text-anchor="middle" fill="#10182f" data-part="{escape(part)}"><rect x="{x:g}" y="{y:g}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#eef1fb" stroke="#5b6785"/>{name}{about}</g>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], one: str, other: str) -> str:
    x1, y1 = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH / 2, end[1]
    bend = (y2 - y1) / 2
    path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    return (
        f'<path d="{path}" fill="none" stroke="#5b6785" stroke-opacity="0.55" marker-end="url(#tip)" '
        f'data-from="{escape(one)}" data-to="{escape(other)}"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(table()), encoding="utf-8")
