"""A Transformer fine-tuned by LoRA adapters in a Flower app of one's own; two lines protect it.

The frozen model is the same on every machine: here one that follows from a configuration and a seed, so that nothing is
downloaded; in a project of yours `AutoModelForImageClassification.from_pretrained(…)`. What clients train, and what
travels, is the adapters and the head: the arrays of `get_peft_model_state_dict`. Pictures are handwritten digits, each
a sequence of sixteen patches.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from sklearn.datasets import load_digits
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import fedveil.flower
from fedveil.runs.folder import RunFolder

PARTS = 5


def network() -> PeftModel:
    """The frozen Transformer with fresh adapters, the same on every machine."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        initializer_range=0.1,
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(ViTForImageClassification(config), adapters)


def adapters_of(net: PeftModel) -> ArrayRecord:
    """What is trained, and nothing else."""
    return ArrayRecord(get_peft_model_state_dict(net))


def own_adapters(context: Context) -> ArrayRecord:
    """Fresh adapters that nobody else knows, for a run whose server is not to know even the first: not by the seed."""
    net = network()
    torch.manual_seed(secrets.randbits(63))
    for name, part in net.named_parameters():
        if part.requires_grad and "lora_B" not in name:  # adapters begin with a product of zero
            nn.init.normal_(part, std=0.1)
    return adapters_of(net)


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A client's digits, to train on and to hold out; a node that was given no part takes one by its number."""
    part = int(context.node_config.get("partition-id", context.node_id)) % PARTS
    x, y = load_digits(return_X_y=True)
    mine = torch.arange(part, len(y), PARTS)
    inputs, labels = torch.tensor(x, dtype=torch.float32)[mine].reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(y)[mine]
    held_out = len(mine) // 5
    return inputs[held_out:], labels[held_out:], inputs[:held_out], labels[:held_out]


client_app = ClientApp(  # the client's line
    mods=[fedveil.flower.protect(first=own_adapters, models="models")]
)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Some passes over a client's digits, by the adapters alone."""
    net, (x, y, _, _) = network(), data(context)
    set_peft_model_state_dict(net, message.content["arrays"].to_torch_state_dict())
    net.train()
    optimiser, total = torch.optim.AdamW([part for part in net.parameters() if part.requires_grad], lr=0.005), 0.0
    epochs = int(message.content["config"]["epochs"])
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(32):
            loss = nn.functional.cross_entropy(net(pixel_values=x[batch]).logits, y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
    metrics = MetricRecord({"train_loss": total / len(y) / epochs, "num-examples": len(y)})
    return Message(RecordDict({"arrays": adapters_of(net), "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """How many of the digits that it has held out a client recognises, before any training and with what it is sent."""
    net, (_, _, x, y) = network().eval(), data(context)
    with torch.no_grad():
        before = float((net(pixel_values=x).logits.argmax(1) == y).float().mean())
        set_peft_model_state_dict(net, message.content["arrays"].to_torch_state_dict())
        right = float((net(pixel_values=x).logits.argmax(1) == y).float().mean())
    metrics = MetricRecord({"before": before, "accuracy": right, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Fine-tune, and say what came of it."""
    given = context.run_config
    scheme, out = str(given["scheme"]), str(given["out"])
    strategy = fedveil.flower.Protected(  # the server's line
        FedAvg(fraction_evaluate=1.0),
        scheme=scheme,
        clients=int(given["clients"]),
        first="client" if scheme == "pads" else None,
        out=out or None,
        deadline=float(given["deadline"]),
    )
    net = network()
    first, rounds = adapters_of(net), int(given["rounds"])
    numbers = sum(array.numpy().size for array in first.values())
    print(f"{numbers:,} numbers of {sum(part.numel() for part in net.parameters()):,} are trained, under {scheme}")
    config = ConfigRecord({"epochs": int(given["epochs"])})
    result = strategy.start(grid, first, num_rounds=rounds, train_config=config)
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: {metrics['accuracy']:.1%} recognised, before any training {metrics['before']:.1%}")
    where = "the clients, in models/" if scheme == "pads" else "the server"
    print(f"the adapters are with {where}: {len(result.arrays)} arrays here")
    for row in RunFolder(Path(out)).metrics() if out else []:
        print(f"round {row['round']}: {row['bytes_up']:,.0f} bytes up, {row['bytes_down']:,.0f} down, a client")
    for line in strategy.ledger.lines:
        print(f"against {line.adversary}: {line.result}; {line.why}")
    if out:
        print(f"ledger and report: {out}/ledger.json, {out}/report.md")
