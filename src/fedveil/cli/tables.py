"""Tables and numbers the way the terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
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

    `ruled` draws a line between rows, where they are long. Texts are shown as they are, whoever wrote them. Where the
    terminal is so narrow that words would be broken, each row is a heading with its cells below.
    """
    heading = Text(printable(title), style="table.title")
    widths = _widths([columns, *rows], whole, room=console.width - 3 * len(columns) - 1)
    if widths is None:
        _row_by_row(heading, columns, rows)
        return
    made = Table(
        title=heading,
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
            width=widths[number],
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    console.print(made)


_WORD = 20
"""Letters up to which a word is not broken; paths and the like may be longer."""


def _widths(rows: Sequence[Sequence[str | Text]], whole: Sequence[int], *, room: int) -> list[int] | None:
    """The widths of columns that together have so much room; None where words would have to be broken."""
    lines = [[line for cell in cells for line in str(cell).splitlines()] for cells in zip(*rows, strict=True)]
    most = [max(map(len, texts), default=0) for texts in lines]
    least = [
        width if number in whole else max((min(len(word), _WORD) for text in texts for word in text.split()), default=0)
        for number, (width, texts) in enumerate(zip(most, lines, strict=True))
    ]
    for limit in range(max(most, default=0), 0, -1):  # the longest lines are broken first
        widths = [max(few, min(many, limit)) for few, many in zip(least, most, strict=True)]
        if sum(widths) <= room:
            return widths
    return None


def _row_by_row(heading: Text, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    console.print(heading)
    for name, *cells in rows:
        console.print(Text(printable(name), style="bold") if isinstance(name, str) else name)
        below = Table.grid(padding=(0, 2))
        below.add_column(style="dim")
        below.add_column(overflow="fold")
        for column, cell in zip(columns[1:], cells, strict=True):
            if len(cell):
                below.add_row(printable(column), Text(printable(cell)) if isinstance(cell, str) else cell)
        console.print(Padding(below, (0, 0, 0, 2)))


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
