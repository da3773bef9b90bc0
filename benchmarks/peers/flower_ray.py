"""Flower's simulation on Ray, one core a client: `main` with a folder as the argument.

Not a script: Ray's workers find the client app by its module, which `__main__` is not for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.turns import Turns
from benchmarks.peers.workloads import Plan, flat

FOLDER = "FEDVEIL_PEERS_PLAN"
"""The environment variable by which Ray's workers find the plan."""

client_app = ClientApp()


@cache
def plan_here() -> Plan:
    """The plan; read once by every process."""
    torch.set_num_threads(1)
    return Plan.read(Path(os.environ[FOLDER]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    plan, config = plan_here(), message.content["config"]
    workload, net = plan.workload, plan.model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = plan.taken(int(config["round"]), int(config["position"]))
    optimiser = torch.optim.SGD(net.parameters(), lr=workload.lr)
    for start in range(0, len(y), workload.batch):
        batch = slice(start, start + workload.batch)
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(content), reply_to=message)


class Given(FedAvg):
    """Flower's averaging, on the plan's cohorts."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = list(grid.get_node_ids())[: plan_here().workload.cohort]
        for position, node in enumerate(nodes):
            seat = ConfigRecord({"round": server_round - 1, "position": position})
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: seat})
            yield Message(content, node, "train")


def main() -> None:
    folder = Path(sys.argv[1])
    turns = Turns()
    os.environ[FOLDER] = str(folder)
    plan = plan_here()
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        def lap(done: int, arrays: ArrayRecord) -> None:
            if done:
                turns.lap()
            else:
                turns.begin()

        strategy = Given(fraction_evaluate=0.0, min_evaluate_nodes=0, min_available_nodes=plan.workload.clients)
        arrays = ArrayRecord(plan.model().state_dict())
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=plan.rounds, evaluate_fn=lap)
        net = plan.model()
        net.load_state_dict(result.arrays.to_torch_state_dict())
        turns.finish(folder, flat(net))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=plan.workload.clients, backend_config=resources)
