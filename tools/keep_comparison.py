"""Keep a comparison of all schemes among the results: `python -m tools.keep_comparison RUN NAME "WHAT" "COMMAND"`.

Writes docs/results/NAME.json (what compare.json says of schemes, without run folders), NAME.md (the table, with the
command that gives it again) and docs/pictures/NAME.png.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from fedveil.cli.compare import GLANCE, READING, glance, glance_notes
from fedveil.report.sources import what_was_compared

DOCS = Path(__file__).parents[1] / "docs"


def kept(results: dict[str, Any], name: str) -> dict[str, Any]:
    """What is worth keeping: settings and figures, and no place on a machine."""
    common = {**results["common"], "dataset": name}
    loads = [run["cost"]["load"] for run in results["runs"] if "cost" in run]
    return {
        **{key: results[key] for key in ("format", "fedveil", "preset", "only", "seeds", "schemes")},
        "common": common,
        "load": {"least": min(loads), "most": max(loads), "cores": results["runs"][0]["cost"]["cores"]},
        "parameters": next(run["summary"]["parameters"] for run in results["runs"] if run["ok"]),
    }


def page(results: dict[str, Any], less: dict[str, Any], *, name: str, what: str, command: str) -> str:
    """The table as Markdown."""
    rows = [glance(scheme, figures) for scheme, figures in results["schemes"].items() if figures["n"]]
    load = less["load"]
    about = what_was_compared({**results, "common": less["common"]})
    return "\n".join(
        [
            f"# Every scheme on {what}",
            "",
            f"{about}; one seed. Times are those of processors, taken at a load of {load['least']:g} to "
            f"{load['most']:g} on {load['cores']} cores.",
            "",
            "```bash",
            command,
            "```",
            "",
            f"![Every scheme: accuracy over bytes and over seconds](../pictures/{name}.png)",
            "",
            *("| " + " | ".join(row) + " |" for row in (GLANCE, ("---",) * len(GLANCE), *rows)),
            "",
            READING,
            "",
            *(f"- {note}" for note in glance_notes(results["schemes"])),
            "",
            "Settings that schemes declare for themselves: "
            + "; ".join(
                f"`{scheme}` {', '.join(f'{key} = {value}' for key, value in own.items())}"
                for scheme, own in results["only"].items()
            )
            + ".",
            "",
        ]
    )


def main(run: str, name: str, what: str, command: str) -> int:
    """Write the three files."""
    results = json.loads((Path(run) / "compare.json").read_text(encoding="utf-8"))
    less = kept(results, name)
    file = DOCS / "results" / f"{name}.json"
    file.write_text(json.dumps(less, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(results, less, name=name, what=what, command=command), encoding="utf-8")
    shutil.copy(Path(run) / "overview.png", DOCS / "pictures" / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
