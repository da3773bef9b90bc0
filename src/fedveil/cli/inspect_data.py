"""`fedveil inspect-data`: what was understood of data, before anything is trained on them."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from fedveil.cli.options import Config, read_settings, takes_flags
from fedveil.cli.tables import listed, plainly, table

if TYPE_CHECKING:
    from fedveil.data.description import Column, Counts, Description

_MOST_ROWS, _MOST_CLASSES, _MOST_VALUES = 40, 12, 4


@takes_flags(
    only=(
        *("target", "task", "text", "group", "site", "picture_size", "test_fraction", "validation_fraction", "split"),
        *("partition", "alpha", "ratio", "clients", "seed"),
    )
)
def inspect_data(
    dataset: str | None = typer.Argument(None, help="A file or folder, a data set's name, or file.py:function."),
    config: Config = None,
    *,
    flags: dict[str, Any],
    json: bool = typer.Option(False, "--json", help="As data: what a run's data.json holds."),
) -> None:
    """Show what is understood of data: columns, gaps, classes, parts, clients, duplicates, and what looks wrong.

    With the same flags and seed, `fedveil run` trains on exactly these parts and clients.

    [bold]Examples[/bold]

      fedveil inspect-data visits.csv --target ill --group patient --site hospital --validation-fraction 0.1

      fedveil inspect-data scans/ --partition site --json

      fedveil inspect-data -c my-run.toml
    """
    from fedveil import data
    from fedveil.config import RunConfig
    from fedveil.data.description import describe_split
    from fedveil.runs.callbacks import working
    from fedveil.runs.job import counted, dealt, loaded

    named = {} if dataset is None else {"dataset": dataset}
    settings = read_settings(config, {**flags, **named})
    settings.setdefault("seed", 0)
    given = RunConfig.from_mapping(settings, where="the command line")
    with working("reading the data", quiet=json):
        split = loaded(given)
        given = counted(given, split.train)
        clients = dealt(given, split.train)
        description = describe_split(split, clients, data.client_names(split.train, clients, given.partition))
    if json:
        typer.echo(json_module.dumps(description.as_data(), indent=2, ensure_ascii=False))
        return
    _show(description, split.remarks)


def _show(description: Description, remarks: Sequence[str]) -> None:
    plainly(description.lines()[0])
    for text in remarks:
        plainly(text)
    if description.columns:
        rows = [
            (column.name, column.role, str(column.kind), f"{column.missing:,}", f"{column.distinct:,}", _values(column))
            for column in description.columns
        ]
        _bounded("Columns", ("column", "role", "holds", "missing", "different", "values"), rows, right=(3, 4))
    _counts("Parts", "part", list(description.parts), list(description.parts.values()), description)
    if description.clients:
        names = description.client_names or [str(client) for client in range(len(description.clients))]
        _counts("Clients, of the training part", "client", list(names), description.clients, description)
    if description.duplicates is not None:
        equal = [
            (one, "the same part" if one == other else other, f"{count:,}")
            for one, others in description.duplicates.items()
            for other, count in others.items()
        ]
        table("Samples with an equal input", ("of", "in", "samples"), equal, right=(2,))
    listed("What looks wrong", description.warnings)


def _values(column: Column) -> str:
    if column.span is not None:
        return f"{column.span[0]:g} to {column.span[1]:g}"
    shown = [f"{text} ({count:,})" for text, count in list(column.categories.items())[:_MOST_VALUES]]
    return ", ".join([*shown, "…"] if shown and column.distinct > len(shown) else shown)


def _counts(title: str, what: str, names: Sequence[str], counts: Sequence[Counts], description: Description) -> None:
    """A line each for parts or clients: rows, groups, and classes as far as there is room."""
    classes = range(min(len(counts[0].classes), _MOST_CLASSES))
    grouped = counts[0].groups is not None
    targets = list(counts[0].target)
    columns = [what, "rows", *(["groups"] if grouped else []), *map(description.class_name, classes), *targets]
    rows = [
        (
            *(name, f"{count.rows:,}", *([f"{count.groups:,}"] if grouped else [])),
            *(*(f"{count.classes[code]:,}" for code in classes), *(f"{count.target[name]:g}" for name in targets)),
        )
        for name, count in zip(names, counts, strict=False)
    ]
    _bounded(title, columns, rows, right=range(1, len(columns)))
    if len(counts[0].classes) > _MOST_CLASSES:
        plainly(f"and {len(counts[0].classes) - _MOST_CLASSES:,} classes more (--json)")


def _bounded(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> None:
    table(title, columns, rows[:_MOST_ROWS], right=right)
    if len(rows) > _MOST_ROWS:
        plainly(f"and {len(rows) - _MOST_ROWS:,} more (--json)")
