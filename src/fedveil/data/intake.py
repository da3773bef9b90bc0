"""What the samples of a client may be given as in Python, and how they are read.

Tensors and arrays are taken as they are. What has numbered samples (a torch Dataset, a DataLoader over one, a Hugging
Face dataset, anything with `len` and `[]`) is read lazily, a batch at a time. What can only be gone through from its
beginning (an IterableDataset, a generator) is read once and kept, as long as it fits into `MOST_KEPT` bytes.

Where a sample is a dict and the model takes several of its entries by name (input_ids and attention_mask), a sample is
all of them in one row, and `Intake.fields` says where each lies: `fedveil.models.Adapted` takes them apart again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedveil.data.dataset import Task, check_labels
from fedveil.data.lazy import Cache, LazySamples, seeded_generators
from fedveil.errors import ConfigError, DataError, FedVeilError

Sample = tuple[Any, Any] | Mapping[str, Any]
ClientSamples = Sample | TorchDataset[Any] | DataLoader[Any] | Iterable[Sample]
Party = tuple[Tensor, Tensor] | LazySamples

MOST_KEPT = 1 << 30
"""How many bytes of samples without numbers are kept, of all clients and the test set together."""

_INPUTS = ("x", "input", "inputs", "features", "data", "image", "images", "img", "pixel_values", "input_ids")
_TARGETS = ("y", "label", "labels", "target", "targets")
_UNREADABLE = (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError)


def clients_of(given: Any) -> list[Any]:
    """What each client was given: the entries of a list, or the parts of a partitioner (`flwr-datasets`)."""
    if hasattr(given, "load_partition"):
        return _partitions(given)
    single = isinstance(given, Tensor | TorchDataset | DataLoader | Mapping) or not isinstance(given, Iterable)
    single = single or hasattr(given, "features")  # one Hugging Face dataset
    if single or (isinstance(given, tuple) and any(isinstance(part, Tensor) for part in given)):
        raise DataError(f"clients is {type(given).__name__}: give a list with one entry per client, [(x, y), (x, y)].")
    return list(given)


def _partitions(given: Any) -> list[Any]:
    """The parts of a Partitioner that has its dataset, or of a FederatedDataset that deals out one of its splits."""
    partitioner = given
    try:
        if hasattr(given, "partitioners"):
            if len(given.partitioners) != 1:
                raise DataError(
                    f"clients deals out {', '.join(map(repr, given.partitioners)) or 'nothing'}, each to clients of "
                    "its own: give [data.load_partition(k, split) for k in range(clients)] of one of them."
                )
            given.load_partition(0)  # only now does its partitioner have data
            (partitioner,) = given.partitioners.values()
        return [given.load_partition(number) for number in range(int(partitioner.num_partitions))]
    except FedVeilError:
        raise
    except Exception as reason:  # no dataset yet, or one that cannot be dealt out so
        raise DataError(
            f"clients is {type(given).__name__}, whose partitions cannot be loaded ({type(reason).__name__}: "
            f"{_said(reason)}). Assign its dataset first (partitioner.dataset = …)."
        ) from reason


class SampleError(DataError):
    """A sample that cannot be used, whosever it is."""


class Intake:
    """Reads what clients and the test set were given as.

    Args:
        dtype: Of floating-point numbers.
        device: Where samples are used.
        seed: A seed from a client's number and, where samples are drawn anew, a step and a sample's number.
        several: Whether a sample's target is several labels of 0 and 1.
        takes: The names that the model's inputs go by, in order.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: Callable[..., int],
        several: bool = False,
        takes: Sequence[str] = (),
    ) -> None:
        self._dtype, self._device, self._seed, self._several = dtype, device, seed, several
        self._cache, self._left = Cache(), MOST_KEPT
        self._takes = tuple(takes)
        self.fields: tuple[tuple[str, tuple[int, ...]], ...] = ()
        """Name and shape of every input, where samples have several, in the order they lie in a row."""

    def take(self, samples: Any, *, who: str, number: int) -> Party:
        """Tensors, or samples that are read when they are asked for; ``number`` tells parties apart."""
        if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
            samples = samples.tensors
        if hasattr(samples, "to_numpy"):  # it gives its columns one by one, where samples are wanted
            raise DataError(
                f"{who} is {type(samples).__name__}, which does not say what is the target. Give (inputs, targets): "
                "(table[inputs].to_numpy(), table[target].to_numpy())."
            )
        fetch, rows = self._numbered(samples, who), getattr(samples, "dataset", samples)
        try:
            if fetch is not None:
                return LazySamples(
                    fetch,
                    len(rows if isinstance(samples, DataLoader) else samples),
                    who=who,
                    dtype=self._dtype,
                    device=self._device,
                    seed=lambda step, sample: self._seed(number, step, sample),
                    cache=self._cache,
                )
            x, y = self._tensors(samples, who, number)
            _refuse_bytes(x)
        except SampleError as reason:
            raise DataError(f"{who}: {reason}") from reason
        except _UNREADABLE as reason:
            raise DataError(
                f"{who}: the samples cannot be read ({type(reason).__name__}: {_said(reason)}). Give (inputs, targets) "
                "as tensors with one row per sample, or a Dataset of (input, target) pairs of tensors."
            ) from reason
        if x.dim() < 2 or y.dim() < 1:
            raise DataError(
                f"{who}: inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}; "
                "both need one row per sample."
            )
        x = x.to(self._device, self._dtype) if x.is_floating_point() else x.to(self._device, torch.int64)
        if self._several:
            y = y.to(self._dtype).reshape(len(y), -1)
            check_labels(y, where=who)
        if not y.is_floating_point():
            if y.dim() != 1:
                raise DataError(
                    f"{who}: class numbers must have shape (samples,), not {tuple(y.shape)}. For several labels of 0 "
                    "and 1 say task='multilabel'."
                )
            return x, y.to(self._device, torch.int64)
        y = y.to(self._device, self._dtype)
        return x, y.flatten(1) if y.dim() > 1 else y[:, None]

    def _tensors(self, samples: Any, who: str, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of what is in memory or can only be gone through."""
        if isinstance(samples, Mapping) or _is_pair(samples):
            x, y = self._row(samples, batch=True)
            return torch.as_tensor(x), torch.as_tensor(y)
        with seeded_generators(self._seed(number)):
            if isinstance(samples, tuple | list):
                return _joined([self._row(row) for row in samples], who, torch.stack)
            # A loader gives batches here, anything else single samples.
            join = torch.cat if isinstance(samples, DataLoader) else torch.stack
            return _joined(list(self._kept(samples, who)), who, join)

    def _kept(self, samples: Iterable[Any], who: str) -> Iterator[tuple[Tensor, Tensor]]:
        named, batch = _features(samples), isinstance(samples, DataLoader)
        for count, row in enumerate(samples):
            x, y = (_tensor(value) for value in self._row(row, *named, batch=batch))
            self._left -= sum(value.numel() * value.element_size() for value in (x, y))
            if self._left < 0:
                raise DataError(
                    f"{who}: {type(samples).__name__} can only be gone through from its beginning, so its samples are "
                    f"kept in memory; after {count} of them there are {MOST_KEPT >> 20} MiB. Give a Dataset with "
                    "__getitem__ and __len__: it is read a batch at a time."
                )
            yield x, y

    def _numbered(self, samples: Any, who: str) -> Callable[[int], tuple[Tensor, Tensor]] | None:
        """How to get a sample by its number; None where samples have none, or are in memory already."""
        if isinstance(samples, Mapping) and samples and all(hasattr(part, "features") for part in samples.values()):
            raise DataError(f"{who}: a dict of the parts {', '.join(map(repr, samples))}: give one of them.")
        if not _has_numbers(samples.dataset if isinstance(samples, DataLoader) else samples):
            return None
        several = self._several
        if isinstance(samples, DataLoader):
            collate, rows = samples.collate_fn, samples.dataset
            single = partial(self._row, batch=True)
            return lambda index: _one(*map(_tensor, single(collate([rows[index]]))), several=several)
        if isinstance(samples, tuple | list | Mapping):
            return None
        named = _features(samples)
        return lambda index: _checked(*map(_tensor, self._row(samples[index], *named)), several=several)

    def _row(
        self, row: Any, pictures: Sequence[str] = (), classes: Sequence[str] = (), *, batch: bool = False
    ) -> tuple[Any, Any]:
        """A sample's input and target, or those of a `batch` of samples; several inputs in one row each."""
        x, y = _of_row(row, pictures, classes, self._takes)
        return (self._packed(x, batch=batch) if isinstance(x, Mapping) else x), y

    def _packed(self, inputs: Mapping[str, Any], *, batch: bool) -> Tensor:
        """Inputs that go by names as one row of numbers a sample."""
        parts = {name: _tensor(inputs[name]) for name in self._takes if name in inputs}
        if len(parts) < len(inputs):
            unknown = [name for name in inputs if name not in parts]
            raise SampleError(f"the model takes no input called {unknown[0]!r}; it takes {', '.join(self._takes)}.")
        kinds = {part.is_floating_point() for part in parts.values()}
        if len(kinds) > 1:
            raise SampleError(
                f"the inputs {', '.join(map(repr, parts))} are whole numbers and real ones together: give all of them "
                "as one kind, or let the model make what it can of the others."
            )
        fields = tuple((name, tuple(part.shape[1:] if batch else part.shape)) for name, part in parts.items())
        self.fields = self.fields or fields
        if fields != self.fields:
            raise SampleError(f"a sample has the inputs {_shown(fields)}, and the first one had {_shown(self.fields)}.")
        rows = [part.reshape(len(part), -1) if batch else part.reshape(-1) for part in parts.values()]
        whole = [row if row.is_floating_point() else row.to(torch.int64) for row in rows]
        return torch.cat(whole, dim=-1)


def _features(samples: Any) -> tuple[list[str], list[str]]:
    """The columns that hold pictures, and those that hold classes, where a Hugging Face dataset says so."""
    features = getattr(samples, "features", None)
    if not isinstance(features, Mapping):
        return [], []
    pictures = [name for name, kind in features.items() if getattr(kind, "dtype", None) == "PIL.Image.Image"]
    return pictures, [name for name, kind in features.items() if hasattr(kind, "num_classes")]


def _has_numbers(samples: Any) -> bool:
    return all(hasattr(samples, what) for what in ("__getitem__", "__len__")) and not isinstance(
        samples, IterableDataset
    )


def _one(x: Tensor, y: Tensor, *, several: bool) -> tuple[Tensor, Tensor]:
    """The only sample of a batch. One sample at a time, so that no sample gets into what another contributes."""
    if x.dim() < 1 or y.dim() < 1 or (len(x), len(y)) != (1, 1):
        raise SampleError(
            f"of one sample the loader's collate function makes inputs of shape {tuple(x.shape)} and targets of shape "
            f"{tuple(y.shape)}; both need one row per sample."
        )
    return _checked(x[0], y[0], several=several)


def _checked(x: Tensor, y: Tensor, *, several: bool) -> tuple[Tensor, Tensor]:
    if x.dim() < 1:
        raise SampleError("the input is a single number; it needs a shape, such as (1,).")
    _refuse_bytes(x[None])
    if several:
        y = y.to(torch.get_default_dtype())
        if bool(((y != 0) & (y != 1)).any()):
            raise SampleError("a label is neither 0 nor 1, as several labels must be.")
    if y.is_floating_point():
        return x, y.reshape(-1)
    if y.dim():
        raise SampleError(
            f"a class is one whole number, not {tuple(y.shape)} of them. For several labels of 0 and 1 say "
            "task='multilabel'."
        )
    return x, y


def _refuse_bytes(x: Tensor) -> None:
    if x.dtype is torch.uint8 and x.dim() >= 3:
        raise SampleError(
            "the inputs are bytes from 0 to 255 (uint8). Networks are trained on small numbers: convert them, for "
            "example with x.float() / 255, or give PIL pictures, which are scaled to [0, 1]."
        )


def _tensor(value: Any) -> Tensor:
    """A tensor of whatever stands for an input or a target; PIL pictures become (channels, height, width) in [0, 1]."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes):
        raise SampleError("a text where numbers are needed: encode it first (classes as 0, 1, …; words as token ids).")
    if _is_picture(value):
        if value.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
            raise SampleError(f"a picture of mode {value.mode}: convert it, to RGB for example, or give a tensor.")
        pixels = np.asarray(value.convert("L" if value.mode in ("1", "L", "LA") else "RGB"), np.float32)
        return torch.from_numpy(pixels[..., None] if pixels.ndim == 2 else pixels).permute(2, 0, 1).div(255.0)
    # What a loader makes of lists: one tensor per place in them.
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return torch.stack(value, dim=1)
    return torch.as_tensor(value)


def _is_picture(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # whoever gives a picture has imported it
    return pillow is not None and isinstance(value, pillow.Image)


def _shown(fields: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} of shape {shape}" for name, shape in fields)


def _is_pair(samples: Any) -> bool:
    if not isinstance(samples, tuple | list) or len(samples) != 2 or isinstance(samples[0], tuple):
        return False
    return not isinstance(samples[0], Mapping) or not isinstance(samples[1], Mapping)


def _joined(
    pairs: Sequence[tuple[Any, Any]], who: str, join: Callable[[list[Tensor]], Tensor]
) -> tuple[Tensor, Tensor]:
    if not pairs:
        raise DataError(f"{who} has no samples. Give it data or leave it out.")
    x, y = (join([_tensor(value) for value in column]) for column in zip(*pairs, strict=True))
    return x, y


def _of_row(
    row: Any, pictures: Sequence[str] = (), classes: Sequence[str] = (), takes: Sequence[str] = ()
) -> tuple[Any, Any]:
    """A sample's input and target; in a dict they go by the names that are usual.

    Otherwise the target is the only one of `classes`, and the input the only picture, or all that is left. Where the
    model `takes` several of a sample's entries by their names, these are the input.
    """
    if not isinstance(row, Mapping):
        if isinstance(row, tuple | list) and len(row) < 2:
            raise SampleError(f"a sample has {len(row)} parts; (input, target) is needed.")
        x, y, *_ = row
        return x, y
    targets = [name for name in _TARGETS if name in row] or [name for name in classes if name in row]
    rest = [name for name in row if name not in targets]
    by_name = {name: row[name] for name in takes if name in rest}
    if len(targets) == 1 and len(by_name) > 1:
        return by_name, row[targets[0]]
    shown = [name for name in rest if name in pictures or _is_picture(row[name])]
    inputs = [name for name in _INPUTS if name in rest] or (shown if len(shown) == 1 else rest)
    if len(targets) != 1 or len(inputs) != 1:
        raise SampleError(
            f"of a sample with {', '.join(map(repr, row))} it is not clear what the input and what the target is. Name "
            "them x and y, or give (input, target) pairs."
        )
    return row[inputs[0]], row[targets[0]]


def _said(reason: Exception) -> str:
    return " ".join(str(reason).split())[:200]


def columns(party: Party) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a party, lazy where it is."""
    return (party.inputs, party.targets) if isinstance(party, LazySamples) else party


def task_of(parties: Sequence[Party], *, asked: str | None = None) -> Task:
    """Classification where targets are whole numbers, regression where they are floating-point numbers.

    Several labels must be `asked` for; another task that is asked for must be that of the targets.
    """
    kinds = {columns(party)[1].is_floating_point() for party in parties}
    if len(kinds) > 1:
        raise DataError("Some clients have integer targets (classes) and some floating-point ones (regression).")
    if asked == "multilabel":
        return "multilabel"
    task: Task = "regression" if kinds == {True} else "classification"
    if asked not in (None, task):
        raise DataError(f"task={asked!r}, but the targets are those of a {task}: integers are classes.")
    return task


def tried(parties: Sequence[Party], model: nn.Module) -> object:
    """What the model gives for two of the clients' inputs, which must be of one shape."""
    shapes = {tuple(columns(party)[0].shape[1:]) for party in parties}
    if len(shapes) > 1:
        raise DataError(f"Clients' inputs have different shapes: {', '.join(map(str, sorted(shapes)))}.")
    x = columns(parties[0])[0][:1]
    with torch.no_grad():
        twin = copy.deepcopy(model).eval().to(x.device, x.dtype if x.is_floating_point() else torch.float32)
        try:
            return twin(torch.cat([x, x]))
        except Exception as reason:
            raise ConfigError(
                f"The model does not take the clients' inputs of shape {tuple(x.shape[1:])}: "
                f"{type(reason).__name__}: {reason}"
            ) from reason


def outputs_of(parties: Sequence[Party], task: Task, output: object) -> int:
    """How many outputs the model gives for a sample, after a look whether the targets go with them."""
    if not isinstance(output, Tensor) or output.dim() != 2:
        given = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(f"The model gives {given} per sample; it must give one vector, as a last nn.Linear does.")
    outputs = int(output.shape[1])
    if task != "classification":
        widths = {int(columns(party)[1].shape[1]) for party in parties}
        if widths != {outputs}:
            many = " or ".join(map(str, sorted(widths)))
            meant = (
                "" if task == "multilabel" else " Floating-point targets are a regression: of classes, give integers."
            )
            raise DataError(f"The model gives {outputs} outputs, the targets have {many} columns.{meant}")
        return outputs
    for client, party in enumerate(parties):
        if isinstance(party, LazySamples):
            party.expect_classes(outputs)  # as they are read
            continue
        labels = party[1]
        outside = labels[(labels < 0) | (labels >= outputs)]
        if len(outside):
            raise DataError(
                f"Client {client} has class {int(outside[0])}, but the model has {outputs} outputs "
                f"(classes 0 to {outputs - 1})."
            )
    return outputs
