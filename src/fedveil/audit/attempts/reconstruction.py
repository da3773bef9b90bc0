"""Reconstruction of a client's samples from a gradient that the server, or somebody on the wire, has seen.

settings: target ("upload" or "sum"), batch (how many samples the gradient is of, where that is not what was
announced), and for what was seen on the wire: client, round. Results: inputs, labels, and the loss of the match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.audit.attacks import closed_form as by_ratio
from fedveil.audit.attacks import dlg as by_search
from fedveil.audit.attacks import inverting as by_cosine
from fedveil.audit.attacks.direction import likeliest_label, read_class
from fedveil.audit.attacks.matching import MOST_READ, MOST_SAMPLES, Attack, Problem, Reconstruction
from fedveil.audit.attacks.rank_one import rank_one
from fedveil.audit.attempts.common import (
    applicable,
    box_of,
    budget_of,
    device_of,
    generator_of,
    require_classes,
    require_numbers,
)
from fedveil.audit.attempts.gradients import Observed, is_clipped, observed_in
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import View
from fedveil.errors import ConfigError, NotApplicableError

READERS: Mapping[str, Attack] = {
    "closed-form": rank_one,
    "dlg": by_search.dlg,
    "idlg": by_search.idlg,
    "inverting": by_cosine.inverting,
}
"""The attacks that read a gradient, by name."""


WITHOUT_SEARCH = ("closed-form",)


def closed_form(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The input of a first linear layer from the ratio of its gradients; nothing is searched."""
    return _tried("closed-form", view, settings, progress)


def dlg(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Deep leakage from gradients: inputs and soft labels by L-BFGS."""
    return _tried("dlg", view, settings, progress)


def idlg(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The same with labels inferred first."""
    return _tried("idlg", view, settings, progress)


def inverting(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Inverting Gradients: cosine distance and total variation."""
    return _tried("inverting", view, settings, progress)


def labels(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """The batch's labels as the last layer's gradient shows them; labels the attacker knows are not looked at."""
    problem = problem_from(replace(observed_in(view, settings), labels=None), settings, most=MOST_READ)
    with applicable():
        found = by_ratio.labels_of(with_label(problem, settings), generator=generator_of(settings))
    progress(1.0)
    return {"labels": found.cpu()}


def problem_of(view: View, settings: Settings) -> Problem:
    """What was observed as a problem for attacks that match gradients; refused where there is none they can take."""
    return problem_from(observed_in(view, settings), settings)


def problem_from(seen: Observed, settings: Settings, *, most: int = MOST_SAMPLES) -> Problem:
    """The same from what was observed, if it is of at most `most` samples.

    The setting `clipped` = False says that no gradient reaches the clipping bound, so that sizes count.
    """
    facts = seen.facts
    require_classes(facts)
    require_numbers(facts)
    if seen.batch > most:
        raise NotApplicableError(f"a gradient of {seen.batch} samples: this attack takes up to {most}")
    device = device_of(settings)
    return Problem(
        module=seen.module.to(device),
        loss=facts.objective(),
        gradient=seen.gradient.to(device),
        input_shape=facts.input_shape,
        outputs=facts.outputs,
        batch=seen.batch,
        labels=None if seen.labels is None else seen.labels.to(device),
        box=box_of(settings),
        clipped=bool(settings.get("clipped", is_clipped(facts))),
    )


def with_label(problem: Problem, settings: Settings) -> Problem:
    """A batch of one with its class, as its gradient tells it; larger batches as they are."""
    if problem.labels is not None or problem.batch > 1:
        return problem
    if problem.clipped:
        return replace(problem, labels=likeliest_label(problem, generator=generator_of(settings)))
    try:
        return replace(problem, labels=read_class(problem))
    except ConfigError:  # no bias at the end: signs may still tell
        return problem


def read_by(
    name: str, seen: Observed, settings: Settings, progress: Progress, *, problem: Problem | None = None
) -> dict[str, Tensor]:
    """Run the attack `name` of `READERS` on what was observed."""
    problem = problem or problem_from(seen, settings, most=MOST_READ if name in WITHOUT_SEARCH else MOST_SAMPLES)
    if name == "closed-form":
        if not has_closed_form(problem):
            raise NotApplicableError("no linear layer with a bias reads the input: there is no closed form")
    elif name != "dlg" or problem.clipped:
        # dlg searches for labels itself; the closed form tells the class by the whole gradient at what it has read.
        with applicable():
            problem = with_label(problem, settings)
    with applicable():
        found = READERS[name](problem, generator=generator_of(settings), budget=budget_of(settings), progress=progress)
    return as_result(found)


def has_closed_form(problem: Problem) -> bool:
    """Whether the first layer is linear, has a bias and reads the raw input."""
    try:
        by_ratio.first_linear_gradients(problem)
    except ConfigError:
        return False
    return True


def as_result(found: Reconstruction) -> dict[str, Tensor]:
    """A reconstruction as tensors that leave the process."""
    return {
        "inputs": found.inputs.detach().cpu(),
        "labels": found.labels.to(torch.int64).cpu(),
        "loss": torch.tensor(found.loss, dtype=torch.float64),
    }


def _tried(name: str, view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    return read_by(name, observed_in(view, settings), settings, progress)
