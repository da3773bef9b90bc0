"""Predictions: a model from a file, for raw samples, prepared arrays, or the data of its own run."""

from __future__ import annotations

import copy
import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.config import RunConfig, as_before
from fedveil.data.arrays import read_array
from fedveil.data.new_samples import Expected, NewSamples, read_samples, refuse_raw_pixels
from fedveil.data.preparation import Features, Pixels
from fedveil.data.sources import EMBEDDED
from fedveil.downlink.export import stock
from fedveil.errors import CheckpointError, ConfigError, DataError, missing_extra, spelled
from fedveil.own_code import names_code
from fedveil.plain import IN_PYTHON
from fedveil.runs.callbacks import Say
from fedveil.runs.evaluation import CHUNK
from fedveil.runs.evaluation import predict as outputs_of
from fedveil.runs.folder import write_atomically
from fedveil.runs.job import loaded as loaded_data
from fedveil.runs.judgement import JudgedSamples, Judgement, judge
from fedveil.runs.model_file import Builder, LoadedModel, load_model

_MOST_AT_ONCE = 1 << 26
_LARGE = 1 << 22
_ALIVE = 5  # tensors of a layer's size that are there at once: what it takes, gives, and a convolution's own room
_BEYOND = 2.0
_OWN = ("sample", "class", "labels")
_HOLDS = 0.5


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's answers, one row a sample, and how good they are where targets are known.

    `probabilities` have a column a class, or a label; they are None for regression, and where the file does not say
    with which loss the model was trained. `beside` are columns of the samples that are written along, and `notes` what
    a person should know.
    """

    kind: str
    task: str
    outputs: Tensor
    labels: tuple[str, ...]
    probabilities: Tensor | None = None
    accuracy: float | None = None
    mse: float | None = None
    judged: Judgement | None = None
    split_known: bool = True
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def classes(self) -> list[str]:
        """The predicted class of every sample, by name."""
        if self.task != "classification":
            raise ConfigError(f"A {self.task} model predicts no class a sample: see outputs and probabilities.")
        return [self.labels[best] if self.labels else str(best) for best in self.outputs.argmax(1).tolist()]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """What is written: the sample's number, what stands beside, its class or labels, probabilities and outputs."""
        columns: dict[str, list[Any]] = {"sample": list(range(len(self)))}
        columns |= {f"{name} (given)" if name in _OWN else name: list(cells) for name, cells in self.beside.items()}
        count = self.outputs.shape[1]
        names = self.labels or tuple(map(str, range(count)))
        if self.task == "classification":
            columns["class"] = self.classes
        if self.task == "multilabel" and self.probabilities is not None:
            held = (self.probabilities > _HOLDS).tolist()
            columns["labels"] = [";".join(compress(names, row)) for row in held]
        if self.probabilities is not None:
            columns |= {f"p_{name}": self.probabilities[:, at].tolist() for at, name in enumerate(names)}
        return columns | {f"output_{at}": self.outputs[:, at].tolist() for at in range(count)}


class Model(nn.Module):
    """A trained model that takes raw samples: `predict` prepares them as the run prepared its training samples.

    Called as a module it takes what the network takes, prepared already, and gives the network's outputs.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.network = loaded.module
        self.loaded = loaded

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs for prepared samples."""
        outputs: Tensor = self.network(x)
        return outputs

    def predict(self, raw: object, *, keep: Sequence[str] = ()) -> Predictions:
        """Class names and probabilities (or values) for raw samples.

        Args:
            raw: A path to a table, pictures or arrays; rows as dicts, a dict of columns or a DataFrame; texts; an array
                or tensor; Pillow pictures. One sample or many.
            keep: Columns of a table that the model does not take, to stand beside the predictions.

        Raises:
            DataError: Something does not fit the model; the message names it.
        """
        return predict_samples(self.loaded, raw, keep=keep)

    def stock(self) -> nn.Module:
        """The network as its own class, with torch's own layers: its `state_dict` has that class's keys.

        Raises:
            ConfigError: The ε of a layer other than a batch normalisation was drawn in secret.
        """
        if self.loaded.kind == "export":
            raise ConfigError("An export for clients has other layers than its class: load the run.")
        return stock(self.loaded.bare, self.network)[0]


def predict_samples(loaded: LoadedModel, source: object, *, keep: Sequence[str] = ()) -> Predictions:
    """Predict raw samples, prepared as the model's file tells."""
    facts = loaded.facts
    if facts.preparation is None:
        raise ConfigError(
            "This model's file does not say how raw samples become inputs: it was trained on other machines (Flower), "
            "where each client prepares its own data and tells nobody how, or written before files did. Prepare new "
            "samples as the clients did, and give them as the model takes them: --inputs FILE.npy (in Python: call the "
            "model)."
        )
    refuse_too_large(loaded.module, facts.input_shape)
    expected = Expected(facts.preparation, facts.task, facts.outputs, facts.vocabulary)  # type: ignore[arg-type]
    samples = read_samples(source, expected, keep=keep)
    outputs = torch.cat([_outputs(loaded, piece) for piece in _pieces(samples, math.prod(facts.input_shape))])
    predictions = _where_known(loaded, outputs, samples.y)
    return replace(predictions, beside=samples.beside, notes=samples.notes)


def refuse_too_large(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse samples of a size at which a single one would not fit into memory: a file can name any.

    What each layer gives is found without computing any number; a network that cannot be asked so is taken.

    Raises:
        DataError: One sample takes more memory than is free.
    """
    size = math.prod(shape)
    if size < _LARGE:
        return
    from fedveil.runs.preflight import free_bytes  # which needs all that training does

    made: list[int] = []

    def note(layer: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            made.append(output.numel() * output.element_size())

    twin = copy.deepcopy(module).to("meta")
    for layer in twin.modules():
        layer.register_forward_hook(note)
    dtype = next(module.parameters()).dtype
    try:
        with torch.no_grad():
            twin(torch.empty(1, *shape, dtype=dtype, device="meta"))
    except Exception:  # a layer that looks at numbers
        return
    needed, free = _ALIVE * (max(made, default=0) + size * dtype.itemsize), free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        raise DataError(
            f"The model takes samples of shape {shape}, and one of them takes about {needed / 1e9:.1f} GB on its way "
            f"through; {free / 1e9:.1f} GB are free. Use a machine with more memory, or do not trust the file."
        )


def _pieces(samples: NewSamples, size: int) -> Iterator[Tensor]:
    # As many as an evaluation takes at once, so that a file gives the same bits here as there; fewer of large ones.
    step = min(CHUNK, max(_MOST_AT_ONCE // size, 1))
    return (samples.prepared(start, start + step) for start in range(0, samples.count, step))


@dataclass(frozen=True, eq=False)
class _Known:
    """Targets of new samples, as `judge` takes them."""

    task: str
    y: Tensor
    labels: tuple[str, ...]
    groups: Tensor | None = None
    sites: Tensor | None = None
    site_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()


def _answered(loaded: LoadedModel, outputs: Tensor, truth: JudgedSamples | None) -> Predictions:
    """The answers, and how good they are by targets that are all known."""
    facts, judged = loaded.facts, None
    probabilities = None if facts.link is None else facts.link.probabilities(outputs)
    if truth is not None and len(truth.y) and (facts.link is not None or facts.task == "regression"):
        judged = judge(outputs, truth, **({} if facts.link is None else facts.link.terms))
    figures = {} if judged is None else {name: figure.value for name, figure in judged.figures.items()}
    accuracy, mse = figures.get("accuracy"), figures.get("mse")
    if judged is None and truth is not None and facts.task == "classification" and len(truth.y):
        accuracy = float((outputs.argmax(1) == truth.y).double().mean())  # which needs no loss
    return Predictions(loaded.kind, facts.task, outputs, facts.labels, probabilities, accuracy, mse, judged)


def _where_known(loaded: LoadedModel, outputs: Tensor, y: Tensor | None) -> Predictions:
    """The answers, judged by those samples whose targets are there."""
    if y is None:
        return _answered(loaded, outputs, None)
    known = y >= 0 if loaded.facts.task == "classification" else ~y.isnan().any(1)
    truth = _Known(loaded.facts.task, y[known], loaded.facts.labels)
    judged = _answered(loaded, outputs[known], truth)
    return replace(_answered(loaded, outputs, None), accuracy=judged.accuracy, mse=judged.mse, judged=judged.judged)


def predict_dataset(
    path: Path,
    *,
    dataset: str | None,
    part: str = "test",
    keep: Sequence[str] = (),
    model: Builder | None = None,
    say: Say = lambda text: None,
) -> Predictions:
    """Predict new data; or, without a data set, the train or test part of the run's own, split as the run split it.

    `model` is the caller's own code or network.
    """
    if part not in ("test", "train", "validation"):
        raise ConfigError(f"part must be test, train or validation (got {part!r}).")
    loaded = load_model(path, model=model, say=say)
    config = loaded.config
    settings = RunConfig.from_mapping(
        as_before({name: value for name, value in config.items() if value is not None}), where=str(path)
    )
    trained = config.get("dataset")
    own = isinstance(trained, str) and dataset is not None and _same(dataset, trained)
    code = dataset is not None and (dataset in EMBEDDED or names_code(dataset))
    if dataset is not None and not (own and (code or loaded.facts.preparation is None or _has_parts(Path(dataset)))):
        if code:
            raise ConfigError(
                f"{dataset} is not the data this model was trained on ({trained}), and no file of new samples: give a "
                "table, a folder of pictures or an array's file."
            )
        if own:
            say(
                f"{dataset} is what this model was trained on: every sample is predicted, also those it was trained on."
            )
        return predict_samples(loaded, dataset, keep=keep)
    if not isinstance(trained, str) or trained == IN_PYTHON:
        raise CheckpointError(
            f"{path} does not say what data it was trained on: give new data with {spelled('dataset')}."
        )
    if keep:
        raise ConfigError(f"keep takes columns of new data along: name their file with {spelled('dataset')}.")
    split = loaded_data(settings.with_changes(seed=settings.seed or 0))
    if part not in split.parts:
        raise ConfigError(f"The data of this model have no {part} part; there are: {', '.join(split.parts)}.")
    chosen = split.parts[part]
    predictions = _answered(loaded, _outputs(loaded, chosen.x), chosen)
    return replace(predictions, split_known="seed" in config)


def _has_parts(path: Path) -> bool:
    """Whether a folder says itself what trains and what tests."""
    return path.is_dir() and any(entry.name.partition(".")[0] == "train" for entry in path.iterdir())


def _same(given: str, trained: str) -> bool:
    return given == trained or Path(given).resolve() == Path(trained).resolve()


def predict_file(
    path: Path, inputs: Path, *, model: Builder | None = None, say: Say = lambda text: None
) -> Predictions:
    """Predict inputs from a .npy file as the model takes them: prepared already. Bytes are prepared, or refused."""
    loaded = load_model(path, model=model, say=say)
    x = read_array(inputs)
    prepared = None if loaded.facts.preparation is None else loaded.facts.preparation.inputs
    if x.dtype == np.uint8 and loaded.facts.vocabulary is None:
        if prepared is None:
            raise DataError(
                f"{inputs}: bytes, and the model's file does not say how they become inputs. Give floating-point "
                "numbers, prepared as the training samples were."
            )
        say(f"{inputs} holds bytes: they are prepared as the training samples were.")
        return predict_samples(loaded, inputs)
    if prepared is None:
        say("The model's file does not say how raw samples become inputs: the numbers are taken as they are.")
    try:
        numbers = torch.from_numpy(x)
    except TypeError as reason:
        raise DataError(f"Cannot read {inputs} as a .npy array of numbers: {reason}") from reason
    if isinstance(prepared, Pixels) and numbers.numel():
        least, most = prepared.bounds
        low, high = float(numbers.min()), float(numbers.max())
        if low < _BEYOND * least - 1 or high > _BEYOND * most + 1:
            raise DataError(
                f"{inputs}: numbers from {low:g} to {high:g}, and pictures prepared for this model lie between "
                f"{least:.2f} and {most:.2f}. Give raw pixels as bytes (uint8): they are prepared as in training."
            )
    if isinstance(prepared, Features):
        refuse_raw_pixels(x, prepared, where=str(inputs))
    return _answered(loaded, _outputs(loaded, numbers), None)


def _outputs(loaded: LoadedModel, x: Tensor) -> Tensor:
    facts = loaded.facts
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(f"Inputs have shape {tuple(x.shape[1:])}, the model takes {facts.input_shape}.")
    inputs = None if facts.preparation is None else facts.preparation.inputs
    ids = facts.vocabulary is not None or (isinstance(inputs, Features) and inputs.whole)
    return outputs_of(loaded.module, x if ids else x.to(next(loaded.module.parameters()).dtype))


_TABLES = (".csv", ".parquet")


def refuse_other_tables(path: Path) -> None:
    """Raise a ConfigError for a name whose ending promises a kind of file that predictions are not written as."""
    if path.suffix.lower() not in ("", *_TABLES):
        raise ConfigError(
            f"{path}: predictions are written as {' or '.join(_TABLES)}, and not as {path.suffix}. Give such a name."
        )


def write_predictions(path: Path, predictions: Predictions) -> None:
    """One line a sample, as CSV, or as parquet where the name ends so."""
    refuse_other_tables(path)
    columns = predictions.columns
    if path.suffix.lower() == ".parquet":
        write_atomically(path, _as_parquet(columns))
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([repr(value) if isinstance(value, float) else value for value in row])
    write_atomically(path, text.getvalue())


def _as_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as reason:
        raise missing_extra("pyarrow", "parquet", "Writing parquet") from reason
    content = io.BytesIO()
    parquet.write_table(pyarrow.table(dict(columns)), content)
    return content.getvalue()
