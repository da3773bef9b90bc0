"""What travels between roles: frozen dataclasses, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.protocol.wire import message

message(PublicHead)
message(Broadcast)


@dataclass(frozen=True, eq=False)
class Request:
    """Anything the server sends to clients."""


@dataclass(frozen=True, eq=False)
class Reply:
    """Anything a client sends back; `client` is its number."""

    client: int


@message
@dataclass(frozen=True, eq=False)
class Train(Request):
    """Server → client: compute on this model. `attempt` counts repetitions of a round."""

    round: int
    attempt: int
    broadcast: Broadcast


@message
@dataclass(frozen=True, eq=False)
class Upload(Reply):
    """Client → server: one flat vector, in the layout both sides know."""

    round: int
    attempt: int
    payload: Tensor
