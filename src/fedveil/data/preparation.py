"""How raw samples become what a model takes: plain data that travels with the model.

What was learnt from training rows (means, deviations, categories, words) stands here as numbers and texts. Training
and predicting apply it by the same functions, so that a raw row gives the same numbers in both, bit for bit. A
preparation may come from a stranger's file: its sizes are checked when it is made, and nothing in it is ever run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.data.lazy import LazyTensor, std_mean
from fedveil.errors import DataError

Floats = npt.NDArray[np.float64]
Cells = Floats | Sequence[str]
"""A column of a table: numbers with NaN for gaps, or words."""

MOST_CATEGORIES = 1000
_MOST_NUMBERS = 1 << 31
_MOST_RESIZED = 1 << 26  # of a picture that is brought to the size a file names: 4096 pixels a side in colour, and more
_MOST_WORDS = 1 << 20
_CHANNELS = (1, 3, 4)
_PIECE = 1 << 13
_FIRST = 64


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers: gaps become `fill`, and then (number − mean) / deviation."""

    name: str
    fill: float
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        if not (all(map(math.isfinite, (self.fill, self.mean, self.deviation))) and self.deviation > 0):
            raise ValueError(f"the column {self.name!r} is scaled by numbers that cannot be used")


@dataclass(frozen=True)
class CategoryColumn:
    """A column of words: one input each, 1 where the word stands; a word that is not among them leaves all at 0."""

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(set(self.categories)) == len(self.categories) <= MOST_CATEGORIES:
            raise ValueError(f"the column {self.name!r} has no usable list of categories")


@dataclass(frozen=True)
class Columns:
    """A table: its columns in the order of the model's inputs."""

    columns: tuple[NumericColumn | CategoryColumn, ...]

    def __post_init__(self) -> None:
        if not 0 < len({column.name for column in self.columns}) == len(self.columns):
            raise ValueError("the columns of a table have no names of their own")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a prepared sample."""
        widths = (len(column.categories) if isinstance(column, CategoryColumn) else 1 for column in self.columns)
        return (sum(widths),)

    def apply(self, cells: Mapping[str, Cells]) -> Tensor:
        """Rows as the model takes them."""
        rows = len(cells[self.columns[0].name])
        x = np.empty((rows, *self.shape), np.float32)
        for start in range(0, rows, _PIECE):  # scikit-learn's own numbers take twice as much and more
            piece = {name: column[start : start + _PIECE] for name, column in cells.items()}
            x[start : start + _PIECE] = self._transformer.transform(_grid(piece, self.columns))
        return torch.from_numpy(x)

    @cached_property
    def _transformer(self) -> Any:
        """Scikit-learn's transformers with what stands here, set as the attributes that their documentation names."""
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        steps: list[tuple[str, Any, list[int]]] = []
        filled = []
        for words, run in groupby(enumerate(self.columns), key=lambda entry: isinstance(entry[1], CategoryColumn)):
            places, columns = zip(*run, strict=True)
            if words:
                categories = [np.array(column.categories, object) for column in columns]
                step = OneHotEncoder(categories=categories, handle_unknown="ignore", sparse_output=False)
            else:
                step = make_pipeline(SimpleImputer(), StandardScaler())
                filled.append((f"from {places[0]}", columns))
            steps.append((f"from {places[0]}", step, list(places)))
        example = {column.name: [""] if isinstance(column, CategoryColumn) else np.zeros(1) for column in self.columns}
        made = ColumnTransformer(steps).fit(_grid(example, self.columns))
        for name, columns in filled:
            imputer, scaler = (step for _, step in made.named_transformers_[name].steps)
            imputer.statistics_ = np.array([column.fill for column in columns])
            scaler.mean_ = np.array([column.mean for column in columns])
            scaler.scale_ = np.array([column.deviation for column in columns])
        return made


def fit_columns(cells: Mapping[str, Cells], *, standardise: bool) -> Columns:
    """What is learnt from training rows: means and deviations of numbers, and the words of the other columns."""
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    words = [name for name, column in cells.items() if not isinstance(column, np.ndarray)]
    numbers = [name for name in cells if name not in words]
    places = {name: place for place, name in enumerate(cells)}
    kinds = (("numbers", StandardScaler(), numbers), ("words", OneHotEncoder(sparse_output=True), words))
    steps = [(kind, step, [places[name] for name in names]) for kind, step, names in kinds if names]
    learnt = ColumnTransformer(steps, sparse_threshold=1.0).fit(_grid(cells)).named_transformers_
    columns: dict[str, NumericColumn | CategoryColumn] = {}
    if numbers:
        for name, mean, scale in zip(numbers, learnt["numbers"].mean_, learnt["numbers"].scale_, strict=True):
            scaled = (float(mean), float(scale)) if standardise else (0.0, 1.0)
            columns[name] = NumericColumn(name, float(mean), *scaled)
    if words:
        for name, categories in zip(words, learnt["words"].categories_, strict=True):
            columns[name] = CategoryColumn(name, tuple(categories.tolist()))
    return Columns(tuple(columns[name] for name in cells))


def _grid(cells: Mapping[str, Cells], columns: Sequence[NumericColumn | CategoryColumn] | None = None) -> Any:
    names = list(cells) if columns is None else [column.name for column in columns]
    grid = np.empty((len(cells[names[0]]), len(names)), object)
    for place, name in enumerate(names):
        grid[:, place] = cells[name]
    return grid


PADDING, UNKNOWN = 0, 1

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


def words(text: str) -> list[str]:
    """The lower-case words of a text."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Words:
    """A column of texts as the ids of their words; ids begin after padding and unknown."""

    column: str
    vocabulary: tuple[str, ...]
    length: int

    def __post_init__(self) -> None:
        if len(set(self.vocabulary)) != len(self.vocabulary) or not 0 < self.length <= _MOST_WORDS:
            raise ValueError(f"the texts of {self.column!r} have no usable vocabulary or length")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a prepared sample."""
        return (self.length,)

    @property
    def ids(self) -> int:
        """How many different ids there are."""
        return len(self.vocabulary) + 2

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary, start=2)}

    def apply(self, texts: Sequence[str]) -> Tensor:
        """Every text as ids, cut or padded at its end; a text without words is one unknown word."""
        block = np.full((len(texts), self.length), PADDING, np.int64)
        for row, text in enumerate(texts):
            tokens = [self._ids.get(word, UNKNOWN) for word in words(text)[: self.length]] or [UNKNOWN]
            block[row, : len(tokens)] = tokens
        return torch.from_numpy(block)


def fit_words(texts: Iterable[str], *, column: str, size: int, length: int) -> Words:
    """The most frequent words; ``size`` counts padding and unknown too. Ties go by alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return Words(column, tuple(ranked), length)


@dataclass(frozen=True)
class Pixels:
    """Pictures stored as bytes: divided by 255, and then (value − mean) / deviation per channel, where there are such.

    `resize` says whether pictures are brought to this size when they are read.
    """

    shape: tuple[int, ...]
    resize: bool
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.shape, self.mean, self.deviation)
        if len(self.mean) not in (0, self.shape[0] if len(self.shape) > 1 else 1):
            raise ValueError("pictures are not scaled by one mean and deviation a channel")
        if self.resize and len(self.shape) != 3:
            raise ValueError("pictures are resized that have no height and width")
        if self.resize and math.prod(self.shape) > _MOST_RESIZED:
            raise ValueError(f"pictures are resized to {self.shape[2]}×{self.shape[1]} pixels, too many to be meant")

    def standardised(self, x: Tensor) -> Tensor:
        """Values in [0, 1] as the model takes them."""
        if not self.mean:
            return x
        form = (1, -1, *([1] * (len(self.shape) - 1)))
        mean, deviation = (torch.tensor(values, dtype=x.dtype).reshape(form) for values in (self.mean, self.deviation))
        return x.sub(mean).div_(deviation)

    def apply(self, pictures: npt.NDArray[Any]) -> Tensor:
        """Bytes of the shape (N, ...) as the model takes them."""
        return self.standardised(from_bytes(pictures))

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest number that a byte can become."""
        pairs = list(zip(self.mean, self.deviation, strict=True)) or [(0.0, 1.0)]
        return min(-mean / by for mean, by in pairs), max((1 - mean) / by for mean, by in pairs)


def fit_pixels(train: Tensor, *, standardise: bool, resize: bool) -> Pixels:
    """The mean and deviation of every channel of training pictures with values in [0, 1]."""
    shape = tuple(train.shape[1:])
    if not standardise:
        return Pixels(shape, resize)
    # A flat row of pixels is one channel: per-pixel statistics would blow up the rim that never varies.
    across = [0, *range(2, train.ndim)] if train.ndim > 2 else [0, 1]
    deviation, mean = std_mean(train, dim=across)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return Pixels(shape, resize, tuple(mean.reshape(-1).tolist()), tuple(deviation.reshape(-1).tolist()))


def from_bytes(pictures: npt.NDArray[Any]) -> Tensor:
    """Bytes as numbers in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(pictures, dtype=np.float32)).div_(255.0)


@dataclass(frozen=True)
class Features:
    """Arrays of numbers, taken as they are or scaled per feature; `whole` ones are ids, of `vocabulary` different ones.

    `largest` is a power of two that no training number exceeds: rounded up, since the largest itself is somebody's.
    """

    shape: tuple[int, ...]
    whole: bool
    largest: float
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.shape, self.mean, self.deviation)
        if not (math.isfinite(self.largest) and self.largest > 0) or len(self.mean) not in (0, *self.shape[:1]):
            raise ValueError("numbers have no scale")

    def apply(self, x: npt.NDArray[Any]) -> Tensor:
        """Numbers of the shape (N, ...) as the model takes them."""
        if self.whole:
            return torch.from_numpy(x.astype(np.int64))
        with np.errstate(over="ignore"):
            ready = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        return self.standardised(ready)

    def standardised(self, x: Tensor) -> Tensor:
        """Numbers as the model takes them, where it is trained on features that were brought to one scale."""
        if not self.mean:
            return x
        mean, deviation = (torch.tensor(values, dtype=x.dtype) for values in (self.mean, self.deviation))
        return (x - mean) / deviation


def numbers_like(*parts: Tensor) -> Features:
    """How numbers are described that a model takes as they are; `parts` are those it is trained on.

    Of samples that are read when they are asked for, only the first are looked at.
    """
    looked_at = (part[:_FIRST] if isinstance(part, LazyTensor) else part for part in parts)
    largest = max(float(part.abs().max()) for part in looked_at)
    rounded = 2.0 ** math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0
    return Features(tuple(parts[0].shape[1:]), not parts[0].is_floating_point(), rounded)


def _check(shape: tuple[int, ...], mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    if not shape or min(shape) < 1 or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(f"samples have no usable shape: {shape}")
    if (
        len(mean) != len(deviation)
        or not all(map(math.isfinite, (*mean, *deviation)))
        or min(deviation, default=1) <= 0
    ):
        raise ValueError("samples are scaled by numbers that cannot be used")


@dataclass(frozen=True)
class Preparation:
    """What a run did to raw samples before a model saw them, and what its outputs are called.

    `target` is the column that was learnt, `aside` are columns that the run knew and no input was made of: new data may
    have either, and need neither.
    """

    inputs: Columns | Words | Pixels | Features
    classes: tuple[str, ...] = ()
    target: str | None = None
    aside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes have no names of their own")

    @property
    def learnt(self) -> str:
        """What of it was computed from training samples and is somebody's: in words, empty where nothing was."""
        inputs = self.inputs
        if isinstance(inputs, Words):
            return f"the {len(inputs.vocabulary):,} most frequent words"
        if isinstance(inputs, Columns):
            words = [column for column in inputs.columns if isinstance(column, CategoryColumn)]
            categories, numbers = sum(len(column.categories) for column in words), len(inputs.columns) - len(words)
            said = [
                f"mean and deviation of {_counted(numbers)}",
                f"all {categories:,} categories of {_counted(len(words))}",
            ]
            return ", ".join(text for text, count in zip(said, (numbers, len(words)), strict=True) if count)
        return "means and deviations" if inputs.mean else ""


def _counted(columns: int) -> str:
    return f"{columns:,} column{'s' * (columns != 1)}"


def laid_out(x: npt.NDArray[Any], shape: tuple[int, ...] | None, *, where: str) -> npt.NDArray[Any]:
    """An array with one sample a row, and channels before height and width.

    Where the `shape` of a sample is known, the array is turned to it or refused; else bytes are taken for pictures,
    mostly channel last, and other numbers are only turned when it is beyond doubt.
    """
    if shape is None:
        if x.dtype == np.uint8 and x.ndim == 3:
            return x[:, None]
        if x.ndim == 4:
            last, first = x.shape[3] in _CHANNELS, x.shape[1] in _CHANNELS
            if (x.dtype == np.uint8 and (last or not first)) or (last and not first):
                return x.transpose(0, 3, 1, 2)
        return x
    forms = [x]
    if x.ndim == 3 and shape[0] == 1:
        forms.append(x[:, None])
    if x.ndim == 4:
        forms.append(x.transpose(0, 3, 1, 2))
    for form in forms if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] not in _CHANNELS else reversed(forms):
        if form.shape[1:] == shape:
            return form
    raise DataError(f"{where}: samples have shape {x.shape[1:]}, the model takes {shape}.")
