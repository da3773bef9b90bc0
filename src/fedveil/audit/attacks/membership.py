"""Membership inference by an attack network: was this sample among those the model was trained on?

The attacker knows of some candidates (half of them, in the papers) whether they were members. It describes every
candidate by what the model makes of it, trains a small network to tell known members from known non-members, and
scores the rest. A blind guess is right half the time.

An auditor grants candidates.x, candidates.y, and candidates.membership, which is 1 or 0 where the client knows the
answer and −1 where it is asked for. The result are `scores` of those it is asked for, in their order, and the
`threshold` above which it says "member".

With the setting `adaptive` the client first takes the head noise off by calibration on its own samples. Secret scales
on hidden layers need no such step: every activation is standardised over the candidates, which undoes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.audit.attack import AttackContext, attack, require_classes, seen_by
from fedveil.audit.attacks.extraction import calibrated, held_model, inputs_like
from fedveil.audit.views import ClientView, Facts, View
from fedveil.errors import ConfigError, DataError, NotApplicableError, NumericError, unknown_name

Outputs = Callable[[Tensor], Tensor]
Features = Literal["outputs", "classes", "layers", "second", "third", "gradients"]
FEATURES: tuple[Features, ...] = get_args(Features)
LAYERS: dict[str, Features] = {"last": "outputs", "second": "second", "third": "third", "three": "layers"}
"""What the setting `layer` stands for."""

UNKNOWN = -1
FEWEST_KNOWN = 4
LAST_LAYERS = 3
_PLACES: dict[Features, tuple[int, ...]] = {"second": (2,), "third": (3,), "layers": (3, 2, 1)}
_WIDEST = 5.0
_AT_ONCE = 256
_PENALTY = 0.3


@attack(
    "membership",
    sees="model",
    asset="members",
    granted=("public",),
    reference="overfitted",
    how="attack network on outputs, half of the members known",
)
def membership_attack(
    view: View, context: AttackContext, *, adaptive: bool = False, features: str = "outputs"
) -> dict[str, Tensor]:
    """By an attack network on the outputs (or on other `features`)."""
    return _by_network(view, context, adaptive=adaptive, features=features)


@attack(
    "membership-layers",
    sees="model",
    asset="members",
    granted=("public",),
    reference="overfitted",
    how="the same on the last three layers",
)
def membership_layers_attack(
    view: View, context: AttackContext, *, adaptive: bool = False, layer: str = "three", features: str | None = None
) -> dict[str, Tensor]:
    """By an attack network on layers: all of the last three, or the one that `layer` names."""
    if layer not in LAYERS:
        raise unknown_name("layer", str(layer), LAYERS)
    return _by_network(view, context, adaptive=adaptive, features=features or LAYERS[layer])


def _by_network(view: View, context: AttackContext, *, adaptive: bool, features: str) -> dict[str, Tensor]:
    seen, model = held_by(view, context, adaptive=adaptive)
    guess = membership(
        model,
        candidates_in(seen, like=next(model.parameters())),
        generator=context.generator(),
        features=cast(Features, str(features)),
        criterion=criterion_of(seen.facts),
        progress=context.progress,
    )
    return guess.result


def held_by(view: View, context: AttackContext, *, adaptive: bool) -> tuple[ClientView, nn.Module]:
    """The model as the client holds it, or as it is after calibration."""
    seen = seen_by(view, ClientView)
    require_classes(seen.facts)
    return seen, (calibrated(seen, device=context.device) if adaptive else held_model(seen, device=context.device)[1])


def candidates_in(view: ClientView, *, like: Tensor) -> Candidates:
    """The candidates that an auditor grants, where and as `like` is; tokens keep their type."""
    x, y, shown = (granted_in(view, f"candidates.{name}") for name in ("x", "y", "membership"))
    if min(int((shown == kind).sum()) for kind in (0, 1)) < FEWEST_KNOWN:
        raise NotApplicableError(
            f"{len(shown)} candidates: an attacker has to know of {FEWEST_KNOWN} members and of {FEWEST_KNOWN} others"
        )
    return Candidates(inputs_like(like, x), y.to(like.device), shown.to(like.device))


def granted_in(view: ClientView, name: str) -> Tensor:
    """What the auditor grants under a name."""
    granted = view.known.get(name)
    if granted is None:
        raise ConfigError(f"The view holds no {name}: membership is told of candidates that an auditor grants.")
    return granted


def criterion_of(facts: Facts) -> Criterion:
    """How the run's loss judges one sample."""
    return Criterion("square" if facts.loss == "square" else "cross-entropy", facts.target_scale)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Samples with labels; ``membership`` is 1 or 0 where the attacker knows it and UNKNOWN elsewhere.

    The truth about the rest is not here, so no attack can look at it.
    """

    x: Tensor
    y: Tensor
    membership: Tensor

    def __post_init__(self) -> None:
        if self.y.dtype is not torch.int64 or self.y.ndim != 1:
            raise DataError("Membership inference needs class labels, one int64 number per candidate.")
        if not len(self.x) == len(self.y) == len(self.membership) or self.membership.ndim != 1:
            raise DataError(
                f"Candidates need one label and one membership each: there are {len(self.x)} samples, "
                f"{len(self.y)} labels and memberships of shape {tuple(self.membership.shape)}."
            )
        if not torch.isin(self.membership, torch.tensor([0, 1, UNKNOWN]).to(self.membership)).all():
            raise DataError(f"A membership is 1 (member), 0 (not) or {UNKNOWN} (unknown to the attacker).")
        if not self.unknown.numel():
            raise DataError("The attacker knows every candidate's membership: nothing is left to infer.")

    @property
    def unknown(self) -> Tensor:
        """Rows to be scored."""
        return (self.membership == UNKNOWN).nonzero().flatten()

    def known(self, membership: int) -> Tensor:
        """Rows the attacker knows to be members (1) or non-members (0)."""
        return (self.membership == membership).nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Guess:
    """Scores (high: member) of the candidates at ``rows``; the attacker calls those above ``threshold`` members."""

    rows: Tensor
    scores: Tensor
    threshold: float

    @property
    def result(self) -> dict[str, Tensor]:
        """The guess as it leaves the process."""
        return {"scores": self.scores.double(), "threshold": torch.tensor(self.threshold, dtype=torch.float64)}


@dataclass(frozen=True)
class Criterion:
    """The loss the model was trained with; ``target_scale`` is the M of square-loss targets M·1_y."""

    kind: Literal["cross-entropy", "square"] = "cross-entropy"
    target_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("cross-entropy", "square"):
            raise unknown_name("loss", self.kind, ("cross-entropy", "square"))

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """−log p_y, or ‖z − M·1_y‖², per sample."""
        if self.kind == "cross-entropy":
            return F.cross_entropy(scores, y, reduction="none")
        return (scores - self.target_scale * F.one_hot(y, scores.shape[1])).square().sum(1)

    def closeness(self, scores: Tensor, y: Tensor) -> Tensor:
        """How well a model fits each sample, on a scale where it is about Gaussian.

        log p_y/(1−p_y) = z_y − log Σ_{i≠y} exp z_i for cross-entropy, −log ‖z − M·1_y‖² for the square loss.
        """
        if self.kind == "cross-entropy":
            others = scores.scatter(1, y[:, None], -torch.inf)
            return scores.gather(1, y[:, None])[:, 0] - others.logsumexp(1)
        return -self.losses(scores, y).clamp_min(torch.finfo(scores.dtype).tiny).log()


@dataclass(frozen=True)
class AttackNetwork:
    """The attack network and its training: one hidden layer, Adam, batches half members and half not.

    ``folds`` networks are trained, each on all but one part of what the attacker knows and stopped at the epoch
    that does best on that part; their mean is the score. (Choosing the epoch on the judged samples, as some papers
    do, would report the luckiest of all epochs.)
    """

    hidden: int = 64
    epochs: int = 100
    rate: float = 1e-3
    weight_decay: float = 1e-2
    batch: int = 64
    folds: int = FEWEST_KNOWN

    def __post_init__(self) -> None:
        if min(self.hidden, self.epochs) < 1 or min(self.batch, self.folds) < 2:
            raise ConfigError(f"An attack network needs hidden, epochs ≥ 1 and batch, folds ≥ 2, not {self}.")


def membership(
    model: nn.Module,
    candidates: Candidates,
    *,
    generator: torch.Generator,
    features: Features = "outputs",
    outputs: Outputs | None = None,
    criterion: Criterion | None = None,
    network: AttackNetwork | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Guess:
    """Score the candidates whose membership the attacker does not know.

    ``model`` is the network as the adversary holds it. ``outputs`` maps samples to class scores and stands for
    ``model`` itself where the attacker can do better, as after calibrating away a perturbed head. ``features``:
    "outputs" sorts the class scores, "classes" leaves them in place, "layers" adds the activations of the last
    three layers, "gradients" the norms of the loss's gradients there (``outputs`` must then be differentiable
    with respect to ``model``'s parameters); "second" and "third" use nothing but the label and the activations of
    the second and the third layer from the end.
    """
    network, criterion = network or AttackNetwork(), criterion or Criterion()
    described = describe(model, candidates, features=features, outputs=outputs, criterion=criterion)
    inside, outside, rows = candidates.known(1).cpu(), candidates.known(0).cpu(), candidates.unknown.cpu()
    if min(len(inside), len(outside)) < network.folds:
        raise DataError(
            f"An attack network needs at least {network.folds} known members and as many known non-members, "
            f"not {len(inside)} and {len(outside)}."
        )
    table = _table(described, known=torch.cat([inside, outside]))
    scores = _scores(table, inside, outside, rows, network=network, generator=generator, progress=progress)
    return Guess(rows=rows, scores=scores, threshold=0.0)


def describe(
    model: nn.Module,
    candidates: Candidates,
    *,
    features: Features = "outputs",
    outputs: Outputs | None = None,
    criterion: Criterion,
) -> list[Tensor]:
    """Blocks of features, in each one row per candidate, on the CPU in double precision."""
    if features not in FEATURES:
        raise unknown_name("kind of membership features", features, FEATURES)
    x, y = candidates.x, candidates.y
    with evaluating(model):
        scores = class_scores(outputs or model, x)
        if y.min() < 0 or y.max() >= scores.shape[1]:
            raise DataError(f"Labels must lie in 0…{scores.shape[1] - 1}, the model's outputs.")
        blocks = _output_features(scores, y.to(scores.device), criterion, ordered=features != "classes")
        if features in _PLACES:
            last = _from_last(activations(model, x), y, features=features, classes=scores.shape[1])
            blocks = [*(blocks if features == "layers" else blocks[-1:]), *last]
        elif features == "gradients":
            blocks.append(_gradient_norms(model, outputs or model, x, y, criterion))
    if not all(block.isfinite().all() for block in blocks):
        raise NumericError("The model gives NaN or infinity on a candidate: membership cannot be inferred from it.")
    return [block.double().cpu() for block in blocks]


def class_scores(outputs: Outputs, x: Tensor) -> Tensor:
    """Class scores in double precision, computed in parts, without gradients."""
    with torch.no_grad():
        parts = parts_of(len(x))
        scores = reordered([outputs(x[rows.to(x.device)]) for rows in parts], parts).double()
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise DataError(f"Membership inference needs at least two class scores per sample, not {scores.shape[1:]}.")
    return scores


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards every part and every buffer of it as it was.

    A model that is in evaluation mode already is taken as it comes: some of its norms may use the batch because
    no running statistics were sent with it.
    """
    modes = {part: part.training for part in model.modules()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    if model.training:
        model.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(buffers[name])


def _output_features(scores: Tensor, y: Tensor, criterion: Criterion, *, ordered: bool) -> list[Tensor]:
    """Class scores and their log-probabilities; loss, closeness, whether the label is the first choice; the label."""
    logs = scores.log_softmax(1)
    fit = [criterion.losses(scores, y), criterion.closeness(scores, y), (scores.argmax(1) == y).to(scores)]
    shown = [values.sort(1, descending=True).values if ordered else values for values in (scores, logs)]
    return [torch.cat(shown, 1), torch.stack(fit, 1), F.one_hot(y, scores.shape[1]).to(scores)]


def _from_last(layers: Sequence[Tensor], y: Tensor, *, features: Features, classes: int) -> list[Tensor]:
    """How well each candidate lies among its own class in hidden layers, and activations.

    The last layer's fit is in the output features already, by the model's own loss.
    """
    places = [place for place in _PLACES[features] if place <= len(layers)]
    if not places:
        raise NotApplicableError(f"too few layers ({len(layers)}): there is no {features} one from the end")
    fits = [class_fit(layers[-place], y, classes=classes) for place in places if place > 1]
    return fits + [layers[-place] for place in places]


def _gradient_norms(model: nn.Module, outputs: Outputs, x: Tensor, y: Tensor, criterion: Criterion) -> Tensor:
    """log ‖∂loss/∂θ‖ of each sample, for every tensor θ of the last layers."""
    if any(part.training for part in model.modules()):
        raise NotApplicableError(
            "A norm of this model uses the batch, so a sample has no gradient of its own: use the features 'layers'."
        )
    parameters = [parameter for layer in last_layers(model, x) for parameter in layer.parameters(recurse=False)]
    rows = []
    for i in range(len(x)):
        with torch.enable_grad():
            loss = criterion.losses(outputs(x[i : i + 1]), y[i : i + 1].to(x.device)).sum()
        if not loss.requires_grad:
            raise ConfigError("The features 'gradients' need outputs that keep their gradient: remove no_grad, detach.")
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = [torch.zeros(()) if gradient is None else gradient.double().norm().cpu() for gradient in gradients]
        rows.append(torch.stack([norm.double() for norm in norms]))
    # A sample fitted to the last bit has no gradient at all, and log 0 is no feature.
    return torch.stack(rows).clamp_min(1e-30).log()


def _table(blocks: Sequence[Tensor], *, known: Tensor) -> Tensor:
    """All blocks side by side, standardised by the known rows, each block with a total variance of one.

    Without the last, a thousand activations would drown the three numbers that say how well a sample is fitted.
    """
    columns = []
    for block in blocks:
        spread, middle = torch.std_mean(block[known], dim=0, correction=0)
        varied = spread > 1e-12 * (1 + middle.abs())
        scaled = (block - middle)[:, varied] / spread[varied]
        columns.append(scaled.clamp(-_WIDEST, _WIDEST) / max(1, scaled.shape[1]) ** 0.5)
    return torch.cat(columns, 1).float()


def _scores(
    table: Tensor,
    inside: Tensor,
    outside: Tensor,
    rows: Tensor,
    *,
    network: AttackNetwork,
    generator: torch.Generator,
    progress: Callable[[float], None],
) -> Tensor:
    """The mean logit, at ``rows``, of networks trained side by side on all known rows but one fold each."""
    groups = [group[torch.randperm(len(group), generator=generator)] for group in (inside, outside)]
    held = torch.cat([_held(len(group), network.folds) / len(group) for group in groups], 1)
    truth = torch.cat([torch.ones(len(inside)), torch.zeros(len(outside))])
    known, half = table[torch.cat(groups)], network.batch // 2
    steps = -(-max(len(group) for group in groups) // half)
    weights = _initial(table.shape[1], network, generator)
    adam = torch.optim.AdamW(weights, lr=network.rate, weight_decay=network.weight_decay)
    best, kept = torch.full((network.folds,), torch.inf), [weight.detach().clone() for weight in weights]
    for epoch in range(network.epochs):
        for _ in range(steps):
            members = _batch(len(inside), half, network.folds, generator)
            others = _batch(len(outside), half, network.folds, generator) + len(inside)
            picked = torch.cat([members, others], 1)
            loss = F.binary_cross_entropy_with_logits(_logits(known[picked], weights), truth[picked])
            adam.zero_grad()
            torch.autograd.backward(loss * network.folds)
            adam.step()
        with torch.no_grad():
            logits = _logits(known.expand(network.folds, -1, -1), weights)
            errors = F.binary_cross_entropy_with_logits(logits, truth.expand_as(logits), reduction="none")
        now = (errors * held).sum(1)
        better = now < best
        best = torch.where(better, now, best)
        for old, new in zip(kept, weights, strict=True):
            old[better] = new.detach()[better]
        progress((epoch + 1) / network.epochs)
    return _logits(table[rows].expand(network.folds, -1, -1), kept).mean(0)


def _initial(width: int, network: AttackNetwork, generator: torch.Generator) -> list[Tensor]:
    """One network per fold: W₁, b₁, w₂, b₂, stacked."""
    folds, hidden = network.folds, network.hidden
    return [
        torch.randn(folds, width, hidden, generator=generator).requires_grad_(),
        torch.zeros(folds, 1, hidden, requires_grad=True),
        (0.01 * torch.randn(folds, hidden, 1, generator=generator)).requires_grad_(),
        torch.zeros(folds, 1, 1, requires_grad=True),
    ]


def _logits(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """w₂ᵀ relu(W₁x + b₁) + b₂ for x of shape (folds, rows, features)."""
    first, bias, second, offset = weights
    return ((x @ first + bias).relu() @ second + offset).squeeze(2)


def _held(count: int, folds: int) -> Tensor:
    """1 where row k is held out of fold f (every folds-th), of shape (folds, count)."""
    return (torch.arange(count) % folds == torch.arange(folds)[:, None]).float()


def _batch(count: int, size: int, folds: int, generator: torch.Generator) -> Tensor:
    """For each fold, ``size`` random rows that are not held out of it."""
    return torch.multinomial(1 - _held(count, folds), size, replacement=True, generator=generator)


def parts_of(count: int) -> list[Tensor]:
    """Rows in equal parts of bounded size, mixed.

    A norm that takes its statistics from the batch would otherwise mark candidates listed side by side, and a list
    that begins with the members would give them away whatever the model had learned.
    """
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return list(mixed.tensor_split(-(-count // _AT_ONCE)))


def reordered(results: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """What was computed in parts, in the order of the candidates."""
    return torch.cat(list(results))[torch.cat(list(parts)).argsort().to(results[0].device)]


def last_layers(model: nn.Module, x: Tensor) -> list[nn.Module]:
    """The last layers with a weight matrix or kernel, in the order in which a sample passes them."""
    passed: dict[nn.Module, None] = {}

    def note(layer: nn.Module, _: object, __: object) -> None:
        passed.pop(layer, None)
        passed[layer] = None

    layers = [part for part in model.modules() if _weighted(part)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            model(x[:2])
    finally:
        for hook in hooks:
            hook.remove()
    if not passed:
        raise DataError("The model has no layer with a weight matrix to look into: use the features 'outputs'.")
    return list(passed)[-LAST_LAYERS:]


def _weighted(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    return weight is not None and weight.ndim >= 2 and not isinstance(part, nn.Embedding)


def activations(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the last layers give: each as the next one reads it, the last one's as it is.

    Those with an extent in space are averaged over it.
    """
    read: dict[nn.Module, Tensor] = {}
    given: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        read[layer] = _pooled(args[0])
        given[:] = [_pooled(output)]

    layers = last_layers(model, x)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    parts, batches = parts_of(len(x)), []
    try:
        with torch.no_grad():
            for rows in parts:
                model(x[rows.to(x.device)])
                batches.append([*(read[layer] for layer in layers[1:]), *given])
    finally:
        for hook in hooks:
            hook.remove()
    return [reordered(results, parts) for results in zip(*batches, strict=True)]


def class_fit(activation: Tensor, y: Tensor, *, classes: int) -> Tensor:
    """How well a linear map from all other candidates' activations to their classes tells each candidate's own.

    Leave-one-out ridge regression on standardised activations Z, with K = ZZᵀ/width + λ·1 and one-hot targets T:
    the residual of candidate i is [K⁻¹(T − T̄)]_i / [K⁻¹]_ii. Columns: −log of its square, the margin of the own
    class over the next, whether it comes first. Positive scales on the activations change nothing; who is a member
    is not used, so members and others are treated alike.
    """
    values, y = activation.double(), y.to(activation.device)
    spread, middle = torch.std_mean(values, dim=0, correction=0)
    varied = spread > 1e-9 * spread.max().clamp_min(1e-300)
    standard = (values - middle)[:, varied] / spread[varied]
    kernel = standard @ standard.T / max(1, standard.shape[1])
    inverse = torch.linalg.inv(kernel + _PENALTY * torch.eye(len(y)).to(kernel))
    targets = F.one_hot(y, classes).double()
    residual = inverse @ (targets - targets.mean(0)) / inverse.diagonal()[:, None]
    told = targets - residual
    own = told.gather(1, y[:, None])[:, 0]
    margin = own - told.scatter(1, y[:, None], -torch.inf).amax(1)
    return torch.stack([-residual.square().sum(1).clamp_min(1e-30).log(), margin, (margin > 0).double()], 1)


def _pooled(values: Tensor) -> Tensor:
    return values.flatten(2).mean(2) if values.ndim > 2 else values
