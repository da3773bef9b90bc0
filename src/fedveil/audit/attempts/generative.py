"""Attempts that use a prior, learned from public pictures: on a gradient, and on the model a client holds.

The attacker's pictures are `public.x` among what the view knows; their labels are not looked at. settings of
class inversion: adaptive (False: the model as it was sent; True: with the head noise taken off first), classes
(a list; None for all), per_class (10).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fedveil.audit.attacks import generative as by_prior
from fedveil.audit.attacks.matching import Budget
from fedveil.audit.attacks.membership import Criterion
from fedveil.audit.attacks.prior import FEWEST_PICTURES, LARGEST_SIDE, SMALLEST_SIDE, Prior, train_prior
from fedveil.audit.attempts.common import (
    applicable,
    box_of,
    budget_of,
    count_of,
    device_of,
    generator_of,
    require_classes,
    require_pictures,
    seen_by,
)
from fedveil.audit.attempts.held import calibrated, held_model
from fedveil.audit.attempts.reconstruction import as_result, problem_of, with_label
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import ClientView, Facts, ServerHistory, View
from fedveil.errors import ConfigError, NotApplicableError

PER_CLASS = 10
_FOR_THE_PRIOR = 0.7


def generative(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Gradient matching over what a generator makes: its latent code, then its features."""
    if isinstance(view, ServerHistory | ClientView):
        raise NotApplicableError("this attack reads one upload: it is made on what the server or an outsider sees")
    _require_small_pictures(view.facts)
    prior = _prior(view.known, settings, progress)
    with applicable():
        problem = with_label(problem_of(view, settings), settings)
        found = by_prior.generative(
            problem, prior, generator=generator_of(settings), budget=budget_of(settings), progress=_second(progress)
        )
    return as_result(found)


def class_inversion(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """Pictures in which the model a client holds is sure of a class."""
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    _require_small_pictures(seen.facts)
    classes = _classes(settings, seen.facts.outputs)
    device = device_of(settings)
    module = calibrated(seen, device=device) if settings.get("adaptive") else held_model(seen, device=device)[1]
    prior = _prior(seen.known, settings, progress)
    with applicable():
        inputs, labels = by_prior.class_inversion(
            _outputs(module),
            prior,
            classes=classes,
            per_class=count_of(settings, "per_class") or PER_CLASS,
            criterion=_criterion(seen.facts),
            generator=generator_of(settings),
            budget=budget_of(settings),
            progress=_second(progress),
        )
    return {"inputs": inputs.cpu(), "labels": labels.cpu()}


def _require_small_pictures(facts: Facts) -> None:
    require_pictures(facts)
    if not all(SMALLEST_SIDE <= side <= LARGEST_SIDE for side in facts.input_shape[1:]):
        shown = "×".join(map(str, facts.input_shape[1:]))
        raise NotApplicableError(
            f"pictures of {shown}: the prior learns sides of {SMALLEST_SIDE} to {LARGEST_SIDE} pixels"
        )


_LEARNED: list[tuple[Tensor, Prior]] = []


def _prior(known: Mapping[str, Tensor], settings: Settings, progress: Progress) -> Prior:
    """The prior of these pictures, learned once for all views of a process.

    It knows public pictures alone, so nothing of one view reaches the next. With `thorough_prior` it is learned with
    the full budget, whatever the attack's own is.
    """
    pictures = known.get("public.x")
    if pictures is None or len(pictures) < FEWEST_PICTURES:
        raise NotApplicableError(f"fewer than {FEWEST_PICTURES} public pictures: no prior can be learned from them")
    for learned_from, prior in _LEARNED:
        if learned_from.shape == pictures.shape and torch.equal(learned_from, pictures):
            return prior
    prior = train_prior(
        pictures,
        generator=generator_of(settings),
        box=box_of(settings),
        budget=Budget() if settings.get("thorough_prior") else budget_of(settings),
        progress=lambda part: progress(_FOR_THE_PRIOR * part),
        device=device_of(settings),
    )
    _LEARNED[:] = [(pictures, prior)]
    return prior


def _second(progress: Progress) -> Callable[[float], None]:
    return lambda part: progress(_FOR_THE_PRIOR + (1 - _FOR_THE_PRIOR) * part)


def _outputs(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model on pictures of the prior's precision; its parameters need no gradient."""
    module.requires_grad_(False)
    example = next(module.parameters())
    return lambda pictures: module(pictures.to(example))


def _criterion(facts: Facts) -> Criterion:
    kind: Literal["cross-entropy", "square"] = "square" if facts.loss == "square" else "cross-entropy"
    return Criterion(kind, facts.target_scale)


def _classes(settings: Settings, outputs: int) -> list[int]:
    given = settings.get("classes")
    if given is None:
        return list(range(outputs))
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"classes must be a list of class numbers, or left out for all (got {given!r}).")
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < outputs for one in given):
        raise ConfigError(f"classes must be whole numbers from 0 to {outputs - 1} (got {given!r}).")
    return list(given)
