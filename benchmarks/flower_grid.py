"""A Grid whose nodes are clients' desks in this process, with a clock on every phase: this process's processor time.

Engine, messages and desks are real; Flower's processes, its network and its serialisation are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower.client_app import answer, parts_of
from fedveil.flower.message_handler import MessageHandler
from fedveil.protocol.codec import decode

_RUN = 7


@dataclass
class Phase:
    """One phase: what was asked, how long all clients worked at it, and how many bytes went each way."""

    what: str
    began: float
    clients: float = 0.0
    """Processor seconds spent in clients' desks."""
    ended: float = 0.0
    """When the last reply was there."""
    down: int = 0
    up: int = 0


class TimedGrid(Grid):
    """Every message goes to its node's desk at once."""

    def __init__(self, homes: Iterable[Path]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN, 1, 1
        self._homes = {100 + place: home for place, home in enumerate(homes)}
        self._desks: dict[Path, MessageHandler] = {}
        self._replies: dict[str, Message] = {}
        self._count = 0
        self.phases: list[Phase] = []

    def get_node_ids(self) -> list[int]:
        return list(self._homes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        given = list(messages)
        what = type(decode(parts_of(given[0].content)["common"])).__name__
        self.phases.append(Phase(what, time.process_time()))
        identifiers = [self._push(one) for one in given]
        self.phases[-1].ended = time.process_time()
        return identifiers

    def _push(self, message: Message) -> str:
        self._count += 1
        identifier = f"message-{self._count}"
        message.metadata.__dict__["_message_id"] = identifier
        node = message.metadata.dst_node_id
        config = {"fedveil-home": str(self._homes[node])}
        context = Context(run_id=_RUN, node_id=node, node_config=config, state=RecordDict(), run_config={})
        reply = answer(message, context, deliver=self._deliver)
        reply.metadata.__dict__["_message_id"] = f"reply-{self._count}"
        self._replies[identifier] = reply
        return identifier

    def _deliver(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
        began = time.process_time()
        if home not in self._desks:
            self._desks[home] = MessageHandler(home)
        reply = self._desks[home].handle(parcel)
        phase = self.phases[-1]
        phase.clients += time.process_time() - began
        phase.down += len(parcel)
        phase.up += len(reply)
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *given: Any, **named: Any) -> Message:
        raise NotImplementedError


def context_of(run_config: dict[str, Any]) -> Context:
    """A server app's context with this run configuration."""
    named = {name.replace("_", "-"): value for name, value in run_config.items()}
    return Context(run_id=_RUN, node_id=1, node_config={}, state=RecordDict(), run_config=named)
