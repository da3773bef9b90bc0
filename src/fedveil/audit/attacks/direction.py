"""The label of a batch of one: read off the last layer's gradient, or told by its direction alone."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.closed_form import PROBES, named_gradients
from fedveil.audit.attacks.matching import Problem, client_gradient, cosine_distance, first_guess, private_copy
from fedveil.errors import ConfigError


def read_class(problem: Problem) -> Tensor:
    """argmin_c ‖∂loss(Wh + b, c)/∂output − G[b]‖ with h = Σ G[b]·G[W]/Σ G[b]²: exact for one sample without noise.

    The last layer's gradient is δ·(h, 1)ᵀ for one sample: it gives away h, so the outputs, so the class whose
    ∂loss/∂output is δ. This holds for any loss; under the square loss a class cannot be told by a sign.
    """
    linear = [name for name, one in problem.module.named_modules() if isinstance(one, nn.Linear)]
    prefix = f"{linear[-1]}." if linear and linear[-1] else ""
    parts, held = named_gradients(problem), dict(problem.module.named_parameters())
    if not linear or f"{prefix}bias" not in parts:
        raise ConfigError("The class is read off a last layer that is linear and has a bias.")
    weight, bias = parts[f"{prefix}weight"].double(), parts[f"{prefix}bias"].double()
    features = (bias @ weight) / bias.square().sum().clamp_min(1e-300)
    with torch.no_grad():
        output = held[f"{prefix}weight"].double() @ features + held[f"{prefix}bias"].double()
    apart = [(_slope(problem, output[None], one) - bias).norm() for one in range(problem.outputs)]
    return torch.stack(apart).nan_to_num(nan=torch.inf).argmin().reshape(1)


def _slope(problem: Problem, output: Tensor, label: int) -> Tensor:
    output = output.detach().requires_grad_(True)
    target = torch.full((1,), label, device=output.device)
    (slope,) = torch.autograd.grad(problem.loss.mean(output, target), output)
    return slope[0]


def likeliest_label(problem: Problem, *, generator: torch.Generator) -> Tensor:
    """argmax_c cos(E_c, ∂L/∂b): E_c is the mean gradient of the last layer's bias for random inputs of class c.

    Without a bias, the last layer's weight stands in.
    """
    if problem.batch != 1:
        raise ConfigError(f"The direction of a gradient tells the label of one sample, not of {problem.batch}.")
    linear = [name for name, one in problem.module.named_modules() if isinstance(one, nn.Linear)]
    if not linear:
        raise ConfigError("Labels can be inferred only where the last layer is linear.")
    parts = named_gradients(problem)
    prefix = f"{linear[-1]}." if linear[-1] else ""
    name = f"{prefix}bias" if f"{prefix}bias" in parts else f"{prefix}weight"
    module = private_copy(problem, dtype=torch.float64)
    probes = torch.cat([first_guess(problem, generator=generator, dtype=torch.float64) for _ in range(PROBES)])
    apart = [
        cosine_distance(_expected(problem, module, probes, one)[name].reshape(-1), parts[name].double().reshape(-1))
        for one in range(problem.outputs)
    ]
    return torch.stack(apart).argmin().reshape(1)


def _expected(problem: Problem, module: nn.Module, probes: Tensor, label: int) -> dict[str, Tensor]:
    labels = torch.full((len(probes),), label, device=probes.device)
    return named_gradients(dataclasses.replace(problem, gradient=client_gradient(module, problem.loss, probes, labels)))
