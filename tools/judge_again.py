"""Judge the figures in docs/results again, by the rules of today, and write their pages and docs/reproduction.md.

`python -m tools.judge_again`, where a rule of `papers/` has changed; no cell is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from papers.page import judge_again, page

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    """Write everything again."""
    judge_again(DOCS / "results")
    (DOCS / "reproduction.md").write_text(page(DOCS / "results"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
