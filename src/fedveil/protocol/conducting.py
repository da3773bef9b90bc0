"""What every server's run has: introductions, the cohort of a round, and the end of the privacy target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from fedveil.downlink.blueprint import Blueprint
from fedveil.errors import ConfigError
from fedveil.ledger.account import Account
from fedveil.ledger.releases import check_declared
from fedveil.protocol.asking import Ask, Gathered, RunStopped, Step, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.handshake import Introductions, Phases
from fedveil.protocol.messages import released_fields
from fedveil.protocol.parts import RoundContext, Scheme
from fedveil.secrets import SecretSource

_LATECOMERS_EVERY = 10


class Progress(Protocol):
    """How far a run has come."""

    round: int
    attempt: int


class Conductor(ABC):
    """A server's run up to the question what a round is."""

    def __init__(
        self,
        scheme: Scheme,
        blueprint: Blueprint,
        state: Progress,
        *,
        secrets: SecretSource,
        cohort: Cohort,
        rounds: int,
        account: Account | None,
        name: str = "",
        announced: Mapping[int, int] | None = None,
    ) -> None:
        """`name` is how the run's name begins, where clients on other machines hold the server to it; `announced` are
        the sizes that clients have announced in it before."""
        self._scheme = scheme
        self._secrets = secrets
        self._cohort = cohort
        self._rounds = rounds
        self._terms = scheme.terms(blueprint)
        self._account = account
        self._progress = state
        self._first = state.round
        self._stopped = False
        self._declared = scheme.releases(blueprint)
        how = scheme.uplink.introduction
        drawn = secrets.stream("run", state.attempt).bytes(16).hex()
        self._introductions = (
            None
            if how == "none"
            else Introductions(
                how,
                name + drawn,
                cohort=cohort,
                rounds=max(rounds, 1),
                max_size_ratio=scheme.max_size_ratio,
                earlier=announced,
            )
        )

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`."""
        if self._introductions is not None:
            yield from self._introduced(self._introductions.steps(self._progress.round))
        while not self._stopped and self._progress.round < self._rounds:
            try:
                context, able = yield from self._assembled()
            except ConfigError as reason:  # no noise would do for so few
                if self._progress.round == self._first:
                    raise
                yield RunStopped(str(reason).rstrip("."))
                return
            if len(able) < self._fewest:
                yield RunStopped(self._why_stopped(context, able))
                return
            try:
                self._scheme.uplink.fits(len(able))
                self._scheme.uplink.fits(len(context.cohort), asked=self._cohort.size)
            except ConfigError as reason:
                yield RunStopped(self._refusal() or str(reason).rstrip("."))
                return
            yield from self._round(context, able)
        yield from self._finish()

    @abstractmethod
    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        """One round, to its boundary; of its cohort, `able` can be asked."""

    def _finish(self) -> Steps:
        """What follows the last round."""
        yield from ()

    @property
    def _fewest(self) -> int:
        return 1 if self._account is None or self._account.limit is None else min(2, self._cohort.size)

    def _assembled(self) -> Generator[Step, Gathered | None, tuple[RoundContext, tuple[int, ...]]]:
        """This round's clients, with privacy left to spend, and those of them that know everything they must.

        Where clients know each other the cohort is the epoch's schedule and nobody's choice: one that is away stays in
        it and counts as missing, and one without privacy left to spend leaves with a new epoch.
        """
        round, known = self._progress.round, self._introductions
        if known is not None:
            yield from self._introduced(known.steps(round, again=self._asks_again()))
        while True:
            cohort = self._cohort.draw(round) if known is None else known.cohort(round)
            context = self._context(cohort)
            able = cohort if known is None else known.known(cohort)
            over = self._over(context) if able else set()
            if not over:
                return context, (yield from self._acquainted(able))
            assert known is not None
            known.leave_out(over)
            yield from self._introduced(known.steps(round))

    def _asks_again(self) -> bool:
        return self._progress.round % _LATECOMERS_EVERY == 0

    def _context(self, cohort: tuple[int, ...]) -> RoundContext:
        known = self._introductions
        at = self._progress
        if known is None:
            return RoundContext(at.round, at.attempt, cohort)
        return RoundContext(at.round, at.attempt, cohort, known.directory, known.beacon)

    def _over(self, context: RoundContext) -> set[int]:
        """Whom this round would bring over the privacy target."""
        covering = None if self._account is None else self._scheme.covering(context, self._terms)
        return set() if covering is None or self._account is None else self._account.exceeded_by(covering)

    def _introduced(self, phases: Phases) -> Generator[Step, Gathered | None, None]:
        """Introductions, with nothing in them that is not declared."""
        answer = None
        while True:
            try:
                ask = phases.send(answer)
            except StopIteration:
                return
            answer = yield self._declared_only(ask)

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        """Those of `clients` that can take part, once everything they share has been dealt out."""
        yield from ()
        return tuple(clients)

    def _refusal(self) -> str:
        """Why somebody could not be made acquainted with the others; empty where nobody refused."""
        refused = {} if self._introductions is None else self._introductions.refused
        return too_few("have agreed on keys", refused) or too_few("have a size that compares", self.left_out)

    @property
    def left_out(self) -> dict[int, str]:
        """Who takes no part because of the size it claims, and why."""
        return {} if self._introductions is None else self._introductions.left_out

    def _why_stopped(self, context: RoundContext, able: tuple[int, ...]) -> str:
        refusal = self._refusal()
        if refusal:
            return refusal
        if self._account is not None and self._account.limit is not None:
            return (
                f"round {context.round + 1} would bring clients over the privacy target, and {len(able)} are "
                "left that it would not"
            )
        return "no client has introduced itself"

    def _declared_only(self, ask: Ask) -> Ask:
        check_declared(released_fields(ask.common), self._declared)
        for kind in {type(one) for one in ask.each.values()}:
            example = next(one for one in ask.each.values() if type(one) is kind)
            check_declared(released_fields(example), self._declared)
        return ask


def too_few(have: str, refused: Mapping[int, str]) -> str:
    """Who of those that refused was the first, and why; empty where nobody did."""
    for client, reason in refused.items():
        return f"too few clients {have}; client {client}: {reason}"
    return ""
