"""Was a sample among those the model was trained on? What a client can tell from the model it holds.

An auditor grants the client candidates: candidates.x, candidates.y, and candidates.membership, which is 1 or 0 where
the client knows the answer and −1 where it is asked for. The result are `scores` of those it is asked for, in their
order, and the `threshold` above which it says "member".

With the setting `adaptive` the client first takes the head noise off by calibration on its own samples. Secret scales
on hidden layers need no such step: every activation is standardised over the candidates, which undoes them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fedveil.audit.attacks import likelihood as by_likelihood
from fedveil.audit.attacks import membership as by_network
from fedveil.audit.attacks.membership import Candidates, Criterion, Features, Guess
from fedveil.audit.attempts.common import count_of, device_of, generator_of, require_classes, seen_by
from fedveil.audit.attempts.held import calibrated, fitting, held_model
from fedveil.audit.registry import Progress, Settings
from fedveil.audit.views import ClientView, Facts, View
from fedveil.errors import ConfigError, unknown_name

LAYERS: dict[str, Features] = {"last": "outputs", "second": "second", "third": "third", "three": "layers"}
"""What the setting `layer` stands for."""

_SHADOWS, _QUICK_SHADOWS = by_likelihood.Shadows(), by_likelihood.Shadows(count=6, epochs=60)


def membership(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """By an attack network on the outputs (or on other `features`)."""
    return _by_network(view, settings, progress, features=settings.get("features", "outputs"))


def membership_layers(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """By an attack network on layers: all of the last three, or the one that `layer` names."""
    layer = str(settings.get("layer", "three"))
    if layer not in LAYERS:
        raise unknown_name("layer", layer, LAYERS)
    return _by_network(view, settings, progress, features=settings.get("features", LAYERS[layer]))


def likelihood(view: View, settings: Settings, progress: Progress) -> dict[str, Tensor]:
    """By the ratio of likelihoods under shadow models, trained on public.x and public.y: `shadows` for `epochs`."""
    seen, model = _attacked(view, settings)
    candidates = _candidates(seen, like=next(seen.facts.module().parameters()).to(device_of(settings)))
    usual = _QUICK_SHADOWS if settings.get("quick", False) else _SHADOWS
    shadows = by_likelihood.Shadows(
        count=count_of(settings, "shadows", usual.count) or usual.count,
        epochs=count_of(settings, "epochs", usual.epochs) or usual.epochs,
    )
    x, y = _granted(seen, "public.x"), _granted(seen, "public.y")
    public = (_like(x, candidates.x), y.to(candidates.x.device))
    guess = by_likelihood.likelihood(
        model,
        candidates,
        public=public,
        fresh=lambda seed: seen.facts.module(seed=seed),
        generator=generator_of(settings),
        # Shadow models have a precision of their own, which need not be the run's.
        outputs=lambda samples: model(fitting(model, samples)),
        criterion=criterion_of(seen.facts),
        strangers=_strangers(seen.facts, candidates, public, shadows, settings, progress),
    )
    return _result(guess)


_TRAINED: list[tuple[tuple[Tensor, ...], tuple[object, ...], Tensor]] = []


def _strangers(
    facts: Facts,
    candidates: Candidates,
    public: tuple[Tensor, Tensor],
    shadows: by_likelihood.Shadows,
    settings: Settings,
    progress: Progress,
) -> Tensor:
    """What shadow models make of the candidates, found once for all views of a process that ask about the same ones.

    Shadows know public data alone, so nothing of one view reaches the next.
    """
    tensors = (*public, candidates.x, candidates.y)
    about = (facts.model, tuple(sorted(facts.options.items())), facts.loss, facts.target_scale, shadows)
    for known, same, found in _TRAINED:
        alike = len(known) == len(tensors) and same == about
        if alike and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(known, tensors, strict=True)):
            return found
    found = by_likelihood.strangers_to(
        candidates,
        public=public,
        fresh=lambda seed: facts.module(seed=seed),
        generator=generator_of(settings),
        criterion=criterion_of(facts),
        shadows=shadows,
        progress=progress,
    )
    _TRAINED[:] = [(tensors, about, found)]
    return found


def criterion_of(facts: Facts) -> Criterion:
    """How the run's loss judges one sample."""
    return Criterion("square" if facts.loss == "square" else "cross-entropy", facts.target_scale)


def _by_network(view: View, settings: Settings, progress: Progress, *, features: object) -> dict[str, Tensor]:
    seen, model = _attacked(view, settings)
    guess = by_network.membership(
        model,
        _candidates(seen, like=next(model.parameters())),
        generator=generator_of(settings),
        features=cast(Features, str(features)),
        criterion=criterion_of(seen.facts),
        progress=progress,
    )
    return _result(guess)


def _attacked(view: View, settings: Settings) -> tuple[ClientView, nn.Module]:
    """The model as the client holds it, or as it is after calibration."""
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    device = device_of(settings)
    if settings.get("adaptive", False):
        return seen, calibrated(seen, device=device)
    return seen, held_model(seen, device=device)[1]


def _candidates(view: ClientView, *, like: Tensor) -> Candidates:
    x, y, shown = (_granted(view, f"candidates.{name}") for name in ("x", "y", "membership"))
    return Candidates(_like(x, like), y.to(like.device), shown.to(like.device))


def _like(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.device, like.dtype if x.is_floating_point() else None)


def _granted(view: ClientView, name: str) -> Tensor:
    found = view.known.get(name)
    if found is None:
        raise ConfigError(f"The view holds no {name}: membership is told of candidates that an auditor grants.")
    return found


def _result(guess: Guess) -> dict[str, Tensor]:
    return {"scores": guess.scores.double(), "threshold": torch.tensor(guess.threshold, dtype=torch.float64)}
