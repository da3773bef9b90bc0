"""Gradients: which one an adversary has seen, and what all attacks share that look for inputs with that gradient.

    the server, target "upload"   the gradient it recovers from the upload, of its own model; where it cannot read
                                  the upload: the first tensor of it, of the model as sent
    the server, target "sum"      the gradient it recovers from the sum of all uploads
    the wire                      the upload's first tensor, of the model as sent

A client that trains locally sends how far its parameters moved, w − w_k = lr·Σ_t g_t: divided by lr and the number
of steps that is about the gradient, as far as the model moved little. Clipping and decaying rates change its size,
which attacks by ratio or cosine do not see.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedveil.audit.attack import AttackContext, OnProgress, require_classes, require_numbers
from fedveil.audit.attacks.extraction import as_sent
from fedveil.audit.views import ClientView, Facts, OutsiderView, ServerView, View
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NotApplicableError, NumericError
from fedveil.protocol.directory import Announce
from fedveil.protocol.messages import Upload
from fedveil.tensors import Layout, flatten
from fedveil.work.losses import Loss

MOST_SAMPLES = 8
"""How many samples a search can tell apart."""

MOST_READ = 64
"""Of how many samples' gradient anything is read at all."""

FILLED = 2.0**58
"""Uniform 64-bit words leave all of d words below this with a chance of 2^−6d, numbers in fixed point always."""

Distance = Callable[[Tensor, Tensor], Tensor]


# Tensors have no single truth value under ==, so equality is identity.
@dataclass(frozen=True, eq=False)
class Problem:
    """One observed gradient and what the attacker knows besides.

    `gradient` is the gradient of the mean loss over `batch` samples, flat, in the order of
    `module.named_parameters()`. `labels` is None where the attacker does not know them. `box` holds the
    least and the greatest value an input can have, or None. Of a `clipped` gradient only the direction counts. The
    module is in the mode (training or evaluation) in which the gradient was taken; attacks work on a copy of it.
    """

    module: nn.Module
    loss: Loss
    gradient: Tensor
    input_shape: tuple[int, ...]
    outputs: int
    batch: int = 1
    labels: Tensor | None = None
    box: tuple[float, float] | None = (0.0, 1.0)
    clipped: bool = False

    def __post_init__(self) -> None:
        size = sum(parameter.numel() for parameter in self.module.parameters())
        if self.gradient.shape != (size,):
            raise ConfigError(
                f"The observed gradient has shape {tuple(self.gradient.shape)}, but the model has {size} parameters: "
                "pass one flat vector with an entry for each."
            )
        if not bool(self.gradient.isfinite().all()):
            raise NumericError("The observed gradient holds NaN or infinity; there is nothing to match.")
        if not 1 <= self.batch <= MOST_READ:
            raise ConfigError(f"Reconstruction takes batches of 1 to {MOST_READ} samples, not {self.batch}.")
        if self.labels is not None and len(self.labels) != self.batch:
            raise ConfigError(f"{len(self.labels)} labels for a batch of {self.batch}: pass one for each sample.")
        if self.box is not None and not self.box[0] < self.box[1]:
            raise ConfigError(f"The box {self.box} is empty: its first number must be below its second.")


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found. `loss` is the matching loss it reached: the attack's own quality, not the truth's."""

    inputs: Tensor
    labels: Tensor
    loss: float


def squared_distance(found: Tensor, observed: Tensor) -> Tensor:
    """‖g − ĝ‖² / ‖ĝ‖²: relative, so that 1 means nothing was explained, at whatever scale uploads come."""
    return (found - observed).square().sum() / observed.square().sum().clamp_min(_tiny(observed))


def cosine_distance(found: Tensor, observed: Tensor) -> Tensor:
    """1 − ⟨g, ĝ⟩ / (‖g‖·‖ĝ‖)."""
    lengths = (found.square().sum() * observed.square().sum()).clamp_min(_tiny(observed)).sqrt()
    return 1.0 - (found * observed).sum() / lengths


def normalised(gradient: Tensor) -> Tensor:
    """The gradient divided by its largest entry's size, against overflow of its square; zeros stay zeros."""
    largest = gradient.abs().max() if gradient.numel() else gradient.new_zeros(())
    return gradient / largest if largest > 0 else gradient


def private_copy(problem: Problem, *, dtype: torch.dtype) -> nn.Module:
    """The model on the gradient's device in `dtype`, every parameter differentiable, nobody else's."""
    module = copy.deepcopy(problem.module).to(device=problem.gradient.device, dtype=dtype)
    return module.requires_grad_(True)


def gradient_at(module: nn.Module, value: Tensor, *, differentiable: bool = True) -> Tensor:
    """The flat gradient of `value`; parameters it does not depend on get zeros."""
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(
        value,
        parameters,
        create_graph=differentiable,
        retain_graph=differentiable,
        allow_unused=True,
        materialize_grads=True,
    )
    return flatten(gradients)


def client_gradient(module: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """The upload of plain federated averaging after one step: the gradient of the mean loss on (x, y)."""
    module = copy.deepcopy(module).requires_grad_(True)
    return gradient_at(module, loss.mean(module(x), y), differentiable=False).detach()


def matching_loss(problem: Problem, inputs: Tensor, labels: Tensor, *, distance: Distance = squared_distance) -> float:
    """How far the gradient at a guess is from the observed one."""
    module = private_copy(problem, dtype=inputs.dtype)
    value = problem.loss.mean(module(inputs), labels)
    gradient = gradient_at(module, value, differentiable=False)
    return float(distance(gradient, problem.gradient.to(gradient.dtype)))


def first_guess(problem: Problem, *, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniform in the box, or standard normal where there is none."""
    shape = (problem.batch, *problem.input_shape)
    device = problem.gradient.device
    if problem.box is None:
        return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device).to(device)
    low, high = problem.box
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=dtype, device=generator.device).to(device)


def boxed(problem: Problem, inputs: Tensor) -> Tensor:
    """The inputs, moved to the nearest point of the box; what is not a number goes to its middle."""
    if problem.box is None:
        return inputs.nan_to_num()
    low, high = problem.box
    return inputs.nan_to_num(nan=(low + high) / 2).clamp(low, high)


class Attempted(Protocol):
    """What an attempt found, with the matching loss that it reached."""

    @property
    def loss(self) -> float:
        """The less, the better."""
        ...


Outcome = TypeVar("Outcome", bound=Attempted)


def best(attempt: Callable[[OnProgress], Outcome], *, times: int, good_enough: float, progress: OnProgress) -> Outcome:
    """The attempt with the least matching loss of several, each from a first guess of its own.

    No more are made once one is at most `good_enough`; each is given its part of the progress to report.
    """
    if times < 1:
        raise ConfigError("An attack needs at least one attempt: set restarts to 1 or more.")
    made: list[Outcome] = []
    for done in range(times):
        made.append(attempt(lambda part, done=done: progress((done + part) / times)))  # type: ignore[misc]
        if made[-1].loss <= good_enough:
            break
    progress(1.0)
    return min(made, key=lambda attempted: _order(attempted.loss))


def _order(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _tiny(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).tiny)


@dataclass(frozen=True, eq=False)
class Observed:
    """A flat gradient of the mean loss over `batch` samples, and the model it is of, in the mode it was taken in."""

    facts: Facts
    module: nn.Module
    gradient: Tensor
    batch: int
    labels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Exchange:
    """One round's model as it was sent, and one client's upload as it was received; `samples` where that is known."""

    facts: Facts
    broadcast: Broadcast
    payload: Tensor
    samples: int | None

    @property
    def numbers(self) -> Tensor:
        """The upload in float64; words are divided by 2⁶³, which nothing that is a ratio notices."""
        return self.payload.double() if self.payload.is_floating_point() else self.payload.double() / 2.0**63


def observed_in(view: View, context: AttackContext) -> Observed:
    """The gradient that the adversary has; refused where it has none."""
    if isinstance(view, ServerView) and context.target == "sum":
        return _summed(view, context)
    if isinstance(view, ServerView) and view.recovered is not None:
        gradient = _as_gradient(view.facts, view.recovered.gradient, view.samples)
        batch = batch_seen(view.facts, view.samples, context)
        return Observed(view.facts, _own_model(view), gradient, batch, view.labels)
    seen = exchange_in(view, context)
    return Observed(
        seen.facts,
        quiet(as_sent(seen.facts.architecture(), seen.broadcast)),
        _as_gradient(seen.facts, _first_tensor(seen), seen.samples),
        batch_seen(seen.facts, seen.samples, context),
        view.labels if isinstance(view, ServerView) else None,
    )


def exchange_in(view: View, context: AttackContext) -> Exchange:
    """What passed between the server and one client in one round: `client` and `round` say which, on the wire.

    Of several attempts at a round, the last with an upload. Where colluders took off what they share with the
    victim, the upload is what is left.
    """
    if isinstance(view, ServerView):
        payload = view.upload if view.uncovered is None else view.uncovered
        broadcast, samples = view.broadcast, view.samples
    elif isinstance(view, OutsiderView):
        payload, broadcast, samples = _overheard(view, context)
    else:
        who = "a client, which gets no upload" if isinstance(view, ClientView) else "many uploads at once"
        raise NotApplicableError(f"this attack reads one upload, and this is the view of {who}")
    if broadcast is None:
        raise NotApplicableError("no model was sent in this round: it lives with the clients")
    if payload is None:
        raise NotApplicableError("no upload came from this client in this round")
    if payload.shape != (Layout(view.facts.contribution).length,):
        raise NotApplicableError("the upload is no vector with a gradient in it")
    return Exchange(view.facts, broadcast, payload, samples)


def batch_seen(facts: Facts, samples: int | None, context: AttackContext) -> int:
    """How many samples an upload's gradient is of: `batch`, or what follows from the client's announced count."""
    if context.batch is not None:
        return context.batch
    if samples is None:
        raise NotApplicableError("nobody but the client knows how many samples this is of: set batch to try a number")
    return min(samples, facts.batch_of(samples) * steps_of(facts, samples))


def is_clipped(facts: Facts) -> bool:
    """Whether uploads are bounded, as differential privacy needs it: then they carry nothing beside the gradient."""
    return dict(facts.contribution).get("values") == (0,)


def steps_of(facts: Facts, samples: int) -> int:
    """How many local steps a client with `samples` samples takes; 1 where it sends a gradient."""
    if facts.returns == "gradient":
        return 1
    if facts.local_steps is not None:
        return facts.local_steps
    return (facts.local_epochs or 1) * max(1, samples // facts.batch_of(samples))


def _summed(view: ServerView, context: AttackContext) -> Observed:
    if view.summed is None:
        raise NotApplicableError("the server opens no sum of this round")
    if context.batch is None:
        raise NotApplicableError("how many samples the sum is of was not said: set batch")
    gradient = _as_gradient(view.facts, view.summed.gradient, view.samples)
    return Observed(view.facts, _own_model(view), gradient, context.batch, view.labels)


def _as_gradient(facts: Facts, sent: Tensor, samples: int | None) -> Tensor:
    """(w − w_k)/(lr·steps), or what was sent if that is a gradient."""
    if facts.returns == "gradient":
        return sent
    return sent / (facts.lr * steps_of(facts, samples or 1))


def _first_tensor(seen: Exchange) -> Tensor:
    """The upload's first gradient over n_k; words that masks still cover are read as numbers up to 1."""
    parts = seen.facts.contributed(seen.numbers)
    first: Tensor = parts["gradients"][0]
    covered = not seen.payload.is_floating_point() and float(seen.payload.double().abs().max()) >= FILLED
    if covered or not float(parts["weight"]):
        return normalised(first)
    # Numbers in fixed point have one step, the weight's too: their ratio is the gradient, whatever the step.
    return first / parts["weight"]


def _own_model(view: ServerView) -> nn.Module:
    if view.weights is None:
        raise NotApplicableError("the server holds no model: it only relays")
    return quiet(view.model())


def quiet(module: nn.Module) -> nn.Module:
    """Without dropout, whose draws the adversary does not know."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
    return module


def _overheard(view: OutsiderView, context: AttackContext) -> tuple[Tensor | None, Broadcast | None, int | None]:
    """(upload, model, samples) of `client` in `round`."""
    client, round = context.client, context.round
    if not isinstance(client, int) or not isinstance(round, int):
        raise ConfigError("Many uploads passed on the wire: the settings client and round must say which to read.")
    uploads = {
        message.attempt: view.facts.whole(said)
        for message in view.messages
        if (message.kind, message.client, message.round) == ("reply", client, round)
        and isinstance(said := message.opened(), Upload)
    }
    models = {sent.attempt: sent.broadcast for sent in view.broadcasts if sent.round == round}
    attempt = max(uploads, default=max(models, default=0))
    payload = uploads.get(attempt)
    return payload, models.get(attempt), _announced(view, client, payload)


def _announced(view: OutsiderView, client: int, payload: Tensor | None) -> int | None:
    """n_k: said before the first round, or the last entry of an upload that can be read."""
    for message in view.messages:
        said = message.opened() if (message.kind, message.client, message.round) == ("reply", client, 0) else None
        if isinstance(said, Announce):
            return said.samples
    if payload is None or not payload.is_floating_point():
        return None
    return round(float(view.facts.contributed(payload)["weight"]))


def problem_from(seen: Observed, context: AttackContext, *, most: int = MOST_SAMPLES) -> Problem:
    """What was observed as a problem for attacks that match gradients, if it is of at most `most` samples."""
    facts = seen.facts
    require_classes(facts)
    require_numbers(facts)
    if seen.batch > most:
        raise NotApplicableError(f"a gradient of {seen.batch} samples: this attack takes up to {most}")
    device = context.device
    return Problem(
        module=seen.module.to(device),
        loss=facts.objective(),
        gradient=seen.gradient.to(device),
        input_shape=facts.input_shape,
        outputs=facts.outputs,
        batch=seen.batch,
        labels=None if seen.labels is None else seen.labels.to(device),
        box=context.box,
        clipped=is_clipped(facts) if context.clipped is None else context.clipped,
    )


def as_result(found: Reconstruction) -> dict[str, Tensor]:
    """A reconstruction as tensors that leave the process."""
    return {
        "inputs": found.inputs.detach().cpu(),
        "labels": found.labels.to(torch.int64).cpu(),
        "loss": torch.tensor(found.loss, dtype=torch.float64),
    }
