"""CSV sources: which rows train, which column is the target, and what is left to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedveil.data.arrays import split_rows
from fedveil.data.columns import Rows, features, group_codes, target
from fedveil.data.dataset import Dataset, Split
from fedveil.data.files import by_plain_name, files_of
from fedveil.data.options import Options
from fedveil.data.table import Table, is_table, read_table
from fedveil.data.text import token_ids, vocabulary_of
from fedveil.errors import ConfigError, DataError, unknown_name

_SPLIT = "split"
_TRAIN = frozenset({"train", "training"})
_TEST = frozenset({"test", "val", "valid", "validation"})


def recognises(path: Path) -> bool:
    """Whether this is a CSV file or a folder that holds some."""
    return any(is_table(file) for file in (files_of(path) if path.is_dir() else [path]))


def load_table(path: Path, options: Options, *, name: str) -> Split:
    """Read one CSV file, or train.csv and test.csv, and encode it."""
    table, fixed = _read(path)
    named = _named_columns(table, options, path)
    if fixed is None and _SPLIT not in named.values():
        fixed = _split_column(table)
    train, test = fixed or (rows.numpy() for rows in split_rows(len(table), options, where=str(path)))
    goal = target(table, named["target"], task=options.task, train=fixed[0] if fixed else None)
    groups = torch.from_numpy(group_codes(table, named["group"])) if "group" in named else None
    vocabulary = None
    if "text" in named:
        texts = table.columns[named["text"]]
        ids = vocabulary_of((texts[row] for row in train), size=options.vocabulary)
        x = torch.from_numpy(token_ids(texts, ids, length=options.max_tokens))
        vocabulary = len(ids) + 2
    else:
        kept = [column for column in table.columns if column not in named.values()]
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
    second = next((f"{name}.csv" for name in ("test", "val", "valid", "validation") if f"{name}.csv" in files), None)
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
    for role, column in named.items():
        if column not in table.columns:
            raise unknown_name(f"{role} column", column, table.columns, hint=f"These are the columns of {path}.")
    if len(set(named.values())) != len(named):
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
        if mark not in _TRAIN | _TEST:
            raise DataError(
                f"{table.place(row)}: column {_SPLIT!r} says {mark!r}; only train and test "
                "can be told apart. Remove the row or rename the column."
            )
    held = np.array([mark in _TEST for mark in marks])
    if not held.any():
        return None
    rows = np.arange(len(marks))
    return rows[~held], rows[held]
