"""What a data set is once it has been read: checked tensors that know their task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedveil.data.lazy import LazyTensor
from fedveil.data.preparation import Preparation
from fedveil.errors import ConfigError, DataError, unknown_name

if TYPE_CHECKING:
    from fedveil.data.description import Column

Task = Literal["classification", "regression", "multilabel"]
LARGEST_PICTURE = 1 << 12
How = Literal["auto", "random", "stratified", "rows"]


# Tensors have no single truth value under ==, so equality of data sets is identity.
@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their targets, validated on construction.

    ``x`` is floating point of shape (N, ...), or int64 token ids for text. ``y`` is int64 of shape (N,) for
    classification and floating point of shape (N, outputs) for regression and for several labels of 0 and 1
    (multilabel). ``groups`` says which samples belong together (one patient's, one writer's) and ``sites`` where they
    are from (a hospital), as numbers; the names behind the numbers of ``sites`` are ``site_names``, those behind
    ``groups`` ``group_names``, where they have any.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    outputs: int
    labels: tuple[str, ...] = ()
    groups: Tensor | None = None
    vocabulary: int | None = None
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_inputs(self)
        _check_targets(self)

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def is_text(self) -> bool:
        """Whether the samples are token ids rather than numbers."""
        return self.x.dtype is torch.int64

    def subset(self, indices: Tensor) -> Dataset:
        """The samples at ``indices``, in that order; an index may occur more than once."""
        rows = indices.to(self.x.device)
        groups, sites = (None if codes is None else codes[rows] for codes in (self.groups, self.sites))
        x = self.x.subset(rows) if isinstance(self.x, LazyTensor) else self.x[rows]
        return replace(self, x=x, y=self.y[rows], groups=groups, sites=sites)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Dataset:
        """A copy on another device or in another precision; integer tensors keep their type."""
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"Dataset.to needs a floating point dtype such as torch.float64, not {dtype}.")

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

        groups, sites = (None if codes is None else moved(codes) for codes in (self.groups, self.sites))
        return replace(self, x=moved(self.x), y=moved(self.y), groups=groups, sites=sites)


@dataclass(frozen=True, eq=False)
class Split:
    """A training part, the test part that belongs to it, and a part to validate by, where there is one.

    ``columns`` are those of the table they come from, as they were read; ``preparation`` says what was done to the raw
    samples.
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None
    columns: tuple[Column, ...] = ()
    preparation: Preparation | None = None
    remarks: tuple[str, ...] = field(default=(), kw_only=True)
    """What was guessed when they were read, a line each."""

    def __post_init__(self) -> None:
        others = {"test": self.test} | ({} if self.validation is None else {"validation": self.validation})
        for name, part in others.items():
            for what in ("task", "outputs", "input_shape", "is_text"):
                ours, theirs = getattr(self.train, what), getattr(part, what)
                if ours != theirs:
                    raise DataError(
                        f"The training and {name} parts of {self.train.name!r} differ in {what}: "
                        f"{ours} and {theirs}. Both parts must describe the same kind of samples."
                    )

    @property
    def parts(self) -> dict[str, Dataset]:
        """Every part that is there, by name: train, validation, test."""
        every = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in every.items() if part is not None}


def check_finite(tensor: Tensor, *, what: str, where: str) -> None:
    """Raise a DataError that names the first sample of ``tensor`` with a NaN or an infinity."""
    if isinstance(tensor, LazyTensor):  # checked where it is read
        return
    if tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax()):  # needs no copy
        return
    finite = torch.isfinite(tensor)
    at = np.unravel_index(int(np.argmin(finite.cpu().numpy())), tuple(tensor.shape))
    sample, rest = int(at[0]), tuple(int(i) for i in at[1:])
    place = "" if not rest else f", column {rest[0]}" if len(rest) == 1 else f", position {rest}"
    raise DataError(
        f"{where}: sample {sample}{place} of {what} is {tensor[at].item()} in {tensor.dtype}. "
        "Remove or repair that sample."
    )


def check_labels(y: Tensor, *, where: str) -> None:
    """Raise a DataError that names the first sample with a label that is neither 0 nor 1."""
    odd = ((y != 0) & (y != 1)).any(1)
    if bool(odd.any()):
        sample = int(odd.nonzero()[0, 0])
        raise DataError(f"{where}: sample {sample} has a label that is neither 0 nor 1, as several labels must be.")


def _check_shapes(data: Dataset) -> None:
    if data.x.ndim < 2:
        raise DataError(f"{data.name}: x has shape {tuple(data.x.shape)}; it needs one row per sample, (N, ...).")
    if len(data) == 0:
        raise DataError(f"{data.name}: there are no samples.")
    for what, tensor in (("targets", data.y), ("groups", data.groups), ("sites", data.sites)):
        if tensor is not None and (tensor.ndim == 0 or tensor.shape[0] != len(data)):
            count = 1 if tensor.ndim == 0 else tensor.shape[0]
            raise DataError(f"{data.name}: {len(data)} samples but {count} {what}; the counts must be equal.")
    for what, codes, names in (
        ("groups", data.groups, data.group_names),
        ("sites", data.sites, data.site_names),
    ):
        if codes is not None and (codes.dtype is not torch.int64 or codes.ndim != 1):
            raise DataError(f"{data.name}: {what} must be int64 of shape (N,).")
        if codes is not None and names and not 0 <= int(codes.min()) <= int(codes.max()) < len(names):
            raise DataError(
                f"{data.name}: {what} run from {int(codes.min())} to {int(codes.max())}, but there are "
                f"{len(names)} names."
            )


def _check_inputs(data: Dataset) -> None:
    if data.x.is_floating_point():
        check_finite(data.x, what="x", where=data.name)
        return
    if data.x.dtype is not torch.int64:
        raise DataError(f"{data.name}: x is {data.x.dtype}; it must be floating point, or int64 token ids for text.")
    low, high = int(data.x.min()), int(data.x.max())
    if low < 0 or (data.vocabulary is not None and high >= data.vocabulary):
        size = "the vocabulary" if data.vocabulary is None else f"0..{data.vocabulary - 1}"
        raise DataError(f"{data.name}: token ids run from {low} to {high}, outside {size}.")


def _check_names(data: Dataset) -> None:
    if data.labels and len(data.labels) != data.outputs:
        raise DataError(f"{data.name}: {len(data.labels)} class names for {data.outputs} classes.")


def _check_targets(data: Dataset) -> None:
    if data.outputs < 1:
        raise DataError(f"{data.name}: outputs is {data.outputs}; at least one is needed.")
    if data.task in ("regression", "multilabel"):
        if not data.y.is_floating_point() or data.y.shape[1:] != (data.outputs,):
            raise DataError(
                f"{data.name}: {data.task} targets must be floating point of shape (N, {data.outputs}), "
                f"not {data.y.dtype} of shape {tuple(data.y.shape)}."
            )
        check_finite(data.y, what="y", where=data.name)
        if data.task == "multilabel":
            check_labels(data.y, where=data.name)
            _check_names(data)
        return
    if data.task != "classification":
        raise DataError(f"{data.name}: task is {data.task!r}; it must be one of {', '.join(get_args(Task))}.")
    if data.y.dtype is not torch.int64 or data.y.ndim != 1:
        raise DataError(
            f"{data.name}: class labels must be int64 of shape (N,), not {data.y.dtype} of shape {tuple(data.y.shape)}."
        )
    _check_names(data)
    outside = (data.y < 0) | (data.y >= data.outputs)
    if bool(outside.any()):
        sample = int(outside.nonzero()[0, 0])
        raise DataError(
            f"{data.name}: sample {sample} has class {int(data.y[sample])}, "
            f"but classes run from 0 to {data.outputs - 1}."
        )


@dataclass(frozen=True)
class Options:
    """The keyword arguments of ``load``."""

    target: str | None = None
    task: Task | None = None
    test_fraction: float = 0.2
    seed: int = 0
    text: str | None = None
    group: str | None = None
    max_tokens: int = 200
    vocabulary: int = 10_000
    normalise: bool = True
    picture_size: int | None = None
    site: str | None = None
    split: str = "auto"
    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.split not in get_args(How):
            raise unknown_name("split", self.split, get_args(How))
        if not 0.0 < self.test_fraction < 1.0:
            raise ConfigError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1, for example 0.2.")
        if not 0.0 <= self.validation_fraction < 1.0 or self.test_fraction + self.validation_fraction >= 1.0:
            raise ConfigError(
                f"validation_fraction is {self.validation_fraction} and test_fraction {self.test_fraction}; something "
                "must be left to train on: for example 0.1 and 0.2."
            )
        if self.task is not None and self.task not in get_args(Task):
            raise unknown_name("task", self.task, get_args(Task))
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; at least one token per text is needed.")
        if self.vocabulary < 3:
            raise ConfigError(
                f"vocabulary is {self.vocabulary}; it must be at least 3: padding, unknown, and one word."
            )
        if self.picture_size is not None and not 1 <= self.picture_size <= LARGEST_PICTURE:
            raise ConfigError(f"picture_size is {self.picture_size}; it must lie between 1 and {LARGEST_PICTURE}.")

    def refuse_columns(self, name: str) -> None:
        """Raise where a column was named although the source ``name`` has no columns."""
        for option in ("target", "text", "group", "site"):
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self, option)!r} names a CSV column, but {name} is not a CSV table. "
                    f"Leave {option} out."
                )

    def refuse_picture_size(self, name: str) -> None:
        """Raise where pictures are to be resized although the source ``name`` is no folder of pictures."""
        if self.picture_size is not None:
            raise ConfigError(
                f"picture_size resizes pictures as they are read from a folder, and {name} is none. Leave it out."
            )
