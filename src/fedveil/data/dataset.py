"""What a data set is once it has been read: checked tensors that know their task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import ConfigError, DataError, unknown_name

Task = Literal["classification", "regression", "multilabel"]


# Tensors have no single truth value under ==, so equality of data sets is identity.
@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their targets, validated on construction.

    ``x`` is floating point of shape (N, ...), or int64 token ids for text. ``y`` is int64 of shape (N,)
    for classification and floating point of shape (N, outputs) for regression and for several labels of 0 and 1
    (multilabel). ``groups`` names the natural owner of each sample (a writer, a hospital), where it is known.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    outputs: int
    labels: tuple[str, ...] = ()
    groups: Tensor | None = None
    vocabulary: int | None = None

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
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, x=self.x[rows], y=self.y[rows], groups=groups)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Dataset:
        """A copy on another device or in another precision; integer tensors keep their type."""
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"Dataset.to needs a floating point dtype such as torch.float64, not {dtype}.")

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

        groups = None if self.groups is None else moved(self.groups)
        return replace(self, x=moved(self.x), y=moved(self.y), groups=groups)


@dataclass(frozen=True, eq=False)
class Split:
    """A training part and the test part that belongs to it."""

    train: Dataset
    test: Dataset

    def __post_init__(self) -> None:
        for what in ("task", "outputs", "input_shape", "is_text"):
            ours, theirs = getattr(self.train, what), getattr(self.test, what)
            if ours != theirs:
                raise DataError(
                    f"The training and test parts of {self.train.name!r} differ in {what}: "
                    f"{ours} and {theirs}. Both parts must describe the same kind of samples."
                )


def check_finite(tensor: Tensor, *, what: str, where: str) -> None:
    """Raise a DataError that names the first sample of ``tensor`` with a NaN or an infinity."""
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return
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
    for what, tensor in (("targets", data.y), ("groups", data.groups)):
        if tensor is not None and (tensor.ndim == 0 or tensor.shape[0] != len(data)):
            count = 1 if tensor.ndim == 0 else tensor.shape[0]
            raise DataError(f"{data.name}: {len(data)} samples but {count} {what}; the counts must be equal.")
    if data.groups is not None and (data.groups.dtype is not torch.int64 or data.groups.ndim != 1):
        raise DataError(f"{data.name}: groups must be int64 of shape (N,).")


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
        return
    if data.task != "classification":
        raise DataError(f"{data.name}: task is {data.task!r}; it must be one of {', '.join(get_args(Task))}.")
    if data.y.dtype is not torch.int64 or data.y.ndim != 1:
        raise DataError(
            f"{data.name}: class labels must be int64 of shape (N,), not {data.y.dtype} of shape {tuple(data.y.shape)}."
        )
    if data.labels and len(data.labels) != data.outputs:
        raise DataError(f"{data.name}: {len(data.labels)} class names for {data.outputs} classes.")
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

    def __post_init__(self) -> None:
        if not 0.0 < self.test_fraction < 1.0:
            raise ConfigError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1, for example 0.2.")
        if self.task is not None and self.task not in get_args(Task):
            raise unknown_name("task", self.task, get_args(Task))
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; at least one token per text is needed.")
        if self.vocabulary < 3:
            raise ConfigError(
                f"vocabulary is {self.vocabulary}; it must be at least 3: padding, unknown, and one word."
            )

    def refuse_columns(self, name: str) -> None:
        """Raise where a column was named although the source ``name`` has no columns."""
        for option in ("target", "text", "group"):
            if getattr(self, option) is not None:
                raise ConfigError(
                    f"{option}={getattr(self, option)!r} names a CSV column, but {name} is not a CSV table. "
                    f"Leave {option} out."
                )
