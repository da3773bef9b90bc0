"""Weights that a run begins with, from a file: safetensors, or a state_dict of PyTorch's, read as plain data."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedveil.errors import ConfigError, spelled

# A counter that decides nothing here, and the ε that FedVeil's own files keep beside a normalisation's weights.
_NO_WEIGHTS = ("num_batches_tracked", "epsilon")
_SHOWN = 3


def fill_from(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file, all of them.

    Raises:
        ConfigError: The file cannot be read, or a name, a shape or a type in it is not the model's.
    """
    own = {name: value for name, value in model.state_dict(keep_vars=True).items() if _is_weight(name)}
    if not path.is_file():
        raise ConfigError(f"There are no weights at {path}: give a .safetensors file, or a state_dict (.pt, .pth).")
    if path.suffix == ".safetensors":
        _fill_from_safetensors(own, path)
    elif path.suffix in (".pt", ".pth", ".bin"):
        _fill_from_state_dict(own, path)
    else:
        raise ConfigError(f"{path} is no file of weights that can be read: give .safetensors, .pt or .pth.")


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] not in _NO_WEIGHTS


def _fill_from_safetensors(own: Mapping[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check(own, shapes, path)
            _copy(own, file.get_tensor)
    except (SafetensorError, OSError, ValueError, AttributeError) as reason:
        raise ConfigError(f"{path} is damaged or not a safetensors file: {reason}") from reason


def _fill_from_state_dict(own: Mapping[str, Tensor], path: Path) -> None:
    """PyTorch's own reader of weights takes tensors, numbers and names, and runs nothing that the file says."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        plain = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not plain or sum(member.file_size for member in members) > path.stat().st_size:
            raise ConfigError(f"{path} is compressed, which torch.save never does: save it again.")
        given = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as reason:  # whatever is wrong with the file, or in it
        raise ConfigError(
            f"{path} cannot be read as weights alone: save a state_dict, torch.save(model.state_dict(), …), with a "
            "PyTorch of this decade, and not a whole model."
        ) from reason
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in given.items()
    ):
        raise ConfigError(f"{path} holds something else than tensors by name: save model.state_dict() alone.")
    _check(own, {name: tuple(value.shape) for name, value in given.items()}, path)
    _copy(own, given.__getitem__)


def _check(own: Mapping[str, Tensor], given: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuse weights of another model, by name, before any is read."""
    there = {name: shape for name, shape in given.items() if _is_weight(name)}
    wrong = [
        f"{name} has shape {there[name]} there and {tuple(own[name].shape)} in the model"
        for name in own
        if name in there and there[name] != tuple(own[name].shape)
    ]
    wrong += [f"{name} is missing there" for name in own if name not in there]
    wrong += [f"{name} is not in the model" for name in there if name not in own]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"The weights in {path} are not this model's: {'; '.join(wrong[:_SHOWN])}{more}. Give the model's settings "
            f"as they were (-o), or fill the model in code of your own ({spelled('model', 'file.py:factory')})."
        )


def _copy(own: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    with torch.no_grad():
        for name, target in own.items():
            value = read(name)
            if value.is_floating_point() != target.is_floating_point():
                raise ConfigError(f"The weights of {name} are {value.dtype}, the model's {target.dtype}.")
            target.copy_(value)
