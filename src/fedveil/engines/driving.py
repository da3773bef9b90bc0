"""What every engine is: the server's steps one after the other, each given to whoever it concerns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from fedveil.protocol import Gathered, RoundBegins, RoundDone, RunStopped, Steps
from fedveil.protocol.asking import Ask


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
