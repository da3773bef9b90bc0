"""What the server's run yields to an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fedveil.protocol.messages import Reply, Request

if TYPE_CHECKING:
    from fedveil.protocol.dividing import Aggregate


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

    def and_then(self, later: Gathered) -> Gathered:
        """The first phase's arrivals, with the traffic and refusals of a later phase of the same round."""
        return Gathered(
            self.arrived,
            {**self.refused, **later.refused},
            self.missing,
            self.bytes_down + later.bytes_down,
            self.bytes_up + later.bytes_up,
        )


@dataclass(frozen=True, eq=False)
class RoundBegins:
    """A round is about to be asked for. Whoever keeps books writes it down before going on.

    `samples` are the cohort's sample counts, as announced (empty where nobody announces them).

    Yielded again when uploads are missing and clients are about to be asked for what opens the sum without
    them: then it says what `arrived` (None: everything may) and which pairs' noise will be `revealed`.
    """

    round: int
    attempt: int
    cohort: tuple[int, ...]
    graph: bytes = b""
    arrived: tuple[int, ...] | None = None
    revealed: tuple[tuple[int, int], ...] = ()
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RoundDone:
    """A round boundary: the only place where a run can be stopped and resumed.

    `aggregate` is what clients that hold the model themselves will be sent, to move it by.
    """

    round: int
    loss: float | None
    cohort: tuple[int, ...]
    gathered: Gathered
    failed: str = ""
    revealed: tuple[tuple[int, int], ...] = ()
    aggregate: Aggregate | None = None


@dataclass(frozen=True)
class RunStopped:
    """The run ends before its last round; `reason` says why."""

    reason: str


Step = Ask | RoundBegins | RoundDone | RunStopped
Steps = Generator[Step, "Gathered | None", None]
