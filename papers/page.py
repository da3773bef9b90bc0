"""The page of all entries: what the papers print, what came out here, and the verdict, from stored figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from papers.report import EMPTY, Figure, Report
from papers.runner import Stored, entries, stored_results

_FAILED = 3
_HEAD = ("entry", "figure: paper", "figure: here", "verdict", "why", "taken")
_INTRODUCTION = """\
# Reproduction

Every table and figure that `fedveil reproduce` runs again, from the figures stored in `docs/results`. This page is
made by

```console
fedveil reproduce --page docs/reproduction.md --from docs/results
```

How to read it:

- The verdict is counted, not chosen: *reproduced* if every claim that could be judged held, *partly* if some did,
  *not* if none did. What a claim stands on, such as that an attack works without protection, earns no verdict by
  itself. Claims are about order, margin and agreement. **They do not ask for the paper's absolute numbers**: networks,
  data and sizes often differ, and the two columns of figures show by how much.
- Claims that no stored cell can judge are open, and said to be. A quick form is small and shows directions only.
- A dash in the paper's column: the paper prints no such number.
- "cpu": two cores of an AMD EPYC. One seed, unless figures carry a ±. How settings were chosen, and what was looked at
  before: [results](results/README.md).
"""


def page(folder: Path) -> str:
    """The page as Markdown, from a folder of stored figures."""
    found = stored_results(folder)
    parts = [_INTRODUCTION, *_counted(found), "## Entries", "", *_table(_entry_row(one) for one in found)]
    parts += ["", "## Without stored figures", "", *_missing(found)]
    return "\n".join(parts) + "\n"


def _counted(found: Sequence[Stored]) -> list[str]:
    words = [one.report.standing for one in found]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    return [f"{len(found)} stored runs of {len({one.entry.name for one in found})} entries: {counts}.", ""]


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [_HEAD, tuple("---" for _ in _HEAD), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _entry_row(one: Stored) -> tuple[str, ...]:
    form = " (quick)" if one.quick else ""
    where = "; ".join(filter(None, (one.machine, one.noted, one.cells)))
    return (
        f"[{one.entry.name}](results/{one.path.stem}.md){form}<br>{_cell(one.entry.paper)}: {_cell(one.entry.what)}",
        *_figures(one.report.figures),
        one.report.standing,
        _why(one.report),
        f"{_cell(where)}<br>`{one.command}`",
    )


def _figures(figures: Sequence[Figure]) -> tuple[str, str]:
    theirs, ours = (
        "<br>".join(f"{_cell(one.what)}: **{_cell(value)}**" for one, value in zip(figures, values, strict=True))
        for values in ([one.paper for one in figures], [one.ours for one in figures])
    )
    return theirs or EMPTY, ours or EMPTY


def _why(report: Report) -> str:
    """How many claims held, which did not, and how many are open."""
    judged = [one for one in report.checks if one.held is not None]
    failed = [one for one in judged if not one.held]
    waiting = len(report.checks) - len(judged)
    told = [f"{len(judged) - len(failed)} of {len(judged)} claims that could be judged held"]
    if len(failed) > _FAILED:
        told.append(f"did not: {', '.join(one.claim for one in failed[:_FAILED])}, and {len(failed) - _FAILED} more")
    elif failed:
        told.append(f"did not: {', '.join(one.claim for one in failed)}")
    elif judged:
        told.append(", ".join(one.claim for one in judged[:_FAILED]))
    if waiting:
        told.append(f"{waiting} open")
    if report.quick:
        told.append("quick form: directions only")
    return _cell("; ".join(told))


def _missing(found: Sequence[Stored]) -> list[str]:
    there = {(one.entry.name, one.quick) for one in found}
    lines = [
        f"- `{entry.name}` ({entry.paper}): {entry.what}. It takes {entry.takes}"
        + (f", {entry.takes_quick} with `--quick`." if entry.has_quick else ".")
        + (" The quick form is above." if (entry.name, True) in there else "")
        for entry in entries()
        if (entry.name, False) not in there
    ]
    return lines or ["None: every entry's full form has stored figures."]


def _cell(text: str) -> str:
    """Text that neither ends a cell of a table nor starts a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
