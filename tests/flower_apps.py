"""Flower apps as people write them, and a Grid that runs them here.

Every message is put on the wire's form and read again, as is what a node remembers: in Flower, too, each message meets
a new process. All that crosses is kept (`AppGrid.crossed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp.strategy import Result, Strategy

from fedveil.crypto.keys import add_mask
from fedveil.errors import ProtocolError
from fedveil.flower.client_app import HEADER, PARTS, out_of_array
from fedveil.protocol.codec import decode
from fedveil.uplink.unmasking import MaskedSum
from flower.in_process import RUN, LoopbackGrid

SIZES = (30, 50, 20, 40, 60)
Train = Callable[[dict[str, np.ndarray], int], tuple[dict[str, np.ndarray], dict[str, Any]]]


def copied(content: RecordDict) -> RecordDict:
    """The same records, by way of their bytes."""
    return recorddict_from_proto(
        type(recorddict_to_proto(content)).FromString(recorddict_to_proto(content).SerializeToString())
    )


class AppGrid(LoopbackGrid):
    """A ClientApp behind every node, each with a folder of its own; `twist` changes replies, and of requests those that
    are `lost` (kind, round, client) never arrive."""

    def __init__(
        self,
        app: ClientApp,
        clients: int = len(SIZES),
        *,
        twist: Callable[[Message, Message], list[Message]] | None = None,
        node_config: Callable[[int], dict[str, Any]] = lambda number: {},
        run_config: Callable[[int], dict[str, Any]] = lambda number: {},
        first: int = 100,
    ) -> None:
        super().__init__()
        self.app = app
        self.states = {first + number: RecordDict() for number in range(clients)}
        self._first = first
        self.crossed: list[tuple[Message, Message]] = []
        self.dead: set[int] = set()
        self.lost: set[tuple[str, int, int]] = set()
        self._node_config, self._run_config, self._twist = node_config, run_config, twist
        self._folder = tempfile.TemporaryDirectory()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.states if node not in self.dead]

    def answered(self, message: Message, node: int) -> list[Message]:
        if (*kind_of(message), node - self._first) in self.lost:
            return []
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
            run_config=self._run_config(node - self._first),
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
        if _share(message) != 1.0:
            moved = {name: given[name] + _share(message) * (moved[name] - given[name]) for name in given}
        content = {"arrays": ArrayRecord({name: Array(np.asarray(value)) for name, value in moved.items()})}
        return Message(RecordDict({**content, "metrics": MetricRecord(figures)}), reply_to=message)

    @app.evaluate()
    def on_evaluate(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        weight = message.content["arrays"]["weight"].numpy()
        loss = _share(message) * float(np.abs(weight).mean() + number)
        figures = {"eval_loss": loss, "num-examples": SIZES[number]}
        return Message(RecordDict({"metrics": MetricRecord(figures)}), reply_to=message)

    return app


def _share(message: Message) -> float:
    """How much of its work an app does, by the configuration that it was sent."""
    return float(message.content["config"].get("lr", 1.0))


def told_otherwise(message: Message, **told: Any) -> Message:
    """A message with another configuration."""
    config = ConfigRecord({**message.content["config"], **told})
    return Message(RecordDict({**message.content, "config": config}), metadata=message.metadata)


def given_otherwise(message: Message) -> Message:
    """A message with another model."""
    other = {name: Array(np.asarray(array.numpy() + 1)) for name, array in message.content["arrays"].items()}
    return Message(RecordDict({**message.content, "arrays": ArrayRecord(other)}), metadata=message.metadata)


class MeddlingGrid(AppGrid):
    """A server that changes what some clients are sent; `meddle` is told the message, and `of` whom it is sent to."""

    def __init__(
        self,
        *own: Any,
        meddle: Callable[[AppGrid, Message], Message],
        of: Collection[int] = (1,),
        **more: Any,
    ) -> None:
        super().__init__(*own, **more)
        self._meddle, self._of = meddle, frozenset(self._first + client for client in of)

    def answered(self, message: Message, node: int) -> list[Message]:
        return super().answered(self._meddle(self, message) if node in self._of else message, node)


def greedy_reader(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Have servers take off every mask that they can and read what is left, whatever it is; gives all that was read."""
    read: list[np.ndarray] = []

    def words(self: MaskedSum) -> np.ndarray:
        if not self.opened:
            self._read_revelations()
            for client in self.survivors if self._self_mask else ():
                with suppress(ProtocolError):
                    add_mask(self._sum, self._secret(client, client), subtract=True)
            self.opened = True
            if self._codec is not None:
                read.append(self._codec.decode(self._sum))
        return self._sum

    monkeypatch.setattr(MaskedSum, "words", words)
    return read


def plain_run(strategy: Strategy, rounds: int = 2, *, without: Callable[[int, int], bool] | None = None) -> Result:
    """The same app without protection; `without(round, client)` replies are lost."""

    def lost(message: Message, reply: Message) -> list[Message]:
        number = message.content["config"]["server-round"]
        gone = without is not None and without(number, message.metadata.dst_node_id - 100)
        return [] if gone and message.metadata.message_type == "train" else [reply]

    return strategy.start(AppGrid(app_of(), twist=lost), start_arrays(), num_rounds=rounds)


def request_in(message: Message) -> Any:
    """The protocol's request in a message."""
    return decode(out_of_array(message.content.array_records[PARTS]["common"]))


def kind_of(message: Message) -> tuple[str, int]:
    """What a message asks for, and in which round, from 1."""
    if HEADER not in message.content:
        return message.metadata.message_type, 0
    request = request_in(message)
    return type(request).__name__, getattr(request, "round", -1) + 1


def lost_where(*places: tuple[str, int, int]) -> Callable[[Message, Message], list[Message]]:
    """A twist: the replies to (kind, round, client) of the training never arrive."""

    def twist(message: Message, reply: Message) -> list[Message]:
        where = (*kind_of(message), message.metadata.dst_node_id - 100)
        return [] if where in places and message.metadata.message_type == "train" else [reply]

    return twist


def assert_alike(arrays: ArrayRecord, expected: ArrayRecord) -> None:
    """To the accuracy of Flower's own mean: single precision where the model has that."""
    assert list(arrays) == list(expected)
    for name in expected:
        given, wanted = arrays[name].numpy(), expected[name].numpy()
        assert given.dtype == wanted.dtype
        np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-6 if name == "weight" else 1e-8)


def numbers(update: dict[str, np.ndarray]) -> list[bytes]:
    """How an update's numbers would look on the wire, in every type and form that something might give them."""
    row = np.concatenate([np.asarray(value, dtype=np.float64).reshape(-1) for value in update.values()])
    looks = []
    for place, value in enumerate(row):
        # Two in single precision: four bytes alone turn up by chance, once in a hundred runs.
        looks += [np.float64(value).tobytes(), row[place : place + 2].astype(np.float32).tobytes()]
        looks += [repr(float(value))[:8].encode()]
    return [look for look in looks if len(look) == 8]


def everything_in(content: RecordDict) -> bytes:
    """The bytes of a message's records, and of its numbers as others would write them."""
    parts = []
    for record in content.array_records.values():
        for array in record.values():
            ours = array.stype == "fedveil" or not array.data
            parts += [array.data, b"" if ours else array.numpy().astype(np.float64).tobytes()]
    return b"".join([*parts, repr(dict(content.config_records)).encode(), repr(dict(content.metric_records)).encode()])
