"""What travels between roles: frozen dataclasses, nothing else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.protocol.codec import message
from fedveil.shapes import REALS, Shape, clients, words

message(PublicHead)
message(Broadcast)


@dataclass(frozen=True, eq=False)
class Request:
    """Anything the server sends to clients."""


@dataclass(frozen=True, eq=False)
class Reply:
    """Anything a client sends back; `client` is its number."""

    client: int


def released_fields(sent: Request) -> list[str]:
    """The name of every field a request carries, as releases name them (train.parameters, train.head.vector).

    What travels inside several requests has a name of its own, `released_as`.
    """

    def walk(value: object, prefix: str) -> list[str]:
        if value is None:
            return []
        if not dataclasses.is_dataclass(value):
            return [prefix]
        found = []
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            name = prefix if isinstance(inner, Broadcast) else f"{prefix}.{field.name}"
            name = getattr(type(inner), "released_as", name)
            found += walk(inner, name)
        return found

    return walk(sent, type(sent).__name__.lower())


@message
@dataclass(frozen=True, eq=False)
class Train(Request):
    """Server → client: compute on this model. `attempt` counts repetitions of a round.

    `cohort` names the round's clients where the uplink ties them together.
    """

    round: int
    attempt: int
    broadcast: Broadcast
    cohort: Annotated[Tensor | None, clients("cohort")] = None


@message
@dataclass(frozen=True, eq=False)
class Upload(Reply):
    """Client → server: one flat vector, in the layout both sides know; of which numbers, the uplink says."""

    round: int
    attempt: int
    payload: Annotated[Tensor, Shape((*REALS, torch.int64), ("contribution",))]


@message
@dataclass(frozen=True, eq=False)
class Aggregate:
    """A round's sums, which bring a model to `version`.

    `asked` is the cohort of the uploads, `contributors` those of it that are in the sums. `rest` is the
    sum of what travelled under noise, `hidden` the sum of what the server could not read.
    """

    version: int
    round: int
    attempt: int
    asked: Annotated[Tensor, clients("asked")]
    contributors: Annotated[Tensor, clients("contributors")]
    rest: Annotated[Tensor, words("rest")]
    hidden: Annotated[Tensor | None, Shape((torch.int64, torch.uint8), ("hidden",))]

    released_as = "aggregate"
