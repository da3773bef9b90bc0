"""Reconstruction with a learned prior: the search goes over what a generator makes, not over pixels.

From a gradient: over the latent code, then over the generator's features stage by stage (GIFD, Fang et al. 2023).
From a model: over the latent code for pictures in which the model is sure of a class (GMI, Zhang et al. 2020).
The attacker's pictures are `public.x` among what the view knows; their labels are not looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from fedveil.audit.metrics import reduced
from fedveil.audit.views import ClientView, Facts, ServerHistory, View
from fedveil.errors import ConfigError, DataError, NotApplicableError, NumericError

# --- a generative prior: what pictures of a kind look like, learned from public pictures without labels
#
# A variational autoencoder with convolutions. Its decoder maps z ~ N(0, I) to pictures in the box, and is made of
# stages, so that a search may also enter it half-way, at the features between two stages.

SMALLEST_SIDE = 8
LARGEST_SIDE = 64
"""Pictures with longer sides are made in this size and enlarged: finer detail is no part of the prior."""
FEWEST_PICTURES = 16
_SMALL_PICTURE = 256
_LARGEST_SEED = 2**31
_AT_ONCE = 500


@dataclass(frozen=True)
class Lessons:
    """How a prior is trained: `steps` of Adam, the rate falling to zero along a cosine.

    The encoder sees pictures under noise of size `jitter`, so that a few hundred are not learned by heart. More
    `strictness`, the weight of KL, makes random pictures look more like real ones and keeps less of their detail.
    """

    steps: int
    batch: int = 64
    rate: float = 2e-3
    latent: int = 24
    width: int = 16
    jitter: float = 0.1
    strictness: float = 1.0


SMALL = Lessons(steps=3000)
SMALL_QUICK = Lessons(steps=600)
LARGE = Lessons(steps=12000, batch=128, rate=1e-3, latent=96, width=64, strictness=4.0)
LARGE_QUICK = Lessons(steps=1500, batch=32, latent=48, strictness=4.0)


@dataclass(frozen=True, eq=False)
class Prior:
    """The decoder of a trained autoencoder, its parameters fixed.

    `decode` is the composition of all stages. Place 0 is the latent z itself; place k the features behind the
    k-th stage, from which `finish` goes on. `held_out` is the autoencoder's mean squared error, in units of the
    box, on pictures kept from its training.
    """

    stages: tuple[nn.Module, ...]
    latent: int
    shape: tuple[int, int, int]
    box: tuple[float, float]
    held_out: float

    @property
    def places(self) -> int:
        """How many places a search may enter at: the latent, and behind every stage but the last."""
        return len(self.stages)

    @property
    def device(self) -> torch.device:
        """Where the decoder lies."""
        return next(self.stages[0].parameters()).device

    def sample(self, count: int, *, generator: torch.Generator) -> Tensor:
        """Latent codes z ~ N(0, I), one row each."""
        return torch.randn(count, self.latent, generator=generator, device=generator.device).to(self.device)

    def decode(self, z: Tensor) -> Tensor:
        """Pictures (count, *shape) of latent codes (count, latent)."""
        return self.finish(z, since=0)

    def features(self, z: Tensor, *, place: int) -> Tensor:
        """What the decoder makes of z up to a place."""
        for stage in self.stages[:place]:
            z = stage(z)
        return z

    def finish(self, features: Tensor, *, since: int) -> Tensor:
        """Pictures of what is at a place."""
        for stage in self.stages[since:]:
            features = stage(features)
        low, high = self.box
        return low + (high - low) * features.sigmoid()


def train_prior(
    x: Tensor,
    *,
    generator: torch.Generator,
    box: tuple[float, float] | None = None,
    quick: bool = False,
    lessons: Lessons | None = None,
    progress: OnProgress = silent,
    device: str | torch.device = "cpu",
) -> Prior:
    """Learn what pictures look like; the `box` is the range of the given ones unless it is known.

    min over decoder D and encoder (μ, σ) of  N/2·log mean‖x − D(μ + σ·ξ)‖² + β·KL(N(μ, σ²) ‖ N(0, I))  with N
    numbers in a picture: a Gaussian likelihood whose variance is the best one (Rybkin et al. 2021).
    """
    shape = _checked(x)
    low, high = box if box is not None else (float(x.min()), float(x.max()))
    if not low < high:
        raise DataError(f"All public pictures are the number {low}: there is nothing to learn from them.")
    small = reduced(x.detach().float(), side=LARGEST_SIDE).to(device)
    made = (shape[0], int(small.shape[2]), int(small.shape[3]))
    lessons = lessons or _lessons(made, quick=quick)
    scaled = ((small - low) / (high - low)).clamp(0.0, 1.0)
    order = torch.randperm(len(x), generator=generator, device=generator.device).to(device)
    kept = scaled[order[: max(2, min(len(x) // 10, 500))]]
    shown = scaled[order[len(kept) :]]
    seed = int(torch.randint(_LARGEST_SEED, (), generator=generator, device=generator.device))
    encoder, stages = _networks(made, lessons, seed=seed)
    encoder, stages = encoder.to(device), stages.to(device)
    _train(encoder, stages, shown, lessons=lessons, generator=generator, progress=progress)
    stages.requires_grad_(False).eval()
    encoder.requires_grad_(False).eval()
    error = float((_through(stages, _codes(encoder, kept)) - kept).square().mean())
    if not math.isfinite(error):
        raise NumericError("The generative prior's training ended in NaN or infinity: lower its rate.")
    first = nn.Sequential(_spread_as(_codes(encoder, shown)).to(device), stages[0])
    last = stages[-1] if made == shape else nn.Sequential(stages[-1], nn.Upsample(size=shape[1:], mode="bilinear"))
    return Prior((first, *stages[1:-1], last), lessons.latent, shape, (low, high), error)


def _checked(x: Tensor) -> tuple[int, int, int]:
    sides_fit = x.dim() == 4 and min(x.shape[2:]) >= SMALLEST_SIDE
    if not sides_fit or not x.is_floating_point() or len(x) < FEWEST_PICTURES or not bool(x.isfinite().all()):
        raise DataError(
            f"A generative prior learns from {FEWEST_PICTURES} pictures or more (count, channels, height, width) of "
            f"finite numbers with sides of at least {SMALLEST_SIDE}, not from {x.dtype} of {tuple(x.shape)}."
        )
    return int(x.shape[1]), int(x.shape[2]), int(x.shape[3])


def _lessons(shape: tuple[int, int, int], *, quick: bool) -> Lessons:
    if math.prod(shape) <= _SMALL_PICTURE:
        return SMALL_QUICK if quick else SMALL
    return LARGE_QUICK if quick else LARGE


def _sizes(height: int, breadth: int) -> list[tuple[int, int]]:
    """Heights and breadths from the finest that are convolved down to the coarsest, halved while 4 or more are left.

    Large pictures are first folded, 2×2 pixels into one: convolutions at full size are most of the cost.
    """
    sizes = [(height, breadth) if _fold(height, breadth) == 1 else _halved(height, breadth)]
    while min(sizes[-1]) >= 8:
        sizes.append(_halved(*sizes[-1]))
    return sizes


def _fold(height: int, breadth: int) -> int:
    return 1 if min(height, breadth) < 16 else 2


def _halved(height: int, breadth: int) -> tuple[int, int]:
    return -(-height // 2), -(-breadth // 2)


def _networks(shape: tuple[int, int, int], lessons: Lessons, *, seed: int) -> tuple[nn.Module, nn.ModuleList]:
    """The encoder, picture → (μ, log σ²), and the decoder's stages, z → logits of a picture."""
    sizes, width, fold = _sizes(*shape[1:]), lessons.width, _fold(*shape[1:])
    # Twice the channels at half the size, as far as it pays.
    wide = [width * min(2**level, 4) for level in range(len(sizes))]
    coarsest = (wide[-1], *sizes[-1])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        down: list[nn.Module] = [nn.Conv2d(shape[0], wide[0], 3, stride=fold, padding=1), nn.SiLU()]
        for before, after in itertools.pairwise(wide):
            down += [nn.Conv2d(before, after, 3, stride=2, padding=1), *_norm(after)]
        encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(math.prod(coarsest), 2 * lessons.latent))
        first = nn.Linear(lessons.latent, math.prod(coarsest))
        stages: list[nn.Module] = [nn.Sequential(first, nn.Unflatten(1, coarsest), *_norm(coarsest[0]))]
        for level in range(len(sizes) - 2, -1, -1):
            finer = nn.Conv2d(wide[level + 1], wide[level], 3, padding=1)
            stages.append(nn.Sequential(nn.Upsample(size=sizes[level]), finer, *_norm(wide[level])))
        last = nn.Conv2d(wide[0], shape[0] * fold**2, 3, padding=1)
        stages.append(nn.Sequential(last, nn.PixelShuffle(fold), _Cut(shape[1], shape[2])))
    return encoder, nn.ModuleList(stages)


class _Cut(nn.Module):
    """The upper left of a picture: folding rounds odd sides up."""

    def __init__(self, height: int, breadth: int) -> None:
        super().__init__()
        self.height, self.breadth = height, breadth

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.height, : self.breadth]


def _codes(encoder: nn.Module, pictures: Tensor) -> Tensor:
    """μ of every picture."""
    return torch.cat([encoder(part).chunk(2, dim=1)[0] for part in torch.split(pictures, _AT_ONCE)])


def _spread_as(codes: Tensor) -> nn.Linear:
    """The map z ↦ m + L·z under which N(0, I) has the mean and the covariance L·Lᵀ that codes of pictures have.

    Training pulls codes towards N(0, I) only so far; what is drawn should be what the decoder has learned to read.
    """
    values, vectors = torch.linalg.eigh(torch.cov(codes.double().T))
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(codes.shape[1], codes.shape[1])
    with torch.no_grad():
        layer.weight.copy_(vectors * values.clamp_min(0.0).sqrt())
        layer.bias.copy_(codes.mean(0))
    return layer.requires_grad_(False)


def _norm(channels: int) -> Sequence[nn.Module]:
    return nn.GroupNorm(math.gcd(8, channels), channels), nn.SiLU()


def _through(stages: nn.ModuleList, z: Tensor) -> Tensor:
    for stage in stages:
        z = stage(z)
    return z.sigmoid()


def _train(
    encoder: nn.Module,
    stages: nn.ModuleList,
    shown: Tensor,
    *,
    lessons: Lessons,
    generator: torch.Generator,
    progress: OnProgress,
) -> None:
    parameters = [*encoder.parameters(), *stages.parameters()]
    adam = torch.optim.Adam(parameters, lr=lessons.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, lessons.steps)
    numbers = shown[0].numel()
    for step in range(lessons.steps):
        picked = torch.randint(len(shown), (lessons.batch,), generator=generator, device=generator.device)
        x = shown[picked.to(shown.device)]
        seen = (x + lessons.jitter * _like(x, generator)).clamp(0.0, 1.0) if lessons.jitter else x
        mean, spread = encoder(seen).chunk(2, dim=1)
        spread = spread.clamp(-12.0, 6.0)
        rebuilt = _through(stages, mean + (0.5 * spread).exp() * _like(mean, generator))
        error = F.mse_loss(rebuilt, x).clamp_min(1e-6)
        apart = 0.5 * (mean.square() + spread.exp() - 1.0 - spread).sum(1).mean()
        loss = (0.5 * numbers * error.log() + lessons.strictness * apart) / numbers
        adam.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        schedule.step()
        progress((step + 1) / lessons.steps)


def _like(values: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(values.shape, generator=generator, device=generator.device).to(values)


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
