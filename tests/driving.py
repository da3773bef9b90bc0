"""Driving a server's steps in tests, without the record of a run."""

from __future__ import annotations

from collections.abc import Callable

from fedveil.protocol.phases import Engine, RoundBegins, RoundDone, Steps, asked


def drive(
    engine: Engine,
    steps: Steps,
    *,
    on_round: Callable[[RoundDone], None] = lambda done: None,
    on_begin: Callable[[RoundBegins], None] = lambda begins: None,
    on_stop: Callable[[str], None] = lambda reason: None,
) -> None:
    """Run to the end; each kind of step is told to whoever asks for it."""
    for step in asked(steps, engine):
        if isinstance(step, RoundBegins):
            on_begin(step)
        elif isinstance(step, RoundDone):
            on_round(step)
        else:
            on_stop(step.reason)
