"""The clients: one gradient step on all samples, or a judgement of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from plain_fedavg.task import network, samples, settings_of, square_loss

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    model, x, y, settings = _ready(message, context)
    loss = square_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for one in model.parameters():
            one -= settings["lr"] * one.grad
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": _metrics(loss, x)})
    return Message(content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, x, y, _ = _ready(message, context)
    with torch.no_grad():
        loss = square_loss(model(x), y)
    return Message(RecordDict({"metrics": _metrics(loss, x)}), reply_to=message)


def _ready(message: Message, context: Context) -> tuple[nn.Module, Tensor, Tensor, dict[str, Any]]:
    settings = settings_of(context)
    model = network()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = samples(settings["data"], _number(context))
    return model, x, y, settings


def _number(context: Context) -> int:
    """A simulation numbers its nodes; on a cluster of FedVeil's a node's home is called client-<number>."""
    if "partition-id" in context.node_config:
        return int(context.node_config["partition-id"])
    return int(Path(str(context.node_config["fedveil-home"])).name.removeprefix("client-"))


def _metrics(loss: Tensor, x: Tensor) -> MetricRecord:
    return MetricRecord({"loss": loss.item(), "num-examples": len(x)})
