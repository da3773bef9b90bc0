"""Which gradient an adversary has seen, of which model, and of how many samples.

    the server, target "upload"   the gradient it recovers from the upload, of its own model; where it cannot read
                                  the upload: the first tensor of it, of the model as sent
    the server, target "sum"      the gradient it recovers from the sum of all uploads
    the wire                      the upload's first tensor, of the model as sent

A client that trains locally sends how far its parameters moved, w − w_k = lr·Σ_t g_t: divided by lr and the number
of steps that is about the gradient, as far as the model moved little. Clipping and decaying rates change its size,
which attacks by ratio or cosine do not see.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedveil.audit.attacks.matching import normalised
from fedveil.audit.attempts.common import count_of
from fedveil.audit.registry import Settings
from fedveil.audit.views import ClientView, Facts, OutsiderView, ServerView, View
from fedveil.downlink.architecture import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import ConfigError, NotApplicableError, unknown_name
from fedveil.protocol.directory import Announce
from fedveil.protocol.messages import Upload
from fedveil.tensors import Layout
from fedveil.work.gradients import prepare

TARGETS = ("upload", "sum")
FILLED = 2.0**58
"""Uniform 64-bit words leave all of d words below this with a chance of 2^−6d, numbers in fixed point always."""


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


def observed_in(view: View, settings: Settings) -> Observed:
    """The gradient that the adversary has; refused where it has none."""
    target = str(settings.get("target", "upload"))
    if target not in TARGETS:
        raise unknown_name("target", target, TARGETS)
    if isinstance(view, ServerView) and target == "sum":
        return _summed(view, settings)
    if isinstance(view, ServerView) and view.recovered is not None:
        gradient = _as_gradient(view.facts, view.recovered.gradient, view.samples)
        batch = batch_seen(view.facts, view.samples, settings)
        return Observed(view.facts, _own_model(view), gradient, batch, view.labels)
    seen = exchange_in(view, settings)
    return Observed(
        seen.facts,
        quiet(_model_as_sent(seen.facts.blueprint(), seen.broadcast)),
        _as_gradient(seen.facts, _first_tensor(seen), seen.samples),
        batch_seen(seen.facts, seen.samples, settings),
        view.labels if isinstance(view, ServerView) else None,
    )


def exchange_in(view: View, settings: Settings) -> Exchange:
    """What passed between the server and one client in one round: `client` and `round` say which, on the wire.

    Of several attempts at a round, the last with an upload. Where colluders took off what they share with the
    victim, the upload is what is left.
    """
    if isinstance(view, ServerView):
        payload = view.upload if view.uncovered is None else view.uncovered
        broadcast, samples = view.broadcast, view.samples
    elif isinstance(view, OutsiderView):
        payload, broadcast, samples = _overheard(view, settings)
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


def batch_seen(facts: Facts, samples: int | None, settings: Settings) -> int:
    """How many samples an upload's gradient is of: `batch`, or what follows from the client's announced count."""
    given = count_of(settings, "batch")
    if given is not None:
        return given
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


def _summed(view: ServerView, settings: Settings) -> Observed:
    if view.summed is None:
        raise NotApplicableError("the server opens no sum of this round")
    batch = count_of(settings, "batch")
    if batch is None:
        raise NotApplicableError("how many samples the sum is of was not said: set batch")
    gradient = _as_gradient(view.facts, view.summed.gradient, view.samples)
    return Observed(view.facts, _own_model(view), gradient, batch, view.labels)


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


def _model_as_sent(blueprint: Blueprint, broadcast: Broadcast) -> nn.Module:
    """The model on which a client computes, veiled or not."""
    module = blueprint.new_skeleton().to(broadcast.parameters.device, broadcast.parameters.dtype)
    prepare(blueprint, module, broadcast)
    return module


def quiet(module: nn.Module) -> nn.Module:
    """Without dropout, whose draws the adversary does not know."""
    for one in module.modules():
        if isinstance(one, nn.modules.dropout._DropoutNd):
            one.eval()
    return module


def _overheard(view: OutsiderView, settings: Settings) -> tuple[Tensor | None, Broadcast | None, int | None]:
    """(upload, model, samples) of `client` in `round`."""
    client, round = settings.get("client"), settings.get("round")
    if not isinstance(client, int) or not isinstance(round, int):
        raise ConfigError("Many uploads passed on the wire: the settings client and round must say which to read.")
    uploads = {
        one.attempt: said.payload
        for one in view.messages
        if (one.kind, one.client, one.round) == ("reply", client, round) and isinstance(said := one.opened(), Upload)
    }
    models = {one.attempt: one.broadcast for one in view.broadcasts if one.round == round}
    attempt = max(uploads, default=max(models, default=0))
    payload = uploads.get(attempt)
    return payload, models.get(attempt), _announced(view, client, payload)


def _announced(view: OutsiderView, client: int, payload: Tensor | None) -> int | None:
    """n_k: said before the first round, or the last entry of an upload that can be read."""
    for one in view.messages:
        said = one.opened() if (one.kind, one.client, one.round) == ("reply", client, 0) else None
        if isinstance(said, Announce):
            return said.samples
    if payload is None or not payload.is_floating_point():
        return None
    return round(float(view.facts.contributed(payload)["weight"]))
