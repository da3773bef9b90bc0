"""`fedveil reproduce`: the papers' tables and figures, run again."""

from __future__ import annotations

import importlib
import json as json_module
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli.tables import aside, plainly, table

if TYPE_CHECKING:
    from papers import Entry, Outcome, Report, Tick

RESULTS = Path("docs/results")
_CHECKOUT = Path(__file__).parents[3]


def _papers(folder: Path | None) -> Any:
    """The package that holds the papers' tables: of the checkout that FedVeil runs from, or where `folder` says.

    It is code, so it is never looked for in the working folder.
    """
    from fedveil.errors import ConfigError

    papers = _CHECKOUT / "papers" if folder is None else folder.resolve()
    if not (papers / "__init__.py").is_file():
        raise ConfigError(
            f"The papers' tables are not part of an installed FedVeil, and {papers} does not hold them: get a checkout "
            "of FedVeil and give --papers CHECKOUT/papers, or run the command of a checkout (make setup)."
        )
    sys.path.insert(0, str(papers.parent))
    return importlib.import_module("papers")


def reproduce(
    name: str | None = typer.Argument(None, help="An entry (see --list), all, or plan."),
    list_entries: bool = typer.Option(False, "--list", help="List the entries, or with plan its steps, and stop."),
    quick: bool = typer.Option(False, "--quick", help="A small form for two CPU cores and a few minutes."),
    full: bool = typer.Option(False, "--full", help="Also the cells that are not run by default."),
    only: str | None = typer.Option(None, help="Only these cells: names, leading parts or patterns, by commas."),
    seeds: int = typer.Option(1, help="Run every cell with the seeds 1 … N."),
    data: Path | None = typer.Option(
        None, help="Folder that holds the data sets' folders. (default: the variable FEDVEIL_DATA)"
    ),
    device: str = typer.Option("cpu", help="cpu, cuda or auto."),
    minutes: float | None = typer.Option(
        None, help="With plan: start no cell that is not expected to end within so many minutes from now."
    ),
    jobs: int = typer.Option(1, help="Cells that run at once, each in a process of its own (0: in this process)."),
    out: Path = typer.Option(Path("runs/reproduce"), help="Folder for figures; cells found there are not run again."),
    page: Path | None = typer.Option(None, help="Write the page of all stored results here and stop."),
    results: Path = typer.Option(RESULTS, "--from", help="With --page and --list: the folder of stored results."),
    papers: Path | None = typer.Option(
        None, help="The folder papers/ of a checkout, whose code is run. (default: of the checkout FedVeil runs from)"
    ),
    json: bool = typer.Option(False, "--json", help="As data: the list, or the verdict."),
) -> None:
    """Run a paper's table or figure again, beside its printed numbers, with a verdict.

    Each cell is saved as soon as it is done: the same command goes on where it was stopped. A cell that fails or dies
    ends no other, and neither does an entry of `all`, which runs every one. `plan` runs the cells of all entries that
    OUT lacks, those that decide a verdict first: for a machine that is there for a while. How long cells take is
    planned for a GPU, taken to be thirty times as long without, and corrected by what was seen.

    [bold]Examples[/bold]

      fedveil reproduce --list

      fedveil reproduce nadp-table3

      fedveil reproduce nadp-table1 --quick --data data

      fedveil reproduce nadp-table1 --only 'fashion-mnist/n100/*' --device cuda --seeds 3

      fedveil reproduce all --quick --data data

      fedveil reproduce plan --list --out docs/results

      fedveil reproduce plan --minutes 28 --device cuda --jobs 3 --data data --out docs/results

      fedveil reproduce --page docs/reproduction.md --from docs/results
    """
    from fedveil.errors import ConfigError

    tables = _papers(papers)
    if page is not None:
        _write_page(tables, page, results)
        return
    if list_entries and name != tables.PLAN:
        chosen = tables.entries() if name in (None, tables.ALL) else (tables.find(name),)
        _show_entries(tables, chosen, json, results)
        return
    if json and name is None:
        _show_entries(tables, tables.entries(), json, results)
        return
    if name is None:
        known = ", ".join(entry.name for entry in tables.entries())
        raise ConfigError(f"Name what to run again: {known}. `fedveil reproduce --list` says what each is.")
    if minutes is not None and name != tables.PLAN:
        raise ConfigError(
            "--minutes is the plan's, which knows how long cells take: fedveil reproduce plan --minutes …"
        )
    patterns = [pattern.strip() for pattern in (only or "").split(",") if pattern.strip()]
    options = tables.Options(
        out=out,
        device=device,
        data=data,
        quick=quick,
        full=full,
        seeds=seeds,
        only=patterns,
        jobs=jobs,
        say=aside,
    )
    if list_entries:
        tables.refuse_choice(options)
        _show_steps(tables, out, json=json)
        return
    if name == tables.ALL:
        if patterns:
            raise ConfigError("--only names cells of one entry: name the entry instead of all.")
        with _bar() as tick:
            outcomes = tables.reproduce_all(replace(options, tick=tick), done=_told)
        _show_all(outcomes, out, json=json)
        if any(outcome.failed for outcome in outcomes):
            raise typer.Exit(1)
        return
    if name == tables.PLAN:
        with _bar() as tick:
            ending = tables.run_plan(replace(options, tick=tick), minutes=minutes)
        _show_all(ending.outcomes, out, json=json)
        if ending.left_out:
            aside(f"{len(ending.left_out)} cells would not have ended in time; the same command goes on with them")
        if any(outcome.failed for outcome in ending.outcomes):
            raise typer.Exit(1)
        return
    with _bar() as tick:
        report, failed = tables.attempt(name, replace(options, tick=tick))
    if json:
        typer.echo(json_module.dumps(report.as_data(), indent=2, ensure_ascii=False))
    else:
        _show(report)
    if failed:
        raise failed


def _write_page(tables: Any, path: Path, results: Path) -> None:
    from fedveil.errors import DataError
    from fedveil.runs.folder import write_atomically

    if not any(results.glob("*.json")):
        raise DataError(f"{results} holds no stored results: name the folder with --from.")
    text = tables.page(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    plainly(f"{path}: written from {results}")


def _show_entries(tables: Any, entries: Sequence[Entry], json: bool, results: Path) -> None:
    fields = ("name", "paper", "what", "takes_quick", "takes", "needs")
    rows = []
    for entry in entries:
        forms = [
            word
            for word, quick in (("full", False), ("quick", True))
            if tables.stored_result(results, entry, quick=quick)
        ]
        rows.append({**{field: str(getattr(entry, field)) for field in fields}, "stored": ", ".join(forms)})
    if json:
        typer.echo(json_module.dumps(rows, indent=2, ensure_ascii=False))
        return
    columns = ("name", "paper", "what it reproduces", "with --quick", "in full", "needs", "stored")
    table("What can be run again", columns, [[cell or "–" for cell in row.values()] for row in rows], whole=(0,))
    plainly(f"stored: in {results} (--from)" + ("" if results.is_dir() else ", which is not there"))


def _show_steps(tables: Any, out: Path, *, json: bool) -> None:
    rows: list[dict[str, Any]] = []
    total = 0.0
    for step, missing in tables.still_to_run(out):
        total += missing * step.minutes
        rows.append(
            {
                "entry": step.entry.name,
                "decides": step.decides,
                "cells": len(step.runs),
                "missing": missing,
                "minutes": step.minutes,
                "minutes_to_here": round(total, 1),
            }
        )
    if json:
        typer.echo(json_module.dumps(rows, indent=2, ensure_ascii=False))
        return
    columns = ("entry", "what it decides", "cells", "missing", "minutes each", "up to here")
    texts = [[str(cell) for cell in row.values()] for row in rows]
    table("What is run next", columns, texts, right=range(2, 6), whole=(0,))
    plainly(f"missing: in {out} (--out). Minutes: of an NVIDIA H200, one cell at a time")


def _told(outcome: Outcome) -> None:
    aside(f"{outcome.entry.name}: {outcome.failed or outcome.word} ({outcome.seconds:.0f} s)")


def _show_all(outcomes: list[Outcome], out: Path, *, json: bool) -> None:
    if json:
        typer.echo(json_module.dumps([outcome.as_data() for outcome in outcomes], indent=2, ensure_ascii=False))
        return
    for outcome in outcomes:
        if outcome.report is not None:
            _show_figures(outcome.report)
            plainly(f"verdict: {outcome.report.verdict}\n")
    rows = [
        (outcome.entry.name, outcome.entry.paper, outcome.word, outcome.failed, f"{outcome.seconds:.0f} s")
        for outcome in outcomes
    ]
    table("Every entry", ("name", "paper", "verdict", "why not", "time"), rows, right=(4,), whole=(0,))
    plainly(f"tables, figures and verdicts: {out}")


def _show(report: Report) -> None:
    table(report.title, report.columns, report.rows, right=range(1, len(report.columns)))
    if report.checks:
        table("Claims", ("claim", "held", "seen"), [(str(check), check.sign, check.seen) for check in report.checks])
    _show_figures(report)
    plainly(f"verdict: {report.verdict}")
    for note in report.notes:
        plainly(f"note: {note}")


def _show_figures(report: Report) -> None:
    if report.figures:
        rows = [(figure.what, figure.paper, figure.ours) for figure in report.figures]
        table(f"In short: {report.title}", ("figure", "paper", "here"), rows)


@contextmanager
def _bar() -> Iterator[Callable[[Tick], None]]:
    """Cells and, within one, rounds; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda tick: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fedveil.cli.tables import complaints

    shown = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=complaints, transient=True) as progress:
        cells = progress.add_task("cells", total=None)
        rounds = progress.add_task("", total=None)

        def tick(now: Tick) -> None:
            progress.update(cells, completed=now.done, total=now.cells)
            progress.update(rounds, description=now.cell, completed=now.round, total=now.rounds or None)

        yield tick
