"""What travels between roles: frozen dataclasses, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.protocol.wire import message

message(PublicHead)
message(Broadcast)


@message
@dataclass(frozen=True, eq=False)
class Train:
    """Server → client: compute on this model. `attempt` counts repetitions of a round."""

    round: int
    attempt: int
    broadcast: Broadcast


@message
@dataclass(frozen=True, eq=False)
class Upload:
    """Client → server: one flat vector, in the layout both sides know."""

    client: int
    round: int
    attempt: int
    payload: Tensor


Request = Train
Reply = Upload
