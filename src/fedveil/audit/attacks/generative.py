"""Reconstruction with a learned prior: the search goes over what a generator makes, not over pixels.

From a gradient: over the latent code, then over the generator's features stage by stage (GIFD, Fang et al. 2023).
From a model: over the latent code for pictures in which the model is sure of a class (GMI, Zhang et al. 2020).
The attacker's pictures are `public.x` among what the view knows; their labels are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.audit.attack import (
    AttackContext,
    OnProgress,
    applicable,
    attack,
    counted,
    require_classes,
    seen_by,
    silent,
)
from fedveil.audit.attacks.closed_form import labels_of, with_label
from fedveil.audit.attacks.extraction import calibrated, held_model
from fedveil.audit.attacks.gradients import (
    Problem,
    Reconstruction,
    as_result,
    best,
    boxed,
    cosine_distance,
    gradient_at,
    normalised,
    observed_in,
    private_copy,
    problem_from,
)
from fedveil.audit.attacks.membership import Criterion, criterion_of
from fedveil.audit.attacks.prior import FEWEST_PICTURES, SMALLEST_SIDE, Prior, train_prior
from fedveil.audit.views import ClientView, Facts, ServerHistory, View
from fedveil.errors import ConfigError, DataError, NotApplicableError

PER_CLASS = 10
_FOR_THE_PRIOR = 0.7

Outputs = Callable[[Tensor], Tensor]


@attack(
    "generative",
    sees="upload",
    asset="data",
    needs=("pictures",),
    granted=("public",),
    reference="lenet",
    slow=True,
    how="matching within a prior learned from public pictures",
)
def generative_attack(view: View, context: AttackContext, *, thorough_prior: bool = False) -> dict[str, Tensor]:
    """Gradient matching over what a generator makes: its latent code, then its features.

    With `thorough_prior` the prior is learned at length, whatever the attack itself may take.
    """
    if isinstance(view, ServerHistory | ClientView):
        raise NotApplicableError("this attack reads one upload: it is made on what the server or an outsider sees")
    _require_pictures(view.facts)
    prior = _prior(view.known, context, quick=context.quick and not thorough_prior)
    with applicable():
        problem = with_label(problem_from(observed_in(view, context), context), context.generator())
        rebuilt = generative(
            problem,
            prior,
            generator=context.generator(),
            quick=context.quick,
            progress=context.part(_FOR_THE_PRIOR, 1.0),
        )
    return as_result(rebuilt)


@attack(
    "class-inversion",
    sees="model",
    asset="what classes look like",
    granted=("public",),
    reference="trained",
    slow=True,
    how="pictures of each class within a learned prior (Zhang et al. 2020)",
)
def class_inversion_attack(
    view: View,
    context: AttackContext,
    *,
    adaptive: bool = False,
    classes: Sequence[int] | None = None,
    per_class: int | None = None,
    thorough_prior: bool = False,
) -> dict[str, Tensor]:
    """Pictures in which the model a client holds is sure of a class, `per_class` of each.

    `adaptive`: with the head noise taken off first; otherwise the model is taken as it was sent.
    """
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    _require_pictures(seen.facts)
    wanted = _classes(classes, seen.facts.outputs)
    module = calibrated(seen, device=context.device) if adaptive else held_model(seen, device=context.device)[1]
    module.requires_grad_(False)
    example = next(module.parameters())
    prior = _prior(seen.known, context, quick=context.quick and not thorough_prior)
    with applicable():
        inputs, labels = class_inversion(
            lambda pictures: module(pictures.to(example)),
            prior,
            classes=wanted,
            per_class=counted("per_class", per_class) or PER_CLASS,
            criterion=criterion_of(seen.facts),
            generator=context.generator(),
            quick=context.quick,
            progress=context.part(_FOR_THE_PRIOR, 1.0),
        )
    return {"inputs": inputs.cpu(), "labels": labels.cpu()}


def _require_pictures(facts: Facts) -> None:
    if facts.input_dtype.startswith("int") or len(facts.input_shape) != 3:
        raise NotApplicableError("inputs that are no pictures: this attack makes pictures")
    if min(facts.input_shape[1:]) < SMALLEST_SIDE:
        shown = "×".join(map(str, facts.input_shape[1:]))
        raise NotApplicableError(f"pictures of {shown}: the prior learns sides of at least {SMALLEST_SIDE} pixels")


_LEARNED: list[tuple[Tensor, Prior]] = []


def _prior(known: Mapping[str, Tensor], context: AttackContext, *, quick: bool) -> Prior:
    """The prior of these pictures, learned once for all views of a process.

    It knows public pictures alone, so nothing of one view reaches the next.
    """
    pictures = known.get("public.x")
    if pictures is None or len(pictures) < FEWEST_PICTURES:
        raise NotApplicableError(f"fewer than {FEWEST_PICTURES} public pictures: no prior can be learned from them")
    for learned_from, prior in _LEARNED:
        if learned_from.shape == pictures.shape and torch.equal(learned_from, pictures):
            return prior
    prior = train_prior(
        pictures,
        generator=context.generator(),
        box=context.box,
        quick=quick,
        progress=context.part(0.0, _FOR_THE_PRIOR),
        device=context.device,
    )
    _LEARNED[:] = [(pictures, prior)]
    return prior


def _classes(given: Sequence[int] | None, outputs: int) -> list[int]:
    if given is None:
        return list(range(outputs))
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"classes must be a list of class numbers, or left out for all (got {given!r}).")
    if any(isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < outputs for label in given):
        raise ConfigError(f"classes must be whole numbers from 0 to {outputs - 1} (got {given!r}).")
    return list(given)


@dataclass(frozen=True)
class LatentSearch:
    """How the search from a gradient is run, by Adam with a rate that falls to zero along a cosine.

    The best of `draws` random codes is where the latent search starts; it takes `steps`. Then come
    `feature_steps` at the features behind each stage of the generator, which may move by at most `reach` times
    their own length, so that pictures stay near those the generator makes.
    """

    draws: int = 64
    steps: int = 300
    feature_steps: int = 300
    restarts: int = 2
    rate: float = 0.1
    feature_rate: float = 0.02
    likelihood: float = 1e-3
    reach: float = 0.5
    good_enough: float = 1e-5


QUICK_SEARCH = LatentSearch(steps=150, feature_steps=150, restarts=1)


def generative(
    problem: Problem,
    prior: Prior,
    *,
    generator: torch.Generator,
    quick: bool = False,
    search: LatentSearch | None = None,
    progress: OnProgress = silent,
) -> Reconstruction:
    """min over z of 1 − cos(∇L(D(z), y), ĝ) + λ·mean z², and then the same over D's features within reach.

    y is inferred where it is not known. Whatever has the least cosine distance is kept; that is the loss reported.
    """
    if tuple(problem.input_shape) != prior.shape:
        raise ConfigError(f"The prior makes pictures of shape {prior.shape}, not of {tuple(problem.input_shape)}.")
    search = search or (QUICK_SEARCH if quick else LatentSearch())
    labels = labels_of(problem, generator=generator)
    match = _matcher(problem, labels)
    candidate = best(
        lambda part: _attempt(prior, match, labels, search=search, generator=generator, progress=part),
        times=search.restarts,
        good_enough=search.good_enough,
        progress=progress,
    )
    inputs = boxed(problem, candidate.inputs).to(problem.gradient.dtype)
    return Reconstruction(inputs=inputs, labels=labels, loss=candidate.loss)


def _matcher(problem: Problem, labels: Tensor) -> Callable[[Tensor, bool], Tensor]:
    """The cosine distance between the gradient at pictures and the observed one."""
    module = private_copy(problem, dtype=torch.float32)
    observed = normalised(problem.gradient).float()

    def match(pictures: Tensor, differentiable: bool) -> Tensor:
        value = problem.loss.mean(module(pictures.to(observed.device)), labels)
        return cosine_distance(gradient_at(module, value, differentiable=differentiable), observed)

    return match


@dataclass(eq=False)
class _Best:
    """The point with the least matching loss at one place of the generator."""

    point: Tensor
    loss: float = math.inf

    def offer(self, point: Tensor, loss: float) -> None:
        if loss < self.loss:
            self.point, self.loss = point.detach().clone(), loss


def _attempt(
    prior: Prior,
    match: Callable[[Tensor, bool], Tensor],
    labels: Tensor,
    *,
    search: LatentSearch,
    generator: torch.Generator,
    progress: OnProgress,
) -> Reconstruction:
    batch = len(labels)
    total = search.steps + (prior.places - 1) * search.feature_steps
    done = 0

    def ahead() -> None:
        nonlocal done
        done += 1
        progress(done / total)

    now = _Best(prior.sample(batch, generator=generator))
    for _ in range(search.draws):
        code = prior.sample(batch, generator=generator)
        now.offer(code, float(match(prior.decode(code), False).detach()))
    for place in range(prior.places):
        if place:
            with torch.no_grad():
                now = _Best(prior.stages[place - 1](now.point), now.loss)
        start, length = now.point, now.point.flatten(1).norm(dim=1)
        point = start.clone().requires_grad_(True)
        steps = search.feature_steps if place else search.steps
        adam = torch.optim.Adam([point], lr=search.feature_rate if place else search.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        for _ in range(steps):
            distance = match(prior.finish(point, since=place), True)
            now.offer(point, float(distance.detach()))
            unlikely = distance.new_zeros(()) if place else search.likelihood * point.square().mean()
            (point.grad,) = torch.autograd.grad(distance + unlikely.to(distance.device), point)
            adam.step()
            schedule.step()
            if place:
                _keep_within(point, start, search.reach * length)
            ahead()
    with torch.no_grad():
        pictures = prior.finish(now.point, since=prior.places - 1)
    return Reconstruction(inputs=pictures.to(labels.device), labels=labels, loss=now.loss)


def _keep_within(point: Tensor, start: Tensor, radius: Tensor) -> None:
    """Move every sample's features to the nearest within `radius` of where they started."""
    with torch.no_grad():
        moved = (point - start).flatten(1)
        shrink = (radius / moved.norm(dim=1).clamp_min(1e-12)).clamp_max(1.0)
        point.copy_(start + (moved * shrink[:, None]).reshape(start.shape))


@dataclass(frozen=True)
class Inversion:
    """How class inversion is run: Adam over codes, started at random ones among those the model likes.

    `draws` codes are tried, and starts are taken from the `chosen` share with the least loss. `likelihood`
    weighs −log p(z)/latent against the class's loss, which is divided by its mean over random pictures so that
    one weight serves every loss and scale.
    """

    draws: int = 2000
    chosen: float = 0.05
    steps: int = 300
    rate: float = 0.05
    likelihood: float = 0.05
    at_once: int = 200


QUICK_INVERSION = Inversion(draws=1000, steps=150)


def class_inversion(
    outputs: Outputs,
    prior: Prior,
    *,
    classes: Sequence[int],
    per_class: int,
    criterion: Criterion,
    generator: torch.Generator,
    quick: bool = False,
    inversion: Inversion | None = None,
    progress: OnProgress = silent,
) -> tuple[Tensor, Tensor]:
    """Pictures in which a model is sure of a class, `per_class` for each, and the classes they were made for.

    min over z of loss_y(outputs(D(z)))/s + λ·½·mean z², with s the mean loss over classes and random codes.
    `outputs` maps pictures to class scores and must be differentiable.
    """
    if not classes or per_class < 1:
        raise ConfigError(f"Class inversion needs a class and a picture of each, not {len(classes)} and {per_class}.")
    plan = inversion or (QUICK_INVERSION if quick else Inversion())
    pool = prior.sample(max(plan.draws, per_class), generator=generator)
    table = _losses_of(outputs, prior, pool, classes=classes, criterion=criterion, at_once=plan.at_once)
    scale = float(table.mean()) or 1.0
    # A model that says the same about everything ranks nothing, and any codes are as good as others.
    codes = torch.cat([pool[_liked(column, per_class, plan.chosen, generator)] for column in table.T])
    labels = torch.tensor(list(classes)).repeat_interleave(per_class)
    # Parts mix the classes: a norm that uses the batch sees what it would see in data.
    parts = torch.split(torch.randperm(len(codes), generator=generator, device=generator.device), plan.at_once)
    made = torch.empty(len(codes), *prior.shape, device=prior.device)
    for number, rows in enumerate(parts):
        made[rows.to(prior.device)] = _sure(
            outputs,
            prior,
            codes[rows.to(prior.device)],
            labels[rows.cpu()].to(prior.device),
            criterion=criterion,
            plan=plan,
            scale=scale,
            progress=lambda part, number=number: progress((number + part) / len(parts)),  # type: ignore[misc]
        )
    return made, labels


def _liked(losses: Tensor, count: int, share: float, generator: torch.Generator) -> Tensor:
    """`count` at random among the share with the least losses, so that a class gets different pictures."""
    among = losses.topk(max(count, round(share * len(losses))), largest=False).indices
    return among[torch.randperm(len(among), generator=generator, device=generator.device)[:count].to(among.device)]


def _losses_of(
    outputs: Outputs, prior: Prior, codes: Tensor, *, classes: Sequence[int], criterion: Criterion, at_once: int
) -> Tensor:
    """The loss of every random picture for every class, codes × classes."""
    losses = []
    with torch.no_grad():
        for part in torch.split(codes, at_once):
            scores = outputs(prior.decode(part)).float()
            if max(classes) >= scores.shape[1] or min(classes) < 0:
                raise DataError(f"The model has the classes 0…{scores.shape[1] - 1}; {list(classes)} were asked for.")
            targets = [torch.full((len(part),), label, device=scores.device) for label in classes]
            losses.append(torch.stack([criterion.losses(scores, target) for target in targets], 1).to(codes.device))
    return torch.cat(losses).nan_to_num(nan=torch.inf)


def _sure(
    outputs: Outputs,
    prior: Prior,
    codes: Tensor,
    labels: Tensor,
    *,
    criterion: Criterion,
    plan: Inversion,
    scale: float,
    progress: OnProgress,
) -> Tensor:
    code = codes.clone().requires_grad_(True)
    adam = torch.optim.Adam([code], lr=plan.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, plan.steps)
    for step in range(plan.steps):
        losses = criterion.losses(outputs(prior.decode(code)).to(prior.device, torch.float32), labels) / scale
        unlikely = 0.5 * plan.likelihood * code.square().mean(1)
        (slope,) = torch.autograd.grad((losses + unlikely).sum(), code)
        code.grad = slope.nan_to_num()
        adam.step()
        schedule.step()
        progress((step + 1) / plan.steps)
    with torch.no_grad():
        return prior.decode(code)
