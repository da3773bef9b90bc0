"""Membership inference by likelihood ratio, offline: does the model fit a sample better than strangers would?

The attacker trains shadow models on random halves of public data, none of which holds a candidate. For each candidate
their closeness φ is about N(μ, σ²) among models that never saw it; one that the audited model fits far better than
that was probably a member (Carlini et al. 2022, the offline form). A blind guess is right half the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.audit.attack import AttackContext, OnProgress, attack, counted, silent
from fedveil.audit.attacks.extraction import fitting, inputs_like
from fedveil.audit.attacks.membership import (
    Candidates,
    Criterion,
    Guess,
    Outputs,
    candidates_in,
    class_scores,
    criterion_of,
    evaluating,
    granted_in,
    held_by,
)
from fedveil.audit.views import Facts, View
from fedveil.errors import ConfigError, DataError, NotApplicableError, NumericError

OWN_SPREAD_FROM = 64
"""From this many shadow models on, each candidate's σ is estimated by itself; below, one σ serves all."""

FEWEST_PUBLIC = 4
_LARGEST_SEED = 2**31


@attack(
    "likelihood",
    sees="model",
    asset="members",
    granted=("public",),
    reference="overfitted",
    slow=True,
    how="likelihood ratio with shadow models (Carlini et al. 2022)",
)
def likelihood_attack(
    view: View,
    context: AttackContext,
    *,
    adaptive: bool = False,
    shadows: int | None = None,
    epochs: int | None = None,
) -> dict[str, Tensor]:
    """By the ratio of likelihoods under shadow models, trained on public.x and public.y: `shadows` for `epochs`."""
    seen, model = held_by(view, context, adaptive=adaptive)
    # Shadow models have a precision of their own, which need not be the run's.
    candidates = candidates_in(seen, like=next(seen.facts.module().parameters()).to(context.device))
    usual = Shadows(count=6, epochs=60) if context.quick else Shadows()
    plan = Shadows(count=counted("shadows", shadows) or usual.count, epochs=counted("epochs", epochs) or usual.epochs)
    x, y = granted_in(seen, "public.x"), granted_in(seen, "public.y")
    public = (inputs_like(candidates.x, x), y.to(candidates.x.device))
    return likelihood(
        model,
        candidates,
        _strangers(seen.facts, candidates, public, plan, context),
        outputs=lambda samples: model(fitting(model, samples)),
        criterion=criterion_of(seen.facts),
    ).result


_TRAINED: list[tuple[tuple[Tensor, ...], tuple[object, ...], Tensor]] = []


def _strangers(
    facts: Facts, candidates: Candidates, public: tuple[Tensor, Tensor], shadows: Shadows, context: AttackContext
) -> Tensor:
    """What shadow models make of the candidates, found once for all views of a process that ask about the same ones.

    Shadows know public data alone, so nothing of one view reaches the next.
    """
    tensors = (*public, candidates.x, candidates.y)
    about = (facts.model, tuple(sorted(facts.options.items())), facts.loss, facts.target_scale, shadows)
    for known, same, strangers in _TRAINED:
        if same == about and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, tensors, strict=True)):
            return strangers
    strangers = strangers_to(
        candidates,
        public=public,
        fresh=lambda seed: facts.module(seed=seed),
        generator=context.generator(),
        criterion=criterion_of(facts),
        shadows=shadows,
        progress=context.progress,
    )
    _TRAINED[:] = [(tensors, about, strangers)]
    return strangers


@dataclass(frozen=True)
class Shadows:
    """How many shadow models, and how each is trained: Adam for ``epochs``, or until the loss is below ``enough``.

    A shadow should be about as overfitted as the audited model; a common offset does no harm, since the threshold
    is set on the candidates the attacker knows.
    """

    count: int = 16
    epochs: int = 100
    rate: float = 1e-3
    batch: int = 128
    enough: float = 1e-3

    def __post_init__(self) -> None:
        if self.count < 2 or min(self.epochs, self.batch) < 1:
            raise ConfigError(f"Shadow models need count ≥ 2 and epochs, batch ≥ 1, not {self}.")


def likelihood(
    model: nn.Module,
    candidates: Candidates,
    strangers: Tensor,
    *,
    outputs: Outputs | None = None,
    criterion: Criterion | None = None,
) -> Guess:
    """Score the candidates whose membership the attacker does not know: −log P(N(μ, σ²) > φ), φ from the audited model.

    ``strangers`` are the candidates' closenesses to shadow models; ``outputs`` stands for ``model`` where the attacker
    can do better than to take its outputs as they are.
    """
    criterion = criterion or Criterion()
    with evaluating(model):
        target = criterion.closeness(class_scores(outputs or model, candidates.x), candidates.y)
    scores = tail_scores(target, strangers).cpu()
    rows = candidates.unknown.cpu()
    threshold = best_threshold(scores, inside=candidates.known(1).cpu(), outside=candidates.known(0).cpu())
    return Guess(rows=rows, scores=scores[rows], threshold=threshold)


def strangers_to(
    candidates: Candidates,
    *,
    public: tuple[Tensor, Tensor],
    fresh: Callable[[int], nn.Module],
    generator: torch.Generator,
    criterion: Criterion,
    shadows: Shadows,
    progress: OnProgress = silent,
) -> Tensor:
    """The closeness φ of every candidate (columns) to every one of freshly trained shadow models (rows).

    ``public`` are samples and labels of the attacker's own, ``fresh`` makes an untrained network of the audited
    architecture from a seed.
    """
    public = _apart(public, candidates)
    closeness = []
    for done in range(shadows.count):
        shadow = train_shadow(public, fresh=fresh, shadows=shadows, criterion=criterion, generator=generator)
        with evaluating(shadow):
            closeness.append(criterion.closeness(class_scores(shadow, candidates.x), candidates.y))
        progress((done + 1) / shadows.count)
    return torch.stack(closeness)


def train_shadow(
    public: tuple[Tensor, Tensor],
    *,
    fresh: Callable[[int], nn.Module],
    shadows: Shadows,
    criterion: Criterion,
    generator: torch.Generator,
) -> nn.Module:
    """A fresh network trained on a random half of the public data."""
    x, y = public
    half = torch.randperm(len(x), generator=generator)[: len(x) // 2]
    seed = int(torch.randint(_LARGEST_SEED, (), generator=generator))
    shadow = fresh(seed).to(x.device).train()
    adam = torch.optim.Adam(shadow.parameters(), lr=shadows.rate)
    for _ in range(shadows.epochs):
        total = 0.0
        order = half[torch.randperm(len(half), generator=generator)]
        for start in range(0, len(order), shadows.batch):
            rows = order[start : start + shadows.batch].to(x.device)
            loss = criterion.losses(shadow(x[rows]), y[rows]).mean()
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
            total += loss.item() * len(rows)
        if not math.isfinite(total):
            raise NumericError("A shadow model's loss is not finite: lower the shadow models' rate.")
        if total < shadows.enough * len(half):
            break
    return shadow


def tail_scores(target: Tensor, strangers: Tensor) -> Tensor:
    """−log P(N(μ_i, σ_i²) > φ_i), with μ and σ from ``strangers`` (shadow models × candidates)."""
    if not (target.isfinite().all() and strangers.isfinite().all()):
        raise NumericError("A model gives NaN or infinity on a candidate: membership cannot be inferred from it.")
    deviation, middle = torch.std_mean(strangers.double(), dim=0)
    if len(strangers) < OWN_SPREAD_FROM:
        deviation = deviation.square().mean().sqrt()
    z = (target.double() - middle) / deviation.clamp_min(1e-12)
    tail: Tensor = torch.special.log_ndtr(-z)
    return -tail


def best_threshold(scores: Tensor, *, inside: Tensor, outside: Tensor) -> float:
    """Where the balanced accuracy on the known rows is highest; log 2 (φ = μ) if only one kind is known."""
    if not len(inside) or not len(outside):
        return math.log(2)
    members, others = scores[inside].sort().values, scores[outside].sort().values
    at = torch.cat([members, others]).sort().values
    # Between two scores rather than on one: the threshold should not favour the side a known score was on.
    cuts = torch.cat([at[:1] - 1, (at[1:] + at[:-1]) / 2, at[-1:] + 1])
    missed = torch.searchsorted(members, cuts, right=True) / len(members)
    passed = torch.searchsorted(others, cuts, right=True) / len(others)
    gain = passed - missed
    best = (gain >= gain.max() - 1e-9).nonzero().flatten()
    return float(cuts[best[len(best) // 2]])


def _apart(public: tuple[Tensor, Tensor], candidates: Candidates) -> tuple[Tensor, Tensor]:
    """The public data less the candidates: a shadow model that has seen one is no stranger to it."""
    x, y = public
    if len(x) != len(y) or x.shape[1:] != candidates.x.shape[1:]:
        raise DataError(
            f"Public data must be samples shaped like the candidates with a label each, not {tuple(x.shape)} with "
            f"{len(y)} labels for candidates of {tuple(candidates.x.shape)}."
        )
    asked = {row.tobytes() for row in candidates.x.cpu().numpy()}
    rest = torch.tensor([row.tobytes() not in asked for row in x.cpu().numpy()], dtype=torch.bool, device=x.device)
    if int(rest.sum()) < FEWEST_PUBLIC:
        raise NotApplicableError(f"fewer than {FEWEST_PUBLIC} public samples: no shadow model can learn from them")
    return x[rest], y[rest]
