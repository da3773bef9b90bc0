"""Reading samples off Ψ and Φ, which travel bare beside a veiled gradient, with or without noise on that."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedveil.audit.attacks.closed_form import closed_form
from fedveil.audit.attacks.matching import MOST_SAMPLES, Problem
from fedveil.audit.attacks.phi import BareTensors, bare_tensors, invert_bare, read_first_layer, read_label
from fedveil.audit.attacks.probe import received
from fedveil.audit.attempts.common import (
    applicable,
    box_of,
    budget_of,
    count_of,
    device_of,
    generator_of,
    require_numbers,
)
from fedveil.audit.attempts.gradients import batch_seen, exchange_in, observed_in
from fedveil.audit.attempts.reconstruction import has_closed_form, problem_from, read_by
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import Facts, ServerView, View
from fedveil.downlink.architecture import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NotApplicableError
from fedveil.tensors import Layout
from fedveil.work.losses import SquareLoss

UNREAD = -1
"""The label of a sample of which the label was not read."""
RESTARTS = 3
STEPS = 300
"""How long a search takes; larger pictures need more."""


def phi(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """A batch from Ψ and Φ alone, with the model as it was sent: the server needs none of its secrets for this.

    In closed form where a linear layer with a bias reads the whole input (`loss` is how badly one sample explains
    the gradients; labels of batches above one stay unread), otherwise by matching. On the wire, the settings
    client and round say whose upload. Words under masks are read as numbers, for what that is worth. An upload that
    is nothing but a gradient, as plain averaging sends it, is read in the same way.
    """
    if isinstance(view, ServerView) and view.broadcast is None and view.recovered is not None:
        observed = observed_in(view, settings)
        problem = problem_from(observed, settings)
        return read_by("closed-form" if has_closed_form(problem) else "idlg", observed, settings, progress)
    seen = exchange_in(view, settings)
    head, facts, device = seen.broadcast.head, seen.facts, device_of(settings)
    if head is None:
        raise NotApplicableError("there is no head noise, so neither Ψ nor Φ is sent")
    require_numbers(facts)
    batch = batch_seen(facts, seen.samples, settings)
    if batch > MOST_SAMPLES:
        raise NotApplicableError(f"a gradient of {batch} samples: this attack takes up to {MOST_SAMPLES}")
    blueprint, broadcast = facts.blueprint().to(device=device), _placed(seen.broadcast, device)
    bare = bare_tensors(seen.numbers.to(device), Layout(facts.contribution), head)
    try:
        reading = read_first_layer(blueprint, torch.cat([bare.phi, bare.psi]))
    except ConfigError:  # no closed form for this model
        return _searched(facts, blueprint, broadcast, bare, batch, settings, progress)
    inputs, labels = reading.x[None], torch.full((batch,), UNREAD)
    if batch > 1:
        inputs = _rows(facts, blueprint, broadcast, bare, batch, settings)
    elif facts.task == "classification":
        with applicable():
            labels[0] = read_label(blueprint, broadcast, bare, loss=_objective(facts))
    progress(1.0)
    box = box_of(settings)
    inputs = inputs if box is None else inputs.clamp(*box)
    return _result(inputs, labels, reading.misfit)


def _searched(
    facts: Facts,
    blueprint: Blueprint,
    broadcast: Broadcast,
    bare: BareTensors,
    batch: int,
    settings: Settings,
    progress: Progress,
) -> dict[str, Tensor]:
    if facts.task != "classification":
        raise NotApplicableError(f"a {facts.task} task, and no linear layer that reads the input: classes are needed")
    with applicable():
        found = invert_bare(
            blueprint,
            broadcast,
            bare,
            loss=_objective(facts),
            generator=generator_of(settings),
            batch=batch,
            restarts=count_of(settings, "restarts") or (1 if budget_of(settings).quick else RESTARTS),
            steps=count_of(settings, "steps") or STEPS,
            box=box_of(settings),
            progress=progress,
        )
    return _result(found.inputs, found.labels.argmax(1), found.loss)


def _rows(
    facts: Facts, blueprint: Blueprint, broadcast: Broadcast, bare: BareTensors, batch: int, settings: Settings
) -> Tensor:
    """Several samples from the first layer's gradient in Φ, row by row, as from any other gradient."""
    problem = Problem(
        module=received(blueprint, broadcast),
        loss=facts.objective(),
        gradient=bare.phi.sum(0),
        input_shape=facts.input_shape,
        outputs=facts.outputs,
        batch=batch,
        # Φ knows no labels: equal ones keep the attack from looking for them.
        labels=torch.zeros(batch, dtype=torch.int64, device=bare.phi.device),
        box=box_of(settings),
    )
    with applicable():
        return closed_form(problem, generator=generator_of(settings)).inputs


def _objective(facts: Facts) -> SquareLoss:
    loss = facts.objective()
    if not isinstance(loss, SquareLoss):
        raise NotApplicableError(f"the loss {loss.name}: Ψ and Φ belong to the square loss")
    return loss


def _placed(broadcast: Broadcast, device: torch.device) -> Broadcast:
    head = broadcast.head
    moved = {name: getattr(broadcast, name).to(device) for name in ("parameters", "epsilon", "statistics")}
    if head is not None:
        head = replace(head, vector=head.vector.to(device), groups=head.groups.to(device))
    return replace(broadcast, **moved, multipliers=broadcast.multipliers.to(device), head=head)


def _result(inputs: Tensor, labels: Tensor, loss: float) -> dict[str, Tensor]:
    return {
        "inputs": inputs.detach().cpu(),
        "labels": labels.to(torch.int64).cpu(),
        "loss": torch.tensor(loss, dtype=torch.float64),
    }
