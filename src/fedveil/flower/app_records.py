"""A Flower app's records as numbers in a row, and back. What arrives is data: held to its form before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import Code, ProtocolError

Reals = NDArray[np.float64]
_NUMBERS = "fiub"
_MOST_NAMES = 64


class FormError(ProtocolError):
    """An app's records have another form than they should."""

    code = Code.FORM


@dataclass(frozen=True, eq=False)
class AppModel:
    """The arrays of a model in one row, in float64; `record` is what they were read from."""

    record: ArrayRecord
    row: Reals

    @staticmethod
    def read(record: ArrayRecord) -> AppModel:
        """An ArrayRecord's numbers; arrays of anything else are refused, by name."""
        parts = []
        for name, array in record.items():
            try:
                numbers = array.numpy()
            except Exception as reason:
                raise FormError(f"the array {name!r} cannot be read") from reason
            if numbers.dtype.kind not in _NUMBERS:
                raise FormError(f"the array {name!r} holds {numbers.dtype}, and numbers are averaged")
            parts.append(numbers.astype(np.float64).reshape(-1))
        return AppModel(record, np.concatenate(parts) if parts else np.zeros(0))

    @property
    def form(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in order."""
        return [(name, tuple(array.shape)) for name, array in self.record.items()]

    def moved(self, by: Reals) -> ArrayRecord:
        """The arrays after an update; floating ones keep their type, others become float64, as in Flower's own mean."""
        arrays, place, row = {}, 0, self.row + by
        for name, old in self.record.items():
            count = math.prod(old.shape)
            numbers = row[place : place + count].reshape(tuple(old.shape))
            kept = np.dtype(old.dtype)
            arrays[name] = Array(np.asarray(numbers.astype(kept) if kept.kind == "f" else numbers))
            place += count
        return ArrayRecord(arrays)


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one ArrayRecord of a message."""
    if len(content.array_records) != 1:
        raise FormError(f"a message of the app holds {len(content.array_records)} ArrayRecords, and one is averaged")
    return next(iter(content.array_records.values()))


def update_between(received: AppModel, reply: RecordDict) -> Tensor:
    """trained − received, in a row; an app that replies in another form is refused."""
    trained = AppModel.read(only_arrays(reply))
    if trained.form != received.form:
        raise FormError("the app replies with other arrays, by name, shape or order, than it was sent")
    return torch.from_numpy(trained.row - received.row)


def only_metrics(content: RecordDict) -> dict[str, float]:
    """The figures of an app's reply: single numbers, since a list may hold a whole update."""
    if len(content.metric_records) != 1:
        raise FormError(f"the app replies with {len(content.metric_records)} MetricRecords, and one is expected")
    figures: dict[str, float] = {}
    for name, value in next(iter(content.metric_records.values())).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormError(f"the metric {name!r} is no single number: a list may hold a whole update")
        figures[name] = value
    if len(figures) > _MOST_NAMES:
        raise FormError(f"the app reports {len(figures)} metrics, and at most {_MOST_NAMES} leave")
    return figures


def figures_alone(message: Message, reply: Message) -> Message:
    """An app's reply to a message that is not about training: its figures, and nothing that could hold an update."""
    if reply.content.array_records or reply.content.config_records:
        kind = message.metadata.message_type.partition(".")[0]
        raise FormError(f"the app's reply to a {kind} message holds more than metrics, which alone leave")
    figures = only_metrics(reply.content)
    (name,) = reply.content.metric_records
    return Message(RecordDict({name: metric_record(figures)}), reply_to=message)


def weight_in(figures: dict[str, float], key: str, *, most: float) -> float:
    """How many examples an app trained on: what its update weighs."""
    if key not in figures:
        raise FormError(f"the app's metrics name no {key!r}, by which its update is weighted")
    weight = float(figures[key])
    if not 0 < weight <= most:
        raise FormError(f"{key!r} must be positive and at most {most:g}, not {weight:g}")
    return weight


def metric_record(figures: Mapping[str, float]) -> MetricRecord:
    """Figures as Flower carries them."""
    return MetricRecord({name: value for name, value in figures.items()})  # noqa: C416 (of Flower's own type)


def metrics_of(record: MetricRecord | None) -> dict[str, float]:
    """What came of an app's figures with an answer; anything but single numbers is left out."""
    if record is None:
        return {}
    return {
        name: value
        for name, value in list(record.items())[:_MOST_NAMES]
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
