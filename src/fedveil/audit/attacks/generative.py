"""Reconstruction with a learned prior: the search goes over what a generator makes, not over pixels.

From a gradient: over the latent code, then over the generator's features stage by stage (GIFD, Fang et al. 2023).
From a model: over the latent code for pictures in which the model is sure of a class (GMI, Zhang et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil import data
from fedveil.audit.attacks.closed_form import labels_of
from fedveil.audit.attacks.matching import (
    FULL_BUDGET,
    Budget,
    Problem,
    Progress,
    Reconstruction,
    Reference,
    best,
    boxed,
    cosine_distance,
    gradient_at,
    normalised,
    private_copy,
    proven,
    restarted,
    silent,
)
from fedveil.audit.attacks.membership import Criterion
from fedveil.audit.attacks.prior import Prior, train_prior
from fedveil.audit.metrics import psnr
from fedveil.errors import ConfigError, DataError

REFERENCE_MODEL = "lenet-sigmoid"
REFERENCE_PICTURES = 500

Outputs = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Search:
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


FULL = Search()
QUICK = Search(steps=150, feature_steps=150, restarts=1)


def generative(
    problem: Problem,
    prior: Prior,
    *,
    generator: torch.Generator,
    budget: Budget = FULL_BUDGET,
    search: Search | None = None,
    progress: Progress = silent,
) -> Reconstruction:
    """min over z of 1 − cos(∇L(D(z), y), ĝ) + λ·mean z², and then the same over D's features within reach.

    y is inferred where it is not known. Whatever has the least cosine distance is kept; that is the loss reported.
    """
    if tuple(problem.input_shape) != prior.shape:
        raise ConfigError(f"The prior makes pictures of shape {prior.shape}, not of {tuple(problem.input_shape)}.")
    search = search or (QUICK if budget.quick else FULL)
    labels = labels_of(problem, generator=generator)
    match = _matcher(problem, labels)
    found = best(
        restarted(
            lambda part: _attempt(prior, match, labels, search=search, generator=generator, progress=part),
            times=search.restarts,
            progress=progress,
        ),
        good_enough=search.good_enough,
    )
    inputs = boxed(problem, found.inputs).to(problem.gradient.dtype)
    return Reconstruction(inputs=inputs, labels=labels, loss=found.loss)


def generative_reference(
    *,
    prior: Prior | None = None,
    picture: Tensor | None = None,
    label: int | None = None,
    seed: int = 0,
    budget: Budget = FULL_BUDGET,
    progress: Progress = silent,
) -> Reference:
    """`generative` on the sigmoid LeNet; unless a prior is given, one of digits other than the one to be found."""
    if prior is None:
        others = data.load("digits", seed=seed).train.x[1 : 1 + REFERENCE_PICTURES]
        teacher = torch.Generator().manual_seed(seed)
        prior = train_prior(
            others, generator=teacher, box=(0.0, 1.0), budget=budget, progress=lambda part: progress(part / 2)
        )
    known = prior
    return proven(
        lambda problem, **how: generative(problem, known, **how),
        model=REFERENCE_MODEL,
        picture=picture,
        label=label,
        seed=seed,
        budget=budget,
        progress=lambda part: progress((1 + part) / 2),
    )


def blind_level(prior: Prior, original: Tensor, *, generator: torch.Generator, draws: int = 64) -> float:
    """The mean PSNR, in units of the box, of the prior's random pictures: what an attack that saw nothing comes to."""
    low, high = prior.box
    with torch.no_grad():
        guesses = prior.decode(prior.sample(draws, generator=generator)).to(original)
    pairs = [(guesses, one.expand_as(guesses)) for one in original]
    return float(torch.stack([psnr(a, b, peak=high - low).mean() for a, b in pairs]).mean())


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
    search: Search,
    generator: torch.Generator,
    progress: Progress,
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


FULL_INVERSION = Inversion()
QUICK_INVERSION = Inversion(draws=1000, steps=150)


def class_inversion(
    outputs: Outputs,
    prior: Prior,
    *,
    classes: Sequence[int],
    per_class: int,
    criterion: Criterion,
    generator: torch.Generator,
    budget: Budget = FULL_BUDGET,
    inversion: Inversion | None = None,
    progress: Progress = silent,
) -> tuple[Tensor, Tensor]:
    """Pictures in which a model is sure of a class, `per_class` for each, and the classes they were made for.

    min over z of loss_y(outputs(D(z)))/s + λ·½·mean z², with s the mean loss over classes and random codes.
    `outputs` maps pictures to class scores and must be differentiable.
    """
    if not classes or per_class < 1:
        raise ConfigError(f"Class inversion needs a class and a picture of each, not {len(classes)} and {per_class}.")
    plan = inversion or (QUICK_INVERSION if budget.quick else FULL_INVERSION)
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
    found = []
    with torch.no_grad():
        for part in torch.split(codes, at_once):
            scores = outputs(prior.decode(part)).float()
            if max(classes) >= scores.shape[1] or min(classes) < 0:
                raise DataError(f"The model has the classes 0…{scores.shape[1] - 1}; {list(classes)} were asked for.")
            targets = [torch.full((len(part),), one, device=scores.device) for one in classes]
            found.append(torch.stack([criterion.losses(scores, one) for one in targets], 1).to(codes.device))
    return torch.cat(found).nan_to_num(nan=torch.inf)


def _sure(
    outputs: Outputs,
    prior: Prior,
    codes: Tensor,
    labels: Tensor,
    *,
    criterion: Criterion,
    plan: Inversion,
    scale: float,
    progress: Progress,
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
