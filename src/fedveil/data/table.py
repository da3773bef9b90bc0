"""A CSV file as columns of text that remember where each row came from."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedveil.data.files import plain_name, read_bytes
from fedveil.errors import DataError

_DELIMITERS = (",", ";", "\t", "|")
_SAMPLE_ROWS = 20


@dataclass(frozen=True)
class Table:
    """Columns of equal length; ``places`` holds the file and the line of every row."""

    columns: dict[str, list[str]]
    places: list[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        """Where a row stands, for an error message."""
        path, line = self.places[row]
        first = next(i for i, (other, _) in enumerate(self.places) if other == path)
        return f"{path}, row {row - first + 1} (line {line})"

    def below(self, other: Table) -> Table:
        """This table with the rows of ``other`` appended."""
        if missing := [name for name in self.columns if name not in other.columns]:
            raise DataError(
                f"{other.places[0][0]}: column(s) {', '.join(missing)} of {self.places[0][0]} are missing. "
                "The training and the test file need the same columns."
            )
        columns = {name: values + other.columns[name] for name, values in self.columns.items()}
        return Table(columns, self.places + other.places)


def is_table(path: Path) -> bool:
    """Whether the name is that of a CSV file, compressed or not."""
    return plain_name(path).lower().endswith(".csv")


def read_table(path: Path) -> Table:
    """Read a CSV file with a header line; the delimiter is found among , ; tab and |."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}). Convert it to UTF-8 first.") from error
    try:
        return _parse(path, text)
    except csv.Error as error:
        raise DataError(f"{path}: not a readable CSV file ({error}).") from error


def _parse(path: Path, text: str) -> Table:
    reader = _rows(text, _delimiter(text))
    header = next(reader, None)
    if header is None:
        raise DataError(f"{path}: the file is empty; a header line and rows are needed.")
    names = [name.strip() or f"column {i}" for i, name in enumerate(header[1], 1)]
    # Whole numbers alone may be a header: that is what a data frame without column names writes.
    if all(_is_number(name) for name in names) and not all(name.isdigit() for name in names):
        raise DataError(f"{path}: the first line ({', '.join(names[:5])}, …) holds numbers. Add a header line.")
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise DataError(
            f"{path}: column name(s) {', '.join(twice)} occur more than once. "
            "Rename them, or add a header line if there is none."
        )
    rows: list[list[str]] = []
    places: list[tuple[Path, int]] = []
    for line, row in reader:
        if len(row) != len(names):
            raise DataError(
                f"{path}, row {len(rows) + 1} (line {line}): {len(row)} fields where the header "
                f"has {len(names)}. Check for a missing or an unquoted delimiter."
            )
        rows.append(row)
        places.append((path, line))
    if not rows:
        raise DataError(f"{path}: there is a header but no rows.")
    values = (list(column) for column in zip(*rows, strict=True))
    return Table(dict(zip(names, values, strict=True)), places)


def _rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    return ((reader.line_num, row) for row in reader if row)


def _delimiter(text: str) -> str:
    """The delimiter that gives the most columns, preferring one under which all first rows agree."""

    def merit(delimiter: str) -> tuple[bool, int]:
        widths = [len(row) for _, row in itertools.islice(_rows(text, delimiter), _SAMPLE_ROWS)]
        return len(set(widths)) == 1 and widths[0] > 1, widths[0] if widths else 0

    return max(_DELIMITERS, key=merit)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
