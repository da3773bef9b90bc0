"""What every server's run has: introductions, the cohort of a round, and the end of the privacy target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from typing import Protocol

from fedveil.downlink.blueprint import Blueprint
from fedveil.errors import ConfigError
from fedveil.ledger.account import Account
from fedveil.ledger.releases import check_declared
from fedveil.protocol.asking import Ask, Gathered, RunStopped, Step, Steps
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.directory import Directory, Hello
from fedveil.protocol.handshake import Introductions
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
        self._stopped = False
        self._declared = scheme.releases(blueprint)
        how = scheme.uplink.introduction
        drawn = secrets.stream("run", state.attempt).bytes(16).hex()
        self._introductions = (
            None
            if how == "none"
            else Introductions(how, name + drawn, max_size_ratio=scheme.max_size_ratio, earlier=announced)
        )
        if self._introductions is not None:
            asked = (f"{kind.__name__.lower()}.{one.name}" for kind in (Hello, Directory) for one in fields(kind))
            check_declared(asked, self._declared)

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`."""
        if self._introductions is not None:
            yield from self._introductions.steps(range(self._cohort.clients))
        while not self._stopped and self._progress.round < self._rounds:
            context = yield from self._assembled()
            if len(context.cohort) < self._fewest:
                yield RunStopped(self._why_stopped(context))
                return
            try:
                self._scheme.uplink.fits(len(context.cohort))
            except ConfigError as reason:
                yield RunStopped(self._refusal() or str(reason).rstrip("."))
                return
            yield from self._round(context)
        yield from self._finish()

    @abstractmethod
    def _round(self, context: RoundContext) -> Steps:
        """One round, to its boundary."""

    def _finish(self) -> Steps:
        """What follows the last round."""
        yield from ()

    @property
    def _fewest(self) -> int:
        return 1 if self._account is None or self._account.limit is None else min(2, self._cohort.size)

    def _assembled(self) -> Generator[Step, Gathered | None, RoundContext]:
        """This round's clients: drawn, known to each other, and with privacy left to spend."""
        cohort = self._cohort.draw(self._progress.round)
        known = self._introductions
        if known is not None:
            yield from known.steps(cohort, again=self._progress.round % _LATECOMERS_EVERY == 0)
            cohort = yield from self._acquainted(known.known(cohort))
        directory = None if known is None else known.directory
        while True:
            context = RoundContext(self._progress.round, self._progress.attempt, cohort, directory)
            if self._account is None or not cohort:
                return context
            covering = self._scheme.covering(context, self._terms)
            over = set() if covering is None else self._account.exceeded_by(covering)
            if not over:
                return context
            cohort = tuple(one for one in cohort if one not in over)

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

    def _why_stopped(self, context: RoundContext) -> str:
        refusal = self._refusal()
        if refusal:
            return refusal
        if self._account is not None and self._account.limit is not None:
            return (
                f"round {context.round + 1} would bring clients over the privacy target, and {len(context.cohort)} are "
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
