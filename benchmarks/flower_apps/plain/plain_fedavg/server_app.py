"""The server: Flower's own FedAvg, with the clock read after every round."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from plain_fedavg.task import network, settings_of

POLL = (0.05, 0.5)

server_app = ServerApp()


class PromptGrid(Grid):
    """Flower's grid, looking for replies as often as FedVeil's engine does."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        waiting, found = set(self._grid.push_messages(messages)), []
        pause = POLL[0]
        while waiting and time.monotonic() < until:
            replies = list(self._grid.pull_messages(waiting))
            found += replies
            waiting -= {one.metadata.reply_to_message_id for one in replies}
            pause = POLL[0] if replies else min(1.5 * pause, POLL[1])
            if waiting:
                time.sleep(pause)
        return found

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def create_message(self, *given: Any, **named: Any) -> Message:
        return self._grid.create_message(*given, **named)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    settings = settings_of(context)
    clients, rounds = settings["clients"], settings["rounds"]
    strategy = FedAvg(
        fraction_evaluate=1.0 if settings["evaluate"] else 0.0,
        min_train_nodes=clients,
        min_evaluate_nodes=clients if settings["evaluate"] else 0,
        min_available_nodes=clients,
    )
    last = [time.perf_counter()]
    tell("began", scheme="plain", rounds=rounds, round=0, out="")

    def clock(done: int, arrays: ArrayRecord) -> None:
        now = time.perf_counter()
        if done:
            tell("round", round=done, seconds=now - last[0])
        last[0] = now

    result = strategy.start(
        grid=PromptGrid(grid) if settings["prompt"] else grid,
        initial_arrays=ArrayRecord(network(settings["seed"]).state_dict()),
        num_rounds=rounds,
        evaluate_fn=clock,
    )
    losses = [one["loss"] for _, one in sorted(result.train_metrics_clientapp.items())]
    tell("done", out="", summary={"losses": losses})


def tell(event: str, **facts: Any) -> None:
    """A line for whoever streams the log."""
    print("FEDVEIL " + json.dumps({"event": event, **facts}), flush=True)
