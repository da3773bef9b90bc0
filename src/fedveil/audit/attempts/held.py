"""The model a client holds, as it was sent or with the head noise taken off, and the samples it knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedveil.audit.attacks.calibration import from_balance, from_expected, targets_of, without_noise
from fedveil.audit.attacks.probe import read_head, received
from fedveil.audit.attempts.common import require_classes
from fedveil.audit.views import ClientView, weights_from
from fedveil.downlink import Blueprint, Broadcast, assemble
from fedveil.downlink.architecture import batch_norms, load_statistics
from fedveil.errors import DataError, NotApplicableError
from fedveil.work.gradients import collect_statistics

CPU = torch.device("cpu")
_WEIGHTS = "weights."
_MOST_FOR_STATISTICS = 1024


def held_model(view: ClientView, *, device: torch.device = CPU) -> tuple[Blueprint, nn.Module, Broadcast | None]:
    """The last model that a client was sent, ready to evaluate, and how it was sent.

    A client that keeps the model itself has it in `known` as weights.*, and there is no broadcast. Where batch
    norms came without running statistics, the client makes its own from all inputs it has, labelled or not: a
    sample's outputs then do not depend on which others it is judged with.
    """
    blueprint = view.facts.blueprint()
    own = {name[len(_WEIGHTS) :]: one for name, one in view.known.items() if name.startswith(_WEIGHTS)}
    weights = weights_from(own)
    if weights is not None:
        return blueprint, assemble(blueprint, weights).eval().to(device), None
    sent = view.broadcasts
    if not sent:
        raise NotApplicableError(f"no model: client {view.client} was sent none in the recorded rounds")
    broadcast = sent[-1].broadcast
    module = received(blueprint, broadcast).to(device)
    if not broadcast.statistics.numel():
        _settle_statistics(module, inputs_at_hand(view))
    return blueprint, module, broadcast


def calibrated(view: ClientView, *, device: torch.device = CPU) -> nn.Module:
    """The model after the best calibration that a client can make: class scores, differentiable in inputs and weights.

    r̂ is found from its labelled samples, or from its unlabelled ones where it has no label, and taken off the
    last layer: ŷ − α·r̂ is what the layer gives with r̂ subtracted from every column of its weight and its bias.
    """
    blueprint, module, broadcast = held_model(view, device=device)
    head = None if broadcast is None else broadcast.head
    if head is None:
        raise NotApplicableError("no head noise: the client sees the model's own outputs, and nothing is left to do")
    x, y = labelled(view)
    readings = read_head(blueprint, module, fitting(module, x)).to(CPU)
    scale = view.facts.target_scale
    if y is None:
        require_classes(view.facts)
        noise = from_balance(readings, head, scale=scale)
    else:
        noise = from_expected(readings, targets_of(y, outputs=view.facts.outputs, target_scale=scale), head)
    return without_noise(blueprint, module, noise)


def labelled(view: ClientView) -> tuple[Tensor, Tensor | None]:
    """A client's own samples, and those an auditor grants it besides as labelled.x and labelled.y."""
    x, y = view.x, view.y
    more_x, more_y = view.known.get("labelled.x"), view.known.get("labelled.y")
    if x is None:
        x, y = more_x, more_y
    elif more_x is not None:
        x = torch.cat([x, more_x.to(x)])
        y = None if y is None or more_y is None else torch.cat([y, more_y.to(y)])
    if x is None or not len(x):
        raise NotApplicableError("no samples: the client's own data are not in its view")
    if y is not None and len(x) != len(y):
        raise DataError(f"A client's samples need a label each: there are {len(x)} samples and {len(y)} labels.")
    return x, y


def inputs_at_hand(view: ClientView) -> Tensor:
    """Every input that a client has, in mixed order, whatever it knows about them; none may be there."""
    names = ("labelled.x", "public.x", "queries", "candidates.x")
    given = [one for one in (view.x, *map(view.known.get, names)) if one is not None]
    if not given:
        return torch.empty(0)
    every = torch.cat([one.to(given[0]) for one in given])
    return every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]


def fitting(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs where the model is, in its precision; tokens keep their type."""
    parameter = next(module.parameters())
    return x.to(parameter.device, parameter.dtype if x.is_floating_point() else None)


def _settle_statistics(module: nn.Module, inputs: Tensor) -> None:
    """Running statistics from one batch; without at least two inputs, norms go on using the batch they are given."""
    norms = batch_norms(module)
    if not norms or len(inputs) < 2:
        return
    with torch.no_grad():
        module(fitting(module, inputs[:_MOST_FOR_STATISTICS]))
        load_statistics(module, collect_statistics(module, next(module.parameters())))
    module.eval()
