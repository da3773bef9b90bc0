"""FedVeil's two apps with a clock around them, and an app that does nothing but send as many bytes as often.

A ServerApp of these tells, as a phase ends, when its messages were pushed and its replies fetched; a ClientApp
writes down in its home what its process had used when FedVeil was reached, and what FedVeil used in it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

TRACE = "traced.jsonl"
_POLL = (0.05, 0.25)

server_app = ServerApp()
client_app = ClientApp()
floor_server_app = ServerApp()
floor_client_app = ClientApp()


class TracedGrid(Grid):
    """Flower's grid; a phase is what lies between two pushes."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._phase: dict[str, Any] = {}
        self._rest = (time.perf_counter(), time.process_time())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        began, used = time.perf_counter(), time.process_time()
        identifiers = list(self._grid.push_messages(sent))
        pushed = time.perf_counter()
        with self._lock:
            self._phase = {
                "round": sent[0].metadata.group_id,
                "messages": len(sent),
                "down": sum(_bytes(one.content) for one in sent),
                "objects": len(_objects(sent[0])),
                "up": 0,
                "between": began - self._rest[0],  # since the last reply: the server's own work, and its waiting
                "between, processor": used - self._rest[1],
                "push": pushed - began,
                "looks": 0,
                "replies": 0,
                "first": None,
                "last": None,
                "fetching": 0.0,
                "fetching, processor": 0.0,
            }
            self._pushed = (began, used)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        began = time.perf_counter()
        replies = list(self._grid.pull_messages(message_ids))
        now = time.perf_counter()
        with self._lock:
            self._phase["looks"] += 1
            self._phase["fetching"] += now - began
            if replies:
                self._phase["up"] += sum(_bytes(one.content) for one in replies if one.has_content())
                self._phase["first"] = self._phase["first"] or now - self._pushed[0]
                self._phase["last"] = now - self._pushed[0]
                self._phase["fetching, processor"] = time.process_time() - self._pushed[1]
                self._rest = (now, time.process_time())
                self._phase["replies"] += len(replies)
                if self._phase["replies"] == self._phase["messages"]:
                    tell("traced", **self._phase)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def create_message(self, *given: Any, **named: Any) -> Message:
        return self._grid.create_message(*given, **named)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from fedveil.flower.server_app import serve

    tell("loaded", processor=time.process_time())
    serve(TracedGrid(grid), context)


@client_app.train()
def handle(message: Message, context: Context) -> Message:
    began, used = time.perf_counter(), time.process_time()
    from fedveil.flower.client_app import answer

    reply = answer(message, context)
    _note(context, message, began, used)
    return reply


@floor_client_app.train()
def echo(message: Message, context: Context) -> Message:
    began, used = time.perf_counter(), time.process_time()
    reply = Message(_content(int(message.content.config_records["ask"]["up"])), reply_to=message)
    _note(context, message, began, used)
    return reply


def _note(context: Context, message: Message, began: float, used: float) -> None:
    facts = {
        "round": message.metadata.group_id,
        "before": used,
        "processor": time.process_time() - used,
        "seconds": time.perf_counter() - began,
    }
    with (Path(str(context.node_config["fedveil-home"])) / TRACE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


@floor_server_app.main()
def floor(grid: Grid, context: Context) -> None:
    """`phases` a round, each of them of `down` and `up` bytes a client."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["rounds"])
    phases = [tuple(map(int, one.split("/"))) for one in str(config["phases"]).split(",")]
    traced = TracedGrid(grid)
    tell("began", scheme="floor", rounds=rounds, round=0, out="")
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.2)
    last = time.perf_counter()
    for done in range(1, rounds + 1):
        for down, up in phases:
            _exchanged(traced, nodes, down, up, str(done))
        now = time.perf_counter()
        tell("round", round=done, seconds=now - last)
        last = now
    tell("done", out="", summary={})


def _exchanged(grid: Grid, nodes: list[int], down: int, up: int, group: str) -> None:
    def request() -> RecordDict:
        return RecordDict({**_content(down), "ask": ConfigRecord({"up": up})})

    waiting = set(grid.push_messages([Message(request(), node, "train", group_id=group) for node in nodes]))
    pause = _POLL[0]
    while waiting:
        replies = list(grid.pull_messages(waiting))
        if any(one.has_error() for one in replies):
            raise RuntimeError("a client failed")
        waiting -= {one.metadata.reply_to_message_id for one in replies}
        pause = _POLL[0] if replies else min(1.5 * pause, _POLL[1])
        if waiting:
            time.sleep(pause)


def _content(size: int) -> RecordDict:
    array = Array(dtype="uint8", shape=(size,), stype="floor", data=bytes(size))
    return RecordDict({"arrays": ArrayRecord({"numbers": array})})


def _bytes(content: RecordDict) -> int:
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    values = (value for record in content.config_records.values() for value in record.values())
    return arrays + sum(len(value) for value in values if isinstance(value, (str, bytes)))


def _objects(message: Message) -> dict[str, Any]:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return get_all_nested_objects(message)


def tell(event: str, **facts: Any) -> None:
    """A line for whoever streams the log."""
    print("FEDVEIL " + json.dumps({"event": event, **facts}), flush=True)
