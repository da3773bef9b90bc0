"""The columns of a table as numbers: features and the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedveil.data.dataset import Task
from fedveil.data.table import Table
from fedveil.errors import DataError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_FEW = 20  # a whole-numbered target with at most this many values is taken for classes
_MOST_CATEGORIES = 1000
_SMALL, _MOST_TIMES = 1 << 25, 100  # cells: a table may become so large, or so many times as large as it is


@dataclass(frozen=True, eq=False)
class Target:
    """The target column: int64 codes for classification, an (N, 1) float32 column for regression."""

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
        if sum(one.size for one in blocks) > most:
            raise DataError(
                f"{table.places[0][0]}: its words take more than {most:,} one-hot numbers. Remove columns of many "
                "different words, or learn from one as text."
            )
    return np.concatenate(blocks, axis=1).astype(np.float32)


def target(table: Table, name: str, *, task: Task | None, train: Rows | None) -> Target:
    """Encode the target column; ``train`` rows, where the file fixes them, define the classes."""
    raw = [value.strip() for value in table.columns[name]]
    for row, value in enumerate(raw):
        if value.lower() in _MISSING:
            raise DataError(f"{table.place(row)}: the target {name!r} is missing. Fill it in or remove the row.")
    numbers = _numbers(table, name)
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
    return Target("classification", np.array([code[value] for value in raw], np.int64), len(ordered), tuple(ordered))


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


def _regression(table: Table, name: str, raw: list[str], numbers: Floats | None) -> Target:
    labels: tuple[str, ...] = ()
    if numbers is None:
        labels = tuple(sorted(set(raw)))
        if len(labels) != 2:
            raise DataError(
                f"{table.places[0][0]}: the target {name!r} holds {len(labels)} different words; "
                "regression needs numbers, or two words for 0 and 1. Use task='classification'."
            )
        numbers = np.array([labels.index(value) for value in raw], np.float64)
    return Target("regression", numbers.astype(np.float32)[:, None], 1, labels)


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
