"""Models that remember: what a forward pass changes beside parameters is refused, since nobody would send it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedveil.downlink import Architecture, Weights, assemble
from fedveil.errors import TraceError


def _plain_state(module: nn.Module) -> dict[str, object]:
    """The numbers, truth values and strings, and lists of them, that layers keep as attributes."""

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return plain([*value.keys(), *value.values()])
        return all(map(plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, (int, float, str))

    return {
        f"{path}.{name}".lstrip("."): copy.deepcopy(value)
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if plain(value)
    }


def refuse_moving_state(architecture: Architecture, weights: Weights, example: Tensor) -> None:
    """What training moves beside parameters would be a hidden state of one machine: neither sent, summed nor saved."""
    module = assemble(architecture, weights).train()
    before = _plain_state(module)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module(example.to(weights.parameters.dtype) if example.is_floating_point() else example)
    moved = [name for name, value in weights.buffers.items() if not torch.equal(module.get_buffer(name), value)]
    if moved:
        raise TraceError(
            f"The model changes its buffer {moved[0]!r} while it trains, and buffers other than BatchNorm's running "
            "statistics are not sent or averaged. Use BatchNorm or GroupNorm, or keep the buffer constant."
        )
    if architecture.table is None:  # under noise, what remembers samples is looked for by its effect
        return
    after = _plain_state(module)
    changed = [name for name, value in before.items() if name in after and repr(after[name]) != repr(value)]
    if changed:
        raise TraceError(
            f"The model changes its attribute {changed[0]!r} when it is called, and a veil is worked out for one "
            "state of it. Keep the attribute constant, or make what it says an input."
        )
