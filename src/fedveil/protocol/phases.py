"""What the server's run yields, who carries it out, and what comes back.

A server is a generator of steps and knows nobody. Of its steps an engine carries out one kind, `Ask`, and whoever keeps
the run's record deals with the others (`runs/loop.py`):

    server.run() ── Ask ────────► engine.gather ──► each client's answer ──► Ask.into.add ──► Gathered ── back to server
                 ── RoundBegins ► privacy journal, written before the next Ask
                 ── RoundDone ──► metrics, checkpoint; the only place to stop and resume
                 ── RunStopped ─► the reason, for a person
                 ── RunJudged ──► figures of the last model, where clients hold back samples

One phase, in `gather`: everybody of `Ask.to` is sent `common`, and its own of `each`. An answer is folded into the
accumulator as it comes and not kept. A client ends up in one of three lists, and the server decides by these alone:

    arrived   its answer was folded in
    refused   it declined, or its answer was not taken: a `Refusal`, whose code says which
    missing   nothing came in time

Accumulators are `Inbox`es: each field of a reply is held to what this phase expects (who, which round, which sizes and
kinds of numbers) before anything else looks at it, and what is refused leaves the sum as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import to_bytes
from fedveil.protocol.messages import DeclaredReleases, Reply, Request, awaited_fields, released_fields
from fedveil.shapes import Sizes, Types, check, named

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.protocol.messages import Aggregate


class Accumulator(Protocol):
    """Folds replies as they arrive; raises ProtocolError to refuse one."""

    def add(self, reply: Reply) -> None:
        """Fold one reply in, or refuse it and stay unchanged."""
        ...


_Reply = TypeVar("_Reply", bound=Reply)


class Inbox(ABC, Generic[_Reply]):
    """What every accumulator is: replies are checked here, every field of each, before anything else looks at one."""

    _kind: type[Any] = Reply
    _waiting: set[int]
    _which: tuple[int, int] | None = None
    _sizes: Sizes
    _types: Types
    _name = ""
    _declared: DeclaredReleases | None = None

    def expect(
        self,
        kind: type[_Reply],
        among: Collection[int],
        *,
        which: tuple[int, int] | None = None,
        sizes: Sizes | None = None,
        types: Types | None = None,
        name: str = "",
    ) -> None:
        """From now on take one `kind` of reply, once from each client `among` these.

        `which` are round and attempt, where the reply names them; `sizes` and `types` what this phase makes of
        its named sizes and numbers (`fedveil.shapes`); `name` is what releases call it, if not by its kind.
        """
        self._name = name
        self._kind, self._waiting, self._which = kind, set(among), which
        self._sizes, self._types = sizes or {}, types or {}

    def add(self, reply: Reply) -> None:
        """Fold one reply in, or refuse it and stay unchanged."""
        wanted = named(self._kind)
        if type(reply) is not self._kind:
            raise ProtocolError(f"a {type(reply).__name__} arrived where {wanted} belongs")
        if reply.client not in self._waiting:
            raise ProtocolError(f"{wanted} from a client that was not asked, or a second one")
        if self._which is not None and (reply.round, reply.attempt) != self._which:  # type: ignore[attr-defined]
            (there, again), (here, attempt) = (reply.round, reply.attempt), self._which  # type: ignore[attr-defined]
            raise ProtocolError(
                f"{wanted} for round {there + 1}, attempt {again} arrived in round {here + 1}, attempt {attempt}"
            )
        check(reply, self._sizes, self._types)
        if self._declared is not None:
            self._declared.check(released_fields(reply, name=self._name, among=self._declared.fields))
        self._fold(reply)  # type: ignore[arg-type]
        self._waiting.discard(reply.client)

    def hold_to(self, declared: DeclaredReleases) -> None:
        """Take no reply with a field, however deep and rarely there, that is not declared."""
        self._declared = declared

    def awaits(self) -> list[str]:
        """The fields that the replies it takes are sure to carry, as releases name them."""
        return awaited_fields(self._kind, name=self._name)

    @abstractmethod
    def _fold(self, reply: _Reply) -> None:
        """Take what has been checked; a refusal by what it says (ProtocolError) leaves everything as it was."""


class Confirmations(Inbox[_Reply]):
    """Hears from each client `among` these that it has come to the same as everybody: `what` it replies is `expected`,
    and otherwise is refused by these words."""

    def __init__(
        self, kind: type[_Reply], among: Collection[int], what: str, expected: bytes | int, *, otherwise: str
    ) -> None:
        self._what, self._expected, self._otherwise = what, expected, otherwise
        self.expect(kind, among)

    def _fold(self, reply: _Reply) -> None:
        said = getattr(reply, self._what)
        if (said if isinstance(said, int) else to_bytes(said)) != self._expected:
            raise ProtocolError(self._otherwise)


@dataclass(frozen=True, eq=False)
class DeclaredOnly:
    """Any other accumulator: it is shown no reply with a field, however deep and rarely there, that nobody declared."""

    into: Accumulator
    declared: DeclaredReleases

    def add(self, reply: Reply) -> None:
        """Fold one reply in, or refuse it and stay unchanged."""
        self.declared.check(released_fields(reply, among=self.declared.fields))
        self.into.add(reply)


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
    refused: Mapping[int, Refusal]
    missing: tuple[int, ...]
    bytes_down: int
    bytes_up: int

    @property
    def seen(self) -> tuple[int, ...]:
        """Whose answer the server has got, be it that it was not taken."""
        return tuple(sorted({*self.arrived, *(client for client, why in self.refused.items() if why.came)}))

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
    them: then it says what `arrived` (None: everything may), what besides was `seen`, having been refused, and which
    pairs' noise will be `revealed`.
    """

    round: int
    attempt: int
    cohort: tuple[int, ...]
    graph: bytes = b""
    arrived: tuple[int, ...] | None = None
    revealed: tuple[tuple[int, int], ...] = ()
    samples: tuple[int, ...] = ()
    seen: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class HeldBack:
    """What clients' held-back samples say of the model that they were sent: how many, their mean loss, and sums that
    answers are counted by."""

    samples: float
    loss: float
    counts: Tensor


@dataclass(frozen=True, eq=False)
class RoundDone:
    """A round boundary: the only place where a run can be stopped and resumed.

    `aggregate` is what clients that hold the model themselves will be sent, to move it by. `code` says for programs why
    the round `failed`. `held_back` is about the model that the round began with. In a round that was `skipped`, for the
    reason in `failed`, nobody was asked for anything. Of rounds that are `taken_back` clients could not read the sums.
    """

    round: int
    loss: float | None
    cohort: tuple[int, ...]
    gathered: Gathered
    failed: str = ""
    revealed: tuple[tuple[int, int], ...] = ()
    aggregate: Aggregate | None = None
    code: Code | None = None
    held_back: HeldBack | None = None
    skipped: bool = False
    taken_back: tuple[int, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether it failed because of what clients sent in it."""
        return self.code in (Code.IMPLAUSIBLE, Code.JUMPED)

    @property
    def published(self) -> bool:
        """Whether clients learn of the sum: the model was moved by it, or was not because of what it is."""
        return not self.failed or self.bad


@dataclass(frozen=True)
class RunStopped:
    """The run ends before its last round; `reason` says why."""

    reason: str


@dataclass(frozen=True, eq=False)
class RunJudged:
    """After the last round: what clients' held-back samples say of the model that the run ends with, or why nobody
    knows."""

    held_back: HeldBack | None
    failed: str = ""


Step = Ask | RoundBegins | RoundDone | RunStopped | RunJudged
Steps = Generator[Step, "Gathered | None", None]


class Engine(Protocol):
    """Carries a server's requests to its clients, wherever they are, and the answers back."""

    def gather(self, ask: Ask) -> Gathered:
        """One phase: ask, fold the replies, and say what came of it."""
        ...


def asked(steps: Steps, engine: Engine) -> Iterator[RoundBegins | RoundDone | RunStopped | RunJudged]:
    """A server's steps, every `Ask` of them answered by an engine; the others are for whoever keeps the run's record.

    The next one is not asked for before the last has been dealt with.
    """
    answer: Gathered | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Ask):
            answer = engine.gather(step)
        else:
            yield step


Kind = Literal["request", "private", "reply"]


@dataclass(frozen=True, eq=False)
class Heard:
    """One message on its way, and the request of the phase it belongs to.

    A request goes `to` all clients it names (`client` is None), a private part and a reply belong to one
    `client`. With a reply comes the `state` of the client that gave it: its own, and no part of the message.
    """

    kind: Kind
    request: Request
    message: Request | Reply
    to: tuple[int, ...] = ()
    client: int | None = None
    state: ClientState | None = None
