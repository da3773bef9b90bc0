"""What the same adversary would have seen without protection: plain gradients, and the model as it is."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedveil.audit.attacks.matching import client_gradient
from fedveil.audit.seen import server_view
from fedveil.audit.views import ClientView, Message, Opened, ServerHistory, ServerView, View
from fedveil.downlink.plain import Unveiled
from fedveil.protocol.messages import Train
from fedveil.protocol.wire import encode
from fedveil.trials.subject import Subject

_SAME = 1e-5


def plain_gradient(subject: Subject, view: ServerView) -> Tensor:
    """The victim's gradient of the mean loss on its batch, at the server's model: what plain averaging sends."""
    x, y = subject.batch(view.victim, round=view.round)
    module = view.model()
    x = x.to(_like(module)) if x.is_floating_point() else x
    return client_gradient(module, view.facts.objective(), x.cpu(), y.cpu()).double()


def unprotected_upload(subject: Subject, view: ServerView) -> ServerView:
    """The view of a server to which the victim sent its gradient as it is, or its update: one step's is lr·g."""
    sent = plain_gradient(subject, view)
    if view.facts.returns != "gradient":
        sent = view.facts.lr * sent
    opened = Opened(sent, None, torch.empty(0))
    return replace(view, messages=(), recovered=opened, summed=None, colluders=(), uncovered=None)


def unprotected_history(subject: Subject, history: ServerHistory) -> ServerHistory:
    """The same for several rounds."""
    return ServerHistory(tuple(unprotected_upload(subject, one) for one in history.rounds))


def unprotected_model(subject: Subject, view: ClientView) -> ClientView:
    """The view of a client to which the last model was sent as it is."""
    last = max(place for place, one in enumerate(view.messages) if isinstance(one.opened(), Train))
    message = view.messages[last]
    said = message.opened()
    assert isinstance(said, Train)
    weights = server_view(subject.record, view.client, round=message.round, attempt=message.attempt).weights
    assert weights is not None
    sent = replace(said, broadcast=Unveiled(view.facts.blueprint(), weights).broadcast())
    raw = encode(sent)
    plain = Message(message.round, message.attempt, message.phase, message.kind, message.client, raw)
    return replace(view, messages=(plain,))


def less_colluders(subject: Subject, view: ServerView, *, cohort: tuple[int, ...]) -> tuple[ServerView, int]:
    """The sum less what colluders put into it, and of how many samples the rest is: of their batches.

    (N·ḡ − Σ_c n_c·g_c)/n: colluders know their own data and the model's gradient on it. What noise they added is
    left in, so this understates colluders under noise.
    """
    assert view.summed is not None
    weights = {client: len(subject.job.pool.clients[client]) for client in cohort}
    left = view.summed.gradient.double() * sum(weights.values())
    for one in view.colluders:
        own = server_view(subject.record, one, round=view.round, attempt=view.attempt)
        left = left - weights[one] * plain_gradient(subject, own)
    honest = [weights[client] for client in cohort if client not in view.colluders]
    samples = sum(view.facts.batch_of(count) for count in honest)
    return replace(view, summed=Opened(left / sum(honest), None, torch.empty(0))), samples


def _like(module: torch.nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def alike(view: View, twin: View) -> bool:
    """Whether a server's view and its twin hold the same gradient: then the same attack finds the same."""
    if not isinstance(view, ServerView) or not isinstance(twin, ServerView):
        return False
    if view.recovered is None or twin.recovered is None or not view.recovered.gradient.numel():
        return False
    ours, theirs = view.recovered.gradient.double(), twin.recovered.gradient.double()
    return float((ours - theirs).norm()) <= _SAME * float(theirs.norm())
