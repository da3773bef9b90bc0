"""What every engine is: the server's steps one after the other, each given to whoever it concerns."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from fedveil.errors import Code, FedVeilError, Refusal
from fedveil.protocol.messages import Reply
from fedveil.protocol.phases import Accumulator, Ask, Gathered, RoundBegins, RoundDone, RunStopped, Steps

_LOG = logging.getLogger(__name__)


def folded(into: Accumulator, reply: Reply, sender: int) -> Refusal | None:
    """Fold a client's reply in, or say why it is refused. Whatever a client sends costs that reply, no more."""
    if reply.client != sender:
        return Refusal(Code.PROTOCOL, "its answer names another client")
    try:
        into.add(reply)
    except FedVeilError as reason:
        return Refusal.of(reason)
    except Exception as reason:
        _LOG.exception("a %s could not be folded in", type(reply).__name__)
        return Refusal(Code.PROTOCOL, f"its answer is malformed ({type(reason).__name__})")
    return None


class Engine(ABC):
    """Carries a server's requests to its clients, wherever they are, and the answers back."""

    @abstractmethod
    def gather(self, ask: Ask) -> Gathered:
        """One phase: ask, fold the replies, and say what came of it."""

    def drive(
        self,
        steps: Steps,
        *,
        on_round: Callable[[RoundDone], None],
        on_begin: Callable[[RoundBegins], None] = lambda begins: None,
        on_stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Run to the end; `on_begin` and `on_round` are called at every round's beginning and boundary."""
        answer: Gathered | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(step, RoundDone):
                on_round(step)
            elif isinstance(step, RoundBegins):
                on_begin(step)
            elif isinstance(step, RunStopped):
                on_stop(step.reason)
            else:
                answer = self.gather(step)
