"""Predictions from a model file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedveil import data
from fedveil.config import RunConfig
from fedveil.data.npz import read_array
from fedveil.errors import CheckpointError, ConfigError, DataError
from fedveil.runs.evaluate import predict as outputs_of
from fedveil.runs.files import write_atomically
from fedveil.runs.model_file import LoadedModel, load_model

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's outputs, and how good they are where targets are known."""

    kind: str
    task: str
    outputs: Tensor
    labels: tuple[str, ...]
    accuracy: float | None = None
    mse: float | None = None
    split_known: bool = True


def predict_dataset(
    path: Path, *, dataset: str | None, part: str, model: str | None = None, say: Say = lambda text: None
) -> Predictions:
    """Predict a data set's train or test part, split as the run split it; `model` is the caller's own code."""
    if part not in ("test", "train"):
        raise ConfigError(f"part must be test or train (got {part!r}).")
    loaded = load_model(path, model=model, say=say)
    config = loaded.config
    RunConfig.from_mapping({name: value for name, value in config.items() if value is not None}, where=str(path))
    if not isinstance(config.get("dataset"), str):
        raise CheckpointError(f"{path} does not say what data it was trained on: give inputs with --inputs FILE.npy.")
    if dataset is not None and not _same_source(dataset, config["dataset"]):
        raise ConfigError(
            f"{dataset} is not the data this model was trained on ({config['dataset']}). Standardisation and "
            "categories come from a run's own training data and are not stored with the model, so other data would be "
            "read on another scale. Give inputs as the model takes them with --inputs FILE.npy."
        )
    split = data.load(
        config["dataset"],
        target=config.get("target"),
        task=config.get("task"),
        test_fraction=config.get("test_fraction", 0.2),
        seed=config.get("seed") or 0,
        text=config.get("text"),
        group=config.get("group"),
    )
    chosen = split.test if part == "test" else split.train
    outputs = _outputs(loaded, chosen.x)
    if chosen.task == "classification":
        accuracy = float((outputs.argmax(1) == chosen.y).double().mean())
        return Predictions(
            loaded.kind, chosen.task, outputs, loaded.facts.labels, accuracy=accuracy, split_known="seed" in config
        )
    mse = float((outputs - chosen.y).double().square().mean())
    return Predictions(loaded.kind, chosen.task, outputs, loaded.facts.labels, mse=mse, split_known="seed" in config)


def _same_source(given: str, trained: str) -> bool:
    return given == trained or Path(given).resolve() == Path(trained).resolve()


def predict_file(path: Path, inputs: Path, *, model: str | None = None, say: Say = lambda text: None) -> Predictions:
    """Predict inputs from a .npy file, taken as they are; `model` is the caller's own code."""
    loaded = load_model(path, model=model, say=say)
    try:
        x = torch.from_numpy(read_array(inputs))
    except TypeError as reason:
        raise DataError(f"Cannot read {inputs} as a .npy array of numbers: {reason}") from reason
    return Predictions(loaded.kind, loaded.facts.task, _outputs(loaded, x), loaded.facts.labels)


def _outputs(loaded: LoadedModel, x: Tensor) -> Tensor:
    if tuple(x.shape[1:]) != loaded.facts.input_shape:
        raise DataError(f"Inputs have shape {tuple(x.shape[1:])}, the model takes {loaded.facts.input_shape}.")
    dtype = next(loaded.module.parameters()).dtype
    return outputs_of(loaded.module, x if loaded.facts.vocabulary is not None else x.to(dtype))


def write_predictions(path: Path, predictions: Predictions) -> None:
    """One line a sample: its number, the predicted class or value, and the outputs."""
    text = io.StringIO()
    writer = csv.writer(text)
    count = predictions.outputs.shape[1]
    classes = predictions.task == "classification"
    writer.writerow(["sample", *(["class"] if classes else []), *(f"output_{i}" for i in range(count))])
    for number, row in enumerate(predictions.outputs.tolist()):
        best = max(range(count), key=row.__getitem__)
        named = [predictions.labels[best] if predictions.labels else str(best)] if classes else []
        writer.writerow([number, *named, *(repr(value) for value in row)])
    write_atomically(path, text.getvalue())
