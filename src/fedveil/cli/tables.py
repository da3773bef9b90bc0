"""Tables and numbers the way the terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedveil.cli import printable

console = Console()
complaints = Console(stderr=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Sequence[int] = (),
    whole: Sequence[int] = (),
    ruled: bool = False,
) -> None:
    """Print a table; `right` names the columns that hold numbers, `whole` those whose lines are not broken.

    `ruled` draws a line between rows, where they are long. Texts are shown as they are, whoever wrote them.
    """
    made = Table(
        title=Text(printable(title), style="table.title"),
        title_justify="left",
        show_header=any(columns),
        show_lines=ruled,
    )
    for number, column in enumerate(columns):
        made.add_column(
            Text(printable(column)),
            justify="right" if number in right else "left",
            overflow="fold",
            no_wrap=number in whole,
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    console.print(made)


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the terminal has room for a table without a line broken."""
    widths = (max(len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True))
    return sum(widths) + 3 * len(columns) + 1 <= console.width


def listed(heading: str, texts: Sequence[str]) -> None:
    """A heading and its points, wrapped with an indent; nothing where there are none."""
    if not texts:
        return
    console.print(f"[bold]{heading}[/bold]")
    points = Table.grid(padding=(0, 1))
    for text in texts:
        points.add_row(" –", Text(printable(text)))
    console.print(points)


def size(count: float) -> str:
    """Bytes in the unit a person reads."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def percent(value: float | None) -> str:
    """A share in percent, or a dash."""
    if value is None:
        return "–"
    # Never round up to all: 99.96 % hidden leaves something visible.
    return f"{min(value, 0.999):.1%}" if value < 1.0 else f"{value:.1%}"


def plainly(text: str) -> None:
    """A line of text as it is: names of the user's may hold square brackets."""
    console.print(printable(text), markup=False, soft_wrap=True)


def aside(text: str) -> None:
    """The same on standard error."""
    complaints.print(printable(text), markup=False, soft_wrap=True)
