"""A last check before training: does the veiled network really compute the same function?

The rules are proven one by one, a user's network is not. Veiling it with random scales and comparing
outputs catches whatever a trace may have missed, before anything is trained on it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fedveil.downlink.blueprint import (
    Blueprint,
    Weights,
    assemble,
    load_epsilon,
    load_parameters,
    load_statistics,
)
from fedveil.downlink.decomposed import Decomposed, load_multipliers
from fedveil.downlink.norms import VectorBatchNorm
from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import TraceError
from fedveil.secrets import OsSecrets

_SAMPLES = 3
_TOLERANCE = 1e-8
_DEFAULT = Rescaling(spread=4.0)


def verify(
    blueprint: Blueprint, weights: Weights, example: Tensor, *, downlink: Rescaling | Decomposed = _DEFAULT
) -> None:
    """Refuse a blueprint whose veiled outputs differ from the true ones by more than 1e-8 relative.

    `downlink` is the one that will be used; its head noise is left out.

    Runs in float64 on the CPU, with batch norms in evaluation and in training mode.
    """
    cpu = blueprint.to(device=torch.device("cpu"))
    exact = weights.to(device=torch.device("cpu"), dtype=torch.float64)
    veil = dataclasses.replace(downlink, head=None).veil(
        cpu, exact, stream=OsSecrets().stream("verify"), head_level=None
    )
    sent = veil.broadcast()
    true, veiled = assemble(cpu, exact), assemble(cpu, exact)
    load_parameters(veiled, sent.parameters)
    load_epsilon(cpu, veiled, sent.epsilon)
    load_multipliers(cpu, veiled, sent.multipliers)
    if exact.statistics.numel():
        load_statistics(veiled, veil.veiled_statistics())
    x = _probe(example)
    for training in (False, True):
        outputs = [_run(module, x, batch_statistics=training) for module in (true, veiled)]
        scale = outputs[0].abs().max().clamp_min(1e-30)
        error = float((outputs[0] - outputs[1]).abs().max() / scale)
        if not error < _TOLERANCE:
            mode = "training" if training else "evaluation"
            raise TraceError(
                f"The veiled network's output differs from the true one by {error:.1e} relative (in {mode} "
                "mode), so some operation is not traced rightly and training under a veil would be wrong. "
                "Nothing was trained. Use --scheme fedavg, and please report the model."
            )


def _probe(example: Tensor) -> Tensor:
    chosen = torch.arange(_SAMPLES) % len(example)
    x = example.detach().cpu()[chosen]
    if not x.is_floating_point():
        return x
    generator = torch.Generator().manual_seed(1)
    return x.double() + torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _run(module: nn.Module, x: Tensor, *, batch_statistics: bool) -> Tensor:
    module.eval()
    for one in module.modules():
        if isinstance(one, VectorBatchNorm):
            one.train(batch_statistics)
    with torch.no_grad():
        output = module(x)
    assert isinstance(output, Tensor)
    return output
