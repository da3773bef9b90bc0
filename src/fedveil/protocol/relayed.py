"""Where a relaying server folds what arrives: votes, divided uploads, lent models, farewells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Ask, Gathered, Inbox
from fedveil.protocol.dividing import Aggregate, Divided, Finished, Lent, Vote
from fedveil.protocol.hiding import HiddenSum
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.unmasking import MaskedUpload
from fedveil.uplink.vote import Tally


class Votes(Inbox[Vote]):
    """Counts tags."""

    def __init__(self, context: RoundContext, *, most: int) -> None:
        self._tally = Tally(most=most, winners=most)
        self.expect(Vote, context.cohort, which=context.which, sizes={"tags": most})

    def _fold(self, reply: Vote) -> None:
        self._tally.add(reply.tags)

    def winners(self) -> Tensor:
        """The tags with most votes."""
        return self._tally.result()


class DividedSum(Inbox[Divided]):
    """Adds both parts of divided uploads: the noised rest modulo 2⁶⁴, the hidden part unread."""

    def __init__(self, context: RoundContext, *, rest: int, hidden: HiddenSum | None) -> None:
        self._context = context
        self._rest = torch.zeros(rest, dtype=torch.int64)
        self._hidden = hidden
        self.expect(Divided, context.cohort, which=context.which, sizes={"rest": rest})

    def _fold(self, reply: Divided) -> None:
        if (self._hidden is None) != (reply.hidden is None):
            raise ProtocolError("an upload lacks its hidden part, or has one where nothing is hidden")
        if self._hidden is not None and reply.hidden is not None:
            if isinstance(reply.hidden, MaskedUpload) and reply.hidden.client != reply.client:
                raise ProtocolError("an upload carries another client's hidden part")
            self._hidden.add(reply.hidden)
        self._rest += reply.rest.cpu()

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


class Loan(Inbox[Lent]):
    """Takes one sealed model of the wanted version, of at most `most` bytes."""

    def __init__(self, version: int, lender: int, *, most: int) -> None:
        self._version = version
        self.sealed: Tensor | None = None
        self.expect(Lent, (lender,), sizes={"sealed": range(most + 1)})

    def _fold(self, reply: Lent) -> None:
        if reply.version != self._version:
            raise ProtocolError("a client lent a model of another version")
        self.sealed = reply.sealed


class Farewells(Inbox[Finished]):
    """Hears which version everybody ends with."""

    def __init__(self, version: int, clients: Sequence[int]) -> None:
        self._version = version
        self.expect(Finished, clients)

    def _fold(self, reply: Finished) -> None:
        if reply.version != self._version:
            raise ProtocolError("a client ends with another version of the model")
