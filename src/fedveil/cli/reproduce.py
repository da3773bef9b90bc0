"""`fedveil reproduce`: the papers' tables and figures, run again."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedveil.cli.tables import aside, plainly, table

if TYPE_CHECKING:
    from fedveil.reproduce import Report, Tick


def reproduce(
    name: str | None = typer.Argument(None, help="An entry (see --list)."),
    list_entries: bool = typer.Option(False, "--list", help="List the entries and stop."),
    quick: bool = typer.Option(False, "--quick", help="A small form for two CPU cores and a few minutes."),
    full: bool = typer.Option(False, "--full", help="Also the cells that are not run by default."),
    only: str | None = typer.Option(None, help="Only these cells: names, leading parts or patterns, by commas."),
    seeds: int = typer.Option(1, help="Run every cell with the seeds 1 … N."),
    data: Path | None = typer.Option(
        None, help="Folder that holds the data sets' folders. (default: the variable FEDVEIL_DATA)"
    ),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    out: Path = typer.Option(Path("runs/reproduce"), help="Folder for figures; cells found there are not run again."),
    json: bool = typer.Option(False, "--json", help="With --list: as data."),
) -> None:
    """Run a paper's table or figure again, beside its printed numbers, with a verdict.

    Each cell is saved as soon as it is done: the same command goes on where it was stopped.

    [bold]Examples[/bold]

      fedveil reproduce --list

      fedveil reproduce nadp-table3

      fedveil reproduce nadp-table1 --quick --data data

      fedveil reproduce nadp-table1 --only 'fashion-mnist/n100/*' --device cuda --seeds 3
    """
    from fedveil.errors import ConfigError
    from fedveil.reproduce import entries
    from fedveil.reproduce import reproduce as run

    if list_entries or (json and name is None):
        _show_entries(json)
        return
    if name is None:
        known = ", ".join(entry.name for entry in entries())
        raise ConfigError(f"Name what to run again: {known}. `fedveil reproduce --list` says what each is.")
    patterns = [one.strip() for one in (only or "").split(",") if one.strip()]
    with _bar() as tick:
        report = run(
            name,
            out=out,
            device=device,
            data=data,
            quick=quick,
            full=full,
            seeds=seeds,
            only=patterns,
            say=aside,
            tick=tick,
        )
    _show(report)


def _show_entries(json: bool) -> None:
    from fedveil.reproduce import entries

    fields = ("name", "paper", "what", "takes", "needs")
    found = [tuple(str(getattr(entry, one)) for one in fields) for entry in entries()]
    if json:
        rows = [dict(zip(fields, row, strict=True)) for row in found]
        typer.echo(json_module.dumps(rows, indent=2, ensure_ascii=False))
        return
    table("What can be run again", ("name", "paper", "what it reproduces", "takes", "needs"), found)


def _show(report: Report) -> None:
    table(report.title, report.columns, report.rows, right=range(1, len(report.columns)))
    if report.checks:
        table("Claims", ("claim", "held", "seen"), [(one.claim, one.sign, one.seen) for one in report.checks])
    plainly(f"verdict: {report.verdict}")
    for note in report.notes:
        plainly(f"note: {note}")


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
