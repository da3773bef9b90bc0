"""Clients without torch that send back what they got, looked for as often as FedVeil's engine looks for replies."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server_app = ServerApp()
client_app = ClientApp()


@client_app.train()
def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    clients, rounds = int(context.run_config["clients"]), int(context.run_config["rounds"])
    numbers = np.zeros(int(context.run_config["numbers"]), np.float32)
    tell("began", scheme="floor", rounds=rounds, round=0, out="")
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.2)
    last = time.perf_counter()
    for done in range(1, rounds + 1):
        content = RecordDict({"arrays": ArrayRecord({"numbers": Array(numbers)})})
        waiting = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
        pause = 0.05
        while waiting:
            replies = list(grid.pull_messages(waiting))
            if any(one.has_error() for one in replies):
                raise RuntimeError("a client failed")
            waiting -= {one.metadata.reply_to_message_id for one in replies}
            pause = 0.05 if replies else min(1.5 * pause, 0.5)
            if waiting:
                time.sleep(pause)
        now = time.perf_counter()
        tell("round", round=done, seconds=now - last)
        last = now
    tell("done", out="", summary={})


def tell(event: str, **facts: Any) -> None:
    """A line for whoever streams the log."""
    print("FEDVEIL " + json.dumps({"event": event, **facts}), flush=True)
