"""What the server's run yields to an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedveil.protocol.messages import Reply, Request


class Accumulator(Protocol):
    """Folds replies as they arrive; raises ProtocolError to refuse one."""

    def add(self, reply: Reply) -> None:
        """Fold one reply in, or refuse it and stay unchanged."""
        ...


@dataclass(frozen=True, eq=False)
class Ask:
    """One phase: send `common` (and `each` client's private part) and fold the replies.

    The engine goes on when all have answered, failed, or its deadline has passed; fewer than
    `quorum` replies make the phase fail.
    """

    to: tuple[int, ...]
    common: Request
    into: Accumulator
    each: Mapping[int, Request] = field(default_factory=dict)
    quorum: int = 1


@dataclass(frozen=True)
class Gathered:
    """What came of a phase."""

    arrived: tuple[int, ...]
    refused: Mapping[int, str]
    missing: tuple[int, ...]
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, eq=False)
class RoundDone:
    """A round boundary: the only place where a run can be stopped and resumed."""

    round: int
    loss: float | None
    cohort: tuple[int, ...]
    gathered: Gathered
    failed: str = ""


Steps = Generator["Ask | RoundDone", "Gathered | None", None]
