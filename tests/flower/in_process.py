"""A Grid whose nodes are desks in this process: engine, messages and desks are real, Flower's processes are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower.app_folder import flattened
from fedveil.flower.client_app import answer
from fedveil.flower.message_handler import MessageHandler

RUN = 7
Twist = Callable[[Message], "list[Message]"]


class LoopbackGrid(Grid):
    """Messages are answered where they are pushed, by whoever inherits this, and replies wait to be pulled."""

    def __init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
        self._replies: list[Message] = []
        self._count = 0

    def answered(self, message: Message, node: int) -> list[Message]:
        """What reaches the server of a node's reply, or in its place."""
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self._count += 1
        identifier = f"message-{self._count}"
        message.metadata.__dict__["_message_id"] = identifier
        self._replies += self.answered(message, message.metadata.dst_node_id)
        return identifier

    def named(self, reply: Message) -> Message:
        """A reply with an identifier, as Flower gives it one."""
        reply.metadata.__dict__["_message_id"] = f"reply-{self._count}"
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        taken = [reply for reply in self._replies if reply.metadata.reply_to_message_id in wanted]
        self._replies = [reply for reply in self._replies if reply.metadata.reply_to_message_id not in wanted]
        return taken

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError


class InProcessGrid(LoopbackGrid):
    """Every message goes to its node's desk at once; `twist` may drop, repeat, delay or change replies."""

    def __init__(self, homes: Iterable[Path], *, twist: Twist | None = None) -> None:
        super().__init__()
        self.homes = {100 + place: home for place, home in enumerate(homes)}
        self.desks: dict[Path, MessageHandler] = {}
        self.twist = twist
        self.sent: list[Message] = []
        self.away: set[int] = set()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.homes if node not in self.away]

    def answered(self, message: Message, node: int) -> list[Message]:
        self.sent.append(message)
        context = Context(
            run_id=RUN,
            node_id=node,
            node_config={"fedveil-home": str(self.homes[node])},
            state=RecordDict(),
            run_config={},
        )
        reply = self.named(answer(message, context, deliver=self._deliver))
        return [reply] if self.twist is None else self.twist(reply)

    def _deliver(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
        if home not in self.desks:
            self.desks[home] = MessageHandler(home)
        return self.desks[home].handle(parcel)


def context_of(**run_config: Any) -> Context:
    """A server app's context with this run configuration."""
    named = flattened({name.replace("_", "-"): value for name, value in run_config.items()})
    return Context(run_id=RUN, node_id=1, node_config={}, state=RecordDict(), run_config=named)


def make_homes(folder: Path, clients: int, *, authority: bool = False) -> list[Path]:
    """A home for every client, with nothing in it but its number and that it takes part in simulations; and, where
    there is one, for a key authority."""
    homes = []
    for number in range(clients + authority):
        home = folder / f"client-{number}"
        home.mkdir(parents=True)
        role = "authority = true\n" if number == clients else ""
        (home / "client.toml").write_text(f"client = {number}\nsimulation = true\n{role}")
        homes.append(home)
    return homes
