"""Model files: safetensors that say how to build their own architecture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from fedveil.downlink import Blueprint, Weights, assemble
from fedveil.downlink.blueprint import weights_of
from fedveil.downlink.export import ExportShape, exported_architecture
from fedveil.downlink.norms import with_vector_norms
from fedveil.errors import CheckpointError, ConfigError
from fedveil.models.custom import vouched
from fedveil.plain import made, named, parsed
from fedveil.runs.digest import digest_of
from fedveil.runs.files import write_atomically
from fedveil.runs.job import ModelFacts

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


def load_weights(path: Path, blueprint: Blueprint, like: Weights) -> Weights:
    """A model file's numbers, for a network that is already there."""
    _, tensors = _read(path)
    module = assemble(blueprint, like)
    _fill(module, tensors, where=f"{path} does not fit the model")
    return weights_of(module, blueprint)


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
    if facts.task not in ("classification", "regression"):
        raise CheckpointError(f"{path} is damaged: it names no task.")
    unlike = f"{path} does not fit the architecture {str(facts.name)!r} it names"
    facts.check_size(most=sum(one.numel() for one in tensors.values()), unlike=unlike)
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
        - {one for one in own if one in tensors and (own[one].shape, own[one].dtype) == _form(tensors[one])}
    )
    if odd:
        raise ConfigError(f"{where} (differs in: {', '.join(odd[:4])}).")
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(tensors[name])


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
