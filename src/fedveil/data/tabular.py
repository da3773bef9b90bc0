"""Tables: columns of text that remember where each row came from, and what a run makes of them."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.arrays import (
    TEST_NAMES,
    VALIDATION_NAMES,
    by_plain_name,
    files_of,
    held_out_names,
    one_spelling,
    plain_name,
    read_bytes,
)
from fedveil.data.dataset import Dataset, Options, Split, Task
from fedveil.data.description import Column, is_missing, is_number
from fedveil.data.partition import PartRows, Rows, Samples, split_rows
from fedveil.data.preparation import MOST_CATEGORIES, Cells, Columns, Floats, Preparation, Words, fit_columns, fit_words
from fedveil.errors import ConfigError, DataError, missing_extra, spelled, unknown_name

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
        return f"{path}, row {row - first + 1}" + (f" (line {line})" if line else "")

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
    """Whether the name is that of a CSV file, compressed or not, or of a parquet file."""
    return plain_name(path).lower().endswith((".csv", ".parquet"))


def read_table(path: Path) -> Table:
    """Read a parquet file, or a CSV file with a header line; the delimiter is found among , ; tab and |."""
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error}). Convert it to UTF-8 first.") from error
    try:
        return _parse(path, text)
    except csv.Error as error:
        raise DataError(f"{path}: not a readable CSV file ({error}).") from error


def _parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "parquet", "Reading a .parquet table") from error
    try:
        names = parquet.read_schema(path).names
        # Words stay as often as they differ: a small file may repeat a long one a billion times.
        with parquet.ParquetFile(path, read_dictionary=names) as file:
            told = file.metadata
            if told.num_rows * len(names) > max(_SMALL, _MOST_TIMES * path.stat().st_size):
                raise ValueError(f"{told.num_rows:,} rows, too many for its size")
            columns = {name: _cells_of(column) for name, column in zip(names, file.read().columns, strict=True)}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable parquet table ({' '.join(str(error).split())[:200]}).") from error
    if len(columns) < len(names) or not names or not told.num_rows:
        raise DataError(f"{path}: a table needs columns with names of their own, and rows.")
    return Table(columns, [(path, 0)] * told.num_rows)


def _cells_of(column: Any) -> list[str]:
    cells: list[str] = []
    for chunk in column.chunks:
        if hasattr(chunk, "dictionary"):
            words = [cell_of(word) for word in chunk.dictionary.to_pylist()]
            cells += ["" if place is None else words[place] for place in chunk.indices.to_pylist()]
        else:
            cells += [cell_of(value) for value in chunk.to_pylist()]
    return cells


def cell_of(value: object) -> str:
    """A value as a CSV file would have it; numbers keep every digit, and what is not known is empty."""
    if isinstance(value, list | dict | bytes):
        raise ValueError(f"a {type(value).__name__} in a cell, where a number or a text belongs")
    return "" if value is None or value != value else str(value)


def _parse(path: Path, text: str) -> Table:
    reader = _rows(text, _delimiter(text))
    header = next(reader, None)
    if header is None:
        raise DataError(f"{path}: the file is empty; a header line and rows are needed.")
    names = [name.strip() or f"column {i}" for i, name in enumerate(header[1], 1)]
    # Whole numbers alone may be a header: that is what a data frame without column names writes.
    if all(is_number(name) for name in names) and not all(name.isdigit() for name in names):
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


_FEW = 20  # a whole-numbered target with at most this many values is taken for classes
_SMALL, _MOST_TIMES = 1 << 25, 100  # cells: a table may become so large, or so many times as large as it is


@dataclass(frozen=True, eq=False)
class TargetColumn:
    """The target: int64 codes for classification, an (N, 1) float32 column for regression, (N, labels) for several."""

    task: Task
    values: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    outputs: int
    labels: tuple[str, ...]


def fit_features(table: Table, names: list[str], *, train: Rows, normalise: bool) -> tuple[Columns, dict[str, Cells]]:
    """How feature columns become inputs, by statistics of the ``train`` rows, and the columns as they are read."""
    if not names:
        raise DataError(f"{table.places[0][0]}: no column is left to learn from besides the target.")
    cells = {name: _cells(table, name) for name in names}
    known: dict[str, Cells] = {}
    width, most = 0, max(_SMALL, _MOST_TIMES * len(table) * len(names))
    for name, column in cells.items():
        if isinstance(column, np.ndarray):
            known[name] = column[train]
            if np.isnan(known[name]).all():
                raise DataError(
                    f"{table.places[0][0]}: column {name!r} holds no value in the training part. "
                    "Remove it, or use another seed or test_fraction."
                )
            width += 1
            continue
        known[name] = [column[row] for row in train]
        categories = len(set(known[name]))
        if categories > MOST_CATEGORIES:
            raise DataError(
                f"{table.places[0][0]}: column {name!r} holds {categories} different words, too many for one-hot "
                f"columns. Remove it if it names rows, or learn from it as text with text={name!r}."
            )
        width += categories
        if width * len(table) > most:
            raise DataError(
                f"{table.places[0][0]}: its words take more than {most:,} one-hot numbers. Remove columns of many "
                "different words, or learn from one as text."
            )
    return fit_columns(known, standardise=normalise), cells


def _cells(table: Table, name: str) -> Cells:
    numbers = _numbers(table, name)
    return [value.strip() for value in table.columns[name]] if numbers is None else numbers


def _target_cells(table: Table, name: str) -> tuple[list[str], Floats | None]:
    """A target column's cells, none of them missing: as they stand, and as numbers where they are."""
    raw = [value.strip() for value in table.columns[name]]
    missing = [row for row, value in enumerate(raw) if is_missing(value)]
    if missing:
        more = f" So it is in {len(missing) - 1} more of {len(raw)} rows." if len(missing) > 1 else ""
        raise DataError(
            f"{table.place(missing[0])}: the target {name!r} is missing. Fill it in or remove the row.{more}"
        )
    return raw, _numbers(table, name)


def target(table: Table, name: str, *, task: Task | None, train: Rows | None) -> TargetColumn:
    """Encode the target column; ``train`` rows, where the file fixes them, define the classes."""
    raw, numbers = _target_cells(table, name)
    if (task or _inferred(numbers)) == "regression":
        return _regression(table, name, raw, numbers)
    if numbers is not None:
        raw = [one_spelling(str(number)) for number in numbers.tolist()]
    seen = set(raw) if train is None else {raw[row] for row in train}
    # By value where they are numbers, so that class 10 does not come before class 2.
    ordered = sorted(seen) if numbers is None else sorted(seen, key=float)
    code = {label: position for position, label in enumerate(ordered)}
    for row, value in enumerate(raw):
        if value not in code:
            raise DataError(
                f"{table.place(row)}: class {value!r} of target {name!r} does not occur "
                f"in the training part, which has {len(ordered)} classes."
            )
    return TargetColumn(
        "classification", np.array([code[value] for value in raw], np.int64), len(ordered), tuple(ordered)
    )


def several_labels(table: Table, names: Sequence[str]) -> TargetColumn:
    """Several columns of 0 and 1, or of two words each, side by side; a column's second word in sorted order is 1."""
    columns = [_regression(table, name, *_target_cells(table, name)).values for name in names]
    values: npt.NDArray[np.float32] = np.concatenate(columns, axis=1, dtype=np.float32)
    for row, label in zip(*np.nonzero((values != 0) & (values != 1)), strict=True):
        raise DataError(f"{table.place(int(row))}: {names[label]!r} is {values[row, label]:g}; a label is 0 or 1.")
    return TargetColumn("multilabel", values, len(names), tuple(names))


def owner_codes(table: Table, name: str, *, role: str) -> tuple[Tensor, tuple[str, ...]]:
    """The group or site of every row, numbered in sorted order of the names, and the names."""
    raw = [one_spelling(value) for value in table.columns[name]]
    for row, value in enumerate(raw):
        if not value:
            raise DataError(f"{table.place(row)}: the {role} {name!r} is missing. Fill it in or remove the row.")
    # Not by numpy, which makes every name as long as the longest.
    names = tuple(sorted(set(raw)))
    position = {name: code for code, name in enumerate(names)}
    return torch.tensor([position[name] for name in raw]), names


def _inferred(numbers: Floats | None) -> Task:
    if numbers is None:
        return "classification"
    distinct = np.unique(numbers)
    whole = bool(np.all(distinct == np.round(distinct)))
    # As many values as rows is a measurement in whole numbers, not a class.
    return "classification" if whole and len(distinct) <= min(_FEW, max(len(numbers) // 2, 2)) else "regression"


def _regression(table: Table, name: str, raw: list[str], numbers: Floats | None) -> TargetColumn:
    labels: tuple[str, ...] = ()
    if numbers is None:
        labels = tuple(sorted(set(raw)))
        if len(labels) != 2:
            raise DataError(
                f"{table.places[0][0]}: the target {name!r} holds {len(labels)} different words; "
                "regression needs numbers, or two words for 0 and 1. Use task='classification'."
            )
        numbers = np.array([labels.index(value) for value in raw], np.float64)
    return TargetColumn("regression", numbers.astype(np.float32)[:, None], 1, labels)


def _numbers(table: Table, name: str) -> Floats | None:
    """The column as numbers with NaN where missing, or None where it holds words."""
    values, word = numbers_in(table, name)
    if word is not None:
        return None
    if np.isnan(values).all():
        raise DataError(f"{table.places[0][0]}: column {name!r} holds no value at all. Remove it.")
    return values


def numbers_in(table: Table, name: str) -> tuple[Floats, int | None]:
    """The column as numbers with NaN where missing, up to the first row that holds a word, and that row."""
    values = np.full(len(table), np.nan)
    for row, text in enumerate(table.columns[name]):
        if is_missing(text):
            continue
        try:
            values[row] = float(text)
        except ValueError:
            return values, row
        if not abs(values[row]) <= np.finfo(np.float32).max:
            raise DataError(f"{table.place(row)}: column {name!r} holds {text.strip()!r}, not a finite number.")
    return values, None


_SPLIT = "split"
_TRAIN = frozenset({"train", "training"})


def recognises(path: Path) -> bool:
    """Whether this is a table or a folder that holds some."""
    return any(is_table(file) for file in (files_of(path) if path.is_dir() else [path]))


def load_table(path: Path, options: Options, name: str) -> Split:
    """Read one table, or train.csv and test.csv (and val.csv), and prepare it."""
    table, fixed = read_tables(path)
    return encode(table, fixed, options, name, where=path)


def encode(table: Table, fixed: Fixed | None, options: Options, name: str, *, where: Path) -> Split:
    """A table as a Split; ``fixed`` are the rows of the parts where the files say which they are."""
    named = _named_columns(table, options, where)
    if fixed is None and _SPLIT not in named.values():
        fixed = _split_column(table, options)
    goals = named.pop("target").split(",") if options.task == "multilabel" else [named["target"]]
    if options.task == "multilabel":
        goal = several_labels(table, goals)
    else:
        goal = target(table, goals[0], task=options.task, train=fixed["train"] if fixed else None)
    y = torch.from_numpy(goal.values)
    owners: dict[str, tuple[Tensor | None, tuple[str, ...]]] = {
        role: owner_codes(table, named[role], role=role) if role in named else (None, ()) for role in ("group", "site")
    }
    (groups, group_names), (sites, site_names) = owners.values()
    parts = _rows_of(Samples(str(where), goal.task, y, groups, sites), options, fixed)
    train = parts.train.numpy()
    if "text" in named:
        texts = table.columns[named["text"]]
        chosen = (texts[row] for row in train)
        inputs: Words | Columns
        inputs = tokens = fit_words(chosen, column=named["text"], size=options.vocabulary, length=options.max_tokens)
        x, vocabulary, used = tokens.apply(texts), tokens.ids, {named["text"]}
    else:
        kept = [column for column in table.columns if column not in (*goals, *named.values())]
        if _marks_parts(table) and _SPLIT in kept:
            kept.remove(_SPLIT)
        features, cells = fit_features(table, kept, train=train, normalise=options.normalise)
        inputs, x, vocabulary, used = features, features.apply(cells), None, set(kept)
    aside = tuple(column for column in table.columns if column not in {*used, *goals})
    preparation = Preparation(inputs, goal.labels, ",".join(goals), aside)
    whole = Dataset(
        *(name, goal.task, x, y, goal.outputs, goal.labels, groups, vocabulary, sites, site_names, group_names)
    )
    validation = None if parts.validation is None else whole.subset(parts.validation)
    roles = {column: "not used" if column in aside else "input" for column in table.columns}
    roles |= {column: role for role, column in named.items()} | dict.fromkeys(goals, "target")
    columns = tuple(Column.of(column, table.columns[column], role=roles[column], place=table.place) for column in roles)
    return Split(whole.subset(parts.train), whole.subset(parts.test), validation, columns, preparation)


def _rows_of(samples: Samples, options: Options, fixed: Fixed | None) -> PartRows:
    """The rows of every part: as the file says, and drawn where it does not."""
    if fixed is None:
        return split_rows(samples, options)
    if "validation" in fixed:
        return PartRows(*(torch.from_numpy(fixed[part]) for part in ("train", "test", "validation")))
    return split_rows(samples, options, fixed=(fixed["train"], fixed["test"]))


Fixed = dict[str, Rows]


def read_tables(path: Path) -> tuple[Table, Fixed | None]:
    """One table, or those of a folder below each other with the rows of each part."""
    if not path.is_dir():
        return read_table(path), None
    files = by_plain_name(file for file in files_of(path) if is_table(file))
    stems = {name.rpartition(".")[0]: file for name, file in files.items()}
    second, third = held_out_names({name for name in TEST_NAMES if name in stems})
    if "train" in stems and second is not None and len(stems) == len(files):
        table, fixed = read_table(stems["train"]), {}
        fixed["train"] = np.arange(len(table))
        for part, name in (("test", second), ("validation", third)):
            if name is not None:
                start = len(table)
                table = table.below(read_table(stems[name]))
                fixed[part] = np.arange(start, len(table))
        return table, fixed
    if len(files) > 1:
        raise DataError(
            f"{path}: {len(files)} tables ({', '.join(sorted(files))}), but not train.csv and test.csv. "
            "Rename them, or pass the path of one file."
        )
    return read_table(next(iter(files.values()))), None


def _named_columns(table: Table, options: Options, path: Path) -> dict[str, str]:
    if options.target is None:
        raise ConfigError(
            f"{path}: which column is the target? Name it with {spelled('target')}. "
            f"Columns: {', '.join(table.columns)}."
        )
    asked = {"target": options.target, "text": options.text, "group": options.group, "site": options.site}
    named = {role: column for role, column in asked.items() if column is not None}
    several = named["target"].split(",") if options.task == "multilabel" else [named["target"]]
    asking = [*(("target", column) for column in several), *((r, c) for r, c in named.items() if r != "target")]
    for role, column in asking:
        if column not in table.columns:
            raise unknown_name(f"{role} column", column, table.columns, hint=f"These are the columns of {path}.")
    if len({column for _, column in asking}) != len(asking):
        raise ConfigError("target, text, group and site must name different columns.")
    return named


def _marks_parts(table: Table) -> bool:
    return _SPLIT in table.columns and any(_mark(value) in _TRAIN for value in table.columns[_SPLIT])


def _mark(value: str) -> str:
    return value.strip().lower()


def _split_column(table: Table, options: Options) -> Fixed | None:
    """The rows that a column called split assigns to the parts, where there is such a column."""
    if not _marks_parts(table):
        return None
    marks = [_mark(value) for value in table.columns[_SPLIT]]
    for row, mark in enumerate(marks):
        if mark not in (*_TRAIN, *TEST_NAMES):
            raise DataError(
                f"{table.place(row)}: column {_SPLIT!r} says {mark!r}; only train, test and validation "
                "can be told apart. Remove the row or rename the column."
            )
    # Before there was a validation part, its rows were taken for test rows.
    apart = "test" in marks and options.split != "rows"
    names = [
        "train" if mark in _TRAIN else "validation" if apart and mark in VALIDATION_NAMES else "test" for mark in marks
    ]
    rows = {part: np.flatnonzero(np.array(names) == part) for part in ("train", "test", "validation")}
    return {part: chosen for part, chosen in rows.items() if len(chosen)} if len(rows["test"]) else None
