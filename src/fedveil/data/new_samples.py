"""Samples to predict for: from wherever they are, refused by name where they do not fit a model's preparation.

Nothing is learnt from them. What a preparation tells to do is done (gaps filled, words counted as none of the
categories), and said; what it does not tell is not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data import pictures, tabular
from fedveil.data.arrays import Array, files_of, labelled, one_spelling, read_array, read_arrays
from fedveil.data.dataset import Task, check_finite
from fedveil.data.description import is_missing
from fedveil.data.preparation import CategoryColumn, Cells, Columns, Features, Pixels, Preparation, Words, laid_out
from fedveil.data.tabular import Table
from fedveil.errors import ConfigError, DataError, spelled, unknown_name

_SHOWN = 4
_UNLIKE_BYTES = 8.0  # so many times the largest training number, and still no more than 255: somebody's raw pixels


@dataclass(frozen=True, eq=False)
class NewSamples:
    """Samples that a model can take, prepared a piece at a time.

    `y` holds targets as far as they are known (−1 or NaN where not), `beside` what is written next to predictions, and
    `notes` what a person should know.
    """

    count: int
    prepared: Callable[[int, int], Tensor]
    y: Tensor | None = None
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """What a model takes and gives."""

    preparation: Preparation
    task: Task
    outputs: int
    vocabulary: int | None = None


def read_samples(source: object, expected: Expected, *, keep: Sequence[str] = ()) -> NewSamples:
    """Samples to predict for.

    Args:
        source: A path (a table, a folder of pictures or one of them, .npz, .npy); or rows as dicts, a dict of columns,
            a DataFrame, texts, an array or tensor, Pillow pictures.
        expected: What the model takes and gives.
        keep: Columns of a table that the model does not take, to stand beside the predictions.

    Raises:
        DataError: Something cannot be read, or does not fit the model; the message names it.
        ConfigError: A column to keep is not there.
    """
    inputs = expected.preparation.inputs
    if isinstance(source, str | Path):
        source = _there(source)
    if isinstance(inputs, Columns | Words):
        return _of_table(_table(source, inputs), expected, keep)
    if keep:
        raise ConfigError(f"keep={keep[0]!r} names a column, and this model takes {_wanted(inputs)}.")
    if isinstance(inputs, Pixels) and (files := _picture_files(source)) is not None:
        return _of_files(files, inputs, expected)
    x, y, where = _array(source, inputs)
    return _of_array(x, y, where, expected)


def _there(source: str | Path) -> Path:
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError):  # no name that a file could have
        pass
    raise DataError(f"{str(source)[:200]}: no such file or folder.")


def _wanted(inputs: Columns | Words | Pixels | Features) -> str:
    if isinstance(inputs, Columns):
        return f"a table with the columns {', '.join(column.name for column in inputs.columns)}"
    if isinstance(inputs, Words):
        return f"texts, in a table's column {inputs.column!r}"
    if isinstance(inputs, Pixels):
        return f"pictures stored as bytes, of shape {inputs.shape}"
    return f"arrays of numbers, of shape {inputs.shape}"


def _table(source: object, inputs: Columns | Words) -> Table:
    if isinstance(source, Path):
        tables = [file for file in (files_of(source) if source.is_dir() else [source]) if tabular.is_table(file)]
        if len(tables) != 1:
            raise DataError(f"{source}: {len(tables)} tables; this model takes {_wanted(inputs)}. Give one file.")
        return tabular.read_table(tables[0])
    if isinstance(inputs, Words) and _all_of(source, str):
        source = {inputs.column: source}
    if isinstance(source, list | tuple) and _all_of(source, Mapping):
        columns = {str(name): [row.get(name, _ABSENT) for row in source] for name in source[0]}
        strange = next((name for row in source for name in row if str(name) not in columns), None)
        lacking = next((name for name, values in columns.items() if any(value is _ABSENT for value in values)), None)
        if strange is not None or lacking is not None:
            raise DataError(f"rows: some have {strange or lacking!r} and some do not. Give all rows the same columns.")
    elif hasattr(source, "columns") and hasattr(source, "__getitem__"):  # a DataFrame, whose package is not needed here
        columns = {str(name): list(source[name]) for name in source.columns}
    elif isinstance(source, Mapping):
        single = all(isinstance(value, str) or not hasattr(value, "__len__") for value in source.values())
        columns = {str(name): [values] if single else list(values) for name, values in source.items()}
    else:
        raise DataError(f"{type(source).__name__} is no table; this model takes {_wanted(inputs)}.")
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1 or not max(counts):
        raise DataError(
            f"rows: {len(columns)} columns of {sorted(counts)} values; there must be rows, and equally many."
        )
    return Table(
        {name: [_cell(value) for value in values] for name, values in columns.items()},
        [(Path("rows"), 0)] * max(counts),
    )


_ABSENT = object()


def _all_of(source: object, kind: type) -> bool:
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(item, kind) for item in source)


def _cell(value: object) -> str:
    try:
        return tabular.cell_of(value.item() if isinstance(value, np.generic | Tensor) else value)
    except TypeError:  # a gap that is not even equal or unequal to itself, as data frames have them
        return ""
    except ValueError as reason:
        raise DataError(f"rows: {reason}.") from reason


def _of_table(table: Table, expected: Expected, keep: Sequence[str]) -> NewSamples:
    preparation = expected.preparation
    inputs, where = preparation.inputs, table.places[0][0]
    wanted = [column.name for column in inputs.columns] if isinstance(inputs, Columns) else [inputs.column]  # type: ignore[union-attr]
    for name in keep:
        if name not in table.columns:
            raise unknown_name("column to keep", name, table.columns)
    if missing := [name for name in wanted if name not in table.columns]:
        raise DataError(f"{where}: it lacks {_columns(missing)}, which the model takes. {_has(table)}")
    targets = _target_names(expected)
    known = {*wanted, *preparation.aside, *keep, *targets}
    if strange := [name for name in table.columns if name not in known]:
        raise DataError(
            f"{where}: the model was trained without {_columns(strange)}. Remove it, or have it stand beside the "
            f"predictions: --keep {strange[0]} (in Python keep=[{strange[0]!r}])."
        )
    notes: list[str] = []
    beside = {name: table.columns[name] for name in keep}
    y = _targets(table, expected) if targets and all(name in table.columns for name in targets) else None
    if isinstance(inputs, Words):
        texts, tokens = table.columns[inputs.column], inputs
        return NewSamples(len(table), lambda start, stop: tokens.apply(texts[start:stop]), y, beside)
    assert isinstance(inputs, Columns)
    columns, cells = inputs, {column.name: _read(table, column, notes) for column in inputs.columns}

    def prepared(start: int, stop: int) -> Tensor:
        return columns.apply({name: column[start:stop] for name, column in cells.items()})

    return NewSamples(len(table), prepared, y, beside, tuple(notes))


def _columns(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"column{'s' * (len(names) > 1)} {shown}" + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")


def _has(table: Table) -> str:
    return f"It has {_columns(list(table.columns))}."


def _read(table: Table, column: Any, notes: list[str]) -> Cells:
    name = column.name
    if isinstance(column, CategoryColumn):
        cells = [value.strip() for value in table.columns[name]]
        strange = Counter(value for value in cells if value not in set(column.categories))
        if strange:
            shown = ", ".join(repr(value[:60]) for value, _ in strange.most_common(_SHOWN))
            notes.append(
                f"column {name!r}: {strange.total()} of {len(cells)} rows hold what training never saw ({shown}"
                f"{', …' * (len(strange) > _SHOWN)}); they count as none of its {len(column.categories)} categories"
            )
        return cells
    values, word = tabular.numbers_in(table, name)
    if word is not None:
        raise DataError(
            f"{table.place(word)}: column {name!r} holds {table.columns[name][word].strip()[:60]!r}, and the model "
            "takes numbers there. Write a number, or leave the cell empty where it is not known."
        )
    if gaps := int(np.isnan(values).sum()):
        notes.append(
            f"column {name!r}: {gaps} of {len(values)} rows are empty and get {column.fill:g}, the training rows' mean"
        )
    return values


def _target_names(expected: Expected) -> list[str]:
    target = expected.preparation.target
    return [] if target is None else target.split(",") if expected.task == "multilabel" else [target]


def _targets(table: Table, expected: Expected) -> Tensor | None:
    """Targets as far as they are known: −1 and NaN where they are not; None where none is."""
    if expected.task == "multilabel":
        # Which of two words held is not kept with a model: only labels of 0 and 1 can be compared.
        columns = [tabular.numbers_in(table, name) for name in _target_names(expected)]
        fit = all(word is None and set(values[~np.isnan(values)]) <= {0.0, 1.0} for values, word in columns)
        labels = np.stack([values for values, _ in columns], axis=1)
        return torch.from_numpy(labels) if fit and not np.isnan(labels).all() else None
    target, classes = expected.preparation.target, expected.preparation.classes
    assert target is not None
    cells = [value.strip() for value in table.columns[target]]
    known = [row for row, value in enumerate(cells) if not is_missing(value)]
    if not known:
        return None
    codes = {name: float(code) for code, name in enumerate(classes)}
    values = torch.full((len(cells),), torch.nan, dtype=torch.float64)
    for row in known:
        value = _coded(cells[row], codes, numbers=expected.task == "regression")
        if value is None:
            what = f"one of the model's classes ({', '.join(classes[:20])})" if classes else "a number"
            raise DataError(
                f"{table.place(row)}: the target {target!r} is {cells[row][:60]!r}, not {what}. Leave the cell empty "
                "where it is not known."
            )
        values[row] = value
    return _as_targets(values, expected)


def _coded(text: str, codes: Mapping[str, float], *, numbers: bool) -> float | None:
    if text in codes:
        return codes[text]
    try:
        number = float(text)
        return number if numbers and not codes else codes.get(one_spelling(str(number)))
    except (ValueError, OverflowError):
        return None


def _as_targets(values: Tensor, expected: Expected) -> Tensor:
    if expected.task == "classification":
        return torch.where(values.isnan(), -1.0, values).to(torch.int64)
    return values.reshape(len(values), -1)


def _picture_files(source: object) -> dict[Path, str | None] | None:
    """Pictures on disk, with the name of their class where a folder tells it; None where the source is no picture."""
    if not isinstance(source, Path):
        return None
    if source.is_file():
        return {source: None} if pictures.is_picture(source) else None
    folders = pictures.class_folders(source)
    loose = [file for file in files_of(source) if pictures.is_picture(file)]
    if folders and loose:
        raise DataError(
            f"{source}: pictures lie in it and in folders of it ({', '.join(folders)}): move one or the other."
        )
    if not folders and not loose:
        raise DataError(f"{source}: no pictures.")
    return dict.fromkeys(loose) | {file: name for name, files in folders.items() for file in files}


def _of_files(files: Mapping[Path, str | None], inputs: Pixels, expected: Expected) -> NewSamples:
    paths, names = list(files), list(files.values())
    y = None
    if names[0] is not None:
        classes = expected.preparation.classes
        if strange := sorted({str(name) for name in names} - set(classes)):
            raise DataError(
                f"{paths[0].parent.parent}: its folder {strange[0]!r} is none of the model's classes "
                f"({', '.join(classes[:20])}). To predict without known classes, put the pictures into one folder."
            )
        y = torch.tensor([classes.index(str(name)) for name in names])
    size = _size(inputs) if inputs.resize else None
    decode = pictures.decoder(size)

    def prepared(start: int, stop: int) -> Tensor:
        return inputs.apply(np.stack([_fitting(decode(path), inputs, where=str(path)) for path in paths[start:stop]]))

    return NewSamples(len(paths), prepared, y, {"file": [str(path) for path in paths]})


def _size(inputs: Pixels) -> tuple[int, int]:
    return inputs.shape[2], inputs.shape[1]


def _fitting(picture: Array, inputs: Pixels, *, where: str) -> Array:
    """A picture of shape (height, width) or (height, width, 3), as the model's shape has it."""
    if len(inputs.shape) != 3 or inputs.shape[0] not in (1, 3):
        raise DataError(f"{where}: a picture, and this model takes {_wanted(inputs)}.")
    if picture.ndim == 3 and inputs.shape[0] == 1:
        raise DataError(f"{where}: a picture in colour, and the model was trained on grey ones. Convert it first.")
    if picture.shape[:2] != inputs.shape[1:]:
        raise DataError(
            f"{where}: {picture.shape[1]}×{picture.shape[0]} pixels, and the model takes "
            f"{inputs.shape[2]}×{inputs.shape[1]}. It was trained without {spelled('picture_size')}, so that nothing "
            "is resized: bring the picture to that size as the training pictures were."
        )
    if picture.ndim == 2:
        return np.stack([picture] * inputs.shape[0])
    return picture.transpose(2, 0, 1)


def _array(source: object, inputs: Pixels | Features) -> tuple[Array, Array | None, str]:
    if isinstance(source, Path):
        if source.suffix == ".npz":
            return (*labelled(read_arrays(source), source), str(source))
        if source.suffix == ".npy":
            return read_array(source), None, str(source)
        if source.is_file() and pictures.is_idx(source):
            return pictures.read_idx(source), None, str(source)
        files = ".npz with x, .npy, or pictures" if isinstance(inputs, Pixels) else ".npz with x, or .npy"
        raise DataError(f"{source}: this model takes {_wanted(inputs)} ({files}).")
    if isinstance(inputs, Pixels):
        source = _from_pillow(source, inputs)
    try:
        x = source.detach().cpu().numpy() if isinstance(source, Tensor) else np.asarray(source)
    except (ValueError, TypeError) as reason:
        raise DataError(f"samples: they make no array ({reason}). This model takes {_wanted(inputs)}.") from reason
    return (x[None] if _is_single(x, inputs) else x), None, "samples"


def _is_single(x: Array, inputs: Pixels | Features) -> bool:
    shape = inputs.shape
    if x.shape == shape or not isinstance(inputs, Pixels) or len(shape) != 3:
        return x.shape == shape
    return x.shape == shape[1:] if shape[0] == 1 else x.ndim == 3 and x.shape[2] == shape[0]


def _from_pillow(source: object, inputs: Pixels) -> object:
    """Pillow's pictures as an array, resized where the preparation says so; anything else as it is."""
    listed = [source] if hasattr(source, "convert") else source
    if not isinstance(listed, list | tuple) or not listed or not all(hasattr(item, "convert") for item in listed):
        return source
    size = _size(inputs) if inputs.resize else None
    taken = enumerate(listed, start=1)
    return np.stack([_fitting(pictures.as_array(item, size), inputs, where=f"picture {at}") for at, item in taken])


def _of_array(x: Array, y: Array | None, where: str, expected: Expected) -> NewSamples:
    inputs = expected.preparation.inputs
    assert isinstance(inputs, Pixels | Features)
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where}: samples are of type {x.dtype}; this model takes {_wanted(inputs)}.")
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"{where}: there are no samples.")
    ready = _bytes(x, inputs, where) if isinstance(inputs, Pixels) else _numbers(x, inputs, expected, where)
    known = None if y is None else _array_targets(y, len(x), where, expected)
    return NewSamples(len(x), lambda start, stop: inputs.apply(ready[start:stop]), known)


def _bytes(x: Array, inputs: Pixels, where: str) -> Array:
    if x.dtype != np.uint8:
        raise DataError(
            f"{where}: numbers of type {x.dtype}, {_range(x)}, and this model was trained on pictures stored as bytes, "
            "which it scales and standardises itself. Give bytes from 0 to 255 (uint8); what is prepared already goes "
            "with --inputs FILE.npy."
        )
    if inputs.resize and x.ndim in (3, 4) and x.shape[1:3] != inputs.shape[1:] and x.shape[2:4] != inputs.shape[1:]:
        from PIL import Image

        return np.stack(
            [_fitting(pictures.as_array(Image.fromarray(item), _size(inputs)), inputs, where=where) for item in x]
        )
    return laid_out(x, inputs.shape, where=where)


def _numbers(x: Array, inputs: Features, expected: Expected, where: str) -> Array:
    x = laid_out(x, inputs.shape, where=where)
    if inputs.whole:
        if x.dtype.kind not in "iu":
            raise DataError(f"{where}: numbers of type {x.dtype}, and this model takes ids, which are whole numbers.")
        least, most = int(x.min()), int(x.max())
        if least < 0 or (expected.vocabulary is not None and most >= expected.vocabulary):
            raise DataError(f"{where}: ids {_range(x)}, outside of those that the model knows.")
        return x
    if x.dtype == np.uint8:
        raise DataError(
            f"{where}: bytes, and this model was trained on numbers up to {inputs.largest:g} that were taken as they "
            "were. Bring them to the scale of the training data, as floating-point numbers."
        )
    check_finite(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), what="x", where=where)
    refuse_raw_pixels(x, inputs, where=where)
    return x


def refuse_raw_pixels(x: Array, inputs: Features, *, where: str) -> None:
    """Refuse numbers from 0 to 255 for a model that was trained on much smaller ones."""
    if inputs.whole or not x.size:
        return
    if float(x.min()) >= 0 and _UNLIKE_BYTES * inputs.largest <= float(x.max()) <= 255:
        raise DataError(
            f"{where}: numbers {_range(x)} look like raw pixels, and this model was trained on numbers up to "
            f"{inputs.largest:g}. Bring them to the scale of the training data (bytes to [0, 1]: divide by 255)."
        )


def _range(x: Array) -> str:
    return f"from {float(x.min()):g} to {float(x.max()):g}"


def _array_targets(y: Array, count: int, where: str, expected: Expected) -> Tensor:
    classes = expected.preparation.classes
    if y.ndim == 0 or len(y) != count:
        raise DataError(f"{where}: {count} samples but {y.size} targets; they do not belong together.")
    if y.dtype.kind in "US":
        codes = {name: float(code) for code, name in enumerate(classes)}
        names = [str(name) for name in y.reshape(-1).astype(np.str_)]
        if strange := sorted(set(names) - set(codes)):
            raise DataError(f"{where}: {strange[0]!r} is none of the model's classes ({', '.join(classes[:20])}).")
        return _as_targets(torch.tensor([codes[name] for name in names], dtype=torch.float64), expected)
    if y.dtype.kind not in "biuf":
        raise DataError(f"{where}: targets of type {y.dtype} are neither numbers nor names.")
    values = torch.from_numpy(y.astype(np.float64)).reshape(count, -1)
    if values.shape[1] != (1 if expected.task == "classification" else expected.outputs):
        raise DataError(f"{where}: {values.shape[1]} targets a sample do not belong to this model.")
    if expected.task == "regression":
        return values
    labels = values.reshape(-1)
    if bool(((labels < 0) | (labels >= expected.outputs) | (labels != labels.round())).any()):
        raise DataError(f"{where}: targets {_range(y)} are not the model's classes, 0 to {expected.outputs - 1}.")
    return labels.to(torch.int64)
