"""What an engine lets somebody listen to: every message as it passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.state import ClientState

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


__all__ = ["Heard", "Kind"]
