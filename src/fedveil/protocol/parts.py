"""The parts a scheme is made of, as the protocol sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import Downlink
from fedveil.errors import ProtocolError
from fedveil.flat import Layout
from fedveil.ledger.releases import Release
from fedveil.protocol.asking import Accumulator, Ask, Gathered
from fedveil.protocol.messages import Reply, Request, Upload
from fedveil.protocol.state import ClientState
from fedveil.uplink.accumulate import ExactSum
from fedveil.work.messages import LocalWork


@dataclass(frozen=True)
class RoundContext:
    """What both roles know about a round."""

    round: int
    attempt: int
    cohort: tuple[int, ...]


class Summing(Accumulator, Protocol):
    """An accumulator that ends in one summed vector."""

    def total(self) -> Tensor:
        """The sum of what arrived."""
        ...


class Uplink(Protocol):
    """How contributions travel to the server and become a sum."""

    def protect(self, state: ClientState, vector: Tensor, *, round: int, attempt: int) -> tuple[ClientState, Tensor]:
        """Client side: cover a contribution before it leaves."""
        ...

    def answer(self, state: ClientState, request: Request) -> tuple[ClientState, Reply]:
        """Client side: answer a phase of the uplink's own (keys, unmasking, repair)."""
        ...

    def accumulator(self, layout: Layout, context: RoundContext, *, device: torch.device) -> Summing:
        """Server side: where this round's uploads are folded."""
        ...

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Server side: the next phase needed to open the sum, or None when it is open."""
        ...

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """What an upload gives away, field by field."""
        ...


class UploadSum:
    """Checks uploads against the round and sums them exactly."""

    def __init__(self, layout: Layout, context: RoundContext, *, device: torch.device) -> None:
        self._sum = ExactSum(layout.length, device=device)
        self._context = context
        self._waiting = set(context.cohort)

    def add(self, reply: Reply) -> None:
        """Fold an upload in; refuses strangers, repetitions, other rounds and malformed vectors."""
        if not isinstance(reply, Upload):
            raise ProtocolError(f"a {type(reply).__name__} arrived where an upload belongs")
        if (reply.round, reply.attempt) != (self._context.round, self._context.attempt):
            raise ProtocolError(
                f"an upload for round {reply.round + 1}, attempt {reply.attempt} arrived in round "
                f"{self._context.round + 1}, attempt {self._context.attempt}"
            )
        if reply.client not in self._waiting:
            raise ProtocolError("an upload from a client that was not asked, or a second one")
        if not reply.payload.is_floating_point():
            raise ProtocolError(f"an upload holds {reply.payload.dtype} where floating-point numbers belong")
        self._sum.add(reply.payload)
        self._waiting.discard(reply.client)

    def total(self) -> Tensor:
        """The sum of what arrived."""
        return self._sum.total()


_UPLOAD_FIELDS = {
    "gradients": "the client's gradient(s) on its batch, or its update",
    "values": "the training loss on its batch, or the φ values that combine into it",
    "statistics": "BatchNorm mean and variance of its batch",
    "weight": "how many samples it has",
}


_ENVELOPE = (
    Release("train.round", "server", ("clients",), "the round's number"),
    Release("train.attempt", "server", ("clients",), "the round's repetition"),
    Release("upload.client", "client", ("server",), "the client's number"),
    Release("upload.round", "client", ("server",), "the round's number"),
    Release("upload.attempt", "client", ("server",), "the round's repetition"),
)


@dataclass(frozen=True)
class Bare:
    """No protection on the way up: the server sees every contribution."""

    def protect(self, state: ClientState, vector: Tensor, *, round: int, attempt: int) -> tuple[ClientState, Tensor]:
        """As it is."""
        return state, vector

    def answer(self, state: ClientState, request: Request) -> tuple[ClientState, Reply]:
        """A bare uplink has no phases of its own."""
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def accumulator(self, layout: Layout, context: RoundContext, *, device: torch.device) -> Summing:
        """An exact sum."""
        return UploadSum(layout, context, device=device)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Already open."""
        return None

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything, to the server and whoever listens, uncovered."""
        # A section this uplink does not know stays undeclared, and the server refuses to start with it.
        known = [name for name in layout.names if name in _UPLOAD_FIELDS]
        return tuple(Release(f"upload.{name}", "client", ("server",), _UPLOAD_FIELDS[name]) for name in known)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Downlink × local work × uplink × who holds the model."""

    name: str
    downlink: Downlink
    work: LocalWork
    uplink: Uplink
    holder: str = "server"

    def layout(self, blueprint: Blueprint) -> Layout:
        """The layout of one contribution."""
        return self.work.layout(blueprint, tensors=self.downlink.head_tensors(blueprint))

    def releases(self, blueprint: Blueprint) -> tuple[Release, ...]:
        """Every declared release of a run."""
        return (*_ENVELOPE, *self.downlink.releases(), *self.uplink.releases(self.layout(blueprint)))
