"""Model files: safetensors that say how to build their own architecture."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedveil import data
from fedveil.config import RunConfig
from fedveil.data.arrays import read_array
from fedveil.data.dataset import Task
from fedveil.downlink import Architecture, Weights, assemble, draw
from fedveil.downlink.architecture import weights_of, with_vector_norms
from fedveil.downlink.export import ExportShape, export, exported_architecture
from fedveil.downlink.scales import Coverage, coverage
from fedveil.errors import CheckpointError, ConfigError, DataError
from fedveil.own_code import vouched
from fedveil.plain import made, named, parsed
from fedveil.runs.callbacks import Say
from fedveil.runs.evaluation import predict as outputs_of
from fedveil.runs.folder import digest_of, write_atomically
from fedveil.runs.job import ModelFacts
from fedveil.secrets import OsSecrets

_FORMAT = "fedveil-model-1"
_KINDS = ("server", "client", "export")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model from a file, ready to predict."""

    module: nn.Module
    facts: ModelFacts
    kind: str
    config: dict[str, Any]


def save_model(
    path: Path,
    module: nn.Module,
    facts: ModelFacts,
    *,
    kind: str,
    config: Mapping[str, Any],
    shape: ExportShape | None,
) -> None:
    """Write a model: a server's (kind "server"), one that clients hold ("client"), or an "export" for them."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in _tensors(module).items()}
    metadata = {
        "format": _FORMAT,
        "kind": kind,
        "facts": json.dumps(dataclasses.asdict(facts)),
        "config": json.dumps(dict(config)),
        "shape": json.dumps(dataclasses.asdict(shape)) if shape is not None else "",
    }
    write_atomically(path, save(tensors, {**metadata, "digest": _digest(tensors, metadata)}))


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    said = {name: text for name, text in metadata.items() if name != "digest"}
    return digest_of(tensors, json.dumps(said, sort_keys=True))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def load_weights(path: Path, architecture: Architecture, like: Weights) -> Weights:
    """A model file's numbers, for a network that is already there."""
    _, tensors = _read(path)
    module = assemble(architecture, like)
    _fill(module, tensors, where=f"{path} does not fit the model")
    return weights_of(module, architecture)


def load_model(path: Path, *, model: str | None = None, say: Callable[[str], None] = lambda text: None) -> LoadedModel:
    """Build the architecture a file describes and fill it; `model` is built instead of what the file names.

    A file that names code is refused: give that name as `model` to have it run.
    """
    metadata, tensors = _read(path)
    facts = made(ModelFacts, parsed(metadata["facts"], where=str(path)), where=str(path))
    config = named(metadata["config"], where=str(path))
    facts = dataclasses.replace(facts, name=vouched(facts.name, model, where=str(path), say=say))
    if facts.name is None:
        raise ConfigError(
            f"{path} holds a model that was built in Python: name what builds it, --model file.py:factory, or build it "
            "there too and load the tensors from the file."
        )
    if facts.task not in get_args(Task):
        raise CheckpointError(f"{path} is damaged: it names no task.")
    unlike = f"{path} does not fit the architecture {str(facts.name)!r} it names"
    facts.check_size(most=sum(tensor.numel() for tensor in tensors.values()), unlike=unlike)
    bare = facts.build(seed=0)
    if metadata["shape"]:
        shape = made(ExportShape, parsed(metadata["shape"], where=str(path)), where=str(path))
        module = exported_architecture(bare, shape)
    else:
        module = with_vector_norms(bare)
    dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float32)
    module = module.to(dtype)
    _fill(module, tensors, where=unlike)
    return LoadedModel(module.eval(), facts, metadata["kind"], config)


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """What a model file says of itself, and its tensors, whole."""
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"There is no model at {path}: give a run folder, its model.safetensors, or an export.")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, AttributeError) as reason:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {reason}") from reason
    if metadata.get("format") != _FORMAT:
        raise ConfigError(f"{path} is a safetensors file, but not a FedVeil model.")
    if metadata.get("digest") != _digest(tensors, metadata):
        raise ConfigError(f"{path} is damaged: its checksum does not match. Take another copy of it.")
    missing = [name for name in ("kind", "facts", "config", "shape") if name not in metadata]
    if missing or metadata["kind"] not in _KINDS:
        raise CheckpointError(f"{path} is damaged: it does not say its {(missing or ['kind'])[0]}.")
    return metadata, tensors


def _fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    own = _tensors(module)
    odd = sorted(
        {*own, *tensors}
        - {name for name in own if name in tensors and (own[name].shape, own[name].dtype) == _form(tensors[name])}
    )
    if odd:
        raise ConfigError(f"{where} (differs in: {', '.join(odd[:4])}).")
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(tensors[name])


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def export_run(
    run: Path,
    out: Path,
    *,
    spread: float = 4.0,
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Coverage:
    """Export the model of a run folder to a file; the scales are drawn from the operating system.

    `model` is the caller's own code that builds it, where the run had such a model.

    Returns what is hidden in the file: everything but the last bias, which the outputs determine.
    """
    loaded = load_model(run, model=model, say=say)
    if loaded.kind == "export":
        raise ConfigError(f"{run} is an export already.")
    if out.exists():
        raise CheckpointError(f"{out} exists already: give another --out.")
    facts = loaded.facts
    tokens = facts.vocabulary is not None
    example = torch.zeros(2, *facts.input_shape, dtype=torch.int64 if tokens else torch.float32)
    architecture, _ = draw(facts.build(seed=0).train(), example, traced=True)
    assert architecture.table is not None
    weights = weights_of(loaded.module, architecture)
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"), spread=spread)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(out, module, facts, kind="export", config=_public(loaded.config), shape=shape)
    return coverage(architecture.table, head_noise=False)


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a client may know of a run: where its data came from, and the seed of a simulation only.

    In a simulation the seed decides the model's first values and the secrets; otherwise it deals data and batches.
    """
    kept = {name: config.get(name) for name in ("dataset", "target", "task", "text", "group", "test_fraction")}
    if RunConfig.from_mapping(config).simulated_secrets:
        kept["seed"] = config.get("seed")
    return kept


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
    trained = config["dataset"]
    if dataset is not None and dataset != trained and Path(dataset).resolve() != Path(trained).resolve():
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
    outputs, accuracy, mse = _outputs(loaded, chosen.x), None, None
    if chosen.task == "classification":
        accuracy = float((outputs.argmax(1) == chosen.y).double().mean())
    else:
        mse = float((outputs - chosen.y).double().square().mean())
    return Predictions(loaded.kind, chosen.task, outputs, loaded.facts.labels, accuracy, mse, "seed" in config)


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
