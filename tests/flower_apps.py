"""Flower apps as people write them, and a Grid that runs them here.

Every message is put on the wire's form and read again, as is what a node remembers: in Flower, too, each message meets
a new process. All that crosses is kept (`AppGrid.crossed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from flower.in_process import RUN, LoopbackGrid

SIZES = (30, 50, 20, 40, 60)
Train = Callable[[dict[str, np.ndarray], int], tuple[dict[str, np.ndarray], dict[str, Any]]]


def copied(content: RecordDict) -> RecordDict:
    """The same records, by way of their bytes."""
    return recorddict_from_proto(
        type(recorddict_to_proto(content)).FromString(recorddict_to_proto(content).SerializeToString())
    )


class AppGrid(LoopbackGrid):
    """A ClientApp behind every node, each with a folder of its own; `twist` changes replies."""

    def __init__(
        self,
        app: ClientApp,
        clients: int = len(SIZES),
        *,
        twist: Callable[[Message, Message], list[Message]] | None = None,
        node_config: Callable[[int], dict[str, Any]] = lambda number: {},
        first: int = 100,
    ) -> None:
        super().__init__()
        self.app = app
        self.states = {first + number: RecordDict() for number in range(clients)}
        self._first = first
        self.crossed: list[tuple[Message, Message]] = []
        self.dead: set[int] = set()
        self._node_config, self._twist = node_config, twist
        self._folder = tempfile.TemporaryDirectory()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.states if node not in self.dead]

    def answered(self, message: Message, node: int) -> list[Message]:
        arrived = Message(copied(message.content), metadata=message.metadata)
        context = Context(
            run_id=RUN,
            node_id=node,
            node_config={
                "partition-id": node - self._first,
                "fedveil-state": f"{self._folder.name}/{node}",
                **self._node_config(node - self._first),
            },
            state=copied(self.states[node]),
            run_config={},
        )
        try:
            reply = self.app(arrived, context)
        except Exception as reason:  # as Flower does: the words go to the server
            reply = Message(Error(2, str(reason)), reply_to=message)
        self.states[node] = copied(context.state)
        replies = [self.named(reply)] if self._twist is None else self._twist(message, self.named(reply))
        self.crossed += [(message, sent) for sent in replies]
        return [
            Message(copied(sent.content), metadata=sent.metadata) if sent.has_content() else sent for sent in replies
        ]


def start_arrays() -> ArrayRecord:
    """A model of a float32 matrix, a float64 vector and a counter."""
    draw = np.random.default_rng(3)
    return ArrayRecord(
        {
            "weight": Array(draw.normal(size=(4, 3)).astype(np.float32)),
            "bias": Array(draw.normal(size=3)),
            "steps": Array(np.array(2, dtype=np.int64)),
        }
    )


def trained(arrays: dict[str, np.ndarray], number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A client's own training: towards a point of its own."""
    target = np.random.default_rng(10 + number).normal(size=(4, 3)).astype(np.float32)
    moved = {
        "weight": arrays["weight"] + 0.5 * (target - arrays["weight"]),
        "bias": arrays["bias"] * 0.9 + 0.01 * number,
        "steps": arrays["steps"] + number,
    }
    loss = float(np.square(target - arrays["weight"]).mean())
    return moved, {"num-examples": SIZES[number], "train_loss": loss, "epochs": 2}


def app_of(mods: list[Any] | None = None, *, train: Train = trained) -> ClientApp:
    """An app in the shape of Flower's quickstarts."""
    app = ClientApp(mods=mods or [])

    @app.train()
    def on_train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        given = {name: array.numpy() for name, array in message.content["arrays"].items()}
        moved, figures = train(given, number)
        content = {"arrays": ArrayRecord({name: Array(np.asarray(value)) for name, value in moved.items()})}
        return Message(RecordDict({**content, "metrics": MetricRecord(figures)}), reply_to=message)

    @app.evaluate()
    def on_evaluate(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        weight = message.content["arrays"]["weight"].numpy()
        figures = {"eval_loss": float(np.abs(weight).mean() + number), "num-examples": SIZES[number]}
        return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=message)

    return app
