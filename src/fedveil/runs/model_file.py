"""Model files: safetensors that say how to build their own architecture."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from fedveil.config import RunConfig
from fedveil.data.dataset import Task
from fedveil.data.preparation import Preparation, Words
from fedveil.downlink import Architecture, Weights, assemble, draw
from fedveil.downlink.architecture import weights_of, with_vector_norms
from fedveil.downlink.export import ExportShape, export, exported_architecture, stock
from fedveil.downlink.scales import Coverage, coverage
from fedveil.errors import CheckpointError, ConfigError, TraceError, missing_extra, spelled
from fedveil.models.building import Adapted, call
from fedveil.own_code import vouched
from fedveil.plain import made, named, parsed
from fedveil.runs.folder import digest_of, write_atomically
from fedveil.runs.job import Link, ModelFacts
from fedveil.runs.pretrained import nothing_hidden
from fedveil.secrets import OsSecrets

_FORMAT = "fedveil-model-1"
_KINDS = ("server", "client", "export")
Builder = str | nn.Module | Callable[..., nn.Module]
"""What builds a model: a name, one's own module, or a function that makes it."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model from a file, ready to predict; `bare` is its architecture as it was built, without these values."""

    module: nn.Module
    bare: nn.Module
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


def load_model(
    path: Path, *, model: Builder | None = None, say: Callable[[str], None] = lambda text: None
) -> LoadedModel:
    """Build the architecture a file describes and fill it; `model` is taken or built instead of what the file names.

    A file that names code is refused: give that name as `model` to have it run.
    """
    metadata, tensors = _read(path)
    facts = made(ModelFacts, parsed(metadata["facts"], where=str(path)), where=str(path))
    config = named(metadata["config"], where=str(path))
    if facts.task not in get_args(Task):
        raise CheckpointError(f"{path} is damaged: it names no task.")
    _check_preparation(facts, where=str(path))
    unlike = f"{path} does not fit the architecture {str(facts.name)!r} it names"
    if model is None or isinstance(model, str):
        facts = dataclasses.replace(facts, name=vouched(facts.name, model, where=str(path), say=say))
        if facts.name is None:
            raise ConfigError(
                f"{path} holds a model that was built in Python: name what builds it, "
                f"{spelled('model', 'file.py:factory')}, or give it there too: fedveil.load(file, model=net)."
            )
        facts.check_size(most=sum(tensor.numel() for tensor in tensors.values()), unlike=unlike)
        bare = facts.build(seed=0)
    else:
        unlike = f"{path} does not fit the model that was given"
        bare = copy.deepcopy(model) if isinstance(model, nn.Module) else _called(model, facts)
        if not isinstance(bare, Adapted) and all(name.startswith("network.") for name in tensors):
            bare = Adapted(bare, facts.fields)
    if metadata["shape"]:
        shape = made(ExportShape, parsed(metadata["shape"], where=str(path)), where=str(path))
        module = exported_architecture(bare, shape)
    else:
        module = with_vector_norms(bare)
    dtype = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float32)
    module = module.to(dtype)
    _fill(module, tensors, where=unlike)
    return LoadedModel(module.eval(), bare.to(dtype), facts, metadata["kind"], config)


def _called(factory: Callable[..., nn.Module], facts: ModelFacts) -> nn.Module:
    given = {"input_shape": facts.input_shape, "outputs": facts.outputs, "vocabulary": facts.vocabulary}
    return call(factory, getattr(factory, "__qualname__", repr(factory)), data=given, options=facts.options)


def _check_preparation(facts: ModelFacts, *, where: str) -> None:
    """Refuse what would make of new samples something else than the model takes, or of its outputs other names."""
    prepared = facts.preparation
    if facts.outputs < 1 or (facts.task != "regression" and len(facts.labels) not in (0, facts.outputs)):
        raise CheckpointError(
            f"{where} is damaged: it names {len(facts.labels)} classes and has {facts.outputs} outputs."
        )
    if prepared is None:
        return
    vocabulary = prepared.inputs.ids if isinstance(prepared.inputs, Words) else facts.vocabulary
    said = (prepared.inputs.shape, prepared.classes, vocabulary)
    if said != (facts.input_shape, facts.labels, facts.vocabulary):
        raise CheckpointError(f"{where} is damaged: its preparation is for another model than it names.")


def _no_model(path: Path, reason: Exception) -> str:
    if is_zipfile(path):
        return (
            f"{path} is a zip file, as torch.save writes them: weights, without what FedVeil needs to predict with "
            "them. Load it into your own network with torch.load, or begin a run with it "
            f"({spelled('weights', argument='train() takes that network')})."
        )
    wanted = "give a run folder, its model.safetensors, or an export"
    return f"{path} is damaged or not a safetensors file ({reason}): {wanted}."


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """What a model file says of itself, and its tensors, whole."""
    if path.is_dir():
        run, path = path, path / "model.safetensors"
        if not path.exists() and (run / "config.toml").exists():
            raise CheckpointError(
                f"The run in {run} has not ended and has no model yet: go on with `fedveil run --resume --out {run}`."
            )
    if not path.is_file():
        raise ConfigError(f"There is no model at {path}: give a run folder, its model.safetensors, or an export.")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, AttributeError) as reason:
        raise ConfigError(_no_model(path, reason)) from reason
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

    Returns what is hidden in the file: everything but the last bias, which the outputs determine; nothing where others
    know the weights that the run began with.
    """
    loaded = load_model(run, model=model, say=say)
    if loaded.kind == "export":
        raise ConfigError(f"{run} is an export already.")
    if out.exists():
        raise CheckpointError(f"{out} exists already: give another {spelled('out')}.")
    facts = loaded.facts
    tokens = facts.vocabulary is not None
    example = torch.zeros(2, *facts.input_shape, dtype=torch.int64 if tokens else torch.float32)
    architecture, fresh = draw(facts.build(seed=0).train(), example, traced=True)
    assert architecture.table is not None
    weights = weights_of(loaded.module, architecture)
    module, shape = export(architecture, weights, stream=OsSecrets().stream("export"), spread=spread)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(out, module, facts, kind="export", config=_public(loaded.config), shape=shape)
    own = torch.equal(weights.epsilon.cpu().double(), fresh.epsilon.double())
    covered = coverage(architecture.table, head_noise=False, secret_epsilon=not own)
    return nothing_hidden(covered) if loaded.config.get("public_start") else covered


def export_torch(
    run: Path, out: Path, *, model: Builder | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[str, ...]:
    """Write a run's model as a plain `state_dict` of the class that built it, for `torch.load(…, weights_only=True)`.

    The numbers are the server's own. Returns the batch normalisations whose secret ε went into their running variance.
    """
    loaded = _whole(run, out, model, say)
    module, folded = stock(loaded.bare, loaded.module)
    content = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in module.state_dict().items()}, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content.getvalue())
    return folded


def export_onnx(
    run: Path, out: Path, *, model: Builder | None = None, say: Callable[[str], None] = lambda text: None
) -> None:
    """Write a run's model as ONNX; how raw samples are prepared and what outputs are called stands in its metadata."""
    loaded = _whole(run, out, model, say)
    facts = loaded.facts
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as reason:
        raise missing_extra("onnx", "onnx", "An export to ONNX") from reason
    whole = facts.vocabulary is not None or getattr(getattr(facts.preparation, "inputs", None), "whole", False)
    dtype = torch.int64 if whole else next(loaded.module.parameters()).dtype
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    try:
        exporter.setLevel(logging.ERROR)  # it tells of packages that it does without
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                loaded.module,
                (torch.zeros(2, *facts.input_shape, dtype=dtype),),
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                dynamo=True,
                verbose=False,
            )
    except Exception as reason:
        said = " ".join(str(reason).split())[:200]
        raise TraceError(f"The model cannot be written as ONNX ({type(reason).__name__}: {said}).") from reason
    finally:
        exporter.setLevel(level)
    assert program is not None
    metadata = {"task": facts.task, "labels": facts.labels, "preparation": facts.preparation, "link": facts.link}
    for name, value in metadata.items():
        plain = dataclasses.asdict(value) if isinstance(value, Preparation | Link) else value
        program.model.metadata_props[f"fedveil.{name}"] = json.dumps(plain)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, program.model_proto.SerializeToString())


def _whole(run: Path, out: Path, model: Builder | None, say: Callable[[str], None]) -> LoadedModel:
    loaded = load_model(run, model=model, say=say)
    if loaded.kind == "export":
        raise ConfigError(f"{run} is an export for clients, whose layers are not those of its class: give the run.")
    if out.exists():
        raise CheckpointError(f"{out} exists already: give another {spelled('out')}.")
    return loaded


_OF_DATA = "dataset target task text group site test_fraction validation_fraction split picture_size".split()


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a client may know of a run: where its data came from, and the seed of a simulation only.

    In a simulation the seed decides the model's first values and the secrets; otherwise it deals data and batches.
    """
    kept = {name: config.get(name) for name in _OF_DATA}
    if RunConfig.from_mapping(config).simulated_secrets:
        kept["seed"] = config.get("seed")
    return kept
