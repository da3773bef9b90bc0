"""A CSV file as columns of text that remember where each row came from."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedveil.data.arrays import TEST_NAMES, by_plain_name, files_of, plain_name, read_bytes, split_rows
from fedveil.data.dataset import Dataset, Options, Split, Task
from fedveil.errors import ConfigError, DataError, unknown_name

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


Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_FEW = 20  # a whole-numbered target with at most this many values is taken for classes
_MOST_CATEGORIES = 1000
_SMALL, _MOST_TIMES = 1 << 25, 100  # cells: a table may become so large, or so many times as large as it is


@dataclass(frozen=True, eq=False)
class TargetColumn:
    """The target: int64 codes for classification, an (N, 1) float32 column for regression, (N, labels) for several."""

    task: Task
    values: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    outputs: int
    labels: tuple[str, ...]


def features(table: Table, names: list[str], *, train: Rows, normalise: bool) -> npt.NDArray[np.float32]:
    """Encode feature columns side by side; every statistic comes from the ``train`` rows."""
    if not names:
        raise DataError(f"{table.places[0][0]}: no column is left to learn from besides the target.")
    blocks: list[Floats] = []
    most = max(_SMALL, _MOST_TIMES * len(table) * len(names))
    for name in names:
        numbers = _numbers(table, name)
        if numbers is None:
            blocks.append(_one_hot(table, name, train=train))
        else:
            blocks.append(_numeric(table, name, numbers, train=train, normalise=normalise))
        if sum(block.size for block in blocks) > most:
            raise DataError(
                f"{table.places[0][0]}: its words take more than {most:,} one-hot numbers. Remove columns of many "
                "different words, or learn from one as text."
            )
    return np.concatenate(blocks, axis=1).astype(np.float32)


def _target_cells(table: Table, name: str) -> tuple[list[str], Floats | None]:
    """A target column's cells, none of them missing: as they stand, and as numbers where they are."""
    raw = [value.strip() for value in table.columns[name]]
    for row, value in enumerate(raw):
        if value.lower() in _MISSING:
            raise DataError(f"{table.place(row)}: the target {name!r} is missing. Fill it in or remove the row.")
    return raw, _numbers(table, name)


def target(table: Table, name: str, *, task: Task | None, train: Rows | None) -> TargetColumn:
    """Encode the target column; ``train`` rows, where the file fixes them, define the classes."""
    raw, numbers = _target_cells(table, name)
    if (task or _inferred(numbers)) == "regression":
        return _regression(table, name, raw, numbers)
    if numbers is not None:
        # One spelling for 1, 1.0 and 01, which name the same class.
        raw = [str(int(number)) if number == int(number) else str(number) for number in numbers.tolist()]
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


def group_codes(table: Table, name: str) -> npt.NDArray[np.int64]:
    """The group of every row, numbered in sorted order of the names."""
    raw = [value.strip() for value in table.columns[name]]
    for row, value in enumerate(raw):
        if not value:
            raise DataError(f"{table.place(row)}: the group {name!r} is missing. Fill it in or remove the row.")
    # Not by numpy, which makes every name as long as the longest.
    position = {name: code for code, name in enumerate(sorted(set(raw)))}
    return np.array([position[name] for name in raw], np.int64)


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
    values = np.full(len(table), np.nan)
    some = False
    for row, text in enumerate(table.columns[name]):
        if text.strip().lower() in _MISSING:
            continue
        try:
            values[row] = float(text)
        except ValueError:
            return None
        some = True
        if not abs(values[row]) <= np.finfo(np.float32).max:
            raise DataError(f"{table.place(row)}: column {name!r} holds {text.strip()!r}, not a finite number.")
    if not some:
        raise DataError(f"{table.places[0][0]}: column {name!r} holds no value at all. Remove it.")
    return values


def _numeric(table: Table, name: str, values: Floats, *, train: Rows, normalise: bool) -> Floats:
    known = values[train][~np.isnan(values[train])]
    if len(known) == 0:
        raise DataError(
            f"{table.places[0][0]}: column {name!r} holds no value in the training part. "
            "Remove it, or use another seed or test_fraction."
        )
    mean, deviation = known.mean(), known.std()
    filled = np.where(np.isnan(values), mean, values)[:, None]
    if normalise:
        filled = (filled - mean) / (deviation if deviation > 0 else 1.0)
    return filled.astype(np.float64)


def _one_hot(table: Table, name: str, *, train: Rows) -> Floats:
    raw = [value.strip() for value in table.columns[name]]
    categories = sorted({raw[row] for row in train})
    if len(categories) > _MOST_CATEGORIES:
        raise DataError(
            f"{table.places[0][0]}: column {name!r} holds {len(categories)} different words, "
            "too many for one-hot columns. Remove it if it names rows, or learn from it as text "
            f"with text={name!r}."
        )
    position = {category: column for column, category in enumerate(categories)}
    block = np.zeros((len(raw), len(categories)))
    for row, value in enumerate(raw):
        # A category that training never saw stays all zeros.
        if value in position:
            block[row, position[value]] = 1.0
    return block


PADDING, UNKNOWN = 0, 1

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words(text: str) -> list[str]:
    """The lower-case words of a text."""
    return _WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], *, size: int) -> dict[str, int]:
    """Ids of the most frequent words; ``size`` counts padding and unknown too. Ties go by alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: position for position, word in enumerate(ranked, start=2)}


def token_ids(texts: Sequence[str], ids: dict[str, int], *, length: int) -> npt.NDArray[np.int64]:
    """Every text as ``length`` ids, cut or padded at its end; a text without words is one unknown word."""
    block = np.full((len(texts), length), PADDING, np.int64)
    for row, text in enumerate(texts):
        tokens = [ids.get(word, UNKNOWN) for word in words(text)[:length]] or [UNKNOWN]
        block[row, : len(tokens)] = tokens
    return block


_SPLIT = "split"
_TRAIN = frozenset({"train", "training"})


def recognises(path: Path) -> bool:
    """Whether this is a CSV file or a folder that holds some."""
    return any(is_table(file) for file in (files_of(path) if path.is_dir() else [path]))


def load_table(path: Path, options: Options, name: str) -> Split:
    """Read one CSV file, or train.csv and test.csv, and encode it."""
    table, fixed = _read(path)
    named = _named_columns(table, options, path)
    if fixed is None and _SPLIT not in named.values():
        fixed = _split_column(table)
    train, test = fixed or (rows.numpy() for rows in split_rows(len(table), options, where=str(path)))
    goals = named.pop("target").split(",") if options.task == "multilabel" else [named["target"]]
    if options.task == "multilabel":
        goal = several_labels(table, goals)
    else:
        goal = target(table, goals[0], task=options.task, train=fixed[0] if fixed else None)
    groups = torch.from_numpy(group_codes(table, named["group"])) if "group" in named else None
    vocabulary = None
    if "text" in named:
        texts = table.columns[named["text"]]
        ids = vocabulary_of((texts[row] for row in train), size=options.vocabulary)
        x = torch.from_numpy(token_ids(texts, ids, length=options.max_tokens))
        vocabulary = len(ids) + 2
    else:
        kept = [column for column in table.columns if column not in (*goals, *named.values())]
        if _marks_parts(table) and _SPLIT in kept:
            kept.remove(_SPLIT)
        x = torch.from_numpy(features(table, kept, train=train, normalise=options.normalise))
    y = torch.from_numpy(goal.values)
    whole = Dataset(name, goal.task, x, y, goal.outputs, goal.labels, groups, vocabulary)
    return Split(whole.subset(torch.from_numpy(train)), whole.subset(torch.from_numpy(test)))


def _read(path: Path) -> tuple[Table, tuple[Rows, Rows] | None]:
    if not path.is_dir():
        return read_table(path), None
    files = by_plain_name(file for file in files_of(path) if is_table(file))
    second = next((f"{name}.csv" for name in TEST_NAMES if f"{name}.csv" in files), None)
    if "train.csv" in files and second is not None:
        train, test = read_table(files["train.csv"]), read_table(files[second])
        rows = np.arange(len(train) + len(test))
        return train.below(test), (rows[: len(train)], rows[len(train) :])
    if len(files) > 1:
        raise DataError(
            f"{path}: {len(files)} CSV files ({', '.join(sorted(files))}), but not train.csv and test.csv. "
            "Rename them, or pass the path of one file."
        )
    return read_table(next(iter(files.values()))), None


def _named_columns(table: Table, options: Options, path: Path) -> dict[str, str]:
    if options.target is None:
        raise ConfigError(f"{path}: which column is the target? Pass target=... Columns: {', '.join(table.columns)}.")
    asked = {"target": options.target, "text": options.text, "group": options.group}
    named = {role: column for role, column in asked.items() if column is not None}
    several = named["target"].split(",") if options.task == "multilabel" else [named["target"]]
    asking = [*(("target", column) for column in several), *((r, c) for r, c in named.items() if r != "target")]
    for role, column in asking:
        if column not in table.columns:
            raise unknown_name(f"{role} column", column, table.columns, hint=f"These are the columns of {path}.")
    if len({column for _, column in asking}) != len(asking):
        raise ConfigError("target, text and group must name different columns.")
    return named


def _marks_parts(table: Table) -> bool:
    return _SPLIT in table.columns and any(_mark(value) in _TRAIN for value in table.columns[_SPLIT])


def _mark(value: str) -> str:
    return value.strip().lower()


def _split_column(table: Table) -> tuple[Rows, Rows] | None:
    """The rows that a column called split assigns to training and test, where there is such a column."""
    if not _marks_parts(table):
        return None
    marks = [_mark(value) for value in table.columns[_SPLIT]]
    for row, mark in enumerate(marks):
        if mark not in (*_TRAIN, *TEST_NAMES):
            raise DataError(
                f"{table.place(row)}: column {_SPLIT!r} says {mark!r}; only train and test "
                "can be told apart. Remove the row or rename the column."
            )
    held = np.array([mark in TEST_NAMES for mark in marks])
    if not held.any():
        return None
    rows = np.arange(len(marks))
    return rows[~held], rows[held]
