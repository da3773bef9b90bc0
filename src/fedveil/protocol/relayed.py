"""Where a relaying server folds what arrives: votes, divided uploads, lent models, farewells."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Ask, Gathered
from fedveil.protocol.dividing import Aggregate, Divided, Finished, Lent, Vote
from fedveil.protocol.hiding import HiddenSum
from fedveil.protocol.messages import Reply
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.unmasking import MaskedUpload
from fedveil.uplink.vote import Tally


class _Round:
    """Takes one reply of a kind from each client of a round."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._waiting = set(context.cohort)

    def check(self, client: int, round: int, attempt: int) -> None:
        """Refuse strangers, repetitions and other rounds."""
        context = self._context
        if (round, attempt) != (context.round, context.attempt):
            raise ProtocolError(
                f"a reply for round {round + 1}, attempt {attempt} arrived in round {context.round + 1}, attempt "
                f"{context.attempt}"
            )
        if client not in self._waiting:
            raise ProtocolError("a reply from a client that was not asked, or a second one")

    def done(self, client: int) -> None:
        """This client has answered."""
        self._waiting.discard(client)


class Votes:
    """Counts tags."""

    def __init__(self, context: RoundContext, *, most: int) -> None:
        self._round = _Round(context)
        self._tally = Tally(most=most, winners=most)

    def add(self, reply: Reply) -> None:
        """Count one client's vote, or refuse it."""
        if not isinstance(reply, Vote):
            raise ProtocolError(f"a {type(reply).__name__} arrived where a vote belongs")
        self._round.check(reply.client, reply.round, reply.attempt)
        self._tally.add(reply.tags)
        self._round.done(reply.client)

    def winners(self) -> Tensor:
        """The tags with most votes."""
        return self._tally.result()


class DividedSum:
    """Adds both parts of divided uploads: the noised rest modulo 2⁶⁴, the hidden part unread."""

    def __init__(self, context: RoundContext, *, rest: int, hidden: HiddenSum | None) -> None:
        self._round = _Round(context)
        self._context = context
        self._rest = torch.zeros(rest, dtype=torch.int64)
        self._hidden = hidden

    def add(self, reply: Reply) -> None:
        """Fold an upload in; a refused one leaves both sums as they were."""
        if not isinstance(reply, Divided):
            raise ProtocolError(f"a {type(reply).__name__} arrived where a divided upload belongs")
        self._round.check(reply.client, reply.round, reply.attempt)
        # Before the other part is added: a refused upload must be in neither sum.
        if reply.rest.shape != self._rest.shape or reply.rest.dtype != torch.int64:
            raise ProtocolError(
                f"an upload has shape {tuple(reply.rest.shape)} and type {reply.rest.dtype} where "
                f"{tuple(self._rest.shape)} and torch.int64 belong; do server and client use the same model and scheme?"
            )
        if (self._hidden is None) != (reply.hidden is None):
            raise ProtocolError("an upload lacks its hidden part, or has one where nothing is hidden")
        if self._hidden is not None and reply.hidden is not None:
            if isinstance(reply.hidden, MaskedUpload) and reply.hidden.client != reply.client:
                raise ProtocolError("an upload carries another client's hidden part")
            self._hidden.add(reply.hidden)
        self._rest += reply.rest.cpu()
        self._round.done(reply.client)

    def open(self, gathered: Gathered) -> Ask | None:
        """The next phase before clients can read the hidden sum."""
        return None if self._hidden is None else self._hidden.open(gathered)

    def aggregate(self, version: int, contributors: tuple[int, ...]) -> Aggregate:
        """Both sums, ready to be passed on."""
        context = self._context
        return Aggregate(
            version,
            context.round,
            context.attempt,
            torch.tensor(context.cohort, dtype=torch.int64),
            torch.tensor(sorted(contributors), dtype=torch.int64),
            self._rest.clone(),
            None if self._hidden is None else self._hidden.total(),
        )


class Loan:
    """Takes one sealed model of the wanted version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.sealed: Tensor | None = None

    def add(self, reply: Reply) -> None:
        """Take the model, or refuse it."""
        if not isinstance(reply, Lent) or reply.version != self._version or reply.sealed.dtype != torch.uint8:
            raise ProtocolError("a client lent no model, or one of another version")
        self.sealed = reply.sealed


class Farewells:
    """Hears which version everybody ends with."""

    def __init__(self, version: int) -> None:
        self._version = version

    def add(self, reply: Reply) -> None:
        """Take one, or refuse it."""
        if not isinstance(reply, Finished) or reply.version != self._version:
            raise ProtocolError("a client ends with another version of the model")
