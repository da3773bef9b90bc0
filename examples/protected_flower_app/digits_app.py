"""A Flower app as people write them, in PyTorch on handwritten digits; two lines protect it.

The lines are marked. Without them the app is Flower's own affair: the server sees every client's model.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam
from sklearn.datasets import load_digits
from torch import nn

import fedveil.flower

PARTS = 5


def network() -> nn.Module:
    """The same network, with the same first weights, on every machine."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A client's digits, to train on and to hold out; a node that was given no part takes one by its number."""
    part = int(context.node_config.get("partition-id", context.node_id)) % PARTS
    x, y = load_digits(return_X_y=True)
    mine = torch.arange(part, len(y), PARTS)
    inputs, labels = torch.tensor(x, dtype=torch.float32)[mine] / 16, torch.tensor(y)[mine]
    held_out = len(mine) // 5
    return inputs[held_out:], labels[held_out:], inputs[:held_out], labels[:held_out]


client_app = ClientApp(mods=[fedveil.flower.protect()])  # the client's line


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One pass over a client's digits."""
    net, (x, y, _, _) = network(), data(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser, total = torch.optim.SGD(net.parameters(), lr=0.5), 0.0
    for batch in torch.arange(len(y)).split(32):
        loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item() * len(batch)
    metrics = MetricRecord({"train_loss": total / len(y), "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """How many of the digits that it has held out a client recognises."""
    net, (_, _, x, y) = network(), data(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        right = float((net(x).argmax(1) == y).float().mean())
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": len(y)})}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and say what came of it."""
    given = context.run_config
    strategy = fedveil.flower.Protected(  # the server's line
        FedAdam(eta=0.1, fraction_evaluate=float(given["fraction-evaluate"])),
        scheme=str(given["scheme"]),
        clients=int(given["clients"]),
        out=str(given["out"]) or None,
        resume=bool(given["resume"]),
        deadline=float(given["deadline"]),
    )
    result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=int(given["rounds"]))
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: {metrics['accuracy']:.1%} of the digits that clients hold out are recognised")
    for line in strategy.ledger.lines:
        print(f"against {line.adversary}: {line.result}")
