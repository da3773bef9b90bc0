"""What a gradient gives away without any search: the first linear layer's input, and the labels.

For a batch of one the first layer's gradient is a matrix of rank one, [∂L/∂W, ∂L/∂b] = δ·(x, 1)ᵀ. With Gaussian
noise of one size on every entry, the likeliest (x, 1) is the first right singular vector of what was observed: every
unit adds its part, where a single row's ratio would use one unit and its noise.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from fedveil.audit.attack import AttackContext, OnProgress, applicable, attack, silent
from fedveil.audit.attacks.extraction import last_linear
from fedveil.audit.attacks.gradients import (
    MOST_READ,
    MOST_SAMPLES,
    Problem,
    Reconstruction,
    as_result,
    boxed,
    client_gradient,
    cosine_distance,
    first_guess,
    matching_loss,
    observed_in,
    private_copy,
    problem_from,
)
from fedveil.audit.views import View
from fedveil.errors import ConfigError, NotApplicableError
from fedveil.tensors import Layout
from fedveil.work.losses import CrossEntropy

PROBES = 64
SAME = 1e-3
FAINTEST = 1e-5


@attack(
    "labels",
    sees=("upload", "sum"),
    asset="labels",
    reference="lenet",
    how="labels read off the last layer's gradient",
)
def labels_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """The batch's labels as the last layer's gradient shows them; labels the attacker knows are not looked at."""
    problem = problem_from(replace(observed_in(view, context), labels=None), context, most=MOST_READ)
    with applicable():
        labels = labels_of(with_label(problem, context.generator()), generator=context.generator())
    context.progress(1.0)
    return {"labels": labels.cpu()}


@attack(
    "closed-form",
    sees=("upload", "masked upload", "sum", "coalition", "wire"),
    asset="data",
    reference="mlp",
    how="the first linear layer's gradient is the input, up to a factor",
)
def closed_form_attack(view: View, context: AttackContext) -> dict[str, Tensor]:
    """The input of a first linear layer from the ratio of its gradients; nothing is searched."""
    return as_result(read_closed_form(problem_from(observed_in(view, context), context, most=MOST_READ), context))


def read_closed_form(problem: Problem, context: AttackContext) -> Reconstruction:
    """`rank_one`, where the model allows it."""
    if not has_closed_form(problem):
        raise NotApplicableError("no linear layer with a bias reads the input: there is no closed form")
    with applicable():
        return rank_one(problem, generator=context.generator(), progress=context.progress)


def has_closed_form(problem: Problem) -> bool:
    """Whether the first layer is linear, has a bias and reads the raw input."""
    try:
        first_linear_gradients(problem)
    except ConfigError:
        return False
    return True


def with_label(problem: Problem, generator: torch.Generator) -> Problem:
    """A batch of one with its class, as its gradient tells it; larger batches as they are."""
    if problem.labels is not None or problem.batch > 1:
        return problem
    if problem.clipped:
        return replace(problem, labels=likeliest_label(problem, generator=generator))
    try:
        return replace(problem, labels=read_class(problem))
    except ConfigError:  # no bias at the end: signs may still tell
        return problem


def closed_form(problem: Problem, *, generator: torch.Generator, progress: OnProgress = silent) -> Reconstruction:
    """Inputs of a model that begins with a linear layer, row by row: x = (∂L/∂W_k) / (∂L/∂b_k).

    Every row k gives Σ_i δ_ik·x_i / Σ_i δ_ik, a mixture of the batch's samples; with a batch of one, x itself.
    A unit that one sample alone activates gives that sample exactly, and all such units agree, so that rows
    which agree are taken first, then rows whose mixture lies in the box.
    """
    weight, bias = first_linear_gradients(problem)
    rows = bias.abs() > FAINTEST * bias.abs().max()
    if not bool(rows.any()):
        candidates = first_guess(problem, generator=generator, dtype=problem.gradient.dtype).flatten(1)
    else:
        candidates = _chosen(problem, weight[rows] / bias[rows, None], bias[rows].abs())
    progress(0.5)
    inputs = boxed(problem, candidates).reshape(problem.batch, *problem.input_shape)
    labels = _paired(problem, inputs, labels_of(problem, generator=generator))
    progress(1.0)
    return Reconstruction(inputs=inputs, labels=labels, loss=matching_loss(problem, inputs, labels))


def rank_one(problem: Problem, *, generator: torch.Generator, progress: OnProgress = silent) -> Reconstruction:
    """`closed_form`, and for a batch of one the best fit over all units, with the class that explains it best.

    The loss is then 1 − cos between the gradient at what was found and the observed one: clipping and weights
    change the size of a gradient, but not its direction.
    """
    if problem.batch > 1:
        return closed_form(problem, generator=generator, progress=progress)
    weight, bias = first_linear_gradients(problem)
    _, _, rows = torch.linalg.svd(torch.cat([weight, bias[:, None]], dim=1).double(), full_matrices=False)
    inputs = boxed(problem, rows[0, :-1] / rows[0, -1]).reshape(1, *problem.input_shape)
    progress(0.5)
    label, loss = _likeliest_class(problem, inputs)
    progress(1.0)
    return Reconstruction(inputs=inputs.to(problem.gradient.dtype), labels=label, loss=loss)


def _likeliest_class(problem: Problem, inputs: Tensor) -> tuple[Tensor, float]:
    module, observed = private_copy(problem, dtype=torch.float64), problem.gradient.double()
    classes = torch.arange(problem.outputs, device=observed.device) if problem.labels is None else problem.labels
    apart = torch.stack(
        [
            cosine_distance(client_gradient(module, problem.loss, inputs, label.reshape(1)), observed)
            for label in classes.to(observed.device)
        ]
    )
    best = int(apart.argmin())
    return classes[best].reshape(1), float(apart[best])


def labels_of(problem: Problem, *, generator: torch.Generator) -> Tensor:
    """The labels the attacker knows, or else those the last layer's gradient shows, where the gradient lies."""
    known = problem.labels
    return (inferred_labels(problem, generator=generator) if known is None else known).to(problem.gradient.device)


def _paired(problem: Problem, inputs: Tensor, labels: Tensor) -> Tensor:
    """The labels in the order that explains the observed gradient best: swaps of two, as long as one helps."""
    if problem.batch == 1 or problem.batch > MOST_SAMPLES or labels.is_floating_point():
        return labels  # among many samples, swaps take long and tell little
    least, improved = matching_loss(problem, inputs, labels), True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(problem.batch), 2):
            if labels[i] == labels[j]:
                continue
            swapped = labels.clone()
            swapped[i], swapped[j] = labels[j], labels[i]
            value = matching_loss(problem, inputs, swapped)
            if value < least:
                labels, least, improved = swapped, value, True
    return labels


def _chosen(problem: Problem, ratios: Tensor, strength: Tensor) -> Tensor:
    """`batch` of the ratios: those most often repeated, then those least outside the box, then the strongest."""
    scale = ratios.abs().amax(1).clamp_min(1.0)
    apart = torch.cdist(ratios, ratios, p=torch.inf) / scale[:, None]
    alike = (apart < SAME) & (apart.T < SAME)
    outside = (ratios - boxed(problem, ratios)).abs().amax(1)
    order = sorted(
        range(len(ratios)),
        key=lambda k: (-int(alike[k].sum()), bool(outside[k] > SAME), float(outside[k]), -float(strength[k])),
    )
    chosen: list[int] = []
    for k in order:
        if not any(bool(alike[k, other]) for other in chosen):
            chosen.append(k)
        if len(chosen) == problem.batch:
            break
    # Fewer different rows than samples: repeat the best, so that the answer always has the batch's size.
    return ratios[[chosen[i % len(chosen)] for i in range(problem.batch)]]


def first_linear_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """(∂L/∂W, ∂L/∂b) of the layer that reads the input; refused if that is not linear with a bias."""
    name, layer = next(
        ((name, layer) for name, layer in problem.module.named_modules() if list(layer.parameters(recurse=False))),
        ("", None),
    )
    if not isinstance(layer, nn.Linear) or layer.bias is None or not _reads_the_input(problem, name):
        raise ConfigError(
            "The closed form needs a model whose first layer is linear, has a bias and reads the raw input (such as "
            f"mlp); here it is {type(layer).__name__}. Use an attack that matches gradients instead."
        )
    parts = named_gradients(problem)
    return parts[f"{name}.weight" if name else "weight"], parts[f"{name}.bias" if name else "bias"]


def named_gradients(problem: Problem) -> dict[str, Tensor]:
    """The observed gradient, cut into the parameters' shapes."""
    sections = tuple((name, tuple(parameter.shape)) for name, parameter in problem.module.named_parameters())
    return Layout(sections).split(problem.gradient)


def inferred_labels(problem: Problem, *, generator: torch.Generator) -> Tensor:
    """The batch's labels, in ascending order, from the last linear layer's gradient.

    Its bias gradient is Σ_c (n_c/B)·E_c with E_c the mean ∂loss/∂output of the samples of class c (softmax −
    one-hot for cross-entropy). The attacker estimates E with random inputs and solves for the counts n ≥ 0. A
    class with a negative entry is certainly in the batch under cross-entropy (Zhao et al. 2020 for B = 1), so
    those come first; under other losses the counts are an estimate, good while outputs are small against targets.
    Without a bias the row sums of ∂L/∂W, over the mean sum of the layer's inputs, stand in.
    """
    evidence, slopes = _output_evidence(problem, generator=generator)
    exact_signs = isinstance(problem.loss, CrossEntropy)
    if problem.batch == 1 and exact_signs:
        return evidence.argmin().reshape(1)
    system = torch.cat([slopes.T, slopes.new_ones(1, problem.outputs)]).cpu().numpy().astype(np.float64)
    known = torch.cat([evidence, evidence.new_ones(1)]).cpu().numpy().astype(np.float64)
    shares, _ = nnls(system, known)
    wanted = torch.from_numpy(np.asarray(shares)) * problem.batch
    counts = torch.zeros(problem.outputs, dtype=torch.int64)
    for c in evidence.argsort()[: problem.batch].tolist() if exact_signs else []:
        counts[c] += int(evidence[c] < 0)
    while int(counts.sum()) < problem.batch:
        counts[int((wanted - counts).argmax())] += 1
    return torch.arange(problem.outputs).repeat_interleave(counts).to(problem.gradient.device)


def _output_evidence(problem: Problem, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(the mean of ∂loss/∂output over the batch as observed, E: row c its mean for random inputs of class c)."""
    dtype = problem.gradient.dtype
    module = private_copy(problem, dtype=dtype)
    name, head = _head(problem, module)
    probes = torch.cat([first_guess(problem, generator=generator, dtype=dtype) for _ in range(PROBES)])[:PROBES]
    heard: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, given: heard.append(given[0].detach()))
    with torch.no_grad():
        output = module(probes)
    handle.remove()
    slopes = torch.stack([_slope(problem, output, c) for c in range(problem.outputs)])
    parts = named_gradients(problem)
    prefix = f"{name}." if name else ""
    if f"{prefix}bias" in parts:
        return parts[f"{prefix}bias"], slopes
    features = heard[0].reshape(len(probes), -1).sum(1).mean()
    return parts[f"{prefix}weight"].sum(1) / features, slopes


def _slope(problem: Problem, output: Tensor, label: int) -> Tensor:
    output = output.detach().requires_grad_(True)
    target = torch.full((len(output),), label, device=output.device)
    (slope,) = torch.autograd.grad(problem.loss.mean(output, target), output)
    return slope.sum(0)


def _head(problem: Problem, module: nn.Module) -> tuple[str, nn.Linear]:
    name = last_linear(module)
    layer = None if name is None else module.get_submodule(name)
    if name is None or not isinstance(layer, nn.Linear) or layer.out_features != problem.outputs:
        raise ConfigError(
            f"Labels can be inferred only where the last layer is linear with one output for each of the "
            f"{problem.outputs} classes. Pass the labels, or use dlg, which searches for them."
        )
    return name, layer


def _reads_the_input(problem: Problem, name: str) -> bool:
    """Whether the layer's input is the model's, flattened: seen by running the model once."""
    module = private_copy(problem, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    probe = torch.rand(2, *problem.input_shape, generator=generator, dtype=torch.float64).to(problem.gradient.device)
    heard: list[Tensor] = []
    handle = module.get_submodule(name).register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    with torch.no_grad():
        module(probe)
    handle.remove()
    return bool(heard) and heard[0].numel() == probe.numel() and torch.equal(heard[0].flatten(), probe.flatten())


def read_class(problem: Problem) -> Tensor:
    """argmin_c ‖∂loss(Wh + b, c)/∂output − G[b]‖ with h = Σ G[b]·G[W]/Σ G[b]²: exact for one sample without noise.

    The last layer's gradient is δ·(h, 1)ᵀ for one sample: it gives away h, so the outputs, so the class whose
    ∂loss/∂output is δ. This holds for any loss; under the square loss a class cannot be told by a sign.
    """
    last = last_linear(problem.module)
    prefix = f"{last}." if last else ""
    parts, held = named_gradients(problem), dict(problem.module.named_parameters())
    if last is None or f"{prefix}bias" not in parts:
        raise ConfigError("The class is read off a last layer that is linear and has a bias.")
    weight, bias = parts[f"{prefix}weight"].double(), parts[f"{prefix}bias"].double()
    features = (bias @ weight) / bias.square().sum().clamp_min(1e-300)
    with torch.no_grad():
        output = held[f"{prefix}weight"].double() @ features + held[f"{prefix}bias"].double()
    apart = [(_slope(problem, output[None], label) - bias).norm() for label in range(problem.outputs)]
    return torch.stack(apart).nan_to_num(nan=torch.inf).argmin().reshape(1)


def likeliest_label(problem: Problem, *, generator: torch.Generator) -> Tensor:
    """argmax_c cos(E_c, ∂L/∂b): E_c is the mean gradient of the last layer's bias for random inputs of class c.

    Without a bias, the last layer's weight stands in.
    """
    if problem.batch != 1:
        raise ConfigError(f"The direction of a gradient tells the label of one sample, not of {problem.batch}.")
    last = last_linear(problem.module)
    if last is None:
        raise ConfigError("Labels can be inferred only where the last layer is linear.")
    parts = named_gradients(problem)
    prefix = f"{last}." if last else ""
    name = f"{prefix}bias" if f"{prefix}bias" in parts else f"{prefix}weight"
    module = private_copy(problem, dtype=torch.float64)
    probes = torch.cat([first_guess(problem, generator=generator, dtype=torch.float64) for _ in range(PROBES)])
    apart = [
        cosine_distance(_expected(problem, module, probes, label)[name].reshape(-1), parts[name].double().reshape(-1))
        for label in range(problem.outputs)
    ]
    return torch.stack(apart).argmin().reshape(1)


def _expected(problem: Problem, module: nn.Module, probes: Tensor, label: int) -> dict[str, Tensor]:
    labels = torch.full((len(probes),), label, device=probes.device)
    return named_gradients(replace(problem, gradient=client_gradient(module, problem.loss, probes, labels)))
