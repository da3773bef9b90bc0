"""Papers' figures that our benchmarks take, judged like entries: the bank data and the curves on CIFAR-10."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import DataError
from papers.cells import EMPTY, Check, Figure, Report
from papers.runner import Stored, entries, stored_results

_DECIMALS = 5e-4
_ERRORS = 2.0
_LAST = 5
_CURVES = {
    "cifar10-k5-batch64": "--clients 5 --batch-size 64 --groups 2 --lr 0.01",
    "cifar10-k5": "--clients 5 --batch-size 256 --lr 0.02",
    "cifar10-k100": "--clients 100 --cohort 5 --batch-size 250 --lr 0.02 --tf32",
}


@dataclass(frozen=True)
class Benchmark:
    """One file of a benchmark: whose figures it checks, the report, and the command that takes them again."""

    name: str
    paper: str
    report: Report
    command: str
    machine: str


def benchmarks(folder: Path) -> Iterator[Benchmark]:
    """Those whose files the folder holds."""
    if (path := folder / "bank.json").exists():
        command = "python -m benchmarks.bank --data $DATA/bank --out bank.json"
        yield Benchmark("bank", "PBPFL; lossless perturbation", _bank(_read(path)), command, "cpu")
    for name, settings in _CURVES.items():
        if (path := folder / f"{name}.json").exists():
            command = f"python -m benchmarks.curves --data $DATA/cifar10 --device cuda --epochs 30 {settings}"
            yield Benchmark(name, "Lossless perturbation", _curve(_read(path)), command, "NVIDIA H200")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as reason:
        raise DataError(f"{path} holds no figures that can be read ({reason}).") from reason
    assert isinstance(content, dict)
    return content


def _bank(content: dict[str, Any]) -> Report:
    """The papers' Table 1: test errors of FedAvg and of their own scheme, by clients and layers."""
    rows = content["rows"]
    printed = max(abs(plain - own) for plain, own in (row["paper"] for row in rows))
    largest = float(content["largest_spread"])
    shown = [row for row in rows if (row["clients"], row["layers"]) in ((1, 3), (10, 7))]
    figures = [
        Figure(
            f"test MSE of FedAvg and own scheme, {row['clients']} clients, {row['layers']} layers",
            f"{row['paper'][0]:.3f}, {row['paper'][1]:.3f}",
            f"{row['fedavg']:.4f}, {row['lossless']:.4f}",
        )
        for row in shown
    ]
    claim = "pbpfl and lossless end at FedAvg's error, to three decimals"
    return Report(
        title="Table 1: bank data, three schemes",
        columns=("clients", "layers", "fedavg", "pbpfl", "lossless"),
        rows=tuple(
            (str(row["clients"]), str(row["layers"]), *(f"{row[one]:.6f}" for one in ("fedavg", "pbpfl", "lossless")))
            for row in rows
        ),
        checks=(Check(claim, largest < _DECIMALS, f"largest difference {largest:.1e}"),),
        figures=(*figures, Figure("largest difference to FedAvg", f"{printed:.3f}", f"{largest:.1e}")),
    )


def _curve(content: dict[str, Any]) -> Report:
    """The ends of the curves: the mean of the last evaluations that all runs have, by scheme and seed."""
    settings, runs = content["settings"], content["runs"]
    shortest = min(len(run["curve"]) for run in runs)
    ends: dict[str, list[float]] = {"fedavg": [], "lossless": []}
    for run in runs:
        last = [point[2] for point in run["curve"][shortest - _LAST : shortest]]
        ends[run["scheme"]].append(100 * statistics.mean(last))
    means = {scheme: statistics.mean(values) for scheme, values in ends.items()}
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in ends.values()))
    gap = means["lossless"] - means["fedavg"]
    claim = f"lossless ends where FedAvg does, within {_ERRORS:g} standard errors"
    return Report(
        title=f"Accuracy on CIFAR-10, ResNet-20, {settings['clients']} clients, batch {settings['batch_size']}",
        columns=("scheme", "accuracy, %"),
        rows=tuple((scheme, f"{value:.2f}") for scheme, value in means.items()),
        checks=(Check(claim, abs(gap) <= _ERRORS * error, f"{gap:+.2f} points, standard error {error:.2f}"),),
        figures=(
            Figure("accuracy of FedAvg, % (paper: ResNet-56, cross-entropy)", "93.18", f"{means['fedavg']:.2f}"),
            Figure("accuracy of the method, %", "93.20", f"{means['lossless']:.2f}"),
        ),
    )


_FAILED = 3
_HEAD = ("entry", "figure: paper", "figure: here", "verdict", "why", "taken")
_INTRODUCTION = """\
# Reproduction

Every table and figure that `fedveil reproduce` and our benchmarks run again, from the figures stored in
`docs/results`. This page is made by

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
    measured = list(benchmarks(folder))
    if measured:
        parts += ["", "## Benchmarks", "", *_table(_benchmark_row(one) for one in measured)]
    parts += ["", "## Without stored figures", "", *_missing(found)]
    return "\n".join(parts) + "\n"


def _counted(found: Sequence[Stored]) -> list[str]:
    words = [one.report.word for one in found]
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
        one.report.word,
        _why(one.report),
        f"{_cell(where)}<br>`{one.command}`",
    )


def _benchmark_row(one: Benchmark) -> tuple[str, ...]:
    return (
        f"{one.name}<br>{one.paper}: {_cell(one.report.title)}",
        *_figures(one.report.figures),
        one.report.word,
        _why(one.report),
        f"{one.machine}<br>`{one.command}`",
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
