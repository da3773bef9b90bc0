"""Tables and numbers the way the terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
complaints = Console(stderr=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table; `right` names the columns that hold numbers."""
    made = Table(title=escape(title), title_justify="left", show_header=any(columns))
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    console.print(made)


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
    console.print(text, markup=False, soft_wrap=True)


def aside(text: str) -> None:
    """The same on standard error."""
    complaints.print(text, markup=False, soft_wrap=True)
